"""The ledger's entries, and the verdict that a claim's cases give.

No number that was measured stands in the ledger. An entry names a function that finds the claim's cases in a committed
record, or computes them, and the range that is claimed; value, spread and verdict follow from the two each time they
are shown, so that they cannot differ from the record, and a new record answers anew.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from math import inf
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from hilbert_lib.lab.records import REPORTS, RESULTS, newest_run, read_records, run_environment

ROOT, LEDGER = REPORTS.parent, REPORTS / "claims.yml"
HOLDS, HOLDS_NOT, UNTESTED = "holds", "does not hold", "cannot be tested here"
MEASURED = ("value", "low", "high")
JUDGED = ("claimed_least", "claimed_most", "as_claimed")
SUCH_CASES = 0.85  # share of the cases under a condition that must bear a claim out for it to hold "when" it is met


@dataclass(frozen=True)
class Band:
    """A claimed range: a case bears it out if its whole interval lies from `least` to `most`.

    `where` is a query over the cases that the range is claimed for; empty means all.
    """

    least: float = -inf
    most: float = inf
    where: str = ""


@dataclass(frozen=True)
class Claim:
    """One entry of the ledger.

    Attributes:
        id, claim, source: which claim, in our words, and the documents that make it.
        question: how it was made testable: the configuration, and what is compared with what.
        quantity: what the values are.
        measure: "module:function" of this package, which gives the cases; empty where tests answer, or nothing can.
        options: its further arguments.
        record: the notebook, or other folder under reports/h200*/RUN/, whose records it reads; empty where the cases
            are computed.
        file: the file of records in it.
        claimed: the claimed ranges.
        tests: tests that answer it, as pytest names them.
        verdict: what they show: "holds" or "does not hold".
        untested: why it cannot be tested here, if nothing answers it.
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
    tests: tuple[str, ...] = ()
    verdict: str = ""
    untested: str = ""
    note: str = ""
    only: dict = field(default_factory=dict)

    def cases(self, path: Path | None) -> pd.DataFrame:
        """The claim's cases: value, low and high, and what distinguishes one case from another.

        Args:
            path: the file of records that the measure reads; None where it computes.
        """
        module, name = self.measure.split(":")
        function: Callable[..., pd.DataFrame] = getattr(import_module(f"hilbert_lib.lab.ledger.{module}"), name)
        return function(_read(path), **self.options) if path else function(**self.options)


@dataclass(frozen=True)
class Answer:
    """What was found of a claim.

    Attributes:
        claim: the entry.
        verdict: "holds", "holds when ...", "holds in ...", "does not hold", "cannot be tested here: ...", or
            "waits for: RECORD".
        value: the value and its interval, or the range of all cases; "" where there are none.
        cases: with claimed_least, claimed_most and as_claimed, whether the case bears the claim out; None where tests
            answer, or nothing does.
        record: the file of records under reports/; None where there is none.
        hardware: on what it was measured.
    """

    claim: Claim
    verdict: str
    value: str = ""
    cases: pd.DataFrame | None = None
    record: Path | None = None
    hardware: str = ""

    @property
    def evidence(self) -> str:
        """Where the answer comes from: a file, tests, or "computed"."""
        if self.record is not None:
            path = self.record.resolve()
            return (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).as_posix()
        return " ".join(self.claim.tests) or ("computed" if self.cases is not None else "")

    @property
    def source(self) -> str:
        """`evidence` in a word: the record's folder, "tests" or "computed"."""
        return "tests" if self.claim.tests else self.record.parent.name if self.record else self.evidence


