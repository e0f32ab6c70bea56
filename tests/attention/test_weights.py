"""Weights of some queries equal brute force, give the output with v, and take memory for the keys seen alone."""

import inspect
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import oracle
import pytest
import torch
from cases import BRANCHES, ends_of, grids, refusals
from counts import ElementsAllocated
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from hilbert_lib import DilatedPattern, Neighbourhood, Ordering, Union, attend, attention_weights
from hilbert_lib.attention import weights
from hilbert_lib.patterns.dilated import MIXING_RULES, OFFSET_RULES, PADDING_RULES
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods
from hilbert_lib.patterns.pattern import Pattern


@dataclass(frozen=True)
class EveryThird(Pattern):
    """Keys at a multiple of three from the query, along a sequence."""

    kind: ClassVar[str] = "every_third_key"
    options: ClassVar[frozenset[str]] = DilatedPattern.options

    step: int = 3

    def attends(self, query, key):
        return (query - key) % self.step == 0


def drawn(rows, heads, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, rows, heads, 4, generator=generator, dtype=torch.float64)


def dense(keys, found, columns):
    """Weights of all keys, from those of the listed ones; lists are ascending, and end with -1 of weight 0."""
    assert keys.dtype == torch.int64
    assert keys.shape == found.shape
    is_key = keys >= 0
    assert (is_key[..., :-1] | ~is_key[..., 1:]).all()
    assert (keys.diff() > 0).where(is_key[..., 1:], True).all()
    assert (found[~is_key] == 0).all()
    assert (keys[~is_key] == -1).all()
    wide = found.new_zeros(*found.shape[:-1], columns + 1)
    return wide.scatter(-1, keys.where(is_key, columns), found)[..., :-1]


@st.composite
def unequal_starts(draw, length):
    """Starts of two sequences. Some lie past the end of k, some behind the first row of q."""
    rows = st.tuples(st.integers(0, length), st.integers(0, length))
    starts = {"query_start": torch.tensor(draw(rows), dtype=torch.int32)}
    if draw(st.booleans()):
        starts["key_start"] = torch.tensor(draw(rows))
    return starts


@st.composite
def along_sequences(draw):
    """A pattern for sequences, sizes, and options of `attend` and of the oracle."""
    names = draw(st.sampled_from(sorted(BRANCHES)))
    rules = {"offsets": draw(st.sampled_from(OFFSET_RULES)), "mixing": draw(st.sampled_from(MIXING_RULES))}
    pattern = DilatedPattern(*BRANCHES[names], **rules, padding=draw(st.sampled_from(PADDING_RULES)))
    other = draw(st.sampled_from(["none", "union", "own"]))
    if other == "union":
        pattern = Union((replace(pattern, padding="none"), DilatedPattern((9,), (2,), offsets="zero"), EveryThird()))
    elif other == "own":
        pattern = EveryThird()
    kv_heads, length = draw(st.integers(3, 4)), draw(st.integers(1, 40))
    rows = draw(st.integers(1, length))
    options = {"is_causal": draw(st.booleans())}
    if draw(st.integers(0, 2)) == 0:
        options |= draw(unequal_starts(length))
    elif rows < length:
        options["query_start"] = draw(st.integers(0, length - rows))
    return pattern, kv_heads, rows, length, options


@st.composite
def on_grids(draw):
    """The same on a grid."""
    near = pattern = draw(grids())
    other = draw(st.sampled_from(["none", "by head", "union"]))
    if other == "by head":
        pattern = HeadNeighbourhoods((near, replace(near, window=1, stride=1) if max(near.stride) == 1 else near))
    elif other == "union":
        pattern = Union((near, Neighbourhood(near.shape, 1)))
    if draw(st.booleans()):
        return pattern, 2, near.length, near.length, {}
    box = []
    for side in near.shape:
        first = draw(st.integers(0, side - 1))
        box.append((first, draw(st.integers(first + 1, side))))
    return pattern, 2, prod(stop - first for first, stop in box), near.length, {"query_box": tuple(box)}


@st.composite
def on_lines(draw):
    """The same on a grid of one axis, whose sequences begin at unequal rows."""
    length, rules = draw(st.integers(1, 20)), {"dilation": draw(st.integers(1, 2))}
    rules |= {"is_causal": draw(st.booleans()), "edge": draw(st.sampled_from(["shift", "clip"]))}
    windows = draw(st.lists(st.integers(1, 9), min_size=2, max_size=2))
    rows, options = draw(st.integers(1, length)), draw(unequal_starts(length))
    if draw(st.integers(0, 3)) == 0:
        options["query_start"] = draw(st.integers(0, length - rows))
    if "key_start" not in options and draw(st.booleans()):  # which holds of no other line
        rules = {"dilation": 1, "edge": "wrap"}
        windows = [min(window, length) for window in windows]
    pattern = tuple(Neighbourhood((length,), window, **rules) for window in windows)
    return HeadNeighbourhoods(pattern), 2, rows, length, options


