"""Sequences of a batch that begin at unequal rows: key_start (padding on the left) and query_start as a tensor."""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import oracle
import pytest
import torch
from allpairspy import AllPairs
from cases import BRANCHES, TOLERANCE, assert_close, attended, differentiated, drawn, refusals
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hilbert_lib import (
    DilatedAttention,
    DilatedPattern,
    Neighbourhood,
    Ordering,
    Union,
    attend,
    dilated_attention,
    estimate_memory,
    explain_backend,
    neighbourhood_attention,
)
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.lab.sweeps.memory import captured
from hilbert_lib.machine import kernel_mode
from hilbert_lib.patterns.dilated import OFFSET_RULES, PADDING_RULES
from hilbert_lib.patterns.neighbourhood import EDGES
from hilbert_lib.patterns.pattern import Pattern

KEYS = 23
# query_start, key_start and the rows of q, of four sequences; values out of range among them.
STARTS = {
    "a number alone": (9, None, 5),
    "padded on the left": (None, (0, 5, 22, 23), KEYS),
    "a number": (17, (0, 18, 19, 22), 4),
    "all rows of padded caches": (0, (0, 3, 11, 30), KEYS),
    "unequal caches": ((0, 4, 20, 22), None, 3),
    "padded, of unequal caches": ((-2, 40, 22, 18), (0, 5, 23, -3), 3),
    "padded, prefilled": ((0, 0, 3, 1), (2, 0, 9, 4), 11),
}
PATTERN = DilatedPattern((6, 24), (1, 4))
FILLED = DilatedPattern((6, 24), (1, 4), padding="zeros")
ROWS = torch.tensor([2, 7])


def starts_of(name: str, device: str = "cpu", dtype: torch.dtype = torch.int64) -> tuple[dict, int]:
    """The options of some starts, and how many rows q has."""
    query_start, key_start, queries = STARTS[name]
    options = {}
    if key_start is not None:
        options["key_start"] = torch.tensor(key_start, dtype=dtype, device=device)
    if query_start is not None:
        is_tensor = isinstance(query_start, tuple)
        options["query_start"] = torch.tensor(query_start, dtype=dtype, device=device) if is_tensor else query_start
    return options, queries


def check(pattern, backend, dtype, starts, has_mask, options, heads=(4, 2), extra=0, order=None, device="cpu") -> None:
    """Compare output, lse and gradients with the oracle, which attends to each sequence alone."""
    own, queries = starts_of(starts, device, torch.int32 if has_mask else torch.int64)
    options = options | own
    *tensors, dout = (x.to(device) for x in drawn(queries, *heads, 8, batch=4, keys=KEYS, dtype=dtype))
    if extra:
        tensors += [x.flip(1)[:, :extra] for x in tensors[1:]]
        if has_mask:
            options["extra_padding_mask"] = (torch.arange(4)[:, None] == torch.arange(extra)).to(device)
    if has_mask:
        hidden = torch.rand(4, KEYS, generator=torch.Generator().manual_seed(0)) < 0.3
        options["key_padding_mask"] = hidden.to(device)
    exact = differentiated(oracle.attending(pattern, **options), [x.double() for x in (*tensors, dout)])
    assert exact[1].isfinite().any()
    if order is not None:
        options["kv_ordering"] = order
        tensors[1:3] = [order.apply(x, dim=1) for x in tensors[1:3]]
    found = list(attended([*tensors, dout], pattern, backend, **options))
    if order is not None:
        found[3:] = [order.undo(x, dim=1) for x in found[3:]]
    close, close_lse, close_grad = TOLERANCE[dtype]
    assert found[0].dtype == dtype
    assert_close(found[:2], exact[:2], (close, close_lse))
    assert_close(found[2:], exact[2:], close_grad, rtol=close_grad / 10)


ORDERS = {"none": None, "random": Ordering.random(KEYS, seed=1)}
AXES = (BRANCHES, OFFSET_RULES, ("softmax", "head_groups"), PADDING_RULES, ("reference", "eager", "auto"), TOLERANCE)
AXES += (STARTS, (False, True), (False, True), ORDERS)


