"""The ledger's entries, and the verdict that a claim's cases give.

No measured number stands in the ledger. An entry names a function that finds the claim's cases in a committed record,
or computes them, and the range that is claimed. Value and verdict follow from the two each time they are shown.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path

import pandas as pd
import yaml

from hilbert_lib.lab.records import REPORTS, RESULTS, newest_run, read_records, run_environment

ROOT, LEDGER = REPORTS.parent, REPORTS / "claims.yml"
HOLDS, HOLDS_NOT, UNTESTED, WAITS = "holds", "does not hold", "cannot be tested here", "waits for"
INTERVAL = ["value", "low", "high"]
JUDGED = ["claimed_least", "claimed_most", "as_claimed"]
MOST = 0.85  # share of the cases under a condition that hold, and of the others that do not


@dataclass(frozen=True)
class Band:
    """A claimed range, of the cases that the query `where` picks. A case holds if its whole interval lies in it."""

    least: float = -inf
    most: float = inf
    where: str = ""


@dataclass(frozen=True)
class Condition:
    """When a claim holds: in words that follow "holds", and as a query over its cases."""

    says: str
    where: str


@dataclass(frozen=True)
class Claim:
    """One entry of the ledger.

    Attributes:
        id, claim, source: which claim, in our words, and the documents that make it.
        question: how it was made testable: the configuration, and what is compared with what.
        quantity: what the values are.
        measure: "module:function" of this package, which gives the cases; empty where tests answer.
        options: its further arguments.
        record: the notebook, or other folder under reports/h200*/RUN/, whose records it reads; empty where the cases
            are computed.
        file: the file of records in it.
        claimed: the claimed ranges.
        when: the condition under which it holds, if it holds in some cases.
        tests: tests that answer it, as pytest names them.
        verdict: what they show: "holds" or "does not hold".
        note: what a reader should know beside the verdict.
        only: parameters of the notebook that measure nothing but this claim again.
    """

    id: str
    claim: str
    source: str
    question: str
    quantity: str = ""
    measure: str = ""
    options: dict = field(default_factory=dict)
    record: str = ""
    file: str = RESULTS
    claimed: tuple[Band, ...] = ()
    when: Condition | None = None
    tests: tuple[str, ...] = ()
    verdict: str = ""
    note: str = ""
    only: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What was found of a claim.

    Attributes:
        claim: the entry.
        verdict: "holds", "holds ..." with its condition, "does not hold", "cannot be tested here: ...", or
            "waits for: RECORD".
        value: the value and its interval, or the range of all cases; "" where there are none.
        cases: with claimed_least, claimed_most and as_claimed; None where tests answer, or nothing does.
        run: the folder under reports/ whose records were read; None where there is none.
        hardware: on what it was measured.
    """

    claim: Claim
    verdict: str
    value: str = ""
    cases: pd.DataFrame | None = None
    run: Path | None = None
    hardware: str = ""

    @property
    def evidence(self) -> str:
        """Where the answer comes from: a folder, tests, or "computed"."""
        if self.run is not None:
            path = self.run.resolve()
            return (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).as_posix()
        return " ".join(self.claim.tests) or ("computed" if self.cases is not None else "")

    @property
    def source(self) -> str:
        """`evidence` in a word: the record's folder, "tests" or "computed"."""
        return "tests" if self.claim.tests else self.run.name if self.run else self.evidence


def read_ledger(path: str | Path = LEDGER) -> dict[str, Claim]:
    """The entries of the ledger by id, in the order of the file.

    Args:
        path: of the YAML file.

    Raises:
        ValueError: if the file is not there, or an entry has an unknown or missing field, or not exactly one way to be
            answered.

    >>> read_ledger()["K3"].source
    '000'
    """
    try:
        entries = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"no ledger of claims at {path}: it is part of the checkout, with its records") from None
    return {name: _claim(name, entry) for name, entry in entries.items()}


def _claim(name: str, entry: dict) -> Claim:
    known = {each.name for each in fields(Claim)}
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"{name} must have fields of {sorted(known)}, got {unknown}")
    if missing := [each for each in ("claim", "source", "question") if not entry.get(each)]:
        raise ValueError(f"{name} must have {', '.join(missing)}")
    if bool(entry.get("measure")) == bool(entry.get("tests")):
        raise ValueError(f"{name} must be answered by measure or by tests, one of the two")
    if entry.get("measure") and not entry.get("claimed"):
        raise ValueError(f"{name} must say what range is claimed")
    if entry.get("tests") and entry.get("verdict") not in (HOLDS, HOLDS_NOT):
        raise ValueError(f"{name} must say whether its tests show that it holds, got {entry.get('verdict')!r}")
    made = {"claimed": tuple(Band(**band) for band in entry.get("claimed", ())), "tests": tuple(entry.get("tests", ()))}
    made["when"] = Condition(**entry["when"]) if "when" in entry else None
    return Claim(id=name, **{**entry, **made})


@cache
def answers() -> dict[str, Answer]:
    """What the committed records say of every claim of the ledger, by id."""
    return {name: answer(claim) for name, claim in read_ledger().items()}


