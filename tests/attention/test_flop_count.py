"""torch's FlopCounterMode counts the useful FLOP of calls, whichever backend serves them."""

import importlib.util
import sys

import pytest
import torch
from torch.utils import flop_counter

from hilbert_lib import DilatedPattern, Neighbourhood, dilated_attention, neighbourhood_attention
from hilbert_lib.attention import flop_count, operators
from hilbert_lib.attention.flop_count import COUNTER
from hilbert_lib.attention.grids import operators as grids

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 11, 4, 2, 8
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "batch": 2}
OPERATORS = [("dilated_attention", 3, operators._pair_elements), ("neighbourhood_attention", 5, grids._pair_elements)]
PATTERNS = [DilatedPattern((4, 16), (1, 3)), DilatedPattern((4, 8), (2, 4), "zero", "head_groups")]


def qkv(queries=LENGTH):
    shapes = (2, queries, HEADS, HEAD_DIM), (2, LENGTH, KV_HEADS, HEAD_DIM), (2, LENGTH, KV_HEADS, HEAD_DIM)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def counted(run):
    with flop_counter.FlopCounterMode(display=False) as counter:
        result = run()
    return result, counter.get_total_flops()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["reference", "eager", "sdpa"])
def test_forward_and_backward_count_their_useful_flop(backend, is_causal, pattern):
    out, flop = counted(lambda: dilated_attention(*qkv(), pattern, is_causal=is_causal, backend=backend))
    work = pattern.work(LENGTH, is_causal=is_causal, **SIZES)
    assert (flop, counted(out.sum().backward)[1]) == (work.flop_forward, work.flop_backward)


@pytest.mark.parametrize("is_causal", [False, True])
def test_decoding_counts_the_rows_that_are_asked_for(is_causal):
    pattern, given = PATTERNS[0], {"kv_heads": KV_HEADS, "length": LENGTH, "is_causal": is_causal}
    pairs = sum(len(pattern.keys(p, kv_head=g, **given)) for p in range(5, 8) for g in range(KV_HEADS))
    with torch.inference_mode():
        _, flop = counted(lambda: dilated_attention(*qkv(3), pattern, query_start=5, is_causal=is_causal))
    assert flop == 2 * 4 * HEAD_DIM * (HEADS // KV_HEADS) * pairs


def test_a_block_of_a_ring_counts_all_its_pairs():
    one = operators.Call(DilatedPattern((LENGTH,), (1,)), is_part=True)
    _, flop = counted(lambda: operators.forward(*qkv(7), one, "reference"))
    assert flop == 2 * HEADS * 7 * LENGTH * 4 * HEAD_DIM


def test_the_counter_may_be_imported_later(monkeypatch):
    monkeypatch.setattr(torch.utils, "flop_counter", flop_counter)  # put back at the end, as is the module
    monkeypatch.delitem(sys.modules, COUNTER)
    monkeypatch.setattr(flop_count, "_FORMULAS", [])
    monkeypatch.setattr(sys, "meta_path", [x for x in sys.meta_path if not isinstance(x, flop_count._OnceLoaded)])
    for name, inputs, elements in OPERATORS:
        both = (getattr(torch.ops.hilbert_lib, own) for own in (name, f"{name}_backward"))
        flop_count.count_flop(*both, inputs, elements)
    assert importlib.util.find_spec(COUNTER)  # as who asks whether it is there
    assert COUNTER not in sys.modules
    again = importlib.import_module(COUNTER)
    assert again is not flop_counter
    with again.FlopCounterMode(display=False) as counter:
        dilated_attention(*qkv(), PATTERNS[0])
    assert counter.get_total_flops() == PATTERNS[0].work(LENGTH, **SIZES).flop_forward
    with again.FlopCounterMode(display=False) as counter:
        neighbourhood_attention(*qkv(), Neighbourhood((LENGTH,), 3))
    assert counter.get_total_flops() == 4 * 2 * HEADS * 3 * LENGTH * HEAD_DIM
