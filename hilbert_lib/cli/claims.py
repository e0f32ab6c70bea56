"""`hilbert claims`: what the documents claim, what was found, and measuring it again."""

import sys

import click
from click.core import ParameterSource

from hilbert_lib.cli.options import json_option, option, out_option, print_json, usage_errors


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--rerun", "again", multiple=True, metavar="ID", help="Measure this claim again; repeatable.")
@option("--segment-length", type=click.IntRange(min=1), default=1024, help="Of K3 and K4; the documents do not say.")
@out_option
@json_option
@click.option("--dry-run", is_flag=True, help="Only show what --rerun would run.")
def claims(ids: tuple[str, ...], again: tuple[str, ...], as_json: bool, dry_run: bool, **how) -> None:
    """Show every claim of the documents with its answer; those named by ID with all their cases.

    Values and verdicts are computed from the committed records. --rerun times a claim's own pairs, or runs the tests or
    the whole notebook that answer it, with the configuration for this number of H200s; --dry-run shows which. What
    needs a GPU is refused without one. Claims that wait for a record are named last, and shown by ID.

    \b
    Example: hilbert claims K3
    Example: hilbert claims --rerun K3
    """
    from hilbert_lib.lab.ledger.answer import answer
    from hilbert_lib.lab.ledger.claims import LEDGER, WAITING
    from hilbert_lib.lab.ledger.rerun import dry_run as dry_run_of
    from hilbert_lib.lab.ledger.rerun import rerun
    from hilbert_lib.ring.plan.cost import aligned

    context = click.get_current_context()
    if context.get_parameter_source("segment_length") == ParameterSource.COMMANDLINE and not again:
        raise click.UsageError("--segment-length is of what --rerun ID measures; there is no --rerun")
    if dry_run and not again:
        raise click.UsageError("--dry-run shows what --rerun ID would run; there is no --rerun")
    with usage_errors():
        known = {**LEDGER, **WAITING}
        for name, allowed in [(name, known) for name in ids] + [(name, LEDGER) for name in again]:
            if name not in allowed:
                raise ValueError(f"a claim must be one of {', '.join(allowed)}; got {name!r}")
        if dry_run:
            click.echo("\n".join(line for name in again for line in dry_run_of(LEDGER[name], **how)))
            return
        answers = [rerun(LEDGER[name], **how) for name in again]
        if not again:  # those that are computed take seconds each
            shown = {"label": "claims", "file": sys.stderr, "hidden": not sys.stderr.isatty()}
            with click.progressbar(ids or list(LEDGER), **shown) as names:
                answers = [answer(known[name]) for name in names]
    summaries = [_fields(judged) for judged in answers]
    if as_json:
        print_json(summaries)
    elif ids or again:
        for judged, fields in zip(answers, summaries, strict=True):
            click.echo("\n".join(f"{label:<12}{text}" for label, text in fields.items() if text))
            if judged.cases is not None and not judged.cases.empty:
                click.echo(judged.cases.to_string(index=False, float_format="{:.4g}".format))
    else:
        rows = [(t["id"], t["verdict"] + " *" * bool(t["note"]), t["value"], t["claim"]) for t in summaries]
        click.echo(aligned(("id", "verdict", "value", "claim"), rows, words=4))
        click.echo("* with a note, which may turn the verdict round: hilbert claims ID shows it")
        if WAITING:
            click.echo(f"not tested yet, for want of a record: {', '.join(WAITING)}")


def _fields(answer) -> dict:
    """The texts that describe a claim and its answer, by label; "" where there is none."""
    from hilbert_lib.lab.ledger.answer import NOT_YET
    from hilbert_lib.lab.ledger.rerun import command

    claim = answer.claim
    verdict = f"{NOT_YET}, {answer.verdict}" if claim.waits and answer.run is None else answer.verdict
    fields = {"id": claim.id, "claim": claim.claim, "claimed in": claim.source, "asked": claim.question}
    fields |= {"verdict": verdict, "value": answer.value, "of": claim.quantity, "note": claim.note}
    fields |= {"not judged": answer.unjudged, "not read": ", ".join(answer.unread)}
    fields |= {"from": answer.evidence, "on": answer.hardware}
    return fields | {"again": command(claim) if claim.measure or claim.tests else ""}
