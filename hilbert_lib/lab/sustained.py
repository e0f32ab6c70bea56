"""Time of calls among calls of their own back to back, as in training, where a GPU meets its limit of power."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread

import numpy as np
import pynvml
import torch

WARM_WINDOWS, WINDOWS = 10, 10  # of all calls together before those that are timed; and of each call
HOST_CALLS = 8
WATCH_SECONDS = 0.02
SETTLE_SECONDS = 0.2  # at a window's begin, when clock and power still follow the call before and the counter lags
REASONS = {  # for which a driver holds the clock down
    "power": pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "heat": pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown,
}


def back_to_back(runs: Sequence[Callable[[], object]], device: torch.device, *, calls: Sequence[int]) -> list[dict]:
    """Runs windows of each call in turn without a wait between them: `WARM_WINDOWS`, then `WINDOWS` of each, timed.

    A run only queues its work. `calls` are those in a window; where processes wait for each other, the same in all.
    Gives of each run: windows_ms, of a call in each timed window; warmup, its calls before them; host, the median ms
    that the host takes to queue a call where nothing is queued; and of a GPU that tells them mhz and celsius (medians),
    watts (the mean), joules (of a call, by the driver's counter of energy) and held_by (why the clock was held down:
    names of `REASONS`).

    >>> len(back_to_back([lambda: None], torch.device("cpu"), calls=[1])[0]["windows_ms"])
    10
    """
    host, warm = [_host_ms(run, device) for run in runs], -(-WARM_WINDOWS // len(runs))
    with _watch(device) as readings:
        marks, began = [_mark(device)], time.perf_counter()
        for _ in range(warm + WINDOWS):
            for run, count in zip(runs, calls, strict=True):
                for _ in range(count):
                    run()
                marks.append(_mark(device))
        wait(device)
        if device.type == "cuda":  # one more look, so that the last window has an end
            time.sleep(2 * WATCH_SECONDS)
    if device.type == "cuda":
        ends = [marks[0].elapsed_time(mark) / 1e3 for mark in marks]
    else:
        ends = [mark - marks[0] for mark in marks]
    timings = []
    for index, count in enumerate(calls):
        spans = [(ends[n], ends[n + 1]) for n in range(warm * len(runs) + index, len(ends) - 1, len(runs))]
        windows_ms = [(end - start) / count * 1e3 for start, end in spans]
        of_gpu = _told([(began + start, began + end) for start, end in spans], readings, calls=count * WINDOWS)
        timings.append({"windows_ms": windows_ms, "warmup": warm * count, "host": host[index]} | of_gpu)
    return timings


def seconds_of_a_call(run: Callable[[], object], device: torch.device, alone: float) -> float:
    """Of a call among others, for about a tenth of a second; `alone`: seconds of one that is waited for."""
    count = max(1, round(0.1 / alone))
    wait(device)
    started = time.perf_counter()
    for _ in range(count):
        run()
    wait(device)
    return (time.perf_counter() - started) / count


def _host_ms(run: Callable[[], object], device: torch.device) -> float:
    took = []
    for _ in range(HOST_CALLS):
        wait(device)
        started = time.perf_counter()
        run()
        took.append((time.perf_counter() - started) * 1e3)
    wait(device)
    return statistics.median(took)


def wait(device: torch.device) -> None:
    """Until a GPU is done with what is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mark(device: torch.device) -> torch.cuda.Event | float:
    if device.type != "cuda":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record(torch.cuda.current_stream(device))
    return mark


@contextmanager
def _watch(device: torch.device) -> Iterator[list[tuple]]:
    # While it is open a thread looks at the GPU: the host's clock, joules so far, MHz, degrees, bits of reasons.
    readings, is_over = [], Event()
    if device.type != "cuda":
        yield readings
        return
    pynvml.nvmlInit()
    # By UUID: NVML counts GPUs that CUDA_VISIBLE_DEVICES hides.
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def look() -> None:
        with suppress(pynvml.NVMLError):  # a GPU that tells no energy tells nothing here
            while not is_over.wait(WATCH_SECONDS):
                joules, host_time = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3, time.perf_counter()
                mhz = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
                celsius = pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)
                readings.append((host_time, joules, mhz, celsius, pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)))

    watcher = Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield readings
    finally:
        is_over.set()
        watcher.join()


def _told(windows: list[tuple[float, float]], readings: list[tuple], *, calls: int) -> dict[str, float | str]:
    # What the looks inside these windows of the host's clock say, once each has settled; nothing where there was none,
    # or where they ended before the windows.
    settled = [(start + min(SETTLE_SECONDS, (end - start) / 2), end) for start, end in windows]
    inside = [look for look in readings if any(start <= look[0] <= end for start, end in settled)]
    if not inside or readings[-1][0] < windows[-1][1]:
        return {}
    times, joules, *_ = zip(*readings, strict=True)
    watts = np.diff(np.interp(settled, times, joules), axis=1).sum() / np.diff(settled).sum()
    _, _, mhz, celsius, bits = zip(*inside, strict=True)
    held_by = [name for name, mask in REASONS.items() if sum(bool(reasons & mask) for reasons in bits) * 2 > len(bits)]
    summary = {"mhz": statistics.median(mhz), "celsius": statistics.median(celsius), "held_by": ", ".join(held_by)}
    return summary | {"watts": float(watts), "joules": float(watts * np.diff(windows).sum() / calls)}
