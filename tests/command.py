"""The command `hilbert`, called in this process."""

from click.testing import CliRunner

from hilbert_lib.cli.main import main


def call(*words, status: int = 0) -> str:
    """What it prints; it must end with this status."""
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exit_code == status, result.output + repr(result.exception)
    return result.output
