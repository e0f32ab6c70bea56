"""Answers to a claim: its cases, and the verdict that they give.

No measured value stands in the ledger. Value and verdict are computed each time they are shown.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pandas as pd

from hilbert_lib.lab.ledger.cases import INTERVAL
from hilbert_lib.lab.ledger.claim import HOLDS, HOLDS_NOT, UNTESTED, WAITS, Band, Claim, When
from hilbert_lib.lab.ledger.claims import LEDGER, WAITING
from hilbert_lib.lab.records import MACHINES, REPORTS, RESULTS, newest_run, read_records, run_environment
from hilbert_lib.lab.tables import sides_of

ROOT = REPORTS.parent
NOT_YET = "not tested yet"  # the verdict where no record holds a case
JUDGED = ["claimed_least", "claimed_most", "as_claimed"]
OUTCOMES = "as claimed", "below the claimed range", "above it", "across an end of it"
FEW = 12  # rows that are read at once
MOST = 0.85  # share of the cases under a condition that hold, and of the others that do not


@dataclass(frozen=True)
class Answer:
    """Answer to a claim: value, with its interval or the range of all cases, and the folder that was read.

    left_out: how many cases each query of `leaves_out` takes away from the judged ones.
    unread: the sweeps of the record whose cases the claim is not about.
    """

    claim: Claim
    verdict: str
    value: str = ""
    cases: pd.DataFrame | None = None
    run: Path | None = None
    left_out: dict[str, int] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @property
    def unjudged(self) -> str:
        """The cases that are left out, in words; empty where all are judged."""
        reasons = (
            f"{count} with {where} ({self.claim.leaves_out[where]})" for where, count in self.left_out.items() if count
        )
        return "; ".join(reasons)

    @property
    def hardware(self) -> str:
        """On what it was measured; any, where nothing was."""
        return run_environment(self.run)["hardware"] if self.run else "any"

    @property
    def evidence(self) -> str:
        """Source of the answer: a folder, tests, or "computed"."""
        if self.run is not None:
            return self.run.resolve().as_posix().removeprefix(f"{ROOT.as_posix()}/")
        return " ".join(self.claim.tests) or ("computed" if self.cases is not None else "")

    @property
    def source(self) -> str:
        """`evidence` in a word: the record's folder, "tests" or "computed"."""
        return "tests" if self.claim.tests else self.run.name if self.run else self.evidence


@cache
def answers() -> dict[str, Answer]:
    """Answers of the committed records to every claim of the ledger, by id."""
    return {name: answer(claim) for name, claim in LEDGER.items()}


def answer(claim: Claim, run: Path | None = None) -> Answer:
    """Answer to a claim by the newest committed record (or that of a folder), the computation or the tests.

    ValueError: for a claim of a record, where there is no checkout that holds records.
    """
    if claim.tests:
        return Answer(claim, claim.verdict)
    unread = ()
    if not claim.record:
        cases = claim.measure()
    else:
        if run is None and not REPORTS.exists():
            raise ValueError(f"no records at {REPORTS}, which {claim.id} is answered by: they are part of the checkout")
        run = run or run_of(claim)
        if run is None:
            return Answer(claim, f"{WAITS}: {claim.record}")
        records = read_records(run / RESULTS)
        unread = tuple(sorted({sweep_of(record) for record in records} - {*claim.sweeps}))
        cases = _measured(claim, records)
    cases, left_out = set_apart(claim, cases)
    counts = {where: len(rows) for where, rows in left_out.items()}
    if cases.empty:  # or was not timed, where NaN stood
        return Answer(claim, f"{UNTESTED}: {claim.record} holds no such measurement", "", cases, run, counts, unread)
    verdict, cases = judge(cases, claim.claimed, claim.when)
    if claim.basis and verdict.startswith(HOLDS):
        verdict = verdict.replace(HOLDS, f"{HOLDS} {claim.basis}", 1)
    return Answer(claim, verdict, _value(cases), cases, run, counts, unread)


def run_of(claim: Claim) -> Path | None:
    """The newest committed run of a claim's record; None where there is none."""
    # What needs no GPU was timed without one.
    return newest_run(claim.record) or newest_run(claim.record, machines=REPORTS.glob(MACHINES))


def _measured(claim: Claim, records: list[dict]) -> pd.DataFrame:
    # The cases of a claim in some records, none where these lack a sweep.
    try:
        return claim.measure(records).dropna(subset=INTERVAL[0])
    except ValueError:  # the records lack a sweep
        return pd.DataFrame()


def standing(kind: str, records: Mapping[str, list[dict]]) -> pd.DataFrame:
    """Verdicts of the claims of a kind by some records, also of those that wait.

    Columns: id, claim, verdict, value, quantity, note. kind: the letter of their ids. records: by the name of a
    notebook; a part of a record is judged by what it holds.
    """
    rows = []
    for claim in (each for each in {**LEDGER, **WAITING}.values() if each.id.startswith(kind)):
        cases, _ = set_apart(claim, _measured(claim, records.get(claim.record, [])))
        verdict, value = NOT_YET, ""
        if not cases.empty:
            verdict, cases = judge(cases, claim.claimed, claim.when)
            value = _value(cases)
        rows.append((claim.id, claim.claim, verdict, value, claim.quantity, claim.note))
    return pd.DataFrame(rows, columns=["id", "claim", "verdict", "value", "quantity", "note"])


def judged(name: str, records: list[dict]) -> tuple[str, pd.DataFrame]:
    """The verdict that records which were just measured give on a claim, also one that waits, and its cases."""
    claim = {**LEDGER, **WAITING}[name]
    cases, _ = set_apart(claim, claim.measure(records))
    return judge(cases, claim.claimed, claim.when)


