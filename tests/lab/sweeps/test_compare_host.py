"""scripts/compare_host.py times torch's attention and ours in turn: what slows the host slows both sides of a ratio."""

import pytest
import torch
from click.testing import CliRunner
from own_scripts import load_script

script = load_script("compare_host")


@pytest.fixture
def two_kinds(monkeypatch):
    """A table of two rows, and the calls that are made for it."""
    made = []

    def kind(name: str):
        return lambda x: made.append(name) or 2 * x

    def works(*_):
        x = torch.ones(2, requires_grad=True)
        return {script.THEIRS: (kind("theirs"), [x]), "ours": (kind("ours"), [x])}

    monkeypatch.setattr(script, "works", works)
    return made


def printed(*words: str) -> list[list[str]]:
    done = CliRunner().invoke(script.main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in done.output.splitlines()[2:]]


def test_both_sides_are_timed_in_each_round(two_kinds):
    printed("--rounds", "2", "--calls", "3", "--kind", "ours")
    a_round = (["theirs"] * 3 + ["theirs"] * 3) * 3 + (["theirs"] * 3 + ["ours"] * 3) * 3
    assert two_kinds[-2 * len(a_round) :] == 2 * a_round


def test_a_host_that_slows_down_changes_no_ratio(two_kinds, monkeypatch):
    sides = iter(range(1000))

    def host_us(mode, calls, wait):
        call, _ = mode
        before = len(two_kinds)
        call()
        speed = 1 if two_kinds[before] == "theirs" else 1.5
        return [10.0 * speed * (1 + next(sides) // 12)] * calls  # slower by 10 us from round to round, of 12 sides

    monkeypatch.setattr(script, "host_us", host_us)
    (_, *own, own_ratios), (_, *cells, ratios) = printed("--rounds", "5")
    assert own_ratios.split(", ") == ["1.00 (1.00 to 1.00)"] * 3
    assert ratios.split(", ") == ["1.50 (1.50 to 1.50)"] * 3
    assert [cell.split(", ")[1].split()[0] for cell in own + cells] == ["10"] * 3 + ["15"] * 3


def test_a_kind_that_there_is_not_is_refused(two_kinds):
    done = CliRunner().invoke(script.main, ["--kind", "other"])
    assert done.exit_code
    assert "--kind must be a row of the table, got other" in done.output
