"""Lengths that grow step by step, each predicted before it is tried, until the next one would pass a limit."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import pandas as pd
import torch

from hilbert_lib import checks
from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.launch.isolated import NO_MEMORY
from hilbert_lib.limits.config import SafetyConfig, config_or_default
from hilbert_lib.limits.estimate import estimate_memory
from hilbert_lib.limits.memory import GB, MemorySafetyChecker, measure_peak, present_device
from hilbert_lib.limits.watch import LimitReachedError, Watcher
from hilbert_lib.pattern import DilatedPattern

# The work of the default run: five branches, as LongNet's (arXiv 2307.02486) grow, and few heads, for any machine.
PATTERN = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
HEADS, HEAD_DIM = 4, 64


@dataclass(frozen=True)
class ProgressiveRow:
    """One length of a progressive test.

    Attributes:
        length: tokens.
        room_bytes: what might be taken then.
        predicted_bytes: what the run was expected to take at its highest point.
        measured_bytes: what it took; None where it did not end well.
        seconds: how long it took; None where it was not tried.
        status: "ran", "not tried", or "ended".
    """

    length: int
    room_bytes: int
    predicted_bytes: int
    measured_bytes: int | None
    seconds: float | None
    status: str


@dataclass(frozen=True)
class ProgressiveResult:
    """What a progressive test found.

    Attributes:
        rows: one a length, those that ran first; the last one is that at which the test stopped, if it did.
        limit: what the limit is and why; that the end was reached, where it was.
    """

    rows: tuple[ProgressiveRow, ...]
    limit: str

    @property
    def longest(self) -> int:
        """The longest length that ran, 0 if none did.

        >>> ProgressiveResult((ProgressiveRow(8, 200, 100, 96, 0.1, "ran"),), "").longest
        8
        """
        return max((row.length for row in self.rows if row.status == "ran"), default=0)

    def table(self) -> pd.DataFrame:
        """The rows as a table, with one column an attribute."""
        return pd.DataFrame([vars(row) for row in self.rows])


class ProgressiveTester:
    """Runs something at growing lengths, and stops before the limits.

    Args:
        config: the limits; by default as `SafetyConfig.load` finds them.
        device: whose memory is predicted and measured; by default as for `MemorySafetyChecker`.
    """

    def __init__(self, config: SafetyConfig | None = None, device: object = None):
        self.config = config_or_default(config)
        self.device = present_device(device)

    def run_progressive_test(
        self,
        start_len: int,
        end_len: int,
        *,
        run: Callable[[int], object] | None = None,
        estimate: Callable[[int], int] | None = None,
    ) -> ProgressiveResult:
        """Runs start_len and, each growth_factor times as long, further lengths up to end_len, which is the last.

        A length is tried only if its predicted memory fits, and if it would end within max_seconds although time grew
        with the square of the length. While it runs, it is watched.

        Args:
            start_len, end_len: tokens.
            run: does the work of a length, its inputs included; by default one forward of dilated attention. It runs in
                the main thread, which alone can be interrupted at a limit.
            estimate: bytes that `run` takes at a length, its inputs included; to be given with `run`.

        Raises:
            TypeError, ValueError: if a length is no integer of at least 1, end_len is below start_len, only one of run
                and estimate is given, or one that is no function, estimate gives no number of at least 0; or outside of
                the main thread.

        >>> tester = ProgressiveTester(device="cpu")
        >>> tester.run_progressive_test(64, 256, run=torch.zeros, estimate=lambda n: 4 * n).longest
        256
        """
        if (thread := threading.current_thread()) is not threading.main_thread():
            raise ValueError(f"run_progressive_test must be called in the main thread, got thread {thread.name!r}")
        start_len = checks.integer("start_len", start_len, least=1)
        end_len = checks.integer("end_len", end_len, least=start_len)
        if (run is None) != (estimate is None):
            raise ValueError("run and estimate must be given together: a run without an estimate is not safe")
        if run is None:
            run, estimate = self._attention, self._attention_bytes
        for name, function in (("run", run), ("estimate", estimate)):
            if not callable(function):
                raise TypeError(f"{name} must be a function of a length, got {function!r}")
        measure_peak(lambda: None, self.device)  # what it imports at first shall be neither timed nor interrupted
        checker = MemorySafetyChecker(self.config, self.device)
        rows, length, seconds, before = [], start_len, 0.0, start_len
        while True:
            predicted, room = _bytes(length, estimate(length)), checker.room()
            if reason := self._refusal(checker, predicted, seconds * (length / before) ** 2):
                rows.append(ProgressiveRow(length, room, predicted, None, None, "not tried"))
                return ProgressiveResult(tuple(rows), f"{length} tokens were not tried: {reason}")
            row, cause = self._tried(run, length, room, predicted)
            rows.append(row)
            if cause:
                return ProgressiveResult(tuple(rows), f"{length} tokens did not end well: {cause}")
            if length == end_len:
                return ProgressiveResult(tuple(rows), f"none was met up to {end_len} tokens, where the test ends")
            seconds, before = row.seconds, length
            length = ceil(min(end_len, length * self.config.growth_factor))

    def _refusal(self, checker: MemorySafetyChecker, predicted: int, seconds: float) -> str:
        fits, reason = checker.check_memory_available(predicted / GB)
        if not fits:
            return reason
        if seconds > self.config.max_seconds:
            return f"up to {seconds:.1f} s expected, allowed are {self.config.max_seconds:g}"
        return ""

    def _tried(
        self, run: Callable[[int], object], length: int, room: int, predicted: int
    ) -> tuple[ProgressiveRow, str]:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks kept from shorter lengths fit no longer, and the watch sees them in use
        measured, cause, began = None, "", [time.perf_counter()]
        try:
            with Watcher(self.config, self.device):
                # The clock begins after the collection of garbage that comes first.
                measured = measure_peak(lambda: (began.append(time.perf_counter()), run(length)), self.device)
        except LimitReachedError as error:
            cause = str(error)
        except (RuntimeError, MemoryError) as error:
            message = str(error).split("\n")[0]
            if not isinstance(error, MemoryError) and not any(words in message for words in NO_MEMORY):
                raise
            cause = f"out of memory: {message}"
        seconds = time.perf_counter() - began[-1]
        return ProgressiveRow(length, room, predicted, measured, seconds, "ended" if cause else "ran"), cause

    def _attention(self, length: int) -> torch.Tensor:
        shape = (1, length, HEADS, HEAD_DIM)
        q, k, v = (torch.randn(shape, device=self.device, dtype=self._dtype) for _ in range(3))
        return dilated_attention(q, k, v, PATTERN)

    def _attention_bytes(self, length: int) -> int:
        sizes = {"length": length, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": self._dtype}
        return estimate_memory(PATTERN, device=self.device, **sizes).total

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def _bytes(length: int, predicted: object) -> float:
    size = checks.number(f"estimate({length})", predicted)
    if not size >= 0:
        raise ValueError(f"estimate({length}) must be at least 0, got {size}")
    return predicted