def set_apart(claim: Claim, cases: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """The cases that are judged, and those that each query of `leaves_out` takes away, in turn."""
    left_out = {}
    for where in claim.leaves_out if len(cases) else ():
        left_out[where] = cases.query(where)
        cases = cases.drop(index=left_out[where].index)
    return cases, left_out


def sweep_of(record: dict) -> str:
    """The sweep of a record of any kind: of a side's parameters, of a rank's run, or the kind of what has no sweep."""
    if "point" in record:
        return "points"
    parameters = sides_of(record)[0].get("parameters", {})
    return parameters.get("sweep") or record.get("sweep") or record["kind"]


def judge(cases: pd.DataFrame, claimed: Sequence[Band], when: When | None = None) -> tuple[str, pd.DataFrame]:
    """The verdict that cases give on claimed ranges, and the cases with their ranges and `as_claimed`.

    A condition counts where most cases under it hold and most others do not; without one, some cases are not enough.
    ValueError: for a case that no range speaks of, or more than one.
    """
    parts = []
    for band in claimed:
        part = cases.query(band.where) if band.where else cases
        ends = {"claimed_least": band.least, "claimed_most": band.most}
        parts.append(part.assign(**ends, as_claimed=part.low.ge(band.least) & part.high.le(band.most)))
    spoken = pd.concat(parts).index
    if spoken.empty or not spoken.sort_values().equals(cases.index.sort_values()):
        raise ValueError(f"claimed must speak of each of {len(cases)} cases once; {list(claimed)} does not")
    judged = pd.concat(parts, ignore_index=True)
    judged = judged[[*judged.columns.difference([*INTERVAL, *JUDGED], sort=False), *INTERVAL, *JUDGED]]
    is_claimed = judged.as_claimed
    if is_claimed.all() or not is_claimed.any():
        return HOLDS if is_claimed.all() else HOLDS_NOT, judged
    count = f"{is_claimed.sum()} of {len(is_claimed)}"
    if when:
        such = judged.index.isin(judged.query(when.where).index)
        if is_claimed[such].mean() >= MOST and is_claimed[~such].mean() <= 1 - MOST:
            of_such = f"{is_claimed[such].sum()} of {such.sum()} such cases, {count} in all"
            return f"{HOLDS} {when.says} ({f'{count} cases' if is_claimed[such].all() else of_such})", judged
    return f"{HOLDS_NOT} ({count} cases)", judged


def _value(cases: pd.DataFrame) -> str:
    if len(cases) == 1:
        value, low, high = (f"{cases[name].iloc[0]:.4g}" for name in INTERVAL)
        return value if low == high else f"{value} ({low} to {high})"
    low, high = (f"{end:.4g}" for end in (cases.value.min(), cases.value.max()))
    return f"{low if low == high else f'{low} to {high}'}, {len(cases)} cases"


def ledger_table(answers: Iterable[Answer]) -> pd.DataFrame:
    """The ledger as it is shown, a row a claim."""
    columns = ["id", "claim", "verdict", "value", "quantity", "from", "note"]
    rows = [(a.claim.id, a.claim.claim, a.verdict, a.value, a.claim.quantity, a.source, _note(a)) for a in answers]
    return pd.DataFrame(rows, columns=columns)


def _note(answer: Answer) -> str:
    left_out = f"not judged: {answer.unjudged}" if answer.unjudged else ""
    return "; ".join(filter(None, (answer.claim.note, left_out)))


def case_summary(cases: pd.DataFrame) -> pd.DataFrame:
    """Judged cases counted by their outcome: where the interval of each lies, beside the range that is claimed for it.

    Columns: outcome, cases, lowest, median, highest; and the columns of words by which cases differ, where a row for
    each makes no more than a dozen.

    >>> cases = pd.DataFrame({"value": [0.3, 0.0, 0.1], "low": [0.3, 0.0, 0.1], "high": [0.3, 0.0, 0.1]})
    >>> case_summary(judge(cases, [Band(least=0.2)])[1])[["outcome", "cases", "highest"]].values.tolist()
    [['as claimed', 1, 0.3], ['below the claimed range', 2, 0.1]]
    """
    outcome = pd.Series(OUTCOMES[3], cases.index).mask(cases.high < cases.claimed_least, OUTCOMES[1])
    outcome = outcome.mask(cases.low > cases.claimed_most, OUTCOMES[2]).mask(cases.as_claimed, OUTCOMES[0])
    cases = cases.assign(outcome=pd.Categorical(outcome, OUTCOMES, ordered=True))
    words = [name for name in cases.columns.difference(["outcome"], sort=False) if cases[name].dtype.kind in "OUT"]
    words = [name for name in words if cases[name].nunique() > 1]
    if len(cases[["outcome", *words]].drop_duplicates()) > FEW:
        words = []
    grouped = cases.groupby(["outcome", *words], observed=True, dropna=False).value
    summary = grouped.agg(cases="size", lowest="min", median="median", highest="max").reset_index()
    return summary.astype({"outcome": str})


def ratio_cases(answers: Iterable[Answer]) -> pd.DataFrame:
    """Every case of the claims whose quantity is a ratio of times, with the claim's id, words and quantity."""
    tables = []
    for answer in answers:
        if answer.claim.quantity.startswith("time ") and answer.cases is not None:
            about = {name: getattr(answer.claim, name) for name in ("id", "claim", "quantity")}
            tables.append(answer.cases[[*INTERVAL, *JUDGED]].assign(**about))
    return pd.concat(tables, ignore_index=True)