@pytest.mark.parametrize("case", list(AllPairs(list(map(list, AXES)))), ids=lambda case: "-".join(map(str, case)))
def test_unequal_sequences_are_each_attended_to_alone(case):
    branches, offsets, mixing, padding, backend, dtype, starts, is_causal, has_mask, order = case
    kv_heads = 3 if mixing == "head_groups" else 2  # at least one a branch
    pattern = DilatedPattern(*BRANCHES[branches], offsets=offsets, mixing=mixing, padding=padding)
    heads, options = (2 * kv_heads, kv_heads), {"is_causal": is_causal}
    check(pattern, backend, dtype, starts, has_mask, options, heads, order=ORDERS[order])


def is_line(edge="clip", is_causal=False, stride=1, dilation=1, window=5, starts="unequal caches", *_) -> bool:
    """Whether such a line exists: one with edge "wrap" is whole, and not causal."""
    return edge != "wrap" or (not is_causal and stride == dilation == 1 and window < 9 and STARTS[starts][1] is None)


# edge, is_causal, stride, dilation, window, starts, windows by head, extra keys, mask, dtype, backend
LINES = (EDGES, (False, True), (1, 3), (1, 2), (5, 40), STARTS, (False, True), (0, 2))
LINES += ((False, True), TOLERANCE, ("reference", "eager", "auto"))


@pytest.mark.parametrize(
    "case", list(AllPairs(list(map(list, LINES)), filter_func=lambda case: is_line(*case))), ids=str
)
def test_unequal_lines_are_each_attended_to_alone(case):
    edge, is_causal, stride, dilation, window, starts, by_head, extra, has_mask, dtype, backend = case
    near = Neighbourhood((KEYS,), window, dilation, stride, is_causal, edge)
    pattern = (near, replace(near, window=window + 3)) if by_head else near
    check(pattern, backend, dtype, starts, has_mask, {}, (4, 2), extra)


def test_keys_of_zeros_are_those_of_each_sequence():
    pattern = DilatedPattern((8,), (2,), padding="zeros")  # 24 rows need none, and fewer do
    for options, queries in (({}, 24), ({"query_start": torch.tensor([9, 3, 20, 21])}, 3), ({"query_start": 17}, 5)):
        options["key_start"] = torch.tensor([0, 5, 20, 24])
        tensors = drawn(queries, 4, 2, 8, batch=4, keys=24, dtype=torch.float64)
        exact = differentiated(partial(oracle.attention, pattern=pattern, **options), tensors)
        assert_close(attended(tensors, pattern, "eager", **options), exact, 1e-12)


@dataclass(frozen=True)
class EverySecond(Pattern):
    """Every second position back."""

    kind: ClassVar[str] = "every_second"
    options: ClassVar[frozenset[str]] = frozenset(("query_start", "key_start"))

    def attends(self, query, key):
        return (key <= query) & ((query - key) % 2 == 0)


UNIONS = {
    "one's own": EverySecond(),
    "one's own beside another": Union((PATTERN, EverySecond())),
    "sequences": Union((PATTERN, DilatedPattern((9,), (2,)))),
    "lines": Union((Neighbourhood((KEYS,), 5), Neighbourhood((KEYS,), 3, dilation=4, edge="clip"))),
}


@pytest.mark.parametrize("kind", UNIONS)
def test_unions_and_patterns_of_ones_own_take_unequal_sequences(kind):
    for starts, backend in zip(STARTS, ("reference", "eager") * 4, strict=False):
        options, queries = starts_of(starts)
        tensors = drawn(queries, 2, 1, 8, batch=4, keys=KEYS, dtype=torch.float64)
        exact = differentiated(partial(oracle.attention, pattern=UNIONS[kind], **options), tensors)
        call = partial(attend, pattern=UNIONS[kind], backend=backend, return_lse=True, **options)
        assert_close(differentiated(call, tensors), exact, 1e-12)