def compared(case, seed, group, masked, ordered):
    """The weights that the library and brute force give for all keys, and the output of each at these queries."""
    pattern, kv_heads, rows, length, options = case
    generator = torch.Generator().manual_seed(seed)
    q, k, v = drawn(rows, kv_heads * group, seed=seed), *drawn(length, 2 * kv_heads, seed=seed + 1).chunk(2, 2)
    options = options | {"scale": 0.7}
    takes_extra, extra = "extra_k" in pattern.options, 3
    extra_keys = {"extra_k": drawn(extra, kv_heads, seed=seed + 2)} if takes_extra else {}
    extra_values = {"extra_v": drawn(extra, kv_heads, seed=seed + 3)} if takes_extra else {}
    if masked:
        options["key_padding_mask"] = torch.rand(2, length, generator=generator) < 0.3
        if takes_extra:
            options["extra_padding_mask"] = torch.rand(2, extra, generator=generator) < 0.3
    if seed % 2 and "bias" in pattern.options:
        near = pattern.by_head if isinstance(pattern, HeadNeighbourhoods) else (pattern,)
        sides = [2 * max(windows) - 1 for windows in zip(*(x.window for x in near), strict=True)]
        options["bias"] = torch.randn(kv_heads * group, *sides, generator=generator, dtype=torch.float64)
    is_joint = seed % 3 == 0 and "extra_q" in pattern.options
    if is_joint:
        options["extra_q"] = drawn(4, kv_heads * group, seed=seed + 4)
    queries = torch.randint(rows + 4 * is_joint, (5,), generator=generator)
    expected = oracle.weights(q, k, pattern, **extra_keys, **options)
    order, own_options = Ordering.random(length, seed), dict(options)
    columns = torch.arange(length)
    if ordered and "kv_ordering" in pattern.options:
        k, v, own_options["kv_ordering"], columns = order.apply(k, 1), order.apply(v, 1), order, order.perm
    elif ordered and "ordering" in pattern.options and not {"query_box", "query_start"} & options.keys():
        q, k, v, own_options["ordering"], columns = *(order.apply(x, 1) for x in (q, k, v)), order, order.perm
        expected = torch.cat([order.apply(expected[:, :, :rows], 2), expected[:, :, rows:]], 2)
        if masked:
            own_options["key_padding_mask"] = order.apply(options["key_padding_mask"], 1)
    columns = torch.cat([columns, torch.arange(length, expected.shape[-1])])
    found = attention_weights(q, k, pattern, queries, **extra_keys, **own_options)
    found = dense(*found, expected.shape[-1])
    values = torch.cat([v, *extra_values.values()], 1).repeat_interleave(group, 2)
    made = torch.einsum("bhqk,bkhd->bqhd", found, values)
    out = attend(q, k, v, pattern, **extra_keys, **extra_values, **own_options)
    out = torch.cat(out, 1) if is_joint else out
    return found, expected[:, :, queries][..., columns], made, out[:, queries]


any_call = given(
    st.one_of(along_sequences(), on_grids(), on_lines()),
    st.integers(0, 99),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)


@any_call
def test_weights_are_those_of_brute_force_and_make_the_output(case, seed, group, masked, ordered):
    found, expected, made, out = compared(case, seed, group, masked, ordered)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert ((found > 0) == (expected > 0)).all()
    torch.testing.assert_close(made, out, atol=1e-12, rtol=0)


@pytest.mark.parametrize("padding", PADDING_RULES)
def test_documents_have_the_weights_that_each_has_alone(padding):
    lengths, queries = (7, 0, 1, 12), [0, 6, 7, 19, 8]
    pattern = DilatedPattern((4, 9), (3, 2), padding=padding)
    q, k = drawn(20, 4, batch=1), drawn(20, 2, batch=1, seed=1)
    alone = zip(*(x.split(lengths, 1) for x in (q, k)), strict=True)
    blocks = [oracle.weights(*each, pattern)[0] if each[0].numel() else torch.empty(4, 0, 0) for each in alone]
    expected = torch.stack([torch.block_diag(*heads) for heads in zip(*blocks, strict=True)])[None, :, queries]
    keys, found = attention_weights(q, k, pattern, queries, cu_seqlens=ends_of(lengths), max_seqlen=12)
    torch.testing.assert_close(dense(keys, found, 20), expected, atol=1e-12, rtol=0)


def test_it_takes_every_option_of_attend_that_changes_a_weight():
    names = [inspect.signature(function).parameters.keys() for function in (attend, attention_weights)]
    assert names[0] - names[1] == {"v", "extra_v", "dropout_p", "backend", "return_lse"}


