"""`hilbert claims`: what the documents claim, what was found, and measuring it again."""

from collections.abc import Sequence
from pathlib import Path

import click

from hilbert_lib.cli.options import json_option, option, out_option, print_json, usage_errors


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--rerun", "again", multiple=True, metavar="ID", help="Measure this claim again; repeatable.")
@option("--segment-length", type=click.IntRange(min=1), default=1024, help="Of K3 and K4; the documents do not say.")
@out_option
@json_option
@click.option("--dry-run", is_flag=True, help="Only show what --rerun would run.")
def claims(
    ids: tuple[str, ...], again: tuple[str, ...], segment_length: int, out: Path, as_json: bool, dry_run: bool
) -> None:
    """Show every claim of the documents with its answer; those named by ID with all their cases.

    Values and verdicts are computed from the committed records. --rerun times a claim's own pairs, or runs the tests or
    the whole notebook that answer it, with the configuration for this number of H200s; --dry-run shows which. What
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
    how = {"out": out, "segment_length": segment_length}
    with usage_errors():
        if dry_run:
            click.echo("\n".join(line for name in again for line in dry_run_of(ledger[name], **how)))
            return
        measured = [rerun(ledger[name], **how) for name in again]
    answers = measured or [answer(ledger[name]) for name in ids or ledger]
    if as_json:
        print_json([_fields(each) for each in answers])
    elif ids or again:
        _print_entries(answers)
    else:
        _print_overview(answers)


def _fields(answer) -> dict:
    """What is told of a claim, by name; empty where there is nothing to tell."""
    from hilbert_lib.lab.ledger.rerun import command

    claim = answer.claim
    told = {"id": claim.id, "claim": claim.claim, "claimed in": claim.source, "asked": claim.question}
    told |= {"verdict": answer.verdict, "value": answer.value, "of": claim.quantity, "note": claim.note}
    told |= {"from": answer.evidence, "on": answer.hardware}
    return told | {"again": command(claim) if claim.measure or claim.tests else ""}


def _print_overview(answers: Sequence) -> None:
    rows = [("id", "verdict", "value", "claim")]
    for each in answers:
        rows.append((each.claim.id, each.verdict + " *" * bool(each.claim.note), each.value, each.claim.claim))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(map(str.ljust, row, widths)).rstrip())
    click.echo("* with a note, which may turn the verdict round: hilbert claims ID shows it")


def _print_entries(answers: Sequence) -> None:
    for each in answers:
        fields = _fields(each)
        click.secho(f"{fields.pop('id')}  {fields.pop('claim')}", bold=True)
        for label, text in fields.items():
            if text:
                click.echo(f"    {label:<11}{text}")
        if each.cases is not None and not each.cases.empty:
            click.echo(each.cases.to_string(index=False, float_format="{:.4g}".format))
