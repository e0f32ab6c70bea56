"""Tables that calls share: made outside of a pool, complete for every stream, and kept for graphs that read them."""

import faulthandler
import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import hilbert_lib
from hilbert_lib.attention.backends import flex_masks
from hilbert_lib.attention.triton import decode, packed, schedule, start
from hilbert_lib.graph_cache import GraphCache, cached_for_graphs, made_to_share
from hilbert_lib.ordering import ordering_tables

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CASES = [(CUDA, True, True), (CUDA, False, False), (CPU, True, False)]


class Table:
    pass


@pytest.fixture
def streams(monkeypatch):
    """A CUDA that is not there: what its streams were asked for, in order."""
    asked = []
    stream = SimpleNamespace(synchronize=lambda: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: nullcontext(asked.append("stream") if s is stream else None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(device))
    return asked


@pytest.mark.parametrize(("device", "capturing", "stays"), CASES)
def test_what_a_graph_captured_outlives_all_that_comes_later(device, capturing, stays, monkeypatch, streams):
    tables = cached_for_graphs()(lambda length, device: Table())
    first = weakref.ref(tables(0, device))  # by a first call, before the capture
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert tables(0, device) is first()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for length in range(1, 1100):
        tables(length, device)
    gc.collect()
    assert (first() is not None) == stays
    info = tables.cache_info()
    assert info.results == info.size == info.maxsize + stays  # the bound is left to the others


@pytest.mark.parametrize("device", [CUDA, CPU])
def test_tables_are_let_go_of_when_no_stream_reads_them_any_more(device, streams):
    there = []

    class Told:
        def __del__(self):
            streams.append("let go")

    def build(length, device):
        there.append(length)
        return Told()

    tables = cached_for_graphs(maxsize=2)(build)
    for length in (0, 1, 0, 1):
        tables(length, device)
    assert there == [0, 1]
    assert device not in streams
    tables(2, CPU)  # where what is let go of lies counts alone
    gc.collect()
    assert [x for x in streams if x in (device, "let go")] == [device, "let go"][device is CPU :]


def test_tables_of_a_gpu_are_made_on_the_calls_stream_in_a_new_thread(streams):
    def build():
        streams.append("built")
        return threading.get_ident()

    assert made_to_share(build, CUDA) != threading.get_ident()
    assert streams == ["stream", "built", "synchronize"]
    assert made_to_share(build, CPU) == threading.get_ident()


def test_a_capture_without_tables_is_refused_and_an_error_of_making_them_is_the_callers(streams, monkeypatch):
    with pytest.raises(MemoryError, match="no room"):
        made_to_share(Mock(side_effect=MemoryError("no room")), CUDA)
    streams.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run it once, just before the CUDA graph is captured"):
        made_to_share(Table, CUDA)
    assert not streams


def test_tables_are_made_where_the_main_thread_has_ended():
    script = """
import threading, time
from types import SimpleNamespace
import torch
from contextlib import nullcontext
from hilbert_lib.graph_cache import made_to_share
stream = SimpleNamespace(synchronize=lambda: None)
torch.cuda.device = torch.cuda.stream = lambda _: nullcontext()
torch.cuda.current_stream, torch.cuda.is_current_stream_capturing = lambda: stream, lambda: False

def serve():
    threading.main_thread().join()
    print(made_to_share(lambda: "made", torch.device("cuda", 0)), flush=True)

threading.Thread(target=serve).start()
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout == "made\n", ran.stderr


def test_the_tables_of_kernels_and_masks_are_such():
    masks = flex_masks.dilated_mask, flex_masks.neighbourhood_mask, flex_masks.pattern_mask
    for tables in (ordering_tables, schedule.tables, packed.tables, decode._table, *masks):
        assert isinstance(tables, GraphCache)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform forks nothing")
def test_a_child_does_not_wait_for_a_lock_that_a_thread_held_when_it_was_forked():
    tables = cached_for_graphs()(lambda length, device: Table())
    kept = tables(1, CPU)
    for is_held in (False, True):
        with tables._lock if is_held else nullcontext():
            child = os.fork()
            if not child:
                faulthandler.dump_traceback_later(20, exit=True)  # instead of waiting for ever
                # What a thread that is gone may have changed by half is made anew; all else is shared still.
                os._exit(0 if (tables(1, CPU) is kept) == (not is_held) else 3)
            _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    assert tables(1, CPU) is kept


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform forks nothing")
def test_a_child_does_not_wait_for_the_lock_of_launchers():
    loaded = []
    kernel = type("Kernel", (), {"run": property(lambda self: loaded.append(self))})()
    with start._loading:
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(20, exit=True)
            start._load(kernel)
            os._exit(0 if loaded == [kernel] else 3)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_every_lock_of_the_library_is_renewed_in_a_forked_child():
    made = re.compile(r"\b(?:R?Lock|Condition|Semaphore|Barrier)\(")
    root = Path(hilbert_lib.__file__).parent
    holders = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if made.search(path.read_text("utf-8"))}
    assert holders == {"graph_cache.py", "attention/triton/start.py"}  # two tests above
