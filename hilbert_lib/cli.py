"""The `hilbert` command."""

import click


@click.group()
def main() -> None:
    """Run the notebooks, compare their records, look at this machine."""
