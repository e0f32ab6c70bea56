"""Entry of the ledger: a claim, the documents that make it, the computation that answers it, a verdict."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

import pandas as pd

from hilbert_lib.lab.pairs import Side

HOLDS, HOLDS_NOT, UNTESTED = "holds", "does not hold", "cannot be tested here"
WAITS = "waits for"  # begins the verdict of a claim whose record is not committed yet
BASES = ("", "as planned", "as predicted")
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class Band:
    """A claimed range, of the cases that the query `where` picks. A case holds if its whole interval lies in it.

    Of a gain with two ends, "25 to 40 %", the lower end alone counts: who gains more gains that too.
    """

    least: float = -inf
    most: float = inf
    where: str = ""


@dataclass(frozen=True)
class When:
    """The condition under which a claim holds: in words that follow "holds", and as a query over its cases."""

    says: str
    where: str


@dataclass(frozen=True)
class Claim:
    """One entry of the ledger. Either `measure` finds its cases, or `tests` show the verdict.

    id: a letter for the subject and a number.
    claim: what is claimed, in our words.
    source: numbers of the documents that claim it, as the project was given them.
    question: how it was made testable.
    verdict: kept by hand, as it was read. A test compares it with what the cases give. "waits for: NOTEBOOK" keeps a
        claim out of the ledger until that record is committed.
    quantity: what the value of a case is.
    record: the notebook whose records `measure` is given; empty where it computes its cases from nothing.
    sweeps: the sweeps of that record whose cases `measure` gives. The ledger names the others as not read.
    measure: gives a table of all cases of these sweeps (see `cases`). It filters none: `leaves_out` does.
    claimed: the ranges that the documents give. Each case must lie in the query of one of them.
    when: the condition under which the claim holds, where it does not always.
    leaves_out: queries over the cases that are not judged, each with its reason. Each takes away from what is left.
    basis: "as planned" or "as predicted" where nothing was measured.
    tests: names of tests, as pytest takes them.
    note: what a reader should know beside the verdict.
    only: parameters of the notebook that measure this claim alone.
    pairs: gives the sides that are timed for this claim alone, for heads, head_dim, segment_length and device.
    device: what `pairs` are timed on.

    Raises ValueError for a field that contradicts another.

    >>> Claim("X1", "it is faster", "000", "is it?", verdict="perhaps", tests=("tests/test_x.py::test_x",))
    Traceback (most recent call last):
    ...
    ValueError: verdict of X1 must start with 'holds', 'does not hold' or 'cannot be tested here', got 'perhaps'
    """

    id: str
    claim: str
    source: str
    question: str
    verdict: str
    quantity: str = ""
    record: str = ""
    sweeps: tuple[str, ...] = ()
    measure: Callable[..., pd.DataFrame] | None = None
    claimed: tuple[Band, ...] = ()
    when: When | None = None
    leaves_out: dict[str, str] = field(default_factory=dict)
    basis: str = ""
    tests: tuple[str, ...] = ()
    note: str = ""
    only: dict = field(default_factory=dict)
    pairs: Callable[..., Iterable[tuple[Side, ...]]] | None = None
    device: str = "cuda"

    @property
    def waits(self) -> bool:
        """Whether its record is not committed yet."""
        return self.verdict == f"{WAITS}: {self.record}"

    def __post_init__(self):
        if bool(self.measure) == bool(self.tests):
            raise ValueError(f"measure or tests of {self.id} must be given, and not both; got {self.tests} as tests")
        if bool(self.measure) != bool(self.claimed):
            raise ValueError(f"claimed of {self.id} must be given with measure, and only then; got {self.claimed}")
        if bool(self.record) != bool(self.sweeps):
            raise ValueError(f"sweeps of {self.id} must be given with record, and only then; got {self.sweeps}")
        if self.pairs and not self.record:
            raise ValueError(f"record of {self.id} must name what pairs write, got ''")
        if not self.waits and not self.verdict.startswith((HOLDS, HOLDS_NOT, UNTESTED)):
            kinds = f"{HOLDS!r}, {HOLDS_NOT!r} or {UNTESTED!r}"
            raise ValueError(f"verdict of {self.id} must start with {kinds}, got {self.verdict!r}")
        for name, allowed in (("basis", BASES), ("device", DEVICES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} of {self.id} must be one of {allowed}, got {getattr(self, name)!r}")