def test_results_do_not_depend_on_how_many_rows_of_k_are_gathered_at_once(monkeypatch):
    q, k, near = drawn(24, 2), drawn(24, 2, seed=1), Neighbourhood((4, 6), 3, edge="clip")
    found = attention_weights(q, k, near, torch.arange(24))
    monkeypatch.setattr(weights, "KEYS_AT_ONCE", 40)
    torch.testing.assert_close(attention_weights(q, k, near, torch.arange(24)), found, atol=1e-15, rtol=0)


def test_gradients_are_those_of_brute_force():
    tensors = [x.requires_grad_() for x in (drawn(12, 4), drawn(12, 2, seed=1), drawn(2, 2, seed=2))]
    near, queries, options = Neighbourhood((3, 4), (2, 3), edge="clip"), [0, 14, 11, 12, 5], {}
    extra_q = options["extra_q"] = drawn(3, 4, seed=4).requires_grad_()
    bias = options["bias"] = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    hidden = options["key_padding_mask"] = torch.zeros(2, 12, dtype=torch.bool)
    hidden[0, :6], hidden[1] = True, True
    for extra in (True, False):  # without extra keys no query of the second sequence sees any
        q, k, *extra_k = tensors if extra else tensors[:2]
        if extra:
            options["extra_k"] = extra_k[0]
        else:
            options.pop("extra_k")
        expected = oracle.weights(q, k, near, **options)[:, :, queries]
        found = dense(*attention_weights(q, k, near, queries, **options), expected.shape[-1])
        dweights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        of = (q, k, bias, extra_q, *extra_k)
        grads = [torch.autograd.grad(x, of, dweights) for x in (found, expected)]
        torch.testing.assert_close(*grads, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_float32_of_rounded_inputs(dtype):
    q, k = drawn(16, 2).to(dtype), drawn(16, 2, seed=1).to(dtype)
    pattern = DilatedPattern((4, 16), (1, 3))
    keys, found = attention_weights(q, k, pattern, [3, 9])
    assert found.dtype == torch.float32
    expected = oracle.weights(q, k, pattern)[:, :, [3, 9]]
    torch.testing.assert_close(dense(keys, found, 16).double(), expected, atol=1e-6, rtol=0)


def test_weights_sum_to_1_less_the_share_of_zero_keys_and_to_0_without_keys():
    q, k = drawn(10, 2), torch.zeros(2, 10, 2, 4, dtype=torch.float64)
    _, found = attention_weights(q, k, DilatedPattern((8,), (4,), padding="zeros"), [9, 2])
    # Of segment 8 to 15 head 1 sees row 9 and the zero key 13; both heads see row 2 in no branch.
    torch.testing.assert_close(found[0].sum(-1), torch.tensor([[0.0, 0.0], [0.5, 0.0]], dtype=torch.float64))


def test_no_queries_have_empty_results_and_lists_have_the_length_that_the_pattern_says():
    x = drawn(12, 2)
    assert attention_weights(x, x, Neighbourhood((3, 4), 2), [])[0].shape == (2, 2, 0, 0)
    bias = torch.zeros(2, 3, 3, dtype=torch.float64)
    assert attention_weights(x, x, Neighbourhood((3, 4), 2), [], bias=bias)[1].shape == (2, 2, 0, 0)
    start = torch.zeros(0, dtype=torch.int64)
    for starts in ({"key_start": start}, {"query_start": start}, {"query_start": start, "key_start": start}):
        assert attention_weights(x[:0], x[:0], Neighbourhood((12,), 2), [1, 3], **starts)[0].shape == (0, 2, 2, 2)
    hidden = torch.ones(2, 12, dtype=torch.bool)
    keys, found = attention_weights(x, x, Neighbourhood((3, 4), 2), range(2), key_padding_mask=hidden)
    assert keys.shape == found.shape == (2, 2, 2, 4)
    assert (keys == -1).all()


MILLION = 10**6


@pytest.mark.parametrize("pattern", [
    Neighbourhood((1000, 1000), 13),
    Neighbourhood((MILLION,), 65, edge="wrap"),
    (Neighbourhood((100, 100, 100), 5), Neighbourhood((100, 100, 100), 3)),
    DilatedPattern.geometric(64, MILLION, branches=5, rate_ratio=8),
    Union((DilatedPattern((512,), (1,)), DilatedPattern((MILLION,), (4096,)))),
])  # fmt: skip
def test_memory_of_a_million_tokens_is_that_of_the_keys_that_are_seen(pattern):
    x, hidden = torch.randn(1, MILLION, 2, 8), torch.zeros(1, MILLION, dtype=torch.bool)
    with ElementsAllocated() as made:
        keys, found = attention_weights(x, x, pattern, [0, 123_456, MILLION - 1], key_padding_mask=hidden)
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 2, 3).where((keys >= 0).any(-1), 0.0))
    # Elements of gathered rows of k, head_dim 8, and of results with their intermediates.
    assert made.count < 60 * keys.numel() + 20_000 < MILLION


