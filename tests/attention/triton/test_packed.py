"""The plain fused kernels take packed documents in one call: programs are found on the device, the host never waits."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from cases import BRANCHES, TOLERANCE, assert_close, attended, documents_alone, drawn, ends_of, exactly, in_pairs, norms
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_lib import DilatedPattern, dilated_attention
from hilbert_lib.attention import operators
from hilbert_lib.attention.documents import check_rows
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.zero_keys import add_zero_keys
from hilbert_lib.lab.sweeps.memory import captured
from hilbert_lib.patterns.dilated import MIXING_RULES, OFFSET_RULES, PADDING_RULES

pytest.importorskip("hilbert_lib.attention.triton.launch", reason="triton has no build for this platform")
from hilbert_lib.attention.triton import packed, schedule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = {"mixed": [0, 1, 18, 0, 3], "one": [20], "short": [1, 1, 0, 3, 1, 9, 0]}
HEADS = ((2, 1), (3, 3))
AXES = (BRANCHES, OFFSET_RULES, MIXING_RULES, PADDING_RULES, LENGTHS, HEADS)
AXES += ((torch.float32, torch.bfloat16, torch.float16), [False, True], [False, True])


ends_there = partial(ends_of, device=DEVICE)


def places_of(cu_seqlens: torch.Tensor, total: int, known: packed.Packed) -> torch.Tensor:
    """The places of a launch's programs, as the kernel finds them."""
    count = packed.program_count(cu_seqlens, total, known)
    places = torch.full((count, packed.COLUMNS), -1, dtype=torch.int32, device=DEVICE)
    known = known._replace(first=known.first.to(DEVICE))
    each = packed.places_start(cu_seqlens.to(DEVICE), known, places)
    each.kernel[each.grid](*each.arguments, **each.named)
    return places.cpu()


@in_pairs(AXES, 5, kv_heads=lambda heads: heads[1])
def test_every_document_is_as_the_oracle_has_it_alone(case):
    branches, offsets, mixing, padding, lengths, heads, dtype, is_causal, is_bounded = case
    pattern, lengths = DilatedPattern(*BRANCHES[branches], offsets, mixing, padding), LENGTHS[lengths]
    tensors = drawn(sum(lengths), *heads, 5, dtype=dtype)
    expected = documents_alone(tensors, lengths, pattern, is_causal=is_causal)
    options = {"cu_seqlens": ends_there(lengths), "max_seqlen": max(lengths) if is_bounded else None}
    found = attended([x.to(DEVICE) for x in tensors], pattern, "triton", is_causal=is_causal, **options)
    assert found[0].dtype == dtype
    assert_close(found, expected, (*TOLERANCE[dtype], *[TOLERANCE[dtype][2]] * 2))


def test_it_is_one_operator_that_compiles_for_all_documents():
    pattern = DilatedPattern((4, 10), (1, 3), padding="zeros")
    tensors = [x.requires_grad_() for x in drawn(22, 2, 1, 4, device=DEVICE)[:3]]
    request = Request(pattern, True, 0.5, cu_seqlens=ends_there([22]))
    given = *tensors, None, None, None, *operators._arguments(request), "triton"
    torch.library.opcheck(torch.ops.hilbert_lib.attention.default, given)
    attend = partial(dilated_attention, pattern=pattern, backend="triton")
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for cu in map(ends_there, ([22], LENGTHS["mixed"])):
        outs = [run(*tensors, cu_seqlens=cu) for run in (attend, compiled)]
        assert torch.equal(*outs)
        grads = [torch.autograd.grad(out.square().sum(), tensors) for out in outs]
        assert all(map(torch.equal, *grads))
    torch.compiler.reset()


# As a whole sequence has several passes, each of which goes on from the results of the last.
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_several_passes_and_dropout_are_those_of_a_loop(dropout_p):
    pattern, lengths = DilatedPattern((4, 11, 32), (1, 3, 32)), [0, 26, 0, 1, 6]
    assert len(schedule.passes(pattern, 33, 16)) > 1
    tensors, cu = drawn(33, 2, 1, 4, device=DEVICE), ends_there(lengths)
    torch.manual_seed(0)
    found = attended(tensors, pattern, "triton", dropout_p=dropout_p, cu_seqlens=cu, is_causal=True)
    torch.manual_seed(0)
    expected = exactly(tensors, pattern, dropout_p=dropout_p, cu_seqlens=cu, is_causal=True)
    assert_close(found, expected, 2e-5)


SEGMENTS = st.integers(1, 60).flatmap(lambda w: st.tuples(st.just(w), st.integers(1, w)))
DOCUMENTS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 150)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(
    st.lists(SEGMENTS, min_size=1, max_size=4), DOCUMENTS, st.sampled_from(OFFSET_RULES), st.integers(1, 3),
    st.sampled_from([4, 16]), st.booleans(),
)  # fmt: skip
def test_programs_take_every_row_of_every_document_once(pairs, lengths, rule, kv_heads, block, is_bounded):
    pattern, total = DilatedPattern(*map(tuple, zip(*pairs, strict=True)), offsets=rule), sum(lengths)
    cu = ends_of(lengths)
    longest = max(1, max(lengths)) if is_bounded else None
    length = packed.scheduled_length(Request(pattern, cu_seqlens=cu, max_seqlen=longest), total)
    assert max(lengths) <= length
    for one in schedule.passes(pattern, length, block):
        known = packed.tables(pattern, one, length, kv_heads, block, torch.device("cpu"))
        places, tables = places_of(cu, total, known).tolist(), known.tables
        for g in range(kv_heads):
            visited = []
            for document, first, rows, at, number in places:
                start, members, u, size = tables.items[g, at % tables.items.shape[1], number].tolist()
                row = u + torch.arange(size)
                own = at * tables.chunk + tables.classes[start + row % members] + row // members * one.stride
                own = own[own < min((at + 1) * tables.chunk, rows)]
                assert not rows or rows == lengths[document]
                assert first == cu[document] or not rows
                visited.append(first + own)
            visited = torch.cat(visited)
            position = torch.cat([torch.arange(0), *map(torch.arange, lengths)])
            needed = torch.full((total,), one.covers_all)
            for i in one.branches:
                needed |= pattern.contains(i, position, g, kv_heads)
            assert len(visited.unique()) == len(visited)
            assert torch.isin(needed.nonzero()[:, 0], visited).all()


