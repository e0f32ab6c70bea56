"""Lengths that grow until the next one would pass a limit; the memory of each is predicted before it is tried."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import torch

from hilbert_lib import checks
from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.files import one_line
from hilbert_lib.launch.isolated import NO_MEMORY
from hilbert_lib.limits.config import SafetyConfig, config_or_default
from hilbert_lib.limits.estimate import estimate_memory
from hilbert_lib.limits.memory import GB, MemorySafetyChecker, measure_peak, present_device
from hilbert_lib.limits.watch import LimitReachedError, Watcher
from hilbert_lib.patterns.dilated import DilatedPattern

if TYPE_CHECKING:
    import pandas as pd

# The default run: five branches that grow as LongNet's (arXiv 2307.02486), and few heads, for any machine.
PATTERN = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
HEADS, HEAD_DIM = 4, 64


@dataclass(frozen=True)
class ProgressiveRow:
    """One length of a progressive test."""

    length: int  # tokens
    room_bytes: int  # that might be taken before the run
    predicted_bytes: int  # at the highest point of the run
    measured_bytes: int | None  # None where it did not end well
    seconds: float | None  # None where it was not tried
    status: str  # "ran", "not tried" or "ended"


@dataclass(frozen=True)
class ProgressiveResult:
    """The rows of a progressive test. If it stopped before the end, the last row is the length at which it did."""

    rows: tuple[ProgressiveRow, ...]
    limit: str  # what stopped the test, in words, also where it reached its end

    @property
    def longest(self) -> int:
        """The longest length that ran, 0 if none did."""
        return max((row.length for row in self.rows if row.status == "ran"), default=0)

    def table(self) -> "pd.DataFrame":
        """One row a length, one column an attribute; needs pandas."""
        import pandas as pd  # the library has no other use for it

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
        self._dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32  # of the default run

    def run_progressive_test(
        self,
        start_len: int,
        end_len: int,
        *,
        run: Callable[[int], object] | None = None,
        estimate: Callable[[int], int] | None = None,
    ) -> ProgressiveResult:
        """Run start_len and further lengths, each growth_factor times as long, up to end_len, which is the last.

        A length is tried only if its predicted memory fits, and if it would end within max_seconds even if time grew
        with the square of the length. A `Watcher` ends a run that passes a limit all the same.

        Args:
            start_len, end_len: tokens.
            run: does the work of a length and makes its inputs; by default one forward of dilated attention.
            estimate: bytes that `run` takes at a length, its inputs included; given with `run`.

        Raises:
            TypeError, ValueError: if a length is no integer of at least 1, end_len is below start_len, only one of run
                and estimate is given, one is no function, or estimate gives no number of at least 0.
            ValueError: outside of the main thread, which alone can be interrupted at a limit.

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
        measure_peak(lambda: None, self.device)  # its first imports are neither timed nor interrupted
        checker = MemorySafetyChecker(self.config, self.device)
        rows, length, seconds, before = [], start_len, 0.0, start_len
        while True:
            predicted, room = estimate(length), checker.room()
            if not (size := checks.number(f"estimate({length})", predicted)) >= 0:
                raise ValueError(f"estimate({length}) must be at least 0, got {size}")
            expected = seconds * (length / before) ** 2
            fits, reason = checker.check_memory_available(predicted / GB)
            if fits and expected > self.config.max_seconds:
                fits, reason = False, f"up to {expected:.1f} s expected, allowed are {self.config.max_seconds:g}"
            if not fits:
                rows.append(ProgressiveRow(length, room, predicted, None, None, "not tried"))
                return ProgressiveResult(tuple(rows), f"{length} tokens were not tried: {reason}")
            measured, seconds, cause = self._tried(run, length)
            rows.append(ProgressiveRow(length, room, predicted, measured, seconds, "ended" if cause else "ran"))
            if cause:
                return ProgressiveResult(tuple(rows), f"{length} tokens did not end well: {cause}")
            if length == end_len:
                return ProgressiveResult(tuple(rows), f"none was met up to {end_len} tokens, where the test ends")
            before, length = length, ceil(min(end_len, length * self.config.growth_factor))

    def _tried(self, run: Callable[[int], object], length: int) -> tuple[int | None, float, str]:
        """Bytes and seconds of a run, and why it did not end well, "" if it did."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks cached for shorter lengths do not fit, and the watch counts them as used
        measured, cause, began = None, "", [time.perf_counter()]
        try:
            with Watcher(self.config, self.device):
                # The clock begins after the collection of garbage that comes first.
                measured = measure_peak(lambda: (began.append(time.perf_counter()), run(length)), self.device)
        except LimitReachedError as error:
            cause = str(error)
        except (RuntimeError, MemoryError) as error:
            message = str(error).split("\n")[0]
            if not isinstance(error, MemoryError) and not NO_MEMORY.search(message):
                raise
            cause = f"out of memory: {one_line(message)}"
        return measured, time.perf_counter() - began[-1], cause

    def _attention(self, length: int) -> torch.Tensor:
        shape = (1, length, HEADS, HEAD_DIM)
        q, k, v = (torch.randn(shape, device=self.device, dtype=self._dtype) for _ in range(3))
        return dilated_attention(q, k, v, PATTERN)

    def _attention_bytes(self, length: int) -> int:
        sizes = {"length": length, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": self._dtype}
        return estimate_memory(PATTERN, device=self.device, **sizes).total
