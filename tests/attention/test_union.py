"""Unions of patterns: one softmax over the multiset of the keys of all, by every backend; and patterns of one's own."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from oracle import attending, times_seen
from torch.utils.flop_counter import FlopCounterMode

from hilbert_lib import (
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
from hilbert_lib.attention.backends import flex, tiles
from hilbert_lib.attention.backends.parts import add_patterns, merge_patterns
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.validation import validated
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods
from hilbert_lib.patterns.pattern import Pattern, from_specification

NEAR_AND_FAR = Union((Neighbourhood((6, 6), 3), Neighbourhood((6, 6), (3, 2), dilation=2, edge="clip")))
BY_HEAD = Union(
    (
        Neighbourhood((6, 6), 3).of_heads(2),
        HeadNeighbourhoods((Neighbourhood((6, 6), 1), Neighbourhood((6, 6), 5))),
    )
)
BRANCHES = Union((DilatedPattern((9, 20), (1, 2)), DilatedPattern((36,), (3,), offsets="zero")))
GROUPS = Union((DilatedPattern((36,), (3,)), DilatedPattern((9, 20), (1, 2), mixing="head_groups")))
CELLS = 36


@dataclass(frozen=True)
class Diamond(Pattern):
    """Every cell within an L1 distance on a grid of two axes."""

    kind: ClassVar[str] = "diamond"

    shape: tuple[int, int]
    radius: int

    def attends(self, query, key):
        rows = (query // self.shape[1] - key // self.shape[1]).abs()
        columns = (query % self.shape[1] - key % self.shape[1]).abs()
        return rows + columns <= self.radius


@dataclass(frozen=True)
class Band(Pattern):
    """Every position within a distance along a sequence."""

    kind: ClassVar[str] = "band"
    options: ClassVar[frozenset[str]] = DilatedPattern.options

    distance: int

    def attends(self, query, key):
        return (query - key).abs() <= self.distance


def drawn(dtype=torch.float64, extra=0, head_dim=8):
    generator = torch.Generator().manual_seed(0)
    sizes = [(CELLS, 4), (CELLS, 2), (CELLS, 2), (extra, 2), (extra, 2)]
    return [torch.randn(2, n, h, head_dim, generator=generator, dtype=dtype).requires_grad_() for n, h in sizes]


def pairs_of(pattern):
    """Number of pairs of a query and a key that attend, of two KV heads."""
    return int(sum(times_seen(pattern, range(CELLS), CELLS, g, 2).sum() for g in range(2)))


def differentiated(out, lse, tensors):
    wanted = [x for x in tensors if x.numel()]
    return [out, lse, *torch.autograd.grad(out.square().sum(), wanted)]


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("ordered", [False, True])
def test_on_a_grid_it_is_one_softmax_over_the_keys_of_all(backend, ordered):
    tensors, order = drawn(extra=3), Ordering.random(CELLS, seed=1)
    padding = torch.rand(2, CELLS, generator=torch.Generator().manual_seed(1)) < 0.2
    expected = differentiated(*attending(NEAR_AND_FAR, key_padding_mask=padding)(*tensors), tensors)
    q, k, v, extra_k, extra_v = tensors
    options = {"extra_k": extra_k, "extra_v": extra_v, "backend": backend, "return_lse": True}
    if ordered:
        stored = [order.apply(x, dim=1) for x in (q, k, v)]
        out, lse = attend(*stored, NEAR_AND_FAR, ordering=order, key_padding_mask=order.apply(padding, 1), **options)
        out, lse = order.undo(out, dim=1), order.undo(lse, dim=2)
    else:
        out, lse = attend(q, k, v, NEAR_AND_FAR, key_padding_mask=padding, **options)
    for found, right in zip(differentiated(out, lse, tensors), expected, strict=True):
        torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_windows_by_head_may_be_parts(backend):
    tensors = drawn()
    expected = differentiated(*attending(BY_HEAD)(*tensors), tensors)
    found = differentiated(*attend(*tensors[:3], BY_HEAD, backend=backend, return_lse=True), tensors)
    for x, right in zip(found, expected, strict=True):
        torch.testing.assert_close(x, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["reference", "eager", "sdpa"])
def test_along_a_sequence_it_is_one_softmax_over_the_keys_of_all(backend, is_causal):
    dtype = torch.float32 if backend == "sdpa" else torch.float64
    tensors = drawn(dtype)
    expected = differentiated(*attending(BRANCHES, is_causal=is_causal)(*tensors), tensors)
    found = attend(*tensors[:3], BRANCHES, is_causal=is_causal, backend=backend, return_lse=True)
    close = 2e-5 if backend == "sdpa" else 1e-12
    for x, right in zip(differentiated(*found, tensors), expected, strict=True):
        torch.testing.assert_close(x.double(), right.double(), atol=close, rtol=close)


@pytest.mark.parametrize("pattern", [NEAR_AND_FAR, BY_HEAD, BRANCHES, GROUPS])
def test_its_masks_and_its_keys_are_those_of_its_parts(pattern):
    positions = torch.arange(CELLS)
    for head in range(2):
        options, times = {"kv_head": head, "kv_heads": 2}, times_seen(pattern, range(CELLS), CELLS, head, 2)
        parts = pattern.head_parts(head, 2)
        assert torch.equal(sum(pattern.mask(part, positions, positions, **options).double() for part in parts), times)
        for query in (0, 17, CELLS - 1):
            keys = torch.cat([pattern.part_keys(part, query, CELLS, **options) for part in parts])
            assert torch.equal(keys.bincount(minlength=CELLS).double(), times[query])
    if pattern is NEAR_AND_FAR:
        assert torch.equal(pattern.attends(positions[:, None], positions), times > 0)


def test_branches_of_one_pattern_are_a_union_of_patterns():
    tensors = drawn()[:3]
    parts = Union((DilatedPattern((9,), (1,)), DilatedPattern((20,), (2,))))
    whole = attend(*tensors, DilatedPattern((9, 20), (1, 2)), is_causal=True)
    torch.testing.assert_close(attend(*tensors, parts, is_causal=True), whole, atol=1e-12, rtol=1e-12)


def test_dropout_is_that_of_the_reference_whatever_computes_the_parts():
    tensors, found = drawn()[:3], []
    for backend in ("reference", "eager"):
        torch.manual_seed(0)
        out = attend(*tensors, BRANCHES, dropout_p=0.4, backend=backend)
        found.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    assert (found[0][0] - attend(*tensors, BRANCHES)).abs().max() > 0.1
    for x, right in zip(*found, strict=True):
        torch.testing.assert_close(x, right, atol=1e-12, rtol=1e-12)


def test_flex_attention_differentiates_a_part_by_the_merged_results(monkeypatch):
    # The compiled FlexAttention runs on a GPU alone; here eager's forward stands in for its own.
    monkeypatch.setattr(flex, "attend", lambda given, request: attending(NEAR)(*given))
    tensors = drawn()
    given, _ = validated(*tensors[:3], NEAR)
    out, lse = (x.detach() for x in attend(*tensors[:3], NEAR_AND_FAR, return_lse=True))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    request = Request(NEAR.of_heads(2), scale=8**-0.5, is_part=True)
    found = flex.backward(dout, Tensors(*(x.detach() for x in given.with_rows)), out, lse, request)
    right = tiles.backward(dout, Tensors(*(x.detach() for x in given.with_rows)), out, lse, request, tiles.ON_CPU)
    for x, y in zip(found[:3], right[:3], strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)


NEAR = NEAR_AND_FAR.patterns[0]


def test_a_new_kind_of_pattern_may_be_compiled_before_it_ever_ran():
    @dataclass(frozen=True)
    class Line(Diamond):
        kind: ClassVar[str] = "line"

    tensors, pattern = drawn()[:3], Line((1, CELLS), 2)
    run = torch.compile(lambda *x: attend(*x, pattern), fullgraph=True, backend="aot_eager")
    found = run(*tensors)
    torch.testing.assert_close(found, attend(*tensors, Neighbourhood((CELLS,), 5, edge="clip")), atol=1e-12, rtol=0)
    torch.compiler.reset()


def test_it_compiles_is_counted_and_explained():
    tensors = drawn()[:3]
    run = torch.compile(lambda *x: attend(*x, NEAR_AND_FAR), fullgraph=True, backend="aot_eager")
    assert torch.equal(run(*tensors), attend(*tensors, NEAR_AND_FAR))
    torch.compiler.reset()
    with FlopCounterMode(display=False) as counter:
        attend(*tensors, NEAR_AND_FAR)
    assert counter.get_total_flops() == 4 * 8 * 2 * 2 * pairs_of(NEAR_AND_FAR)
    q, k, v, extra_k, extra_v = drawn(extra=3)
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v, NEAR_AND_FAR, extra_k=extra_k, extra_v=extra_v)
    pairs = 2 * 2 * pairs_of(NEAR_AND_FAR) + 2 * 4 * CELLS * 3  # every query head sees the extra keys once
    assert counter.get_total_flops() == 4 * 8 * pairs
    reasons = explain_backend(*tensors, NEAR_AND_FAR).reasons
    assert reasons["sdpa"] == "cannot serve: serves no Neighbourhood, which is a part of the union"
    assert reasons["eager"].startswith("chosen: the parts of the union one by one")
    assert estimate_memory(NEAR_AND_FAR, heads=4, kv_heads=2, head_dim=8, device="cpu", backend="eager").peak > 0


@pytest.mark.parametrize("pattern", [NEAR_AND_FAR, BY_HEAD.of_heads(2), BRANCHES, Diamond((6, 6), 2), NEAR])
def test_a_pattern_is_made_again_of_its_words_and_integers(pattern):
    assert from_specification(*pattern.specification) == pattern


@pytest.mark.parametrize(
    ("patterns", "error", "words"),
    [
        ((), ValueError, "at least one pattern, got none"),
        ((NEAR, 3), TypeError, r"must be a Pattern of sequences or grids, .*; got int"),
        ((NEAR, Neighbourhood((4, 9), 3)), ValueError, "for sequences, or on one grid"),
        ((NEAR, DilatedPattern((4,), (1,))), ValueError, "for sequences, or on one grid"),
        ((DilatedPattern((4,), (3,), padding="zeros"),), ValueError, "padding='none' in a union"),
    ],
)
def test_what_is_no_union_is_refused(patterns, error, words):
    with pytest.raises(error, match=words):
        Union(patterns)


def test_patterns_one_by_one_are_refused_with_their_form():
    with pytest.raises(TypeError, match=r"patterns must be one tuple, as in Union\(\(a, b\)\); got 2 arguments"):
        Union(NEAR, NEAR)
    assert Union(patterns=[NEAR]) == Union((NEAR,)) == replace(NEAR_AND_FAR, patterns=(NEAR,))
    assert repr(Union((NEAR,))) == f"Union(patterns=({NEAR!r},))"


def test_what_not_all_parts_take_is_refused():
    tensors = drawn()[:3]
    for options in ({"is_causal": True}, {"kv_ordering": Ordering.linear(CELLS)}, {"dropout_p": 0.1}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be left out for a Union"):
            attend(*tensors, NEAR_AND_FAR, **options)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_a_pattern_of_ones_own_is_served_by_its_file_alone(backend, monkeypatch):
    monkeypatch.setattr("hilbert_lib.attention.backends.reference.SCORES_AT_ONCE", 1000)  # several chunks
    tensors, pattern = drawn(), Diamond((6, 6), 2)
    assert times_seen(pattern, range(14, 15), CELLS).sum() == 13
    expected = differentiated(*attending(pattern)(*tensors), tensors)
    found = differentiated(*attend(*tensors[:3], pattern, backend=backend, return_lse=True), tensors)
    for x, right in zip(found, expected, strict=True):
        torch.testing.assert_close(x, right, atol=1e-12, rtol=1e-12)
    both = Union((pattern, NEAR))
    out, _ = attending(both)(*tensors)
    torch.testing.assert_close(attend(*tensors[:3], both, backend=backend), out, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("pattern", "options", "words"),
    [
        (Diamond((6, 6), 2), {"is_causal": True}, "no is_causal"),
        (Diamond((6, 6), 2), {"dropout_p": 0.1}, "no dropout_p"),
        (Diamond((6, 6), 2), {"query_start": 3}, "no query_start"),
        (Diamond((6, 6), 2), {"cu_seqlens": torch.tensor([0, 36])}, "no cu_seqlens"),
        (DilatedPattern((9,), (1,)), {}, "has no attends"),
        (NEAR, {}, "serves no extra keys"),
        (Diamond((6, 6), 2), {}, ""),
    ],
)
def test_flex_attention_refuses_what_its_mask_of_pairs_does_not_say(pattern, options, words):
    flex = backends_for(Diamond)["flex"]
    refusal = flex.limits(torch.empty(1, 36, 2, 16), Request(pattern, **options))
    assert words in refusal
    assert bool(refusal) == bool(words)
    assert not flex.reads_orderings  # k and v come in sequence order


def test_flex_attention_serves_a_pattern_of_ones_own():
    tensors = [x.detach() for x in drawn(torch.float32, head_dim=16)]
    pattern, order = Diamond((6, 6), 2), Ordering.random(CELLS, seed=1)
    given, request = validated(*tensors[:3], pattern)
    out, lse = flex.attend(given, request, block_size=16)
    exact = attending(pattern)(*tensors)
    torch.testing.assert_close((out.double(), lse.double()), exact, atol=1e-5, rtol=1e-5)
    stored = Tensors(*(order.apply(x, dim=1) for x in tensors[:3]))
    ordered = Request(pattern, scale=request.scale, ordering=order)
    torch.testing.assert_close(order.undo(flex.attend(stored, ordered, block_size=16)[0], dim=1), out)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", [Band(4), Union((Band(4), BRANCHES))])
def test_auto_serves_a_pattern_of_ones_own_along_a_sequence(pattern, is_causal):
    tensors = drawn()
    expected = differentiated(*attending(pattern, is_causal=is_causal)(*tensors), tensors)
    found = attend(*tensors[:3], pattern, is_causal=is_causal, return_lse=True)
    for x, right in zip(differentiated(*found, tensors), expected, strict=True):
        torch.testing.assert_close(x, right, atol=1e-12, rtol=1e-12)
    assert explain_backend(*tensors[:3], pattern).chosen == "eager"


@pytest.mark.parametrize("patterns", [(Diamond((6, 6), 2), NEAR), (NEAR, Diamond((6, 6), 2))])
def test_a_union_of_which_one_part_takes_no_extra_keys_has_gradients(patterns):
    tensors, pattern = drawn(), Union(patterns)
    expected = differentiated(*attending(pattern)(*tensors), tensors)
    found = differentiated(*attend(*tensors[:3], pattern, backend="eager", return_lse=True), tensors)
    for x, right in zip(found, expected, strict=True):
        torch.testing.assert_close(x, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("pattern", [BRANCHES, GROUPS, Band(4), Union((Band(4), BRANCHES))])
def test_documents_drop_what_a_batch_of_them_drops(pattern, backend):
    # A batch of two sequences of one length, packed, is the same call.
    batched = [x.detach() for x in drawn()[:3]]
    packed = [x.reshape(1, -1, *x.shape[2:]) for x in batched]
    ends, found = torch.tensor([0, CELLS, 2 * CELLS], dtype=torch.int32), []
    for tensors, options in ((batched, {}), (packed, {"cu_seqlens": ends})):
        torch.manual_seed(0)
        found.append(attend(*tensors, pattern, dropout_p=0.4, backend=backend, **options))
    torch.testing.assert_close(found[1].view_as(found[0]), found[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("pattern", [BRANCHES, Band(4)])
def test_memory_along_a_sequence_is_estimated(pattern):
    sizes = {"length": CELLS, "heads": 4, "kv_heads": 2, "head_dim": 8, "device": "cpu"}
    assert estimate_memory(pattern, **sizes, backend="eager").peak > 0


def test_what_the_parts_lack_the_union_lacks():
    tensors = drawn()[:3]
    reason = explain_backend(*tensors, NEAR_AND_FAR).reasons["eager"]
    assert explain_backend(*tensors, NEAR).reasons["eager"].partition("; ")[2] in reason.partition("; ")[2]
    assert "a NaN in a masked key" in reason


def test_a_class_that_is_written_anew_is_the_one_that_runs():
    found = []
    for distance in (0, CELLS):  # as a cell of a notebook that is changed and run again

        @dataclass(frozen=True)
        class Anew(Pattern):
            kind: ClassVar[str] = "anew"
            shape: tuple[int, ...]

            def attends(self, query, key, distance=distance):
                return (query - key).abs() <= distance

        found.append(attend(*drawn()[:3], Anew((CELLS,))))
    assert (found[0] - found[1]).abs().max() > 0.1


@dataclass(frozen=True)
class Loose(Diamond):
    kind: ClassVar[str] = "loose"

    extra: object = 0


@pytest.mark.parametrize("value", [2.5, None, "a b", "a,b", "a|b", ("a", 1), ((1, 2),)])
def test_a_field_that_is_not_kept_exactly_is_refused(value):
    with pytest.raises(TypeError, match="extra of a Loose must be an integer, a truth value, a word"):
        attend(*drawn()[:3], Loose((6, 6), 2, value))


def test_a_kind_is_a_word_that_no_other_pattern_has():
    with pytest.raises(TypeError, match="Heir must have a kind of its own"):
        type("Heir", (Diamond,), {})
    with pytest.raises(TypeError, match="a word of letters and digits; got 'two words'"):
        type("Heir", (Diamond,), {"kind": "two words"})
    with pytest.raises(ValueError, match="DilatedPattern has 'dilated'"):
        type("Heir", (Diamond,), {"kind": "dilated"})
    plain = type("Plain", (Pattern,), {"kind": "plain"})
    with pytest.raises(TypeError, match="Plain must be a frozen dataclass"):
        attend(*drawn()[:3], plain())


@pytest.mark.parametrize("patterns", [NEAR, 3, "near"])
def test_patterns_of_a_union_are_several(patterns):
    with pytest.raises(TypeError, match="patterns must be a tuple of patterns, got"):
        Union(patterns)


def test_an_option_of_several_values_is_refused_by_name():
    several = torch.tensor([True, False])
    for options in ({"is_causal": several}, {"dropout_p": several.numpy()}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be left out for a Neighbourhood"):
            attend(*drawn()[:3], NEAR, **options)


def test_the_doors_of_one_kind_send_a_union_to_attend():
    tensors = drawn()[:3]
    with pytest.raises(TypeError, match=r"got Union: call attend$"):
        dilated_attention(*tensors, BRANCHES)
    with pytest.raises(TypeError, match=r": call attend$"):
        neighbourhood_attention(*tensors, NEAR_AND_FAR)


@pytest.mark.parametrize(
    ("rows", "options", "pairs"),
    [
        (CELLS, {}, 9 * CELLS - 20),
        (CELLS, {"is_causal": True}, 5 * CELLS - 10),
        (2, {"query_start": 20}, 18),
        (1, {"query_start": 35, "is_causal": True}, 5),
        (CELLS, {"cu_seqlens": torch.tensor([0, 3, 3, CELLS], dtype=torch.int32)}, 9 + 9 * 33 - 20),
    ],
)
def test_pairs_of_a_pattern_of_ones_own_are_those_of_the_call(rows, options, pairs):
    q, k, v = (x[:1].detach() for x in drawn()[:3])
    with FlopCounterMode(display=False) as counter:
        attend(q[:, :rows], k, v, Band(4), **options)
    assert counter.get_total_flops() == 4 * 8 * 4 * pairs


@dataclass(frozen=True)
class Given(Pattern):
    """What a function says."""

    kind: ClassVar[str] = "given"
    found: ClassVar[object]

    shape: tuple[int, ...] = (6, 6)

    def attends(self, query, key):
        return type(self).found(query, key)


def test_what_a_pattern_sees_may_depend_on_the_key_or_the_query_alone():
    tensors = [x.detach() for x in drawn(extra=0)]
    for found, pairs in ((lambda q, k: k < 3, CELLS * 3), (lambda q, k: q < 3, 3 * CELLS)):
        Given.found = staticmethod(found)
        with FlopCounterMode(display=False) as counter:
            out = attend(*tensors[:3], Given())
        torch.testing.assert_close(out, attending(Given())(*tensors)[0], atol=1e-12, rtol=1e-12)
        assert counter.get_total_flops() == 4 * 8 * 2 * 4 * pairs


@pytest.mark.parametrize("found", [lambda q, k: (q - k).abs(), lambda q, k: torch.ones(3, dtype=torch.bool)])
def test_what_attends_must_say_is_told(found):
    Given.found = staticmethod(found)
    with pytest.raises(
        TypeError, match=r"attends of a Given must be bool of positions that broadcast, \(36, 36\); got"
    ):
        attend(*drawn()[:3], Given())


@pytest.mark.parametrize("shape", [CELLS, [6, 6]])
def test_a_shape_is_a_tuple(shape):
    with pytest.raises(TypeError, match="shape of a Given must be a tuple of sides, got"):
        attend(*drawn()[:3], Given(shape))


def test_results_and_gradients_of_three_patterns_are_rounded_once():
    # bfloat16 has no number between 256 and 258.
    values = [torch.full((1, 1, 1, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    inputs = Tensors(*values)
    sums = add_patterns((Tensors(x, x, x) for x in values), inputs, in_float=(1,))
    assert [x.item() for x in sums[:3]] == [258.0, 258.0, 258.0]
    assert [x.dtype for x in sums[:3]] == [torch.bfloat16, torch.float32, torch.bfloat16]
    # Of equal weights; above 1 the next number is 1 + 2^-7.
    results = [(torch.full_like(values[0], value), torch.zeros(1, 1, 1)) for value in (1 + 2**-7, 1.0, 1 + 2**-7)]
    out, lse = merge_patterns(results, torch.bfloat16)
    assert out.item() == 1 + 2**-7
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(lse, torch.full((1, 1, 1), 3.0).log())
