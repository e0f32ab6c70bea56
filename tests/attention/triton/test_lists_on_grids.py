"""Grids and unions by the kernels for lists equal the oracle; without a GPU they run here in Triton's interpreter."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import (
    GROUPED_WINDOWS,
    HEADS,
    MORE,
    ORDERS,
    SMALL,
    attended,
    check_grouped_windows,
    check_nan,
    check_on_grid,
    every_rule,
    grids_in_pairs,
    pairs_of_options,
    refusals,
)
from torch.utils.flop_counter import FlopCounterMode

from hilbert_lib import (
    DilatedPattern,
    Neighbourhood,
    Ordering,
    Union,
    attend,
    estimate_memory,
    explain_backend,
    neighbourhood_attention,
)
from hilbert_lib.attention import grid_lists, rules
from hilbert_lib.attention.backends import listed_grid
from hilbert_lib.lab.selection import candidates
from hilbert_lib.lab.sweeps.memory import captured
from hilbert_lib.lab.workload import Workload

launch = pytest.importorskip(
    "hilbert_lib.attention.triton.lists_launch", reason="triton has no build for this platform"
)

from gathered_starts import counted_launches  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = torch.float32, torch.bfloat16, torch.float16
WITH_DLSE = False, True
PLANE = ((20, 18), (5, 7), 1, 1, False, "shift")  # of several blocks with several tiles each
NEAR = Neighbourhood((8, 9), (3, 5))
WIDE = Neighbourhood((8, 9), 5)
FAR = Neighbourhood((8, 9), 3, dilation=2)


@grids_in_pairs(DTYPES, WITH_DLSE)
def test_output_lse_and_gradients_equal_the_oracle(case):
    *rest, with_dlse = case
    check_on_grid(*rest, "lists", device=DEVICE, with_dlse=with_dlse)


@pytest.mark.parametrize("case", pairs_of_options(DTYPES, WITH_DLSE), ids=str)
def test_options_in_pairs(case):
    *rest, with_dlse = case
    check_on_grid(*rest, "lists", device=DEVICE, with_dlse=with_dlse)


@pytest.mark.full
@pytest.mark.parametrize("rules", every_rule(SMALL), ids=str)
def test_all_options_together(rules):
    """Heads and dtypes in turn."""
    for n, order in enumerate(ORDERS):
        for more in MORE:
            check_on_grid(rules, list(HEADS)[n % 3], order, more, DTYPES[n % 3], "lists", device=DEVICE)


def test_blocks_of_several_tiles():
    check_on_grid(PLANE, "grouped", "hilbert", "extra and padding", torch.bfloat16, "lists", device=DEVICE)


def test_a_short_backward_is_one_launch_and_a_longer_one_is_several(monkeypatch):
    tensors = [torch.randn(1, 72, 2, 16, device=DEVICE) for _ in range(4)]
    run = partial(attended, tensors, Union((NEAR, FAR)), "lists")
    tiles = max(grid_lists.count_tiles((NEAR, FAR), is_turned=is_turned) for is_turned in (False, True))
    for most, wanted in ((2 * tiles, [1, 1]), (2 * tiles - 1, [1, 3])):
        monkeypatch.setattr(launch, "MOST_TILES_AT_ONCE", most)
        with monkeypatch.context() as patch:
            counts = counted_launches(patch, launch)
            run()
        assert counts == wanted


def test_gradients_by_several_launches_equal_the_oracle(monkeypatch):
    monkeypatch.setattr(launch, "MOST_TILES_AT_ONCE", 0)
    case = PLANE, "grouped", "hilbert", "extra and padding", torch.bfloat16, "lists"
    counts = counted_launches(monkeypatch, launch)
    check_on_grid(*case, device=DEVICE, with_dlse=True)
    assert max(counts) == 4


def test_windows_are_those_of_the_kv_head_of_each_group():
    check_grouped_windows("lists", torch.float32, device=DEVICE)


@pytest.mark.parametrize("pattern", [(NEAR, replace(NEAR, window=(3, 4))), NEAR], ids=["windows by head", "one window"])
def test_results_are_contiguous_whatever_the_strides_of_q(pattern):
    """As torch.compile takes them to be."""
    tensors = [torch.randn(1, 2, 72, 16, device=DEVICE).transpose(1, 2) for _ in range(4)]
    assert all(x.is_contiguous() for x in attended(tensors, pattern, "lists"))


@pytest.mark.parametrize(
    ("union", "heads", "order", "more", "most_pairs", "passes"),
    [
        ("near and far", "grouped", "random", "extra and padding", 0, 2),
        ("near and far", "grouped", "random", "extra and padding", 2**19, 1),
        ("round and causal", "windows", "none", "extra", 0, 4),
        ("a line three times", GROUPED_WINDOWS, "box", "padding", 0, 6),
        ("near and wide", "grouped", "hilbert", "extra and padding", 0, 1),
        ("near and wide", GROUPED_WINDOWS, "box", "extra", 0, 2),
    ],
)
def test_a_union_is_one_softmax(union, heads, order, more, most_pairs, passes, monkeypatch):
    """In one pass, or part by part, for each window of heads. most_pairs: of a short call."""
    monkeypatch.setattr(listed_grid, "MOST_PAIRS", most_pairs)
    calls = {"forward": 0, "backward": 0}

    def counted(name, run, *given):
        calls[name] += 1
        return run(*given)

    for name in calls:
        monkeypatch.setattr(launch, name, partial(counted, name, getattr(launch, name)))
    check_on_grid(union, heads, order, more, torch.float32, "lists", device=DEVICE, with_dlse=True)
    assert calls == {"forward": passes, "backward": passes}


def test_a_dropped_bit_of_a_word_is_seen(monkeypatch):
    case = PLANE, "one", "none", "nothing", torch.float32, "lists"
    words_of = grid_lists.words_of
    grid_lists.grid_lists.cache_clear()
    try:
        monkeypatch.setattr(grid_lists, "words_of", lambda attends: words_of(attends) & ~(1 << 40))
        with pytest.raises(AssertionError):
            check_on_grid(*case, device=DEVICE)
    finally:
        grid_lists.grid_lists.cache_clear()


def test_what_is_no_number_reaches_only_those_who_see_it():
    near = Neighbourhood((4, 6), (3, 2), dilation=(1, 2), edge=("wrap", "clip"))
    run = partial(neighbourhood_attention, neighbourhood=near, backend="lists")
    for at in range(3):
        check_nan(near, [torch.randn(1, 24, 1, 4, device=DEVICE) for _ in range(3)], at, 13, run)


@pytest.mark.parametrize("order", [None, Ordering.random(72, seed=2)], ids=["rows", "random"])
def test_the_bits_are_the_same_every_time(order):
    tensors = [torch.randn(1, 72, 2, 16, device=DEVICE) for _ in range(4)]
    for union in (Union((NEAR, FAR)), Union((NEAR, WIDE))):
        first, second = (attended(tensors, union, "lists", ordering=order) for _ in range(2))
        assert all(map(torch.equal, first, second))


def test_compiled_calls_are_those_of_eager_mode():
    tensors = [torch.randn(1, 72, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    run = partial(neighbourhood_attention, neighbourhood=NEAR, backend="lists")
    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        out = function(*tensors)
        results.append([out, *torch.autograd.grad(out, tensors, torch.ones_like(out))])
    assert all(map(torch.equal, *results))


X = torch.randn(1, 72, 2, 16, device=DEVICE)


test_what_it_lacks_is_refused_by_name = refusals(
    {
        ValueError: [
            (
                lambda: attend(X, X, X, NEAR, bias=torch.zeros(2, 5, 9, device=DEVICE), backend="lists"),
                "backend='lists' cannot serve: adds no bias to scores",
            ),
            (
                lambda: attend(*(x.double() for x in (X, X, X)), NEAR, backend="lists"),
                "serves float16, bfloat16 and float32, got float64",
            ),
            (
                lambda: attend(X, X, X, Union((DilatedPattern((8,), (1,)),) * 2), backend="lists"),
                "serves no DilatedPattern, which is a part of the union",
            ),
            (
                lambda: attend(X, X, X, DilatedPattern((8,), (1,)), backend="lists"),
                "backend must be one of auto, .* for a DilatedPattern; got 'lists'",
            ),
        ]
    }
)


def test_lists_that_are_too_large_are_refused(monkeypatch):
    size = grid_lists.lists_bytes((NEAR,))
    attend(X, X, X, NEAR, backend="lists")
    monkeypatch.setattr(grid_lists, "LARGEST", size - 1)
    told = explain_backend(X, X, X, NEAR, backend="lists").reasons["lists"]
    assert told == f"cannot serve: serves lists of up to {size - 1:,} bytes, got {size:,}"


def test_lists_of_all_parts_of_a_union_must_fit_together(monkeypatch):
    monkeypatch.setattr(listed_grid, "MOST_PAIRS", 0)  # no call is short
    sizes = [grid_lists.lists_bytes((each,)) for each in (NEAR, FAR)]
    monkeypatch.setattr(grid_lists, "LARGEST", sum(sizes))
    attend(X, X, X, Union((NEAR, FAR)), backend="lists")
    monkeypatch.setattr(grid_lists, "LARGEST", sum(sizes) - 1)
    told = explain_backend(X, X, X, Union((NEAR, FAR)), backend="lists").reasons["lists"]
    assert told == f"cannot serve: serves lists of up to {sum(sizes) - 1:,} bytes, got {sum(sizes):,}"


def test_explanations_and_estimates_name_it():
    explained = explain_backend(X, X, X, NEAR, backend="lists")
    assert explained.chosen == "lists"
    assert explained.reasons["lists"].startswith("chosen: kernels that walk over lists of keys")
    of_union = explain_backend(X, X, X, Union((NEAR, FAR)), backend="lists").reasons["lists"]
    assert "a union in one pass if short or of about as many tiles as its parts, else the parts" in of_union
    sizes = {"heads": 2, "head_dim": 64, "backend": "lists", "device": "cuda"}
    for direction in ("forward", "backward"):
        told = estimate_memory(Union((NEAR, FAR)), direction=direction, **sizes)
        assert told.items["workspace: lists"] == grid_lists.lists_bytes((NEAR, FAR))
        assert "workspace: lse and delta" not in told.items  # of a short call, whose backward is one launch
        for union, lists in (((NEAR, FAR), [(NEAR,), (FAR,)]), ((NEAR, WIDE), [(NEAR, WIDE)])):
            told = estimate_memory(Union(union), direction=direction, **sizes, batch=999)
            assert told.items["workspace: lists"] == sum(map(grid_lists.lists_bytes, lists))
    many = estimate_memory(NEAR, direction="backward", **sizes, batch=999)
    assert many.items["workspace: lse and delta"] == 999 * 8 * 2 * NEAR.length
    heads = replace(NEAR, window=(3, 4)), NEAR
    by_head = estimate_memory(heads, **sizes)
    assert by_head.items["workspace: lists"] == sum(grid_lists.lists_bytes((each,)) for each in heads)
    assert by_head.items["workspace: a set of heads"] > 0


def test_its_flop_are_those_of_other_backends():
    counts = []
    for backend in ("lists", "eager"):
        with FlopCounterMode(display=False) as counter:
            attend(X, X, X, Union((NEAR, FAR)), backend=backend)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == (NEAR.pairs + FAR.pairs) * 2 * 4 * 16


def test_auto_takes_it_before_rectangles_and_flex():
    for rule in (rules.GRID_BY_ROW, rules.GRID_ON_GPU, rules.GRID_COMPACT):
        behind = rule.order[rule.order.index("lists") + 1 :]
        assert {"triton", "flex"} < set(behind)
    assert "lists" not in rules.GRID_ON_CPU.order


def test_it_is_timed_among_the_candidates_but_for_the_interpreter():
    work = Workload(NEAR, NEAR.length, 2, 16, torch.device(DEVICE), dtype="bfloat16")
    assert ("lists" in candidates(work, gradient=True)) == (DEVICE == "cuda")


@pytest.mark.gpu
def test_a_cuda_graph_replays_a_call():
    tensors = [torch.randn(1, 72, 2, 32, device="cuda", requires_grad=True) for _ in range(3)]

    def step():
        out = neighbourhood_attention(*tensors, NEAR, backend="lists")
        return out, *torch.autograd.grad(out, tensors, torch.ones_like(out))

    step()
    graph, found = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, step()))
