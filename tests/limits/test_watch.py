"""The watch over a run: what it sees, and that it ends the run at each limit."""

import faulthandler
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from own_processes import PATIENCE, wait_for

from hilbert_lib.limits import watch
from hilbert_lib.limits.config import SafetyConfig
from hilbert_lib.limits.memory import GB, Memory
from hilbert_lib.limits.watch import LimitReachedError, Watcher

SHORT = SafetyConfig(max_seconds=0.3)
LONG_SLEEP = PATIENCE


@pytest.fixture
def next_look(monkeypatch):
    """Waits until the watch has taken another sample from its begin to its end."""
    see, looks = watch.host_memory, []

    def look():
        looks.append(None)
        return see()

    def wait():  # the first may have begun before
        seen = len(looks)
        wait_for(lambda: len(looks) >= seen + 2)

    monkeypatch.setattr(watch, "host_memory", look)
    return wait


def sleep_until_interrupted():
    time.sleep(LONG_SLEEP)
    pytest.fail("nothing interrupted it")


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_a_run_that_takes_too_long_is_interrupted_and_says_so(handler):
    before = signal.signal(signal.SIGINT, handler)
    with pytest.raises(LimitReachedError, match=r"it ran for \d+\.\d s, allowed are 0\.3"), Watcher(SHORT, "cpu"):
        sleep_until_interrupted()
    assert signal.signal(signal.SIGINT, before) is handler


def test_an_error_of_the_block_itself_is_not_replaced_by_the_limit():
    def run():
        try:
            sleep_until_interrupted()
        except KeyboardInterrupt:
            raise OSError("while it ended") from None

    with pytest.raises(OSError, match="while it ended"), Watcher(SHORT, "cpu"):
        run()


@pytest.mark.parametrize(
    ("available", "temperature", "words"),
    [(1, 60, "79.0 GB of cuda:0 in use"), (40, 91, "the GPU has 91 C, allowed are 90"), (40, None, "")],
)
def test_a_run_is_interrupted_where_the_gpu_is_full_or_hot(monkeypatch, next_look, available, temperature, words):
    seen = Memory("cuda:0", 80 * GB, available * GB), temperature
    monkeypatch.setattr(watch, "_Gpu", lambda device: SimpleNamespace(look=lambda: seen))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    told = []
    with Watcher(SafetyConfig(), "cuda:0", on_limit=told.append) as one:
        if words:
            wait_for(lambda: told)
        else:
            next_look()
    assert len(told) == bool(words)
    assert words in one.cause
    assert (one.peaks.gpu_bytes, one.peaks.temperature_c) == ((80 - available) * GB, temperature)


@pytest.mark.parametrize(("on_gpu", "on_host", "words"), [(3, 1, "of cuda:0 must"), (1, 3, "of host must"), (1, 1, "")])
def test_what_must_stay_free_is_a_limit_of_its_own_of_gpu_and_host(monkeypatch, on_gpu, on_host, words):
    """Each has 2 GB left."""
    gpu, host = (Memory(name, 80 * GB, 2 * GB) for name in ("cuda:0", "host"))
    monkeypatch.setattr(watch, "_Gpu", lambda device: SimpleNamespace(look=lambda: (gpu, 60)))
    monkeypatch.setattr(watch, "host_memory", lambda: host)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    limits = {"min_free_gpu_gb": on_gpu, "min_free_host_gb": on_host, "max_memory_share": 1.0}
    one = Watcher(SafetyConfig(**limits), "cuda:0")
    one._start = time.monotonic()
    assert words in (cause := one._look())
    assert bool(cause) == bool(words)


