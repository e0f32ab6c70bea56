"""`hilbert claims`: what the documents claim, what was found, and measuring it again."""

# papermill and the drawing of figures take half a second to import: the command imports what it needs, so that --help
# does not wait for them.
from collections.abc import Sequence
from pathlib import Path

import click

from hilbert_lib.cli.options import out_option, usage_errors


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--rerun", "again", multiple=True, metavar="ID", help="Measure this claim again; repeatable.")
@click.option(
    "--segment-length",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Tokens of a segment in K3 and K4; the documents do not say.",
)
@out_option(help="Folder of the runs that --rerun makes.")
@click.option("--dry-run", is_flag=True, help="Only show what --rerun would run.")
def claims(ids: tuple[str, ...], again: tuple[str, ...], segment_length: int, out: Path, dry_run: bool) -> None:
    """Show every claim of the documents with its answer; those named by ID with all their cases.

    Values and verdicts are computed from the committed records: a claim "holds when" its cases have something in
    common, and "holds in" so many of them where that is nothing. --rerun times a claim's own pairs, or runs the tests
    or the whole notebook that answer it, with the configuration for this number of H200s; --dry-run shows which. What
    needs a GPU is refused without one.

    \b
    Example: hilbert claims K3
    Example: hilbert claims --rerun K3
    """
    from hilbert_lib.lab.ledger.claim import answer, read_ledger
    from hilbert_lib.lab.ledger.rerun import dry_run as dry_run_of
    from hilbert_lib.lab.ledger.rerun import rerun

    with usage_errors():
        ledger = read_ledger()
    if dry_run and not again:
        raise click.UsageError("--dry-run shows what --rerun ID would run; there is no --rerun")
    for name in (*ids, *again):
        if name not in ledger:
            raise click.UsageError(f"a claim must be one of {', '.join(ledger)}; got {name!r}")
    if not again:
        answers = [answer(ledger[name]) for name in ids or ledger]
        _print_entries(answers) if ids else _print_table(answers)
    for name in again:
        try:
            if dry_run:
                click.echo("\n".join(dry_run_of(ledger[name], out=out, segment_length=segment_length)))
            else:
                _print_entries([rerun(ledger[name], out=out, segment_length=segment_length)])
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error


def _print_table(answers: Sequence) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    table = Table("id", "claim", "verdict", "value", "of", "from", show_lines=True)
    for each in answers:
        verdict = f"{each.verdict} *" if each.claim.note else each.verdict
        table.add_row(each.claim.id, each.claim.claim, verdict, each.value, each.claim.quantity, each.source)
    console.print(table)
    click.echo("* with a note, which may turn the verdict round: hilbert claims ID shows it")


def _print_entries(answers: Sequence) -> None:
    from hilbert_lib.lab.ledger.rerun import command

    for each in answers:
        claim = each.claim
        lines = {"claimed in": claim.source, "asked": claim.question, "verdict": each.verdict, "value": each.value}
        lines |= {"of": claim.quantity, "note": claim.note, "from": each.evidence, "on": each.hardware}
        lines["again"] = command(claim) if claim.measure or claim.tests else ""
        click.secho(f"{claim.id}  {claim.claim}", bold=True)
        for label, text in lines.items():
            if text:
                click.echo(f"    {label:<11}{text}")
        if each.cases is not None and not each.cases.empty:
            click.echo(each.cases.to_string(index=False, float_format="{:.4g}".format))
