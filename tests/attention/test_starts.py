"""Sequences of a batch that begin at unequal rows: key_start (padding on the left) and query_start as a tensor."""

from functools import partial

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
    Ordering,
    Union,
    attend,
    dilated_attention,
    estimate_memory,
    explain_backend,
)
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.patterns.dilated import OFFSET_RULES, PADDING_RULES

KEYS = 23
# query_start, key_start and the rows of q, of four sequences; values out of range among them.
STARTS = {
    "padded on the left": (None, (0, 5, 22, 23), KEYS),
    "a number": (17, (0, 18, 19, 22), 4),
    "all rows of padded caches": (0, (0, 3, 11, 30), KEYS),
    "unequal caches": ((0, 4, 20, 22), None, 3),
    "padded, of unequal caches": ((-2, 40, 22, 18), (0, 5, 23, -3), 3),
    "padded, prefilled": ((0, 0, 3, 1), (2, 0, 9, 4), 11),
}
PATTERN = DilatedPattern((6, 24), (1, 4))
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


def check(pattern, backend, dtype, starts, is_causal, has_mask, order, heads=(4, 2), device="cpu") -> None:
    """Compare output, lse and gradients with the oracle, which attends to each sequence alone."""
    options, queries = starts_of(starts, device, torch.int32 if is_causal else torch.int64)
    tensors = [x.to(device) for x in drawn(queries, *heads, 8, batch=4, keys=KEYS, dtype=dtype)]
    options["is_causal"] = is_causal
    if has_mask:
        hidden = torch.rand(4, KEYS, generator=torch.Generator().manual_seed(0)) < 0.3
        options["key_padding_mask"] = hidden.to(device)
    exact = differentiated(partial(oracle.attention, pattern=pattern, **options), [x.double() for x in tensors])
    assert exact[1].isfinite().any()
    if order is not None:
        options["kv_ordering"] = order
        tensors[1:3] = [order.apply(x, dim=1) for x in tensors[1:3]]
    found = list(attended(tensors, pattern, backend, **options))
    if order is not None:
        found[3:] = [order.undo(x, dim=1) for x in found[3:]]
    close, close_lse, close_grad = TOLERANCE[dtype]
    assert found[0].dtype == dtype
    assert_close(found, exact, (close, close_lse, *[close_grad] * 3))


ORDERS = {"none": None, "random": Ordering.random(KEYS, seed=1)}
AXES = (BRANCHES, OFFSET_RULES, ("softmax", "head_groups"), PADDING_RULES, ("reference", "eager", "auto"), TOLERANCE)
AXES += (STARTS, (False, True), (False, True), ORDERS)


@pytest.mark.parametrize("case", list(AllPairs(list(map(list, AXES)))), ids=lambda case: "-".join(map(str, case)))
def test_unequal_sequences_are_each_attended_to_alone(case):
    branches, offsets, mixing, padding, backend, dtype, starts, is_causal, has_mask, order = case
    kv_heads = 3 if mixing == "head_groups" else 2  # at least one a branch
    pattern = DilatedPattern(*BRANCHES[branches], offsets=offsets, mixing=mixing, padding=padding)
    check(pattern, backend, dtype, starts, is_causal, has_mask, ORDERS[order], (2 * kv_heads, kv_heads))


def test_keys_of_zeros_are_those_of_each_sequence():
    pattern = DilatedPattern((8,), (2,), padding="zeros")  # 24 rows need none, and fewer do
    for options, queries in (({}, 24), ({"query_start": torch.tensor([9, 3, 20, 21])}, 3), ({"query_start": 17}, 5)):
        options["key_start"] = torch.tensor([0, 5, 20, 24])
        tensors = drawn(queries, 4, 2, 8, batch=4, keys=24, dtype=torch.float64)
        exact = differentiated(partial(oracle.attention, pattern=pattern, **options), tensors)
        assert_close(attended(tensors, pattern, "eager", **options), exact, 1e-12)