@pytest.mark.skipif(kernel_mode() != "interpreted", reason="a GPU's kernels have a test of their own")
def test_a_number_alone_is_a_part_of_a_line_that_kernels_serve():
    check(Neighbourhood((KEYS,), 5, 2, 3), "triton", torch.float32, "a number alone", True, {}, extra=2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_drops_by_position(is_causal):
    # Expected: the dropout of a sequence that begins at row 0, with the same number in the batch and the same seed.
    q, k, v, dout = drawn(KEYS, 4, 2, 8, batch=2, dtype=torch.float64)
    options = {"dropout_p": 0.4, "is_causal": is_causal}
    begins = torch.tensor([0, 6])
    for backend in ("reference", "eager"):
        torch.manual_seed(0)
        found = attended((q, k, v, dout), PATTERN, backend, key_start=begins, **options)
        moved = [torch.cat([x[:1], x[1:].roll(-6, 1)]) for x in (q, k, v, dout)]
        hidden = torch.arange(KEYS) >= KEYS - begins[:, None]
        moved[3][hidden] = 0.0
        torch.manual_seed(0)
        expected = attended(moved, PATTERN, "reference", key_padding_mask=hidden, **options)
        for x, right, dim in zip(found, expected, (1, 2, 1, 1, 1), strict=True):
            assert_close(
                [x[:1], x[1:].narrow(dim, 6, KEYS - 6)], [right[:1], right[1:].narrow(dim, 0, KEYS - 6)], 1e-12
            )
        assert not found[0].equal(dilated_attention(q, k, v, PATTERN, key_start=begins, is_causal=is_causal))


def test_dropout_of_a_few_queries_is_that_of_the_reference():
    tensors = drawn(2, 4, 2, 8, batch=2, keys=KEYS, dtype=torch.float64)
    found = []
    for backend in ("eager", "reference"):
        torch.manual_seed(0)
        found.append(attended(tensors, PATTERN, backend, query_start=ROWS, dropout_p=0.4))
    assert_close(*found, 1e-12)


SHORT = DilatedPattern((5, 7, KEYS), (2, 3, 4))  # whose rates do not divide the segments
FEW = [SHORT, Neighbourhood((KEYS,), 6, 2, 3), Neighbourhood((KEYS,), 9, edge="clip"), Neighbourhood((KEYS,), 30)]


@pytest.mark.parametrize("pattern", FEW, ids=str)
@pytest.mark.parametrize("begin", [0, 7])
def test_one_query_at_every_position_sees_what_it_sees_alone(pattern, begin):
    tensors = drawn(1, 4, 4, 8, batch=KEYS, keys=KEYS, dtype=torch.float64)
    options = {"query_start": torch.arange(KEYS), "key_start": torch.full((KEYS,), begin)}
    exact = differentiated(partial(oracle.attention, pattern=pattern, **options), tensors)
    assert_close(attended(tensors, pattern, "eager", **options), exact, 1e-12)


class Cache:
    """k and v of a batch in buffers of a fixed length, which tokens are written into."""

    def __init__(self, k, v, rows, length):
        self.k, self.v = (x.new_zeros(x.shape[0], length, *x.shape[2:]) for x in (k, v))
        self.write(k, v, torch.zeros(len(k), dtype=torch.int64), rows)

    def write(self, k, v, first, rows):
        for b, row in enumerate(first.tolist()):
            self.k[b, row : row + rows], self.v[b, row : row + rows] = k[b, :rows], v[b, :rows]


SLIDING = Neighbourhood((16,), 5, is_causal=True)


@pytest.mark.parametrize(
    ("pattern", "backend"), [(PATTERN, "auto"), (PATTERN, "reference"), (SLIDING, "auto")], ids=str
)
def test_a_batch_padded_on_the_left_is_prefilled_and_decoded_as_each_sequence_alone(pattern, backend):
    # transformers' generate() pads a batch so. Two prompts of 5 and 8 tokens; six more tokens follow each.
    lengths, prompt, steps = (5, 8), 8, 6
    options = {"backend": backend} | ({"is_causal": True} if pattern is PATTERN else {})
    alone = [drawn(n + steps, 4, 2, 8, keys=n + steps, dtype=torch.float64)[:3] for n in lengths]
    shorter = [pattern if pattern is PATTERN else replace(pattern, shape=(n + steps,)) for n in lengths]
    whole = [attend(*tensors, own, **options)[0] for tensors, own in zip(alone, shorter, strict=True)]
    padding = torch.tensor([prompt - n for n in lengths])
    # q, k and v with rows of padding that hold something.
    padded = [
        torch.stack([torch.nn.functional.pad(x[0], (0, 0, 0, 0, before, 0), value=9.0) for x, before in pairs])
        for pairs in (zip(own, padding.tolist(), strict=True) for own in zip(*alone, strict=True))
    ]
    q, k, v = padded
    cache = Cache(k, v, prompt, prompt + steps + 2)
    first = torch.zeros(2, dtype=torch.int64)
    out = attend(q[:, :prompt], cache.k, cache.v, pattern, query_start=first, key_start=padding, **options)
    for b, n in enumerate(lengths):
        assert_close([out[b, prompt - n :]], [whole[b][:n]], 1e-12)
        assert not out[b, : prompt - n].any()
    for step in range(steps):
        at = torch.full((2,), prompt + step)
        cache.write(k[:, prompt + step :], v[:, prompt + step :], at, 1)
        step_q = q[:, prompt + step : prompt + step + 1]
        out = attend(step_q, cache.k, cache.v, pattern, query_start=at, key_start=padding, **options)
        assert_close([out[b, 0] for b in range(2)], [whole[b][n + step] for b, n in enumerate(lengths)], 1e-12)


def test_padding_on_the_left_without_key_start_is_another_function():
    # A mask hides the padding, but the sequence lies in other segments, as the docs say.
    q, k, v = drawn(8, 4, 2, 8, dtype=torch.float64)[:3]
    alone = dilated_attention(q, k, v, PATTERN, is_causal=True)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 3, 0)) for x in (q, k, v)]
    hidden = torch.arange(11)[None] < 3
    masked = dilated_attention(*padded, PATTERN, is_causal=True, key_padding_mask=hidden)
    assert (masked[:, 3:] - alone).abs().max() > 0.1
    assert_close(
        [dilated_attention(*padded, PATTERN, is_causal=True, key_start=torch.tensor([3]))[:, 3:]], [alone], 1e-12
    )


