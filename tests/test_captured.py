"""Tables that a CUDA graph reads stay."""

import gc
import weakref

import pytest
import torch

from hilbert_lib.attention.triton import decode, schedule
from hilbert_lib.attention.triton.captured import cached_for_graphs


class Table:
    pass


CASES = [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]


@pytest.mark.parametrize(("device", "capturing", "stays"), CASES)
def test_what_a_graph_captured_outlives_all_that_comes_later(device, capturing, stays, monkeypatch):
    tables = cached_for_graphs(lambda length, device: Table())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    first = weakref.ref(tables(0, torch.device(device)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for length in range(1, 2000):
        tables(length, torch.device(device))
    gc.collect()
    assert (first() is not None) == stays


def test_the_kernels_tables_are_such():
    for tables in (schedule.tables, decode._table):
        assert tables.__code__ is cached_for_graphs(lambda device: None).__code__