def test_unions_along_sequences_take_unequal_ones():
    pattern = Union((PATTERN, DilatedPattern((9,), (2,))))
    for starts, backend in zip(STARTS, ("reference", "eager") * 3, strict=True):
        options, queries = starts_of(starts)
        tensors = drawn(queries, 2, 1, 8, batch=4, keys=KEYS, dtype=torch.float64)
        exact = differentiated(partial(oracle.attention, pattern=pattern, **options), tensors)
        call = partial(attend, pattern=pattern, backend=backend, return_lse=True, **options)
        assert_close(differentiated(call, tensors), exact, 1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_drops_by_position(is_causal):
    # As in a sequence that begins at row 0: of the same number in the batch, with the same seed.
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


class Cache:
    """k and v of a batch in buffers of a fixed length, which tokens are written into."""

    def __init__(self, k, v, rows, length):
        self.k, self.v = (x.new_zeros(x.shape[0], length, *x.shape[2:]) for x in (k, v))
        self.write(k, v, torch.zeros(len(k), dtype=torch.int64), rows)

    def write(self, k, v, first, rows):
        for b, row in enumerate(first.tolist()):
            self.k[b, row : row + rows], self.v[b, row : row + rows] = k[b, :rows], v[b, :rows]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_batch_padded_on_the_left_is_prefilled_and_decoded_as_each_sequence_alone(backend):
    # transformers' generate() pads a batch so. Two prompts of 5 and 8 tokens; six more tokens follow each.
    lengths, prompt, steps = (5, 8), 8, 6
    alone = [drawn(n + steps, 4, 2, 8, keys=n + steps, dtype=torch.float64)[:3] for n in lengths]
    whole = [dilated_attention(*tensors, PATTERN, is_causal=True, backend=backend)[0] for tensors in alone]
    padding = torch.tensor([prompt - n for n in lengths])
    padded = [
        torch.stack([torch.nn.functional.pad(x[0], (0, 0, 0, 0, prompt - n, 0), value=9.0) for x, n in pairs])
        for pairs in ([(tensors[i], n) for tensors, n in zip(alone, lengths, strict=True)] for i in range(3))
    ]
    q, k, v = padded
    cache = Cache(k, v, prompt, prompt + steps + 2)
    run = partial(dilated_attention, pattern=PATTERN, is_causal=True, backend=backend)
    first = torch.zeros(2, dtype=torch.int64)  # prefill
    out = run(q[:, :prompt], cache.k, cache.v, query_start=first, key_start=padding)
    without = run(q[:, :prompt], k[:, :prompt], v[:, :prompt], key_padding_mask=torch.arange(prompt) < padding[:, None])
    for b, n in enumerate(lengths):
        assert_close([out[b, prompt - n :]], [whole[b][:n]], 1e-12)
        assert not out[b, : prompt - n].any()
    assert (out[0, 3:] - without[0, 3:]).abs().max() > 0.1  # a mask alone leaves it in other segments
    for step in range(steps):
        at = torch.full((2,), prompt + step)
        cache.write(k[:, prompt + step :], v[:, prompt + step :], at, 1)
        out = run(q[:, prompt + step : prompt + step + 1], cache.k, cache.v, query_start=at, key_start=padding)
        assert_close([out[b, 0] for b in range(2)], [whole[b][n + step] for b, n in enumerate(lengths)], 1e-12)


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
    assert counted(k, key_start=ROWS) == 2 * PATTERN.pairs(KEYS, heads=kv_heads)


def test_what_does_not_serve_them_says_so():
    q, k, v = drawn(KEYS, 2, 1, 16, batch=2)[:3]
    for name, options in (("key_start", {"key_start": ROWS}), ("query_start", {"query_start": ROWS})):
        explanation = explain_backend(q, k, v, PATTERN, **options)
        assert explanation.chosen == "eager"
        for backend in set(BACKENDS) - {"eager", "reference"}:
            assert f"no {name}" in explanation.reasons[backend]
            with pytest.raises(ValueError, match=f"backend='{backend}' cannot serve: no {name}"):
                dilated_attention(q, k, v, PATTERN, backend=backend, **options)
    sizes = {"length": KEYS, "heads": 2, "head_dim": 16, "has_key_start": True, "device": "cuda"}
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="backend='triton' cannot serve: no key_start"):
            estimate_memory(PATTERN, backend="triton", **sizes)


X = torch.zeros(2, 8, 2, 4)
PAIR = DilatedPattern((4,), (1,))


def given(**options):
    return lambda: dilated_attention(options.pop("q", X), X, X, PAIR, **options)


test_what_is_no_start_is_refused_by_name_and_value = refusals(
    {
        TypeError: [
            (given(key_start=3), r"key_start must be a \(batch,\) tensor of int32 or int64, or None; got 3"),
            (given(key_start=ROWS.float()), r"key_start must be .*; got torch.float32"),
            (given(q=X[:, :2], query_start=ROWS.bool()), r"query_start must be an integer, or .*; got torch.bool"),
            (given(q=X[:, :2], query_start=(1, 2)), r"query_start must be an integer from 0 to 6, got \(1, 2\)"),
        ],
        ValueError: [
            (given(key_start=ROWS[:1]), r"key_start must be \(batch,\) = \(2,\), got shape \(1,\)"),
            (given(key_start=ROWS.to("meta")), r"key_start must be on the device of k \(cpu\), got meta"),
            (given(q=X[:, :2], query_start=ROWS[0]), r"query_start must be \(batch,\) = \(2,\), got shape \(\)"),
            (given(q=X[:, :2], key_start=ROWS), r"k must have the length of q \(2\) unless query_start is given"),
        ],
    }
)
