"""No case of a record is passed over: planted in any sweep, it is judged, or listed as left out with its reason."""

import copy
import random
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest

from hilbert_lib.lab.ledger import ring
from hilbert_lib.lab.ledger.answer import judge, run_of, set_apart, sweep_of
from hilbert_lib.lab.ledger.cases import INTERVAL
from hilbert_lib.lab.ledger.claims import LEDGER
from hilbert_lib.lab.records import RESULTS, read_records
from hilbert_lib.lab.sweeps import options

pytestmark = pytest.mark.evidence
READ = {name: claim for name, claim in LEDGER.items() if claim.record}
SWEEPS = [(name, sweep) for name, claim in READ.items() for sweep in claim.sweeps]
FACTORS = (1e3, 1e-3)  # what is measured becomes so many times as large
# What tells cases apart, or was not measured.
KEPT = {"parameters", "environment", "point", "ranks", "heads", "kv_heads", "head_dim", "batch", "ms", "model"}
SHARES = {}
PLANNED_MEMORY, PLANNED_RATIOS = cache(ring._planned_memory), cache(ring._planned_ratios)
# Records with no case of their own, each with its reason.
NO_CASE = {
    "O1": ("kind != 'measurement'", "other ways, and those that were not tried: ours is compared with its base"),
    "O2": ("kind != 'comparison'", "ours alone, and ways that were not tried"),
    "O3": ("kind != 'measurement'", "other ways, and those that were not tried: ours is compared with full attention"),
    "R1": ("ranks == 1", "the shorter runs of one rank: with the longest the others are compared"),
    "R2": ("ranks < 4", "runs without a ring, with which the others would be compared"),
    "R4": ("side == 'each by itself'", "ranks that exchange nothing"),
    "R5": ("out_error is None", "runs that were held against no float64 rows"),
}
LONGEST = {"R5", "R6"}  # claims that a length was reached, in whatever time


@cache
def records_of(name):
    records = read_records(run_of(READ[name]) / RESULTS)
    return [record for record in records if sweep_of(record) in READ[name].sweeps]


@pytest.fixture(autouse=True)
def _plans_are_made_once(monkeypatch):
    monkeypatch.setattr(ring, "_planned_memory", PLANNED_MEMORY)
    monkeypatch.setattr(ring, "_planned_ratios", PLANNED_RATIOS)


@pytest.fixture(autouse=True)
def _sides_that_are_not_planted_are_resampled_once(monkeypatch):
    def share(side, reference, own=options._share):
        key = tuple(x and (x["useful_flop"], *x.get("samples_ms", ())) for x in (side, reference))
        if key not in SHARES:
            SHARES[key] = own(side, reference)
        return SHARES[key]

    monkeypatch.setattr(options, "_share", share)


def scaled(value, factor, chosen, name=""):
    """What was measured, some so many times as large, some more: the ratio of two numbers of a record changes too."""
    if isinstance(value, dict):
        return {key: each if key in KEPT else scaled(each, factor, chosen, key) for key, each in value.items()}
    if isinstance(value, list):
        return [scaled(each, factor, chosen, name) for each in value]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    grown = factor ** chosen.uniform(0.5, 1.5)
    return (value * grown or grown) if is_number and name != "tokens" else value


def planted(record, factor, *, lengths):
    if not lengths:
        return scaled(record, factor, random.Random(0))
    changed = copy.deepcopy(record)
    if "tokens" in changed:
        changed["tokens"] = int(changed["tokens"] * factor)
    else:
        for side in "ab":
            changed[side]["parameters"]["length"] = int(changed[side]["parameters"]["length"] * factor)
    return changed


def has_no_case(name, record):
    exempt, _ = NO_CASE.get(name, ("False", ""))
    return eval(exempt, {}, record)


def alike(record):
    """Records that differ in sizes alone are of one group."""
    names = [record[side]["name"] for side in "ab"] if "a" in record else [record.get("name"), record.get("side")]
    about = record["b"]["parameters"] if "b" in record else record.get("parameters", {})
    kinds = [about.get(name) for name in ("direction", "pair", "layout", "what", "strategy", "dtype")]
    return str([sweep_of(record), names, kinds, record.get("ranks"), record.get("is_causal")])


