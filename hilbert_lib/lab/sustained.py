"""How long a call takes among the same calls back to back, as in training, where a GPU meets its limit of power."""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import pynvml
import torch

WARM_WINDOWS, WINDOWS = 5, 5  # before those that are timed, and these
HOST_CALLS = 8


def back_to_back(call: Callable[[], object], device: torch.device, *, calls: int) -> dict[str, list[float] | float]:
    """Runs `WARM_WINDOWS` windows of so many calls and then `WINDOWS` more, and waits for the device after all of them.

    `call` only queues its work; where processes wait for each other, the number of calls is the same in all. Gives
    windows_ms, of a call in each timed window; host, the ms that the host takes to queue a call where nothing is
    queued; of a GPU that tells them mhz and watts, read after each window was queued. All but windows_ms medians.

    >>> len(back_to_back(lambda: None, torch.device("cpu"), calls=1)["windows_ms"])
    5
    """
    is_gpu, host, moments, seen = device.type == "cuda", [], [], []
    if is_gpu:
        pynvml.nvmlInit()
        # By UUID: NVML counts GPUs that CUDA_VISIBLE_DEVICES hides.
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    for _ in range(HOST_CALLS):
        if is_gpu:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        host.append((time.perf_counter() - started) * 1e3)
    for _ in range(WARM_WINDOWS + WINDOWS):
        for _ in range(calls):
            call()
        moments.append(torch.cuda.Event(enable_timing=True) if is_gpu else time.perf_counter())
        if is_gpu:
            moments[-1].record()
            with suppress(pynvml.NVMLError):
                clock = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
                seen.append((clock, pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3))
    if is_gpu:
        torch.cuda.synchronize(device)
    timed = pairwise(moments[WARM_WINDOWS - 1 :])
    windows_ms = [(a.elapsed_time(b) if is_gpu else (b - a) * 1e3) / calls for a, b in timed]
    told = zip(("mhz", "watts"), map(statistics.median, zip(*seen[-WINDOWS:], strict=True)), strict=False)
    return {"windows_ms": windows_ms, "host": statistics.median(host)} | dict(told)