def answer(claim: Claim, run: Path | None = None) -> Answer:
    """What the newest committed record, the computation or the tests say of a claim.

    Args:
        claim: an entry of the ledger.
        run: the folder of another run, to be read instead of the committed one.

    >>> answer(read_ledger()["M2"]).verdict
    'holds'
    """
    if claim.tests:
        return Answer(claim, claim.verdict, hardware="any")
    module, name = claim.measure.split(":")
    measure: Callable[..., pd.DataFrame] = getattr(import_module(f"hilbert_lib.lab.ledger.{module}"), name)
    if not claim.record:
        return _answer(claim, measure(**claim.options), None, "any: nothing is timed")
    run = newest_run(claim.record, claim.file) if run is None else run
    if run is None:
        return Answer(claim, f"{WAITS}: {claim.record}")
    try:
        cases = measure(read_records(run / claim.file), **claim.options).dropna(subset=INTERVAL[0])
    except ValueError:
        cases = pd.DataFrame()  # the record lacks a sweep
    return _answer(claim, cases, run, run_environment(run, claim.file)["hardware"])


def _answer(claim: Claim, cases: pd.DataFrame, run: Path | None, hardware: str) -> Answer:
    if cases.empty:  # or was not timed, where NaN stood
        return Answer(claim, f"{UNTESTED}: {claim.record} holds no such measurement", "", cases, run, hardware)
    verdict, cases = judge(cases, claim.claimed, claim.when)
    return Answer(claim, verdict, _value(cases), cases, run, hardware)


def judge(cases: pd.DataFrame, claimed: Sequence[Band], when: Condition | None = None) -> tuple[str, pd.DataFrame]:
    """The verdict that cases give on claimed ranges.

    Args:
        cases: value, low, high, and the columns that tell cases apart.
        claimed: ranges; cases that none of them speaks of are left out.
        when: the condition that the ledger states.

    Returns:
        "holds" where every case does, and "does not hold" where none does, or some do without a condition. A condition
        counts where most cases under it hold and most others do not. And the cases, with claimed_least, claimed_most
        and as_claimed.

    Raises:
        ValueError: if no range speaks of any case.

    >>> cases = pd.DataFrame({"row_bytes": [32, 128], "value": [1.2, 1.0], "low": [1.1, 0.9], "high": [1.3, 1.1]})
    >>> judge(cases, [Band(least=1.05)])[0]
    'does not hold (1 of 2 cases)'
    >>> judge(cases, [Band(least=1.05)], Condition("for rows of 32 B", "row_bytes == 32"))[0]
    'holds for rows of 32 B (1 of 2 cases)'
    """
    parts = [(band, cases.query(band.where) if band.where else cases) for band in claimed]
    if not any(len(part) for _, part in parts):
        raise ValueError(f"claimed must speak of some case; none of {list(claimed)} does")
    judged = pd.concat([_judged(part, band) for band, part in parts], ignore_index=True)
    judged = judged[[*judged.columns.difference([*INTERVAL, *JUDGED], sort=False), *INTERVAL, *JUDGED]]
    held = judged.as_claimed
    if held.all() or not held.any():
        return HOLDS if held.all() else HOLDS_NOT, judged
    count = f"{held.sum()} of {len(held)}"
    if when:
        such = judged.index.isin(judged.query(when.where).index)
        if held[such].mean() >= MOST and held[~such].mean() <= 1 - MOST:
            of_such = f"{held[such].sum()} of {such.sum()} such cases, {count} in all"
            return f"{HOLDS} {when.says} ({f'{count} cases' if held[such].all() else of_such})", judged
    return f"{HOLDS_NOT} ({count} cases)", judged


def _judged(part: pd.DataFrame, band: Band) -> pd.DataFrame:
    held = part.low.ge(band.least) & part.high.le(band.most)
    return part.assign(claimed_least=band.least, claimed_most=band.most, as_claimed=held)


def _value(cases: pd.DataFrame) -> str:
    if len(cases) == 1:
        value, low, high = (f"{cases[name].iloc[0]:.4g}" for name in INTERVAL)
        return value if low == high else f"{value} ({low} to {high})"
    low, high = (f"{each:.4g}" for each in (cases.value.min(), cases.value.max()))
    return f"{low if low == high else f'{low} to {high}'}, {len(cases)} cases"


def ledger_table(answers: Iterable[Answer]) -> pd.DataFrame:
    """The ledger as it is shown: id, claim, verdict, value, quantity, from, hardware and note, a row a claim."""
    columns = ["id", "claim", "verdict", "value", "quantity", "from", "hardware", "note"]
    rows = [
        (a.claim.id, a.claim.claim, a.verdict, a.value, a.claim.quantity, a.source, a.hardware, a.claim.note)
        for a in answers
    ]
    return pd.DataFrame(rows, columns=columns)


def ratio_cases(answers: Iterable[Answer]) -> pd.DataFrame:
    """Every case of the claims whose quantity is a ratio of times.

    Returns:
        id, claim, quantity, value, low, high, claimed_least, claimed_most and as_claimed.
    """
    tables = []
    for each in answers:
        if each.claim.quantity.startswith("time ") and each.cases is not None:
            told = {name: getattr(each.claim, name) for name in ("id", "claim", "quantity")}
            tables.append(each.cases[[*INTERVAL, *JUDGED]].assign(**told))
    return pd.concat(tables, ignore_index=True)


def counted(cases: pd.DataFrame, value: pd.Series | None = None) -> pd.DataFrame:
    """Cases whose value, by default the column of that name, has no spread because it is counted."""
    value = cases.value if value is None else value
    return cases.assign(value=value, low=value, high=value).reset_index(drop=True)
