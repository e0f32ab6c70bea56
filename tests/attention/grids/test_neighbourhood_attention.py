"""Neighbourhood attention is the oracle's function in every option, order and backend."""

from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from random import Random

import pytest
import torch
from cases import (
    BIASED,
    HEADS,
    LARGE,
    MORE,
    ORDERS,
    PARTS,
    SMALL,
    TOLERANCE,
    assert_close,
    boxed,
    check_grouped_windows,
    check_nan,
    check_on_grid,
    check_part,
    every_rule,
    grids,
    grids_in_pairs,
    pairs_of_options,
    part_of,
    parts,
    refusals,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import cells_of_box, mask_of
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hilbert_lib import (
    DilatedPattern,
    Neighbourhood,
    NeighbourhoodAttention,
    Ordering,
    Union,
    attend,
    estimate_memory,
    explain_backend,
    neighbourhood_attention,
    ring_attend,
)
from hilbert_lib.attention import api, choice, grid_module, operators
from hilbert_lib.attention.backends import flex, reference, tiles
from hilbert_lib.attention.backends.kernel import Eager
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.backends.tile_groups import MOST_ADDED, sides_on_cpu
from hilbert_lib.attention.grid_parts import on_its_keys, part_of_box
from hilbert_lib.attention.request import GridPart, Request, Tensors
from hilbert_lib.attention.rules import Rule
from hilbert_lib.attention.validation import validated
from hilbert_lib.lab.sweeps.memory import captured
from hilbert_lib.patterns.blocks import axis_tiles, mask_blocks
from hilbert_lib.patterns.neighbourhood import EDGES, HeadNeighbourhoods

NEAR = Neighbourhood((4, 6), (3, 2), dilation=(1, 2), edge=("wrap", "clip"))
WITH_DLSE = False, True


@pytest.mark.parametrize("case", pairs_of_options(TOLERANCE, ("reference", "eager"), WITH_DLSE, more=BIASED), ids=str)
def test_options_in_pairs(case, monkeypatch):
    monkeypatch.setattr(tiles, "CHUNK", 2**10)  # several chunks
    *rest, with_dlse = case
    check_on_grid(*rest, with_dlse=with_dlse)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("rules", every_rule(SMALL), ids=str)
def test_all_options_together(rules, backend):
    for heads, dtype, order, more in product(HEADS, TOLERANCE, ORDERS, BIASED):
        check_on_grid(rules, heads, order, more, dtype, backend)


# Apart, since each compiles kernels of its own: as one test a rule's took minutes.
@pytest.mark.gpu
@pytest.mark.parametrize("n", range(12))
@pytest.mark.parametrize("rules", every_rule(LARGE), ids=str)
def test_on_a_gpu_the_kernels_serve_all_options(rules, n):
    dtype, head_dim = list(product((torch.float32, torch.bfloat16, torch.float16), (16, 40, 64, 128)))[n]
    how = (list(ORDERS)[n % 3], MORE[n // 3 % 4])
    check_on_grid(rules, "grouped", *how, dtype, "triton", head_dim, device="cuda")


@grids_in_pairs((torch.float64, torch.bfloat16), ("reference", "eager"), WITH_DLSE, more=BIASED)
def test_output_lse_and_gradients_are_the_oracles(case, monkeypatch):
    monkeypatch.setattr(tiles, "CHUNK", 2**10)  # several chunks
    *rest, with_dlse = case
    check_on_grid(*rest, with_dlse=with_dlse)


@pytest.mark.parametrize("backend", ["reference", "eager", "flex"])
def test_windows_are_those_of_the_kv_head_of_each_group(backend, monkeypatch):
    if backend == "flex":  # as below
        run = partial(flex.attend, block_size=16)
        backends = backends_for(HeadNeighbourhoods)
        monkeypatch.setitem(backends, "eager", replace(backends["eager"], functions=lambda _: (run, None)))
        check_grouped_windows("eager", head_dim=16, gradients=False)
    else:
        check_grouped_windows(backend)


@pytest.mark.gpu
@grids_in_pairs(
    (torch.float32, torch.bfloat16, torch.float16), ("triton", "flex", "eager"), (16, 40, 64, 128), WITH_DLSE
)
def test_on_a_gpu_every_backend_is_the_oracles(case):
    *rest, with_dlse = case
    check_on_grid(*rest, device="cuda", with_dlse=with_dlse)


@settings(max_examples=60, deadline=None)
@given(grids(), st.integers(1, 9), st.integers(1, 9))
@example(Neighbourhood((11,), 7, stride=4, edge="clip"), 2, 4)  # the grid does not fill the last block of keys
@example(Neighbourhood((1,), 1), 2, 1)  # nor that of queries
def test_windows_tiles_and_blocks_are_those_of_the_definition(near, q_block, kv_block):
    mask, position = mask_of(near), torch.arange(near.length)
    assert near.attends(position[:, None], position).equal(mask)
    assert near.pairs == mask.sum()
    assert near.keys(near.length // 2).equal(mask[near.length // 2].nonzero()[:, 0])
    assert near.queries(near.length // 2).equal(mask[:, near.length // 2].nonzero()[:, 0])
    for axis in near.axes:
        ranks = -(-axis.cells // axis.dilation)
        assert axis.dilation <= axis.cells
        assert axis.window <= (2 * ranks - 1 if axis.edge == "clip" and not axis.is_causal else ranks)
        found = torch.zeros(axis.cells, axis.cells, dtype=torch.int)
        for queries, keys, seen in zip(*axis_tiles(axis, q_block), strict=True):
            assert len(keys[keys >= 0].unique()) == (keys >= 0).sum()
            for query, row in zip(queries, seen, strict=True):
                found[query, keys[row]] += 1 if query >= 0 else 100
        cell = torch.arange(axis.cells)
        assert found.equal(axis.attends(cell[:, None], cell).int())
    order = Ordering.random(near.length, seed=0)
    size = (q_block, kv_block)
    for queries in (None, position[near.length // 3 :]):  # of all cells, or of some row by row
        stored = mask[order.perm if queries is None else queries][:, order.perm]
        parts = [list(rows.split(kv_block, 1)) for rows in stored.split(q_block)]
        some = torch.tensor([[bool(block.any()) for block in row] for row in parts])
        whole = torch.tensor([[bool(block.all()) and block.shape == size for block in row] for row in parts])
        blocks = mask_blocks(near, order, q_block=q_block, kv_block=kv_block, queries=queries)
        assert (blocks.partial | blocks.full).equal(some)
        assert not (blocks.full & ~whole).any()
        assert "wrap" in near.edge or blocks.full.equal(whole)


@settings(max_examples=60)
@given(parts(), st.sampled_from(["reference", "eager"]), st.sampled_from([torch.float64, torch.bfloat16]))
def test_a_part_of_a_grid_is_what_it_is_in_the_whole(case, backend, dtype):
    check_part(case, backend, dtype=dtype)


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("edge", [*EDGES, "causal"])
def test_a_query_of_a_part_sees_the_same_keys_in_the_grid_that_these_are(edge, stride):
    random, served = Random(0), 0
    rules = {"stride": stride, "is_causal": edge == "causal", "edge": "clip" if edge == "causal" else edge}
    for _ in range(300):
        cells = 3 * random.randint(4, 9)
        window = random.randint(stride, 11 if edge == "wrap" else random.choice((11, 2 * cells)))
        each = [Neighbourhood((cells,), w, **rules) for w in (window, random.randint(stride, window))]
        first = random.randrange(cells)
        last = random.randint(first + 1, cells)
        rows = range(random.randint(0, first), random.randint(last, cells))
        _, part, *_ = boxed(each[0], (rows,), (range(first, last),))
        try:
            found = on_its_keys(Request(HeadNeighbourhoods(tuple(each)), part=part))
        except ValueError:  # no such grid has the same rules
            continue
        served += 1
        own = found.part or part
        keys, line = torch.tensor(part.keys[0]) % cells, torch.arange(len(part.keys[0]))
        assert own.queries[0].start - own.rows[0].start == first - rows.start
        assert (len(own.queries[0]), len(own.rows[0])) == (last - first, len(rows))
        for near, frame in zip(each, found.neighbourhoods, strict=True):
            seen = near.attends(torch.arange(first, last)[:, None], torch.arange(cells))
            assert frame.attends(torch.tensor(own.queries[0])[:, None], line).equal(seen[:, keys])
            assert seen.sum() == seen[:, keys].sum()
    assert served > 50


@pytest.mark.parametrize("rules", [*PARTS, "several tiles"])
def test_some_parts_of_grids_are(rules):
    # Drawn parts need not wrap.
    several = boxed(Neighbourhood((100,), 5), (range(80),), (range(70),))
    check_part(part_of(rules) if rules in PARTS else several, "eager", dtype=torch.bfloat16)


def test_flex_attention_with_options_of_its_own_gives_the_output_alone():
    q, k, v = torch.randn(3, 1, 36, 2, 16).unbind()
    given = validated(q, k, v, Neighbourhood((6, 6), 3))
    out, lse = flex.attend(*given, kernel_options={"BACKEND": "TRITON"})
    assert lse is None
    assert torch.equal(out, flex.attend(*given)[0])


@grids_in_pairs((4,), more=BIASED)
def test_flex_attention_has_the_oracles_mask(case, monkeypatch):
    # Compiled it runs on a GPU alone; its blocks and its mask are the same here. Torch traces them all the same, which
    # takes ten times as long as the rest: a case of each rules is enough.
    *rest, _ = case
    if rest[-1] != "extra and padding":
        monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    run = partial(flex.attend, block_size=16)
    backends = backends_for(HeadNeighbourhoods)
    monkeypatch.setitem(backends, "eager", replace(backends["eager"], functions=lambda _: (run, None)))
    check_on_grid(*rest, torch.float64, "eager", head_dim=16, gradients=False)


def tensors(kv_heads=2, extra=3, **options):
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64, **options)
    sizes = [(24, 2), (24, kv_heads), (24, kv_heads), (extra, kv_heads), (extra, kv_heads)]
    return [draw(2, rows, heads, 4) for rows, heads in sizes]


def test_what_is_no_number_reaches_only_those_who_see_it():
    attend = partial(neighbourhood_attention, neighbourhood=NEAR, backend="reference")
    for token, at in product((0, 13), range(3)):
        check_nan(NEAR, tensors()[:3], at, token, attend)


def test_extra_keys_have_gradients_when_compiled_and_checkpointed():
    leaves = tensors(requires_grad=True)
    order = Ordering.from_curve("hilbert", 24, grid=(4, 6))

    def call(*leaves):
        return neighbourhood_attention(*leaves[:3], NEAR, ordering=order, extra_k=leaves[3], extra_v=leaves[4])

    out = call(*leaves)
    torch.testing.assert_close(torch.compile(call, fullgraph=True)(*leaves), out)
    again = checkpoint(call, *leaves, use_reentrant=False)
    grads = (torch.autograd.grad(each.square().sum(), leaves) for each in (again, out))
    assert all(map(torch.equal, *grads))


BOX = ((1, 3), (2, 6))  # of the grid of NEAR: 8 cells
IN_BOX = torch.tensor(cells_of_box(BOX, NEAR.shape))


def test_a_box_of_queries_is_compiled_and_checkpointed():
    q, *rest = tensors(requires_grad=True)
    leaves = [q[:, IN_BOX].detach().requires_grad_(), *rest]

    def call(*leaves):
        return neighbourhood_attention(*leaves[:3], NEAR, query_box=BOX, extra_k=leaves[3], extra_v=leaves[4])

    out = call(*leaves)
    whole = neighbourhood_attention(q, *rest[:2], NEAR, extra_k=rest[2], extra_v=rest[3])
    torch.testing.assert_close(out, whole[:, IN_BOX], atol=1e-14, rtol=0)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    again = checkpoint(call, *leaves, use_reentrant=False)
    grads = [torch.autograd.grad(each.square().sum(), leaves) for each in (out, again, compiled)]
    for found in grads[1:]:
        assert all(map(torch.equal, found, grads[0]))
    near = NEAR.of_heads(2)
    request = Request(near, scale=0.5, part=part_of_box(BOX, NEAR.shape))
    torch.library.opcheck(torch.ops.hilbert_lib.attention, (*leaves, None, *operators._arguments(request), "eager"))


def test_a_cache_of_a_sliding_window_is_its_last_cell():
    q, k, v = (torch.randn(2, 9, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    whole = neighbourhood_attention(q, k, v, Neighbourhood((9,), 4, is_causal=True), return_lse=True)
    for last in range(9):  # at first the window is larger than the cache
        cache = Neighbourhood((last + 1,), 4, is_causal=True)
        rows = slice(last, last + 1), slice(last + 1)
        given = q[:, rows[0]], k[:, rows[1]], v[:, rows[1]]
        out, lse = neighbourhood_attention(*given, cache, query_box=((last, last + 1),), return_lse=True)
        torch.testing.assert_close(out, whole[0][:, rows[0]], atol=1e-14, rtol=0)
        torch.testing.assert_close(lse, whole[1][..., rows[0]], atol=1e-14, rtol=0)


def test_another_box_is_another_form_of_call():
    q, k, v, *_ = tensors()
    for start in (0, 1, 0, 2):  # the third is known
        box = ((start, start + 2), (0, 6))
        rows = cells_of_box(box, NEAR.shape)
        for query_box in (box, [list(ends) for ends in box]):
            out = neighbourhood_attention(q[:, rows], k, v, NEAR, query_box=query_box)
            torch.testing.assert_close(out, neighbourhood_attention(q, k, v, NEAR)[:, rows], atol=1e-14, rtol=0)
    with pytest.raises(TypeError, match=r"query_box\[0\]\[0\] must be an integer, got False"):
        neighbourhood_attention(q[:, :12], k, v, NEAR, query_box=((False, 2), (0, 6)))


@pytest.mark.parametrize(
    ("rules", "serving"), [({}, "hopper"), ({"dilation": (3, 1)}, "triton"), ({"edge": ("wrap", "clip")}, "triton")]
)
def test_boxes_of_one_size_are_one_graph(rules, serving, monkeypatch):
    # The backends of a GPU, chosen as there; "eager" computes.
    backends = backends_for(HeadNeighbourhoods)
    for name in ("hopper", "triton", "flex"):
        same = {"here": lambda q, request: "", "functions": backends["eager"].functions}
        monkeypatch.setitem(backends, name, replace(backends[name], **same))
    monkeypatch.setattr(choice, "rule_for", lambda *_, **__: Rule(("hopper", "triton", "flex", "eager"), ""))
    near = Neighbourhood((9, 4), 3, **rules)
    q, k = torch.randn(2, 1, 36, 2, 16).bfloat16().unbind()

    def call(q, k, start):
        return neighbourhood_attention(q, k, k, near, query_box=((start, start + 2), (0, 4)))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for start, stance in ((2, "default"), (4, "fail_on_recompile"), (7, "fail_on_recompile")):
        rows = q[:, 4 * start : 4 * start + 8]
        with torch.compiler.set_stance(stance):
            assert compiled(rows, k, start).equal(call(rows, k, start))
        assert explain_backend(rows, k, k, near, query_box=((start, start + 2), (0, 4))).chosen == serving


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton", "flex", "eager"])
def test_on_a_gpu_a_box_is_compiled_and_captured(backend):
    near = Neighbourhood((6, 16, 16), (3, 7, 7), is_causal=(True, False, False))
    q, k, v = torch.randn(3, 2, near.length, 4, 64, device="cuda", dtype=torch.bfloat16).unbind()

    def call(q, k, v, frame):
        box = ((frame, frame + 1), (0, 16), (0, 16))
        return neighbourhood_attention(q, k, v, near, query_box=box, backend=backend)

    whole = neighbourhood_attention(q.double(), k.double(), v.double(), near, backend="eager").split(256, 1)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for frame, rows in enumerate(q.split(256, 1)):
        out = call(rows, k, v, frame)
        assert_close([out], [whole[frame]], TOLERANCE[torch.bfloat16][0])
        if backend != "flex":  # which torch compiles for itself
            assert compiled(rows, k, v, frame).equal(out)
    if backend != "flex":
        graph, replayed = captured(lambda: call(rows, k, v, 5))
        rows.fill_(0.5)
        graph.replay()
        assert replayed.equal(call(rows, k, v, 5))


def test_unions_take_a_box():
    q, k, v, extra_k, extra_v = tensors()
    union = Union((NEAR, replace(NEAR, dilation=1)))
    for backend in ("reference", "eager"):
        call = partial(attend, pattern=union, extra_k=extra_k, extra_v=extra_v, backend=backend)
        torch.testing.assert_close(call(q[:, IN_BOX], k, v, query_box=BOX), call(q, k, v)[:, IN_BOX])


STORED = (
    None, Ordering.from_curve("hilbert", 24, grid=(4, 6)), Ordering.from_curve("snake", 24, chunk=6),
    Ordering.residue(24, 3, chunk=12), Ordering.random(24, 2**40), Ordering.from_permutation(torch.arange(24).flip(0)),
)  # fmt: skip


@pytest.mark.parametrize(
    "part", [None, GridPart(*(tuple(map(range, NEAR.shape)),) * 3, in_float=True)], ids=["", "part"]
)
@pytest.mark.parametrize("order", STORED, ids=repr)
def test_the_operator_is_given_all_of_a_request(order, part):
    masks = torch.zeros(2, 24, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    asked = Request(
        HeadNeighbourhoods((NEAR, replace(NEAR, window=(2, 1)))),
        scale=0.25,
        ordering=order,
        key_padding_mask=masks[0],
        extra_padding_mask=masks[1],
        part=part,
        slots=torch.arange(24).int(),
    )
    found = operators._request(*operators._arguments(asked))
    assert found.options == asked.options
    for name in ("key_padding_mask", "extra_padding_mask", "slots"):
        assert getattr(found, name) is getattr(asked, name)


def test_its_useful_flop_are_counted():
    leaves = tensors(kv_heads=1, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        out = neighbourhood_attention(*leaves[:3], NEAR, extra_k=leaves[3], extra_v=leaves[4])
        forward = counted.get_total_flops()
        out.sum().backward()
    pairs = int(mask_of(NEAR).sum()) + 24 * 3  # of two heads and two sequences, head_dim 4
    assert (forward, counted.get_total_flops()) == (4 * pairs * 2 * 2 * 4, 14 * pairs * 2 * 2 * 4)
    with FlopCounterMode(display=False) as counted:
        neighbourhood_attention(leaves[0][:, IN_BOX], *leaves[1:3], NEAR, query_box=BOX)
    assert counted.get_total_flops() == 4 * int(mask_of(NEAR)[IN_BOX].sum()) * 2 * 2 * 4
    near, part, rows, computed, keys, _ = part_of("line, causal")
    x = torch.ones(1, near.length, 1, 4)
    given_ = Tensors(x[:, rows], x[:, keys], x[:, keys], x[:, :3], x[:, :3])
    with FlopCounterMode(display=False) as counted:
        operators.attention(given_, Request(near.of_heads(1), part=part), "eager")
    assert counted.get_total_flops() == 4 * int(mask_of(near)[rows[computed]].sum() + 3 * computed.sum()) * 4


def test_autocast_casts_all_tensors():
    q, k, v, extra_k, extra_v = (x.float() for x in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = neighbourhood_attention(q, k, v, NEAR, extra_k=extra_k, extra_v=extra_v, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("door", [attend, neighbourhood_attention])
def test_the_error_for_heads_that_come_before_cells_says_what_to_do(door):
    with pytest.raises(ValueError, match=r"got shape .*; if heads come first, give x.transpose"):
        door(*(x.transpose(1, 2) for x in (Q, K, V)), NEAR)


FOUR = Neighbourhood((2, 2), 2)


@pytest.mark.filterwarnings("error:k has")
@pytest.mark.parametrize("near", [FOUR, (FOUR,) * 80, Union((FOUR, FOUR))], ids=["one", "by head", "union"])
def test_cells_are_counted_so_that_many_heads_are_never_warned_of(monkeypatch, near):
    monkeypatch.setattr(api, "_warned", False)
    x = torch.ones(1, 4, 80, 4)
    assert attend(x, x, x, near).shape == x.shape


def test_several_neighbourhoods_are_one_for_each_kv_head_wherever_they_are_given():
    windows = [NEAR, replace(NEAR, window=(2, 2))]
    found, told = (explain_backend(Q, K, V, each) for each in (windows, tuple(windows)))
    assert found.chosen == told.chosen == "eager"
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 4, "device": "cpu"}
    assert estimate_memory(windows, **sizes) == estimate_memory(tuple(windows), **sizes)
    one = DilatedPattern((4,), (1,))
    for several, words in (
        ([one, one], r"pattern must be .*; got list: several patterns in one softmax are a Union"),
        ((one, one), r"pattern must be .*; got tuple: several patterns in one softmax are a Union"),
        ([NEAR, one], "one for each KV head; got DilatedPattern"),
        ([Union((NEAR, NEAR)), NEAR], "one for each KV head; got Union"),
    ):
        for call in (partial(explain_backend, Q, K, V, several), partial(estimate_memory, several, **sizes)):
            with pytest.raises(TypeError, match=words):
                call()


def test_it_says_which_backend_serves():
    found = explain_backend(*tensors()[:3], NEAR)
    assert found.chosen == "eager"
    assert "cannot serve" in found.reasons["flex"]
    assert "by name" in found.reasons["reference"]
    q, k, v, *_ = tensors()
    assert explain_backend(q[:, IN_BOX], k, v, NEAR, query_box=BOX).chosen == "eager"


Q, K, V, EXTRA_K, EXTRA_V = tensors()
ORDER = Ordering.linear(24)
WIDE = torch.zeros(1, 24, 2, 32, dtype=torch.bfloat16)


asked = partial(neighbourhood_attention, Q, K, V, NEAR)
WRONG = [
    (lambda: neighbourhood_attention(Q, K, V, (4, 6)), "must hold one for each .*, got 2|must be a Neighbourhood"),
    (lambda: neighbourhood_attention(Q, K, V, (NEAR,)), "one for each of the 2 KV heads, got 1"),
    (lambda: neighbourhood_attention(Q, K, V, (NEAR, Neighbourhood((4, 6), 2))), "differ in window alone"),
    (
        lambda: neighbourhood_attention(Q[:, 1:], K, V, NEAR),
        r"q must have the 24 cells of the grid \(4, 6\), got .*4\)$",
    ),
    (lambda: neighbourhood_attention(Q, K[:, 1:], V[:, 1:], NEAR), "k must have the 24 cells"),
    (lambda: asked(ordering=Ordering.linear(5)), "ordering must have the 24 cells"),
    (lambda: asked(ordering="hilbert"), "ordering must be an Ordering"),
    (lambda: asked(scale=0.0), "scale must be finite and above 0"),
    (lambda: asked(extra_k=EXTRA_K), "extra_v must be a tensor"),
    (lambda: asked(query_box=3), r"query_box must be \(start, stop\) for each axis of the grid \(4, 6\), got 3"),
    (lambda: asked(query_box=((0, 4),)), "query_box must be .* for each axis"),
    (lambda: asked(query_box=((0, 4), 6)), r"query_box\[1\] must be \(start, stop\), got 6"),
    (lambda: asked(query_box=((0, 4), (6,))), r"query_box\[1\] must be \(start, stop\), got \(6,\)"),
    (lambda: asked(query_box=((-1, 4), (0, 6))), r"query_box\[0\] must be .*start at least 0.* got \(-1, 4\)"),
    (lambda: asked(query_box=((0, 4), (0, 7))), r"query_box\[1\] must be .*at most the side 6; got \(0, 7\)"),
    (lambda: asked(query_box=((0, 4), (2, 2))), r"query_box\[1\] must be .*start .* below stop.* got \(2, 2\)"),
    (lambda: asked(query_box=((0, 4), (6, 7))), r"query_box\[1\] must be .*at most the side 6; got \(6, 7\)"),
    (lambda: asked(query_box=((0, 4), (0, 2.0))), r"query_box\[1\]\[1\] must be an integer, got 2.0"),
    (lambda: asked(query_box=((0, 4), (0, 3))), r"q must have the cells of query_box .*, got shape \(2, 24, 2, 4\)"),
    (
        lambda: neighbourhood_attention(Q[:, IN_BOX], K, V, NEAR, query_box=BOX, ordering=Ordering.random(24, 0)),
        "ordering must be None with query_box",
    ),
    (
        lambda: asked(query_box=((0, 4), (0, 6)), ordering=Ordering.random(24, 0)),
        "ordering must be None with query_box",
    ),
    (lambda: attend(Q, K, V, DilatedPattern((4,), (1,)), query_box=BOX), "query_start is the word there"),
    (lambda: ring_attend(Q, K, V, NEAR, query_box=BOX), "ring_attend has no argument 'query_box'"),
    (lambda: asked(extra_k=EXTRA_K, extra_v=EXTRA_V[:, 1:]), "extra_v must be .* like extra_k"),
    (lambda: asked(extra_k=EXTRA_K.float(), extra_v=EXTRA_V), "extra_k must have the dtype of k"),
    (lambda: asked(key_padding_mask=torch.zeros(2, 5).bool()), r"key_padding_mask must be .*\(2, 24\)"),
    (lambda: asked(extra_padding_mask=torch.zeros(2, 3).bool()), "extra_padding_mask must be None"),
    (lambda: asked(backend="natten"), "backend must be one of auto, hopper, triton"),
    (lambda: asked(backend="hopper"), "backend='hopper' cannot serve: needs a CUDA device"),
    (lambda: asked(causal=True), "no argument 'causal'"),
    (lambda: Neighbourhood((), 1), "shape must hold at least one"),
    (lambda: Neighbourhood((2, 2, 2, 2), 1), "shape must have 1 to 3 sides"),
    (lambda: Neighbourhood((4, 4), (1, 2, 3)), "window must be one value or one for each of the 2 axes"),
    (lambda: Neighbourhood((4, 8), 3, (1, 3), edge="wrap"), "side of axis 1, 8 cells, .* 'wrap'; got 3 \\* 3"),
    (lambda: Neighbourhood((4, 4), (1, 2), 1, 2), "stride must be at most the window of axis 0, 1; got 2"),
    (lambda: Neighbourhood((4, 4), 2, 1, 1, (False, True), "wrap"), "edge must be 'shift' or 'clip' along axis 1"),
    (lambda: Neighbourhood((4, 6), 2, 1, (1, 2), False, ("clip", "torus")), r"edge\[1\] must be one of shift, clip"),
    (lambda: Neighbourhood((5, 6), 2, 1, 2, False, "wrap"), "multiple of stride \\* dilation, 2, along axis 0"),
    (lambda: Neighbourhood((4, 4), 2, 1, 1, 1), "is_causal must be True or False"),
    (lambda: Neighbourhood((4, 4), 2.0), "window must be an integer"),
]
test_bad_arguments_and_neighbourhoods_are_named = refusals({(TypeError, ValueError): WRONG})


def test_an_empty_extra_k_may_have_an_empty_mask():
    none, mask = torch.zeros(2, 0, *K.shape[2:], dtype=K.dtype), torch.zeros(2, 0, dtype=torch.bool)
    given = {"extra_k": none, "extra_v": none, "extra_padding_mask": mask}
    assert torch.equal(asked(**given), asked())
    assert validated(Q, K, V, NEAR, **given)[1].extra_padding_mask is None  # kernels load no mask of no keys


@pytest.mark.parametrize(
    ("given", "near", "ordering", "words"),
    [
        (Q, NEAR, None, "serves float16 and bfloat16, got float64"),
        (Q.bfloat16(), NEAR, None, "serves a head_dim of 16 to 256, a multiple of 8; got 4"),
        (WIDE[..., :20], NEAR, None, "a multiple of 8; got 20"),
        (WIDE, NEAR, Ordering.residue(24, 2), "row by row, got Ordering.residue"),
        (WIDE, NEAR, ORDER, ""),
        (WIDE[:, :15], Neighbourhood((3, 5), 2, dilation=(1, 2)), None, ""),
        (WIDE, NEAR, None, ""),
        (WIDE.repeat(1, 1, 1, 8), NEAR, None, ""),
        (WIDE[:1].expand(2**16, -1, -1, -1), NEAR, None, "serves up to 65,535 sequences, got 65,536"),
    ],
)
def test_what_the_kernels_of_boxes_do_not_serve_is_named(given, near, ordering, words):
    pytest.importorskip("triton", reason="triton has no build for this platform")
    tensors, request = validated(given, given, given, near, ordering=ordering)
    limits = backends_for(HeadNeighbourhoods)["hopper"].limits(tensors.q, request)
    assert words in limits
    assert bool(words) == bool(limits)


def test_parts_that_backends_do_not_serve_are_named():
    backends, x = backends_for(HeadNeighbourhoods), WIDE.expand(1, -1, -1, -1)

    def limits(name, near, box=BOX, **fields):
        part = part_of_box(box, near.shape)._replace(**fields)
        return backends[name].limits(x, Request(near.of_heads(2), scale=1.0, part=part))

    assert "axis 1 is dilated" in limits("hopper", Neighbourhood((4, 6), 2, dilation=(1, 2)))
    assert limits("hopper", Neighbourhood((4, 6), 2, dilation=(1, 2)), ((1, 3), (0, 6))) == ""
    uneven = limits("hopper", Neighbourhood((4, 5), 2, dilation=(1, 2)), ((1, 3), (0, 5)))
    assert "grids whose sides are multiples of dilation, got 5 and 2 along axis 1" in uneven
    assert "axis 0 goes round" in limits("hopper", Neighbourhood((4, 6), 2, edge=("wrap", "clip")))
    assert "axis 0 cut a group" in limits("hopper", Neighbourhood((4, 6), 2, stride=2), keys=(range(1, 4), range(6)))
    assert limits("flex", NEAR) == limits("triton", NEAR) == ""
    keys = (range(1, 4), range(6)), (range(4), range(5))
    for fields in ({"in_float": True}, *({"keys": box} for box in keys), {"queries": (range(1, 2), range(2, 6))}):
        assert "no part of a grid but a query_box" in limits("flex", NEAR, **fields)


def test_a_module_projects_and_serves_every_grid():
    torch.manual_seed(0)
    module = NeighbourhoodAttention(12, 3, window=3, kv_heads=1, edge="clip").double()
    for grid in ((7,), (4, 5), (3, 4, 3)):
        x = torch.randn(2, *grid, 12, dtype=torch.float64, requires_grad=True)
        extra = torch.randn(2, 2, 12, dtype=torch.float64)
        hidden = torch.rand(2, *grid) < 0.3
        parts = [
            tokens.unflatten(-1, (-1, 4)).split((3, 1, 1), -2) for tokens in (module.in_proj(x), module.in_proj(extra))
        ]
        q, k, v = (part.flatten(1, -3) for part in parts[0])
        options = {"key_padding_mask": hidden.flatten(1), "extra_k": parts[1][1], "extra_v": parts[1][2]}
        out = neighbourhood_attention(q, k, v, Neighbourhood(grid, 3, edge="clip"), **options, backend="reference")
        own = module(x, key_padding_mask=hidden, extra=extra)
        torch.testing.assert_close(own, module.out_proj(out.flatten(2)).view_as(x))
    box = ((2, 3), (0, 4), (1, 3))
    part = module(x, query_box=box, key_padding_mask=hidden, extra=extra)
    torch.testing.assert_close(part, own[:, 2:3, :, 1:3], atol=1e-14, rtol=0)
    own.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    torch.testing.assert_close(torch.compile(module, fullgraph=True)(x), module(x))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, query_box=box), module(x, query_box=box))
    with pytest.raises(ValueError, match=r"x must be \(batch, \*grid, embed_dim\)"):
        module(torch.ones(2, 12))
    with pytest.raises(ValueError, match=r"extra must be \(batch, tokens, embed_dim\) and embed_dim 12, got .*2, 12\)"):
        module(x, extra=torch.ones(2, 12))
    with pytest.raises(ValueError, match="kv_heads must divide num_heads 3, got 2"):
        NeighbourhoodAttention(12, 3, window=3, kv_heads=2)
    assert "num_heads=3, kv_heads=1, window=3" in repr(module)


def test_an_image_passes_through_a_layer_for_video():
    torch.manual_seed(0)
    video = NeighbourhoodAttention(8, 2, window=(4, 3, 9), stride=(3, 1, 1), is_causal=(True, False, False))
    image = NeighbourhoodAttention(8, 2, window=(3, 5))
    image.load_state_dict(video.state_dict())
    x = torch.randn(2, 6, 5, 8)
    torch.testing.assert_close(video(x[:, None])[:, 0], image(x))  # a row of 5 cells is seen whole


@pytest.mark.parametrize("kernel", [tiles.ON_CPU, Eager])
def test_memory_does_not_grow_with_length_squared(monkeypatch, kernel):
    # Of pairs, no more than a chunk at a time, however long the sequence is.
    most, steps = [], tiles._steps

    def watched(*args):
        for step in steps(*args):
            most.append(prod(step.q.shape[:3]) * step.k.shape[2])
            yield step

    monkeypatch.setattr(tiles, "_steps", watched)
    for bound in ("CHUNK", "PAIRS_OF_STEP"):
        monkeypatch.setattr(tiles, bound, 2**16)
    near = Neighbourhood((32, 32), 3)
    x = torch.randn(1, 1024, 2, 4)
    for extra in (0, 20):  # which every tile has too
        tiles.forward(Tensors(x, x, x, x[:, :extra], x[:, :extra]), Request(near.of_heads(2)), kernel)
        assert len(most) > 1
        assert max(most) <= 2**16
        most.clear()


@pytest.mark.parametrize("kernel", [tiles.ON_CPU, Eager])
@pytest.mark.parametrize(
    ("near", "sides"),
    [
        (Neighbourhood(50, 9, dilation=3, is_causal=True), (7,)),
        (Neighbourhood(48, 7, stride=3, edge="wrap"), (48,)),
        (Neighbourhood((9, 10), (3, 5), stride=(2, 1), edge="clip"), (9, 4)),
        (Neighbourhood((9, 10), (3, 5), dilation=(1, 2)), (9, 10)),
        (Neighbourhood((3, 4, 5), 3), (2, 4, 5)),
    ],
)
def test_no_result_depends_on_the_sides_of_tiles(monkeypatch, kernel, near, sides):
    """By both kernels: with tiles of one step or of several, as slices and as indices of rows."""
    generator = torch.Generator().manual_seed(5)
    q, k, v, dout = (
        torch.randn(2, near.length, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)
    )
    no_keys = k[:, :0]
    padding = torch.rand(2, near.length, generator=generator) < 0.2
    padding[1] = True  # a sequence without keys
    dlse = torch.randn(2, 4, near.length, dtype=torch.float64, generator=generator)
    monkeypatch.setattr(tiles, "sides_on_cpu", lambda *_: sides)
    monkeypatch.setitem(tiles.SIDES, len(sides), sides)
    for mask in (None, padding):
        inputs = Tensors(q, k, v, no_keys, no_keys)
        request = Request(near.of_heads(2), scale=0.3, key_padding_mask=mask)
        expected = reference.forward(inputs, request)
        finite = dlse.masked_fill(expected[1] == -torch.inf, 0.0)
        grads = reference.backward(dout, inputs, *expected, request, dlse=finite)
        for pairs in (1, 2**20):
            for bound in ("CHUNK", "PAIRS_OF_STEP"):
                monkeypatch.setattr(tiles, bound, pairs)
            found = tiles.forward(inputs, request, kernel)
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
            found_grads = tiles.backward(dout, inputs, *expected, request, kernel, finite)
            torch.testing.assert_close(found_grads[:3], tuple(grads[:3]), atol=1e-12, rtol=0)


def test_a_small_grid_is_one_tile_on_a_cpu_and_a_large_one_many():
    """As measured: 14 x 14 with window 7 dense, 56 x 56 and a sequence with window 512 by tiles."""

    def sides(near: Neighbourhood, copies: int) -> tuple[int, ...]:
        return sides_on_cpu(near, None, extra=0, group=1, copies=copies, added=1)

    assert sides(Neighbourhood((14, 14), 7), 256) == (14, 14)
    assert sides(Neighbourhood((8, 8), 3), 4) == (8, 8)
    assert prod(sides(Neighbourhood((56, 56), 7), 32)) <= 112
    assert sides(Neighbourhood(4096, 512, is_causal=True), 8) == (128,)
    assert prod(sides(Neighbourhood((128, 128), 21), 4)) <= 256
    assert prod(sides(Neighbourhood((8, 8, 8), 5), 8)) <= 128  # tiles at the ends of an axis have few keys
    # What is added to scores is bounded where every query sees all keys, too.
    assert prod(sides(Neighbourhood(2**15, 2**15), 8)) * 2**15 <= MOST_ADDED


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_a_permutation_of_ones_own_is_an_order_of_storage(backend):
    order = Ordering.from_permutation(torch.randperm(24, generator=torch.Generator().manual_seed(3)))
    leaves = [x.requires_grad_() for x in tensors()[:3]]
    expected = neighbourhood_attention(*leaves, NEAR, backend=backend)
    found = neighbourhood_attention(*(order.apply(x, dim=1) for x in leaves), NEAR, ordering=order, backend=backend)
    found = order.undo(found, dim=1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected)]
    torch.testing.assert_close(*grads, atol=1e-12, rtol=0)


def test_a_module_makes_the_neighbourhood_of_a_grid_once(monkeypatch):
    layer = NeighbourhoodAttention(8, 2, window=3)
    several = NeighbourhoodAttention(8, 2, window=((3, 3), (1, 1)))
    x = torch.randn(1, 4, 5, 8)
    expected = layer(x), several(x)
    monkeypatch.setattr(grid_module, "Neighbourhood", lambda *_, **__: pytest.fail("it was made again"))
    assert torch.equal(layer(x), expected[0])
    assert torch.equal(several(x), expected[1])