@pytest.mark.parametrize(
    ("lengths", "most"), [([2048] * 8, 1.2), ([200] * 80, 1.5), ([1] * 4000, 1.0), ([1, 4000] * 9, 1.5)]
)
def test_few_programs_are_started_in_vain(lengths, most):
    pattern, cpu = DilatedPattern((2048, 8192), (1, 4), offsets="zero"), torch.device("cpu")
    (one,) = schedule.passes(pattern, 8192, 128)
    known = packed.tables(pattern, one, 8192, 1, 128, cpu)
    places = places_of(ends_of(lengths), sum(lengths), known)
    assert len(places) <= most * int((places[:, 2] > 0).sum())


def test_nothing_that_the_host_does_needs_the_lengths():
    pattern, cpu, total = DilatedPattern((8, 20), (1, 3), padding="zeros"), torch.device("cpu"), 50
    *_, one = schedule.passes(pattern, 64, 4)
    known, cu = packed.tables(pattern, one, 64, 2, 4, cpu), ends_of([30, 0, 20], "meta")  # has no values to ask for
    check_rows(cu, total, 30)
    assert packed.program_count(cu, total, known) == packed.program_count(ends_of([30, 0, 20]), total, known)
    out, lse = torch.empty(1, total, 2, 4, device="meta"), torch.empty(1, 2, total, device="meta")
    add_zero_keys(out, lse, Request(pattern, cu_seqlens=cu), 0, total, 2)


def long_documents() -> list[int]:
    """Ten thousand documents of 2,000,000 tokens in all: one of 50,000, most of a few hundred, some of none."""
    shares = torch.empty(10_000).exponential_(generator=torch.Generator().manual_seed(0))
    shares[::50] = 0
    lengths = (shares / shares.sum() * 1_940_000).int().tolist()
    lengths[5001] = 50_000
    lengths[-1] += 2_000_000 - sum(lengths)
    return lengths


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("is_causal", [False, True])
def test_ten_thousand_documents_are_one_call_for_which_the_host_never_waits(is_causal):
    lengths, pattern = long_documents(), DilatedPattern((2048, 8192, 65536), (1, 4, 16))
    assert (len(lengths), sum(lengths), max(lengths)) == (10_000, 2_000_000, 50_000)
    tensors, cu = drawn(sum(lengths), 8, 2, 64, dtype=torch.bfloat16, device="cuda"), ends_there(lengths)
    options = {"is_causal": is_causal, "cu_seqlens": cu, "max_seqlen": 50_000}
    attended(tensors, pattern, "triton", **options)  # compiles kernels and makes tables
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = attended(tensors, pattern, "auto", **options)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    out, lse, *grads = found
    for number in (1, 2, 777, 5001, 5002, 9998, 9999):  # 5000 has no token
        rows = slice(int(cu[number]), int(cu[number + 1]))
        alone = attended([x[:, rows].float() for x in tensors], pattern, "eager", is_causal=is_causal)
        mine = out[:, rows], lse[:, :, rows], *(x[:, rows] for x in grads)
        assert max(norms([x for x in mine if x.numel()], [x.double() for x in alone if x.numel()])) < 1e-2, number


@pytest.mark.gpu
def test_a_graph_takes_other_documents_when_it_is_replayed():
    pattern = DilatedPattern((64, 256), (1, 4), padding="zeros")
    q, k, v, _ = drawn(1000, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    cu = ends_there([0, 400, 1, 599])

    def call() -> torch.Tensor:
        return dilated_attention(q, k, v, pattern, cu_seqlens=cu, backend="triton")

    graph, replayed = captured(call)
    for lengths in ([250] * 4, [1000, 0, 0, 0], [0, 3, 990, 7]):
        cu.copy_(ends_there(lengths))
        graph.replay()
        assert torch.equal(replayed, call())


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", ["[1, 8]", "[0, 7]", "[0, 5, 3, 8]", "[0, 8], 7"])
def test_what_is_no_row_of_documents_stops_the_device(wrong):
    script = f"""
import torch
from hilbert_lib import DilatedPattern, dilated_attention
def call(ends, max_seqlen=None):
    q = torch.ones(1, 8, 2, 16, device="cuda")
    cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
    dilated_attention(q, q, q, DilatedPattern((4,), (1,)), cu_seqlens=cu, max_seqlen=max_seqlen, backend="triton")
    torch.cuda.synchronize()
call([0, 3, 8], 5)
print("right")
call({wrong})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "right\n"
    assert done.returncode
    assert "device-side assert" in done.stderr