def test_the_highest_values_of_a_gpu_are_kept_and_a_limit_itself_is_allowed(monkeypatch):
    looks = iter([(Memory("cuda:0", 80 * GB, 80 * GB - used * GB), hot) for used, hot in ((1, 60), (3, 90), (2, 70))])
    monkeypatch.setattr(watch, "_Gpu", lambda device: SimpleNamespace(look=lambda: next(looks)))
    monkeypatch.setattr(watch, "host_memory", lambda: Memory("host", 80 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    one = Watcher(SafetyConfig(max_temperature_c=90), "cuda:0")
    one._start = time.monotonic()
    assert [one._look() for _ in range(3)] == ["", "", ""]
    assert (one.peaks.gpu_bytes, one.peaks.temperature_c) == (3 * GB, 90)


def test_another_process_is_ended_with_all_that_it_started():
    # A process, what it started, and what that started.
    process = subprocess.Popen(["sh", "-c", "sh -c 'sleep 600 & echo up; wait' & wait"], stdout=subprocess.PIPE)
    process.stdout.readline()
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) == 3
    with Watcher(SHORT, "cpu", pid=process.pid) as one:
        process.wait(PATIENCE)  # 0 where the shell saw its own child end first
    assert not psutil.wait_procs(family, timeout=PATIENCE)[1]
    assert "it ran for" in one.cause
    process.stdout.close()


def test_the_peak_of_the_host_is_kept_after_the_memory_is_given_back(next_look):
    start = time.monotonic()
    with Watcher(SafetyConfig(), "cpu") as one:
        next_look()
        before = one.peaks.host_bytes
        x = torch.ones(2**28, dtype=torch.uint8)
        next_look()
        del x
        next_look()
    assert one.cause == ""
    assert one.peaks.host_bytes - before > 0.9 * 2**28
    assert 4 * watch.INTERVAL_SECONDS < one.peaks.seconds < time.monotonic() - start


LESS_AND_LESS = [Memory("host", 50 * GB, left * GB) for left in (40, 40, *[2] * 99)]
LOOKS = [
    (LESS_AND_LESS, r"48\.0 GB of host in use: 90 % of the 50\.0 GB"),
    (OSError("no such file"), "the watch failed, OSError: no such file"),
    (ValueError("no number"), "the watch failed, ValueError: no number"),
]


@pytest.mark.parametrize(("looks", "words"), LOOKS, ids=[words for _, words in LOOKS])
def test_a_run_is_interrupted_where_the_hosts_memory_runs_out_or_the_watch_fails(monkeypatch, looks, words):
    monkeypatch.setattr(watch, "host_memory", Mock(side_effect=looks))
    config = SafetyConfig(min_free_host_gb=1, max_memory_share=0.9)
    with pytest.raises(LimitReachedError, match=words), Watcher(config, "cpu"):
        sleep_until_interrupted()


def test_a_limit_passed_before_the_block_leaves_no_interrupt(monkeypatch):
    class Slow(threading.Thread):
        def start(self):
            super().start()
            time.sleep(LONG_SLEEP)

    monkeypatch.setattr(watch.threading, "Thread", Slow)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(LimitReachedError), Watcher(SafetyConfig(max_seconds=1e-9), "cpu"):
        pytest.fail("the block began")
    assert signal.getsignal(signal.SIGINT) == handler


def test_a_watch_that_cannot_begin_leaves_interrupts_as_they_were(monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    with Watcher(device="cpu") as one:
        pass
    with pytest.raises(RuntimeError, match="a Watcher watches once, and this one has begun"), one:
        pytest.fail("the block began")
    with Watcher(device="cpu") as one, pytest.raises(RuntimeError, match="watches once"), one:
        pytest.fail("the block began")

    for error in (RuntimeError("can't start new thread"), KeyboardInterrupt("now")):
        monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=error))
        with pytest.raises(type(error), match=str(error)), Watcher(device="cpu"):
            pytest.fail("the block began")
        assert signal.getsignal(signal.SIGINT) == handler


def test_errors_and_interrupts_that_are_not_the_watchs_pass_through():
    for error in (KeyError, KeyboardInterrupt):
        with pytest.raises(error), Watcher(device="cpu"):
            raise error
    assert not [thread for thread in threading.enumerate() if thread.name == "watch"]


def test_a_limit_passed_at_the_very_end_is_told_and_no_interrupt_is_left(monkeypatch):
    looking, full = threading.Event(), Memory("host", GB, 0)
    one = Watcher(SafetyConfig(), "cpu")

    def look():
        looking.set()
        return full if one._stop.wait(PATIENCE) else None  # the block has ended

    monkeypatch.setattr(watch, "host_memory", look)
    with pytest.raises(LimitReachedError, match="GB of host in use"), one:
        looking.wait(PATIENCE)
    time.sleep(0.05)  # an interrupt left over would arrive here


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(ValueError, match="pid must be"):
        Watcher(device="cpu", pid=2**22 + 1)
    with ThreadPoolExecutor(1) as threads, pytest.raises(ValueError, match="on_limit must be given"):
        threads.submit(Watcher(device="cpu").__enter__).result()


@pytest.mark.gpu
@pytest.mark.alone
def test_the_gpus_memory_and_temperature_are_seen(next_look):
    with Watcher(SafetyConfig(), "cuda") as one:
        x = torch.ones(2 * GB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        next_look()
    assert one.cause == ""
    assert one.peaks.gpu_bytes > x.nbytes
    assert 10 < one.peaks.temperature_c < 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform forks nothing")
def test_a_forked_child_leaves_the_block_without_a_wait_for_the_thread_that_it_does_not_have():
    with Watcher(SafetyConfig(), "cpu", on_limit=print) as watcher:
        with watcher._stop._cond:  # as the thread holds it for a moment in every look
            child = os.fork()
            if not child:
                faulthandler.dump_traceback_later(20, exit=True)  # instead of waiting for ever
                watcher.__exit__(None, None, None)
                os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
