"""The two clocks of `timing`: the host's and the CUDA device's; and collections of garbage kept short meanwhile."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hilbert_lib.internals import spin
from hilbert_lib.lab.environment import sm_clocks_mhz


class Sample(NamedTuple):
    """One timed stretch of calls."""

    ms: float
    host_ms: float  # what the host took; with `waited`, host and device together
    waited: bool  # whether the device waited for the host all the same: then the time holds launches


class CpuTimer:
    """Times stretches of calls by the clock."""

    device = "cpu"

    def sample(self, run: Callable[[], object], calls: int) -> Sample:
        took = _host_ms(run, calls)
        return Sample(took, took, False)

    def sm_clock_mhz(self) -> None:
        return None


# Before each sample the device spins, about 2 ms at 2 GHz, while the host queues the sample's launches: a
# kernel shorter than its launch is then timed for what it is (tests/lab/test_timing.py compares it with a graph).
# Where that was too short for the host, it is doubled up to 64 ms, and the sample taken again. Where nothing was long
# enough, as for calls that wait for the device themselves, the shortest is taken: longer ones only cost time.
LEAD_CYCLES = 4_000_000
MOST_CYCLES = 32 * LEAD_CYCLES


class CudaTimer:
    """Times stretches of calls by events on the device's stream, without the host's launch costs."""

    def __init__(self, device: torch.device):
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.device = str(self._device)
        self._leads = {}  # the last and the longest to try, by the id of the call, which outlives its samples

    def sample(self, run: Callable[[], object], calls: int) -> Sample:
        lead, most = self._leads.get(id(run), (LEAD_CYCLES, MOST_CYCLES))
        while (sample := self._behind_lead(run, calls, lead)).waited and lead < most:
            lead *= 2
        self._leads[id(run)] = (LEAD_CYCLES, LEAD_CYCLES) if sample.waited else (lead, most)
        return sample

    def _behind_lead(self, run: Callable[[], object], calls: int, lead: int) -> Sample:
        # It begins on an idle device: behind earlier calls the host would wait for room in the queue of launches.
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            spin(lead)
            start.record()
            host_ms = _host_ms(run, calls)
            end.record()
            waited = start.query()  # the device had begun before the host had queued all of it
        torch.cuda.synchronize(self._device)
        return Sample(start.elapsed_time(end), host_ms, waited)

    def sm_clock_mhz(self) -> int | None:
        return sm_clocks_mhz()[self._device.index]


def timer_of(device: torch.device | str) -> CpuTimer | CudaTimer:
    """The timer of a device; ValueError where it is neither a CPU nor a CUDA device."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device, got {device}")
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def _host_ms(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        run()
    return (time.perf_counter_ns() - start) / 1e6


@contextmanager
def old_objects_apart() -> Iterator[None]:
    """Inside, garbage collections skip objects that were made before: one of all, torch's compiler loaded, takes longer
    than a short call. Objects that somebody has frozen before stay so, and none are added."""
    # More than half of them: from Python 3.12 on each collection freezes the immortal objects that it meets.
    if gc.get_freeze_count() > len(gc.get_objects()):
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