def read_ledger(path: str | Path = LEDGER) -> dict[str, Claim]:
    """The entries of the ledger, by id.

    Args:
        path: of the YAML file.

    Returns:
        Id to claim, in the order of the file.

    Raises:
        ValueError: for an entry with an unknown or missing field, or without exactly one way to be answered; if the
            file is not there, as where the library is installed without its checkout.

    >>> read_ledger()["K3"].source
    '000'
    """
    try:
        entries = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"no ledger of claims at {path}: it is part of the checkout, with its records") from None
    return {name: _claim(name, entry) for name, entry in entries.items()}


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
    if not claim.measure:
        return Answer(claim, f"{UNTESTED}: {claim.untested}")
    path, hardware = None, "any: nothing is timed"
    if claim.record:
        run = newest_run(claim.record, claim.file) if run is None else run
        if run is None:
            return Answer(claim, f"waits for: {claim.record}")
        path, hardware = run / claim.file, run_environment(run, claim.file)["hardware"]
    try:
        cases = claim.cases(path)
        cases = cases if cases.empty else cases.dropna(subset=["value"])  # NaN: checked there, and not timed
    except ValueError:
        if not claim.record:
            raise
        cases = pd.DataFrame()  # the record lacks a sweep
    if cases.empty:
        reason = claim.untested or f"{claim.record} holds no such measurement"
        return Answer(claim, f"{UNTESTED}: {reason}", "", cases, path, hardware)
    verdict, cases = judge(cases, claim.claimed)
    return Answer(claim, verdict, _value(cases), cases, path, hardware)


def judge(cases: pd.DataFrame, claimed: Sequence[Band]) -> tuple[str, pd.DataFrame]:
    """The verdict that cases give on claimed ranges.

    Args:
        cases: value, low, high, and the columns that distinguish a case.
        claimed: ranges; cases that none of them speaks of are left out.

    Returns:
        "holds" where every case bears the claim out, "does not hold" where none does; otherwise "holds when" and what
        the cases that do have in common, or "holds but where" and what those have that do not, whichever is exact, and
        counts. Where too many others have the same in common it is no condition: "holds in so many of so many cases".
        And the cases, with claimed_least, claimed_most and as_claimed.

    Raises:
        ValueError: if no range speaks of any case.

    >>> cases = pd.DataFrame({"row_bytes": [32, 128], "value": [1.2, 1.0], "low": [1.1, 0.9], "high": [1.3, 1.1]})
    >>> judge(cases, [Band(least=1.05)])[0]
    'holds when row_bytes <= 32 (1 of 1 such cases, 1 of 2 in all)'
    """
    parts = [cases.query(band.where) if band.where else cases for band in claimed]
    if not any(map(len, parts)):
        raise ValueError(f"claimed must speak of some case; none of {list(claimed)} does")
    marked = [
        part.assign(
            claimed_least=band.least,
            claimed_most=band.most,
            as_claimed=part.low.ge(band.least) & part.high.le(band.most),
        )
        for part, band in zip(parts, claimed, strict=True)
    ]
    judged = pd.concat(marked, ignore_index=True)
    judged = judged[[*judged.columns.difference([*MEASURED, *JUDGED], sort=False), *MEASURED, *JUDGED]]
    held = judged.as_claimed
    if held.all():
        return HOLDS, judged
    if not held.any():
        return HOLDS_NOT, judged
    (when, such), (unless, others) = (_in_common(judged, which) for which in (held, ~held))
    is_exact, is_exact_without = held[such].all(), not held[others].any()
    if unless and is_exact_without and not (when and is_exact):
        return f"{HOLDS} but where {unless} ({held.sum()} of {len(held)} cases)", judged
    if not when or held[such].mean() < SUCH_CASES:
        return f"{HOLDS} in {held.sum()} of {len(held)} cases", judged
    return f"{HOLDS} when {when} ({held.sum()} of {such.sum()} such cases, {held.sum()} of {len(held)} in all)", judged


def ledger_table(answers: Sequence[Answer]) -> pd.DataFrame:
    """The ledger as it is shown: id, claim, verdict, value, quantity, from, hardware and note, a row a claim."""
    return pd.DataFrame(
        {
            "id": each.claim.id,
            "claim": each.claim.claim,
            "verdict": each.verdict,
            "value": each.value,
            "quantity": each.claim.quantity,
            "from": each.source,
            "hardware": each.hardware,
            "note": each.claim.note,
        }
        for each in answers
    )


