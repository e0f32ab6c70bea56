"""torch's FlopCounterMode counts the useful FLOP of calls, whichever backend serves them."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hilbert_lib import DilatedPattern, dilated_attention
from hilbert_lib.attention import operators
from hilbert_lib.attention.request import Request, Tensors

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 11, 4, 2, 8
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "batch": 2}
PATTERNS = [DilatedPattern((4, 16), (1, 3)), DilatedPattern((4, 8), (2, 4), "zero", "head_groups")]


def qkv(queries=LENGTH):
    shapes = (2, queries, HEADS, HEAD_DIM), (2, LENGTH, KV_HEADS, HEAD_DIM), (2, LENGTH, KV_HEADS, HEAD_DIM)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def counted(run):
    with FlopCounterMode(display=False) as counter:
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
    one = Request(DilatedPattern((LENGTH,), (1,)), is_part=True)
    _, flop = counted(lambda: operators.attention(Tensors(*qkv(7)), one, "reference"))
    assert flop == 2 * HEADS * 7 * LENGTH * 4 * HEAD_DIM


LATER = """
import importlib.util, sys, torch
from hilbert_lib import DilatedPattern, Neighbourhood, dilated_attention, neighbourhood_attention
q = torch.ones(1, 4, 1, 2)
calls = dilated_attention, DilatedPattern((4,), (1,)), neighbourhood_attention, Neighbourhood((4,), 3)
calls[0](q, q, q, calls[1]), calls[2](q, q, q, calls[3])
importlib.util.find_spec("torch.utils.flop_counter")  # as who asks whether it is there
print("torch.utils.flop_counter" in sys.modules)
from torch.utils.flop_counter import FlopCounterMode
for attend, rule in (calls[:2], calls[2:]):
    with FlopCounterMode(display=False) as counter:
        attend(q, q, q, rule)
    print(counter.get_total_flops())
"""


def test_the_counter_may_be_imported_later():
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", str(4 * 2 * 4 * 4), str(4 * 2 * 4 * 3)]