WINDOWS = Neighbourhood((KEYS,), 6, 2, is_causal=True)
WHOLE = [("sdpa", True, PATTERN), ("eager", False, PATTERN), ("eager", True, WINDOWS)]
WHOLE += [("eager", False, Neighbourhood((KEYS,), 6, edge="clip")), ("eager", False, UNIONS["lines"])]
WHOLE += [("triton", is_causal, PATTERN) for is_causal in (False, True)] * (kernel_mode() == "interpreted")
WHOLE += [("triton", True, WINDOWS)] * (kernel_mode() == "interpreted")


LAYOUTS = {
    "rows": lambda tensors: tensors,
    "heads first": lambda tensors: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors],
    "packed": lambda tensors: torch.stack(tensors, dim=2).unbind(2),
    "batch inside": lambda tensors: [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors],
    "heads inside": lambda tensors: [heads_inside(torch.cat([x, x], 1))[:, : x.shape[1]] for x in tensors],
    "head_dim first": lambda tensors: [x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1) for x in tensors],
}


def heads_inside(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize(("backend", "is_causal", "pattern"), WHOLE, ids=str)
def test_gradients_of_lse_too_are_those_of_each_sequence_alone(backend, is_causal, pattern):
    dtype = torch.float32 if backend == "triton" else torch.float64
    options = {"is_causal": is_causal} if pattern is PATTERN else {}
    if backend != "sdpa":
        options["key_padding_mask"] = torch.rand(4, KEYS, generator=torch.Generator().manual_seed(1)) < 0.2
    for starts in ("padded on the left", "unequal caches"):
        own, queries = starts_of(starts)
        if starts == "unequal caches" and backend != "eager":
            continue  # which "eager" serves alone
        *tensors, dout = drawn(queries, 4, 2, 8, batch=4, keys=KEYS, dtype=dtype)
        if starts == "padded on the left" and backend != "triton":  # scores of padding overflow exp
            for b, begin in enumerate(STARTS[starts][1]):
                for x in (*tensors, dout):
                    x[b, :begin] = 1e3
        dlse = torch.randn(4, 4, queries, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        exact = partial(oracle.attention, pattern=pattern, **own, **options)
        call = partial(attend, pattern=pattern, backend=backend, return_lse=True, **own, **options)
        found = differentiated(call, (*tensors, dout), dlse)
        right = differentiated(exact, [x.double() for x in (*tensors, dout)], dlse)
        assert_close(found, right, 1e-11 if dtype == torch.float64 else 2e-4)


@pytest.mark.parametrize("pattern", [PATTERN, Neighbourhood((KEYS,), 5, is_causal=True)], ids=str)
def test_many_queries_on_a_cpu_make_no_scores_of_all_keys(monkeypatch, pattern):
    monkeypatch.delattr("hilbert_lib.attention.backends.reference.forward_by_rows")
    options, queries = starts_of("padded, prefilled")
    q, k, v, _ = drawn(queries, 4, 2, 8, batch=4, keys=KEYS, dtype=torch.float64)
    call = partial(attend, q, k, v, pattern, backend="eager", **options)
    assert call().isfinite().all()
    if pattern is PATTERN:
        with pytest.raises(AttributeError, match="forward_by_rows"):
            call(dropout_p=0.5)


@pytest.mark.parametrize("backend", ["sdpa"] + ["triton"] * (kernel_mode() == "interpreted"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_are_moved_in_any_layout(layout, backend):
    # Both need sequences at row 0. The gradient of the output keeps the caller's layout.
    dtype, close = (torch.float64, 1e-12) if backend == "sdpa" else (torch.float32, 1e-5)
    *tensors, dout = drawn(KEYS, 4, 4, 8, batch=3, dtype=dtype)
    options = {"key_start": torch.tensor([0, 5, 22]), "is_causal": True}
    exact = attended([*tensors, dout], PATTERN, "reference", **options)
    found = attended(LAYOUTS[layout]([*tensors, dout]), PATTERN, backend, **options)
    assert_close(found, exact, close)


@pytest.mark.skipif(kernel_mode() != "interpreted", reason="a GPU's kernels have a test of their own")
def test_a_table_is_undone_before_sequences_are_moved():
    check(PATTERN, "triton", torch.float32, "padded on the left", False, {}, order=ORDERS["random"])


def test_values_that_change_are_those_of_the_next_call():
    # Tensors of one form: the second call is known, and a compiled one runs the same graph.
    q, k, v = drawn(3, 2, 1, 8, batch=2, keys=KEYS)[:3]
    run = partial(dilated_attention, pattern=PATTERN, is_causal=True, return_lse=True)
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        for first, begin in (((4, 9), (1, 9)), ((20, 0), (0, 0)), ((7, 7), (3, 7))):
            options = {"query_start": torch.tensor(first), "key_start": torch.tensor(begin)}
            with torch.compiler.set_stance("default" if first == (4, 9) else "fail_on_recompile"):
                found = call(q, k, v, **options)
            assert_close(found, oracle.attention(q, k, v, PATTERN, is_causal=True, **options), 1e-5)


def test_rows_that_no_query_sees_may_hold_anything():
    q, k, v = drawn(2, 2, 1, 8, batch=2, keys=KEYS, dtype=torch.float64)[:3]
    options = {"query_start": torch.tensor([4, 9]), "key_start": torch.tensor([3, 0]), "is_causal": True}
    expected = dilated_attention(q, k, v, PATTERN, **options)
    for b, (begin, end) in enumerate(((3, 6), (0, 11))):
        for x in (k, v):
            x[b, :begin] = x[b, end:] = torch.nan
    for backend in ("reference", "eager"):
        assert_close([dilated_attention(q, k, v, PATTERN, backend=backend, **options)], [expected], 1e-14)


def test_a_start_that_changes_before_the_backward_is_an_error():
    q, k, v = (x.requires_grad_() for x in drawn(3, 2, 1, 8, batch=2, keys=KEYS)[:3])
    begins = torch.tensor([0, 4])
    out = dilated_attention(q, k, v, PATTERN, query_start=9, key_start=begins)
    begins += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_checkpoint_and_the_module_take_them():
    options, queries = starts_of("padded, of unequal caches")
    q, k, v, dout = drawn(queries, 4, 2, 8, batch=4, keys=KEYS, dtype=torch.float64)
    module = DilatedAttention(PATTERN, kv_ordering=Ordering.random(KEYS, seed=1))
    exact = differentiated(partial(oracle.attention, pattern=PATTERN, **options), (q, k, v, dout))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = checkpoint(module, *leaves, use_reentrant=False, **options)
    assert_close([out, *torch.autograd.grad(out, leaves, dout)], [exact[0], *exact[2:]], 1e-12)


def test_flop_are_counted_as_the_most_that_they_may_be():
    queries, heads, kv_heads = 3, 4, 2
    q, k, v = drawn(queries, heads, kv_heads, 8, batch=2, keys=KEYS)[:3]
    most = sum(
        max(len(PATTERN.keys(p, kv_head=g, kv_heads=kv_heads, length=KEYS)) for p in range(KEYS))
        for g in range(kv_heads)
    )

    def counted(q, **options) -> int:
        with FlopCounterMode(display=False) as counter:
            dilated_attention(q, k, v, PATTERN, **options)
        return counter.get_total_flops() // (4 * 8)

    assert counted(q, query_start=ROWS) == 2 * queries * heads // kv_heads * most
    # Both tensors have values that only the device knows: a line of windows, too.
    line = Neighbourhood((KEYS,), 5)
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v, line, query_start=ROWS, extra_k=k[:, :2], extra_v=v[:, :2])
    assert counter.get_total_flops() == 4 * 8 * 2 * queries * heads * (5 + 2)
    assert counted(k, key_start=ROWS) == 2 * PATTERN.pairs(KEYS, heads=kv_heads)


def test_extra_queries_see_no_row_before_a_sequence():
    q, k, v = drawn(KEYS, 2, 1, 8, batch=2, dtype=torch.float64)[:3]
    hidden = torch.arange(KEYS) < ROWS[:, None]
    everyone = DilatedPattern((KEYS,), (1,))
    expected, _ = oracle.attention(q, k, v, everyone, key_padding_mask=hidden)
    for _ in range(2):  # the second call is known
        _, out = neighbourhood_attention(q, k, v, Neighbourhood((KEYS,), 5), key_start=ROWS, extra_q=q)
        assert_close([out], [expected], 1e-12)


def test_what_does_not_serve_them_says_so():
    q, k, v = drawn(KEYS, 2, 1, 16, batch=2)[:3]
    explanation = explain_backend(q, k, v, PATTERN, query_start=ROWS)
    assert explanation.chosen == "eager"
    for backend in set(BACKENDS) - {"eager", "reference", "triton"}:
        assert "no query_start that is a tensor" in explanation.reasons[backend]
        with pytest.raises(ValueError, match=f"backend='{backend}' cannot serve: no query_start"):
            dilated_attention(q, k, v, PATTERN, backend=backend, query_start=ROWS)
    few = explain_backend(q[:, :2], k, v, PATTERN, query_start=4, key_start=ROWS)
    assert (few.chosen, "no key_start" in few.reasons["sdpa"]) == ("eager", True)
    assert few.reasons["triton"].startswith("can serve") == (kernel_mode() == "interpreted")
    # A whole sequence is moved to row 0, which dense kernels serve without a mask where it is causal.
    whole = explain_backend(q, k, v, PATTERN, key_start=ROWS)
    assert whole.chosen == "eager"
    assert "no key_start unless attention is causal: no key_padding_mask" in whole.reasons["sdpa"]
    assert explain_backend(q, k, v, PATTERN, key_start=ROWS, is_causal=True).chosen == "sdpa"
    sizes = {"length": KEYS, "heads": 2, "head_dim": 16, "has_key_start": True, "device": "cuda"}
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="backend='sdpa' cannot serve: no key_start"):
            estimate_memory(PATTERN, backend="sdpa", queries=2, **sizes)
        assert estimate_memory(PATTERN, backend="triton", queries=2, **sizes).workspace > 0
        assert estimate_memory(PATTERN, backend="triton", **sizes).workspace > 0


ON_GPU = (torch.float32, torch.bfloat16, torch.float16), ("eager", "auto", "triton", "sdpa"), STARTS, (False, True)
ON_GPU += ((False, True), (PATTERN, FILLED, WINDOWS))


def is_served(dtype=None, backend="auto", starts="a number alone", is_causal=True, has_mask=False, pattern=PATTERN):
    """Whether a backend serves such a call on a GPU."""
    whole = STARTS[starts][2] == KEYS
    if pattern is WINDOWS and (is_causal or backend == "sdpa"):  # a window says itself whether it is causal
        return False
    return backend != "sdpa" or (whole and is_causal and not has_mask)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", list(AllPairs(list(map(list, ON_GPU)), filter_func=lambda case: is_served(*case))), ids=str
)
def test_on_a_gpu_unequal_sequences_are_each_attended_to_alone(case):
    dtype, backend, starts, is_causal, has_mask, pattern = case
    options = {} if pattern is WINDOWS else {"is_causal": is_causal}
    check(pattern, backend, dtype, starts, has_mask, options, (4, 2), device="cuda")


@contextmanager
def host_never_waits():
    """A wait of the host for a GPU raises an error."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", [PATTERN, WINDOWS], ids=str)
def test_one_captured_graph_serves_every_step_and_the_host_never_waits(pattern):
    q, k, v = (x.cuda() for x in drawn(1, 4, 2, 16, batch=2, keys=KEYS)[:3])
    options = {"is_causal": True} if pattern is PATTERN else {}
    starts = {"query_start": torch.tensor([3, 9], device="cuda"), "key_start": torch.tensor([0, 4], device="cuda")}
    run = partial(attend, q, k, v, pattern, **starts, **options)
    with torch.no_grad():
        run()
        with host_never_waits():
            run()
        graph, out = captured(run)
        for first, begin in (((5, 12), (2, 7)), ((22, 0), (1, 0)), ((30, 4), (0, 9))):
            starts["query_start"].copy_(torch.tensor(first))
            starts["key_start"].copy_(torch.tensor(begin))
            graph.replay()
            expected, _ = oracle.attention(q, k, v, pattern, **starts, **options)
            assert_close([out], [expected], 1e-4)


@pytest.mark.gpu
def test_on_a_gpu_a_padded_prefill_and_its_backward_never_wait():
    q, k, v = (x.cuda().bfloat16().requires_grad_() for x in drawn(KEYS, 4, 4, 16, batch=2)[:3])
    begins = torch.tensor([0, 4], device="cuda")

    def run():
        torch.autograd.grad(dilated_attention(q, k, v, PATTERN, is_causal=True, key_start=begins).sum(), (q, k, v))

    run()
    with host_never_waits():
        run()


X = torch.zeros(2, 8, 2, 4)
PAIR = DilatedPattern((4,), (1,))


def given(**options):
    return lambda: dilated_attention(options.pop("q", X), X, X, PAIR, **options)


def on_line(pattern=SLIDING, **options):
    near = replace(pattern, shape=(8,)) if len(pattern.shape) == 1 else pattern
    return lambda: neighbourhood_attention(X, X, X, near, key_start=ROWS, **options)


test_what_is_no_start_is_refused_by_name_and_value = refusals(
    {
        TypeError: [
            (given(key_start=3), r"key_start must be a \(batch,\) tensor of int32 or int64, or None; got 3"),
            (given(key_start=ROWS.float()), r"key_start must be .*; got torch.float32"),
            (given(q=X[:, :2], query_start=ROWS.bool()), r"query_start must be an integer, or .*; got torch.bool"),
            (
                given(q=X[:, :2], query_start=(1, 2)),
                r"from 0 to 6, or a \(batch,\) tensor of .*; got \(1, 2\)",
            ),
            (given(q=X[:, :2], query_start=2.0), r"query_start .*, or a \(batch,\) tensor of int32 or int64; got 2.0"),
        ],
        ValueError: [
            (given(key_start=ROWS[:1]), r"key_start must be \(batch,\) = \(2,\), got shape \(1,\)"),
            (given(key_start=ROWS.to("meta")), r"key_start must be on the device of k \(cpu\), got meta"),
            (given(q=X[:, :2], query_start=ROWS[0]), r"query_start must be \(batch,\) = \(2,\), got shape \(\)"),
            (
                on_line(pattern=Neighbourhood((2, 4), 2)),
                "key_start must be left out for a Neighbourhood, got .*; it has more than one axis",
            ),
            (on_line(pattern=Neighbourhood((8,), 4, edge="wrap")), "edge must be 'shift' or 'clip' with key_start"),
            (on_line(query_box=((0, 8),)), "query_box must be None with key_start, which counts rows of a line"),
            (on_line(ordering=Ordering.random(8, 0)), "ordering must be None with key_start, which counts rows"),
            (given(q=X[:, :2], key_start=ROWS), r"k must have the length of q \(2\) unless query_start is given"),
        ],
    }
)
