"""The artifact page: every headline number of the README is on it, with a command that runs and the record's value."""

import re
from pathlib import Path

import pytest

from hilbert_lib.lab.environment import environment, say_hardware
from hilbert_lib.lab.ledger import artifact
from hilbert_lib.lab.ledger.answer import ROOT
from hilbert_lib.lab.ledger.artifact import COUNTED, HEADLINES, Headline, artifact_table, between_runs, command, minutes
from hilbert_lib.lab.ledger.claims import LEDGER
from hilbert_lib.lab.ledger.kernels import grid_gains
from hilbert_lib.lab.ledger.numbers import SLOT, numbers
from hilbert_lib.lab.records import REPORTS, RESULTS, append_lines, committed_runs, read_records

pytestmark = pytest.mark.evidence
# Of README's slots those that are no measured number: links to runs, sizes, names, what an interval is of, and counts.
NO_RESULT = {"claims", "printed", "ratio", "timed", "05", "06", "07", "08"}


def named(headline):
    return re.findall(r"\{(\w+)\}", headline.value + headline.says)


def test_every_number_of_the_readme_has_a_row_and_every_row_a_number():
    stems = {name.partition("_")[0] for headline in HEADLINES for name in named(headline)}
    readme = {slot[1] for slot in SLOT.finditer((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert len(readme) > 80
    assert {name.partition("_")[0] for name in readme} - NO_RESULT <= stems, "add a row to ledger/artifact.py"
    assert {name for headline in HEADLINES for name in named(headline)} <= set(numbers())


def rows_of(table):
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line]
    return [row for row in lines if row[0] not in ("number", "run") and set(row[0]) != {"-"}]


def test_the_tables_have_the_records_numbers_and_a_command_for_each():
    both = artifact_table(numbers()).strip().split("\n\n")
    rows, commands = (rows_of(table) for table in both)
    assert len(rows) == len(HEADLINES)
    shells = {name: (shell, took) for name, shell, took in commands}
    assert len(shells) == len(commands)
    for (says, expected, tolerance, run), headline in zip(rows, HEADLINES, strict=True):
        assert says == headline.says.format_map(numbers())
        assert all(numbers()[name] in expected for name in re.findall(r"\{(\w+)\}", headline.value))
        assert (tolerance == "exact") == (headline.kind == COUNTED)
        shell, took = shells[run]
        assert shell == f"`{command(headline)}`"
        assert re.match(r"(about )?\d+, \S", took)


@pytest.mark.parametrize("shell", sorted({command(headline) for headline in HEADLINES}))
def test_every_command_names_what_is_there(shell):
    words = shell.split()
    if words[:2] == ["hilbert", "run"]:
        assert (ROOT / f"notebooks/{words[2]}.ipynb").exists()
        assert all((ROOT / word).exists() for word in words if word.endswith(".yaml"))
    elif words[:2] == ["hilbert", "claims"]:
        assert words[-1] in LEDGER
        assert "--rerun" not in words or LEDGER[words[-1]].pairs
    else:
        assert shell == "make numbers"


def test_two_runs_of_one_card_tell_how_far_ratios_differ(monkeypatch):
    runs = [run for run in committed_runs(artifact.GRIDS) if run.is_relative_to(REPORTS / "h200")]
    assert len(runs) >= 2
    first, second = (
        grid_gains(read_records(run / RESULTS)).set_index(["order", "side", "window", "head_dim"]) for run in runs[:2]
    )
    largest = 100 * (first.value / second.value - 1).abs().max()
    assert between_runs() >= largest > 0
    monkeypatch.setattr(artifact, "committed_runs", lambda _: runs[:1])
    with pytest.raises(ValueError, match="two committed runs of 08b_kernels_on_grids must be of one card"):
        between_runs.__wrapped__()


def test_minutes_are_the_longer_of_the_manifests_and_the_records(monkeypatch, tmp_path):
    headline = next(headline for headline in HEADLINES if headline.notebook == artifact.KERNELS)
    times = ("2026-11-28T03:00:00+00:00", "2026-11-28T03:07:40+00:00")
    records = [{"kind": "measurement", "utc": time, "parameters": {}, "environment": environment()} for time in times]
    append_lines(records, tmp_path / RESULTS)
    monkeypatch.setattr(artifact, "newest_run", lambda *_, **__: tmp_path)
    assert minutes(headline) == f"8, {say_hardware()}"
    for start, took in (("03:06:00", 8), ("02:50:00", 18)):  # a run that went on where it was, and one with other work
        manifest = {"start": f"2026-11-28T{start}+00:00", "end": times[1]}
        monkeypatch.setattr(artifact, "read_manifest", lambda _, manifest=manifest: manifest)
        assert minutes(headline) == f"{took}, {say_hardware()}"


def test_a_headline_has_one_way_to_be_measured():
    with pytest.raises(ValueError, match="one of notebook and claim must measure 'x'"):
        Headline("x", "{y}", COUNTED, "06_kernel_benchmarks", "K3")
    with pytest.raises(ValueError, match="one of notebook and claim must measure 'x'"):
        Headline("x", "{y}", "ratio")
    with pytest.raises(ValueError, match="kind must be one of counted, ratio, speed, learnt, error, got 'guess'"):
        Headline("x", "{y}", "guess", claim="K3")


def test_the_page_says_how_a_run_is_sent_in():
    assert "## A run of another card" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    page = Path(ROOT / "docs/artifact.md").read_text(encoding="utf-8")
    assert "../CONTRIBUTING.md#a-run-of-another-card" in page