def ratio_cases(answers: Iterable[Answer]) -> pd.DataFrame:
    """Every case of the claims that one time is so many times another, measured and as claimed.

    Args:
        answers: of the ledger.

    Returns:
        id, claim, quantity, verdict, value, low, high, claimed_least, claimed_most and as_claimed; a claim that waits
        has one row without values.
    """
    columns = [*MEASURED, *JUDGED]
    tables = []
    for each in answers:
        if each.claim.quantity.startswith("time "):
            table = pd.DataFrame([{}], columns=columns) if each.cases is None else each.cases[columns]
            told = {"id": each.claim.id, "claim": each.claim.claim, "quantity": each.claim.quantity}
            tables.append(table.assign(**told, verdict=each.verdict))
    return pd.concat(tables, ignore_index=True)


def counted(cases: pd.DataFrame, value: pd.Series | None = None) -> pd.DataFrame:
    """Cases whose value has no spread, because it is counted.

    Args:
        cases: what distinguishes them; also `value` where it is not given.
        value: of each.

    >>> counted(pd.DataFrame({"ranks": [2], "value": [1.0]})).columns.tolist()
    ['ranks', 'value', 'low', 'high']
    """
    value = cases.value if value is None else value
    return cases.assign(value=value, low=value, high=value).reset_index(drop=True)


def _claim(name: str, entry: dict) -> Claim:
    known = {each.name for each in fields(Claim)}
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"{name} must have fields of {sorted(known)}, got {unknown}")
    if missing := [each for each in ("claim", "source", "question") if not entry.get(each)]:
        raise ValueError(f"{name} must have {', '.join(missing)}")
    answered = [
        bool(entry.get("measure")),
        bool(entry.get("tests")),
        set(entry) & {"measure", "untested"} == {"untested"},
    ]
    if sum(answered) != 1:
        raise ValueError(f"{name} must be answered by measure, by tests, or say why it is untested; one of the three")
    if entry.get("measure") and not entry.get("claimed"):
        raise ValueError(f"{name} must say what range is claimed")
    if entry.get("tests") and entry.get("verdict") not in (HOLDS, HOLDS_NOT):
        raise ValueError(f"{name} must say whether its tests show that it holds, got {entry.get('verdict')!r}")
    given = {**entry, "claimed": tuple(Band(**band) for band in entry.get("claimed", ()))}
    return Claim(id=name, **{**given, "tests": tuple(entry.get("tests", ()))})


def _in_common(judged: pd.DataFrame, marked: pd.Series) -> tuple[str, pd.Series]:
    """What marked cases have in common that others lack, column by column, and which cases have it.

    A column that only some cases have, as those of a second measurement lack it, is no condition.
    """
    such, words = pd.Series(True, judged.index), []
    for name in judged.columns[judged.notna().all()].difference([*MEASURED, *JUDGED], sort=False):
        column = judged[name]
        own = sorted(column[marked].unique())
        if not column[such].isin(own).all():
            such &= column.isin(own)
            words.append(_values(name, own, sorted(column.unique())))
    return " and ".join(words), such


def _values(name: str, own: list, every: list) -> str:
    if isinstance(own[0], str | bool | np.bool) or not _is_run(own, every):
        return f"{name} is {' or '.join(map(str, own))}"
    if own[0] == every[0]:
        return f"{name} <= {own[-1]}"
    if own[-1] == every[-1]:
        return f"{name} >= {own[0]}"
    return f"{name} is {own[0]}" if len(own) == 1 else f"{name} is {own[0]} to {own[-1]}"


def _is_run(own: list, every: list) -> bool:
    """Whether values follow each other among all values."""
    first = every.index(own[0])
    return own == every[first : first + len(own)]


def _value(cases: pd.DataFrame) -> str:
    if len(cases) == 1:
        value, low, high = (f"{cases[name].iloc[0]:.4g}" for name in MEASURED)
        return value if low == high else f"{value} ({low} to {high})"
    low, high = (f"{each:.4g}" for each in (cases.value.min(), cases.value.max()))
    return f"{low if low == high else f'{low} to {high}'}, {len(cases)} cases"


def _read(path: Path) -> list[dict]:
    return pd.read_csv(path).to_dict("records") if path.suffix == ".csv" else read_records(path)
