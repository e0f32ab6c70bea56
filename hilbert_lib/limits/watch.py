"""A watch over a run: it samples memory, temperature and time, and ends the run at a limit."""

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import psutil
import pynvml
import torch

from hilbert_lib import checks
from hilbert_lib.limits.config import SafetyConfig, config_or_default
from hilbert_lib.limits.memory import Memory, host_memory, present_device

INTERVAL_SECONDS = 0.1
MOST_SECONDS = 5.0  # that the end of a block waits for the watch's thread


class LimitReachedError(RuntimeError):
    """A `Watcher` ended the run; the text names the limit."""


@dataclass
class Peaks:
    """The highest values that a watch has seen."""

    seconds: float = 0.0
    host_bytes: int = 0  # of all watched processes; memory that they share counts for each
    gpu_bytes: int | None = None  # in use by anyone, torch's cached blocks included; None without a GPU
    temperature_c: int | None = None  # of the GPU; None where it reports none


class Watcher:
    """Watches memory, temperature and time while a block runs, and ends the run at the first limit that is passed.

    By default it kills the watched process and all that it started. If that is this process, it interrupts the main
    thread instead, and the block raises LimitReachedError. A call that never returns to Python cannot be interrupted:
    run it in a process of its own.

    Args:
        config: the limits; by default as `SafetyConfig.load` finds them.
        device: the GPU to watch, or the CPU for none; by default as for `MemorySafetyChecker`.
        pid: process to watch, with all that it started; by default this one.
        on_limit: called once at a limit, in the watch's thread, with the cause in words, instead of ending the run.

    Attributes:
        cause: the limit that was passed, in words; "" as long as there is none.
        peaks: the highest values seen.

    Raises:
        TypeError, ValueError: naming the argument; also if there is no such process or device, or if a block outside of
            the main thread is to be interrupted.

    >>> with Watcher(device="cpu") as watch:
    ...     total = sum(range(1000))
    >>> watch.cause, watch.peaks.host_bytes > 0
    ('', True)
    """

    def __init__(
        self,
        config: SafetyConfig | None = None,
        device: object = None,
        *,
        pid: int | None = None,
        on_limit: Callable[[str], None] | None = None,
    ):
        self.config, self.cause, self.peaks = config_or_default(config), "", Peaks()
        if on_limit is not None and not callable(on_limit):  # it would show when the limit is reached
            raise TypeError(f"on_limit must be a function or None, got {on_limit!r}")
        try:
            self._process = psutil.Process(None if pid is None else checks.integer("pid", pid, least=0))
        except psutil.NoSuchProcess:
            raise ValueError(f"pid must be that of a process that runs, got {pid}") from None
        device = present_device(device)
        self._gpu = _Gpu(device) if device.type == "cuda" else None
        self._on_limit = on_limit
        self._interrupts = on_limit is None and self._process.pid == os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Self:
        if self._interrupts and threading.current_thread() is not threading.main_thread():
            raise ValueError("on_limit must be given outside of the main thread, which alone can be interrupted")
        if self._thread.ident is not None:
            raise RuntimeError("a Watcher watches once, and this one has begun")
        if self._interrupts:
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        self._start, self._owner = time.monotonic(), os.getpid()
        try:
            self._thread.start()
        except KeyboardInterrupt as error:  # a limit is passed already: the block does not begin
            self.__exit__(type(error), error, None)
            raise
        except RuntimeError:  # the system gives no thread
            self._give_back_interrupts()
            raise
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if os.getpid() != self._owner:  # a forked child, which has no such thread, and no share in its locks
            self._give_back_interrupts()
            return
        try:
            self._stop.set()
            with suppress(RuntimeError):  # it was interrupted before it had begun, and ends by itself
                self._thread.join(MOST_SECONDS)
            time.sleep(0)  # an interrupt still on its way arrives here
        except KeyboardInterrupt:
            if not (self._interrupts and self.cause):
                raise
        finally:
            self._give_back_interrupts()
        if self._interrupts and self.cause and (kind is None or issubclass(kind, KeyboardInterrupt)):
            raise LimitReachedError(self.cause) from error

    def _give_back_interrupts(self) -> None:
        if self._interrupts:
            signal.signal(signal.SIGINT, signal.SIG_DFL if self._handler is None else self._handler)

    def _interrupt(self, number: int, frame: object) -> None:
        # A limit interrupts even where SIGINT was ignored, as in a shell's background jobs.
        if self.cause:
            raise KeyboardInterrupt
        if callable(self._handler):
            self._handler(number, frame)
        elif self._handler != signal.SIG_IGN:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self.cause = self._look()
            except Exception as error:
                self.cause = f"the watch failed, {type(error).__name__}: {error}"  # nothing runs unwatched
            if self.cause:
                (self._on_limit or self._end)(self.cause)
                return
            self._stop.wait(INTERVAL_SECONDS)

    def _look(self) -> str:
        """Take a sample into the peaks; the limit that it passes, or ""."""
        config, peaks = self.config, self.peaks
        peaks.seconds = time.monotonic() - self._start
        peaks.host_bytes = max(peaks.host_bytes, _tree_bytes(self._process))
        memories = [(host_memory(), config.min_free_host_gb)]
        if self._gpu is not None:
            memory, temperature = self._gpu.look()
            memories.insert(0, (memory, config.min_free_gpu_gb))
            peaks.gpu_bytes = max(peaks.gpu_bytes or 0, memory.total - memory.available)
            if temperature is not None:
                peaks.temperature_c = max(peaks.temperature_c or 0, temperature)
                if temperature > config.max_temperature_c:
                    return f"the GPU has {temperature} C, allowed are {config.max_temperature_c:g}"
        for memory, min_free_gb in memories:
            room, limit = memory.room(config.max_memory_share, min_free_gb)
            if room < 0:
                return f"{memory.in_use()}: {limit}"
        if peaks.seconds > config.max_seconds:
            return f"it ran for {peaks.seconds:.1f} s, allowed are {config.max_seconds:g}"
        return ""

    def _end(self, cause: str) -> None:
        if self._interrupts:
            if hasattr(signal, "pthread_kill"):  # wakes the main thread where it waits
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            else:  # Windows: the wait goes on
                _thread.interrupt_main()
            return
        with suppress(psutil.NoSuchProcess):
            for process in [*self._process.children(recursive=True), self._process]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


class _Gpu:
    """Memory and temperature of a GPU from NVML, without a CUDA context."""

    def __init__(self, device: torch.device):
        self._name = str(device)
        pynvml.nvmlInit()
        # By UUID: NVML counts GPUs that CUDA_VISIBLE_DEVICES hides.
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def look(self) -> tuple[Memory, int | None]:
        memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        try:
            temperature = pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU)
        except pynvml.NVMLError_NotSupported:
            temperature = None
        return Memory(self._name, memory.total, memory.free), temperature


def _tree_bytes(process: psutil.Process) -> int:
    """Resident memory of a process and all that it started; 0 once it has ended."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        for member in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += member.memory_info().rss
    return total