def test_compiled_code_calls_it_between_two_graphs_and_an_export_is_refused_by_name():
    q, k, near = drawn(6, 2), drawn(12, 2, seed=1), Neighbourhood((3, 4), 2)

    def doubled(q, k):
        keys, found = attention_weights(q * 2, k, near, [1, 3], query_box=((1, 3), (0, 3)))
        return keys, found * 2

    expected = doubled(q, k)
    counters.clear()
    assert all(map(torch.equal, torch.compile(doubled, backend="eager")(q, k), expected))
    assert counters["stats"]["unique_graphs"] == 2

    class Layer(torch.nn.Module):
        def forward(self, q, k):
            return doubled(q, k)

    with pytest.raises(TypeError, match="attention_weights is not exported by"):
        torch.export.export(Layer(), (q, k), strict=False)


x = torch.ones(1, 12, 2, 4)
ON_GRID, ALONG = Neighbourhood((3, 4), 2), DilatedPattern((4,), (1,))
test_wrong_arguments_are_refused_by_name = refusals({
    TypeError: [
        (lambda: attention_weights(x, x, ON_GRID, torch.ones(12, dtype=torch.bool)), "queries must be rows of q"),
        (lambda: attention_weights(x, x, ON_GRID, torch.ones(3)), "queries must be rows of q, .* got torch.float32"),
        (lambda: attention_weights(x, x, ON_GRID, torch.ones(3, 1).long()), "queries must be .* of shape .3, 1."),
        (lambda: attention_weights(x, x, ON_GRID, 3), "queries must be a sequence of integers, got 3"),
        (lambda: attention_weights(x, x, ON_GRID, [0.5]), r"queries\[0\] must be an integer"),
        (lambda: attention_weights(x, x, "near", [0]), r"pattern must be a Pattern, such as .*; got str"),
        (lambda: attention_weights(x, x, ON_GRID, [0], causal=True), "no argument 'causal'; did you mean 'is_causal'"),
        (lambda: attention_weights(x, x.double(), ON_GRID, [0]), "k must have the dtype of q"),
        (lambda: attention_weights(x.to_sparse(), x, ON_GRID, [0]), "q must be a dense"),
    ],
    ValueError: [
        (lambda: attention_weights(x, x, ON_GRID, [0, 12]), r"queries\[1\] must be a row of q, 0 to 11; got 12"),
        (lambda: attention_weights(x, x, ON_GRID, [14], extra_q=x[:, :2]), "0 to 11, or of extra_q, 12 to 13; got 14"),
        (lambda: attention_weights(x, x, ON_GRID, [0], extra_q=x[:, :2, :1]), r"extra_q must be \(batch, extra, heads"),
        (lambda: attention_weights(x, x, ALONG, [0], extra_q=x), "extra_q must be left out"),
        (lambda: attention_weights(x, x, ON_GRID, torch.tensor([-1])), r"queries\[0\] must be .* at least 0, got -1"),
        (lambda: attention_weights(x, x, ON_GRID, [0], is_causal=True), "is_causal must be left out"),
        (lambda: attention_weights(x, x, ALONG, [0], extra_k=x), "extra_k must be left out"),
        (lambda: attention_weights(x, x, ALONG, [0], scale=0.0), "scale must be finite and above 0"),
        (lambda: attention_weights(x[:, :2], x, ALONG, [2], query_start=5), r"must be a row of q, 0 to 1; got 2"),
        (lambda: attention_weights(x, x, Neighbourhood((3, 5), 2), [0]), "q must have the 15 cells"),
    ],
})  # fmt: skip


@pytest.mark.gpu
def test_results_lie_on_the_device_of_q():
    q, k, near = drawn(12, 4), drawn(12, 2, seed=1), (Neighbourhood((3, 4), 2), Neighbourhood((3, 4), 3))
    hidden, extra_k, order = torch.arange(24).view(2, 12) % 5 == 0, drawn(3, 2, seed=2), Ordering.random(12, seed=0)
    expected = attention_weights(q, k, near, [3, 7], extra_k=extra_k, key_padding_mask=hidden, ordering=order)
    tensors = [x.cuda() for x in (q, k, torch.tensor([3, 7]), extra_k, hidden)]
    q, k, queries, extra_k, hidden = tensors
    found = attention_weights(q, k, near, queries, extra_k=extra_k, key_padding_mask=hidden, ordering=order)
    assert {x.device.type for x in found} == {"cuda"}
    torch.testing.assert_close([x.cpu() for x in found], list(expected), atol=1e-12, rtol=0)