def one_of_each_group(records, seed):
    chosen = random.Random(seed)
    places = {}
    for place in chosen.sample(range(len(records)), len(records)):
        places.setdefault(alike(records[place]), place)
    return sorted(places.values())


def with_one_planted(name, place, factor):
    records = list(records_of(name))
    records[place] = planted(records[place], factor, lengths=name in LONGEST)
    return READ[name].measure(records).dropna(subset=INTERVAL[0])


def as_text(cases):
    return cases[sorted(cases.columns)].to_csv(index=False)


def outcome(claim, cases):
    """Whether each judged case is as claimed, counted; and what is left out."""
    kept, left_out = set_apart(claim, cases)
    _, rows = judge(kept, claim.claimed, claim.when)
    return rows.as_claimed.value_counts().to_dict(), pd.concat([pd.DataFrame(), *left_out.values()])


def test_each_claim_names_sweeps_of_its_record():
    for name, claim in READ.items():
        assert {sweep_of(record) for record in records_of(name)} == {*claim.sweeps}, name


@pytest.mark.parametrize("name", READ)
def test_a_sweep_that_is_said_not_to_be_read_changes_no_case(name):
    every = read_records(run_of(READ[name]) / RESULTS)
    found, alone = (READ[name].measure(records) for records in (every, records_of(name)))
    assert as_text(found) == as_text(alone)


MEASURES = {}  # a measure that several claims share is tried once
for _name, _claim in READ.items():
    MEASURES.setdefault(getattr(_claim.measure, "__qualname__", "") + str(id(_claim.measure)), _name)


@pytest.mark.parametrize("name", MEASURES.values())
def test_no_record_is_passed_over_without_a_word(name):
    before = as_text(READ[name].measure(records_of(name)).dropna(subset=INTERVAL[0]))
    passed_over = []
    for place in one_of_each_group(records_of(name), name):
        if has_no_case(name, records_of(name)[place]):
            continue
        if all(as_text(with_one_planted(name, place, factor)) == before for factor in FACTORS):
            passed_over.append(alike(records_of(name)[place]))
    assert not passed_over


@pytest.mark.parametrize(("name", "sweep"), SWEEPS)
def test_a_case_that_is_planted_in_a_sweep_is_judged_or_listed_as_left_out(name, sweep):
    claim = READ[name]
    before = claim.measure(records_of(name)).dropna(subset=INTERVAL[0])
    counts, left_out = outcome(claim, before)
    of_sweep = [place for place, record in enumerate(records_of(name)) if sweep_of(record) == sweep]
    places = [place for place in of_sweep if not has_no_case(name, records_of(name)[place])] or of_sweep
    random.Random(name).shuffle(places)
    is_listed = False
    for place in places[:8]:
        for factor in FACTORS:
            cases = with_one_planted(name, place, factor)
            found, apart = outcome(claim, cases)
            if found != counts or (name in LONGEST and as_text(cases) != as_text(before)):
                return
            is_listed |= not apart.equals(left_out)
    assert is_listed, f"nothing of {sweep} counts in {name}"


@pytest.mark.parametrize("name", [name for name in READ if name != "K4"])  # which 1.02 to 1.04 alone bear out
def test_other_measurements_change_what_is_counted(name):
    claim, records = READ[name], records_of(name)
    counts, _ = outcome(claim, claim.measure(records).dropna(subset=INTERVAL[0]))
    factors = [FACTORS[1:]] if name in LONGEST else [FACTORS] * 4
    found = []
    for seed, some in enumerate(factors):
        chosen = random.Random(seed)
        others = [planted(record, chosen.choice(some), lengths=name in LONGEST) for record in records]
        found.append(outcome(claim, claim.measure(others).dropna(subset=INTERVAL[0]))[0])
    assert any(each != counts for each in found)


def test_a_filter_in_a_measure_is_seen(monkeypatch):
    claim = READ["K12"]
    hidden = replace(claim, measure=lambda records: claim.measure(records).query("base == 'torchscale'"))
    monkeypatch.setitem(READ, "K12", hidden)
    with pytest.raises(AssertionError, match="assert not"):
        test_no_record_is_passed_over_without_a_word("K12")
