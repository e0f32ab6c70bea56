"""What needs no ranks: what a ring refuses, by the argument's name, before anything is sent, and pieces of it."""

import copy
import inspect
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import oracle
import pytest
import torch
import torch.distributed as dist
from cases import assert_close, differentiated, drawn, refusals
from ring_ranks import run_threads
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hilbert_lib import (
    MultiheadDilatedAttention,
    Neighbourhood,
    NeighbourhoodAttention,
    Ordering,
    Rectangles,
    RingNeighbourhoodAttention,
    Union,
    ring_attend,
    ring_neighbourhood_attention,
)
from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.launch import REFUSED
from hilbert_lib.ordering import OrderingSpec
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.ring import agreement, attention
from hilbert_lib.ring import module as modules
from hilbert_lib.ring.agreement import Agreement
from hilbert_lib.ring.attention import ring_dilated_attention
from hilbert_lib.ring.module import RingDilatedAttention, gather, shard
from hilbert_lib.ring.plan.plan import plan_ring
from hilbert_lib.ring.rank import passes
from hilbert_lib.ring.rank.blocks import Job
from hilbert_lib.ring.rank.layout import layout_of

CPU = torch.device("cpu")


@pytest.fixture
def four_ranks():
    """This process as the first of four ranks that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


X = torch.ones(1, 4, 1, 4)


def call(**options):
    ring_dilated_attention(X, X, X, DilatedPattern((4,), (1,)), **options)


NEAR = Neighbourhood((8, 2), 2)


def on_grid(neighbourhood=NEAR, **options):
    """Without a message, for which there are no ranks."""
    ring_neighbourhood_attention(X, X, X, neighbourhood, validate=False, **options)


def grid_module(neighbourhood=NEAR, **options):
    RingNeighbourhoodAttention(neighbourhood, **options)


NEAR_AND_FAR = Union((NEAR, Neighbourhood((8, 2), (3, 1), dilation=(2, 1))))
SPREAD = Union((DilatedPattern((4,), (1,)), DilatedPattern((8,), (2,))))


@dataclass(frozen=True)
class Band(Pattern):
    """A pattern of one's own."""

    kind: ClassVar[str] = "ring_band"

    width: int


def of_any(pattern=NEAR_AND_FAR, **options):
    """On a grid without a message, for which there are no ranks."""
    ring_attend(X, X, X, pattern, validate=False, **options)


def of_any_on_one(pattern=SPREAD, **options):
    ring_attend(X, X, X, pattern, group=dist.new_group([0]), **options)


def sequence_of(pattern):
    ring_dilated_attention(X, X, X, pattern, group=dist.new_group([0]))


def on_one(**options):
    call(group=dist.new_group([0]), **options)


def module(**options):
    RingDilatedAttention(DilatedPattern((4,), (1,)), **options)


def layer_over_ranks():
    layer = MultiheadDilatedAttention(4, 1, DilatedPattern((4,), (1,)), batch_first=True)
    layer.attention = RingDilatedAttention(layer.attention.pattern)
    return layer


def grid_layer_over_ranks(window=2, **options):
    """A layer of windows, whose ring has those of NEAR; it is called with this rank's cells."""
    layer = NeighbourhoodAttention(4, 1, window)
    layer.attention = RingNeighbourhoodAttention(NEAR)
    layer(X[:, :, 0], **options)


CACHE = MultiheadDilatedAttention(4, 1, DilatedPattern((4,), (1,)), batch_first=True).make_cache(1, 8)
STARTS = torch.zeros(1, dtype=torch.int32)
TYPES = [
    (lambda: call(group=[0, 1]), "group must be a process group, a 1-D DeviceMesh or None, got list"),
    (lambda: on_one(memory_limit=1.5), "memory_limit must be an integer of at least 1, got 1.5"),
    (lambda: on_one(validate="no"), "validate must be True or False, got 'no'"),
    (lambda: module(dropout="0.1"), "dropout must be a number, got '0.1'"),
    (lambda: module(kv_ordering="hilbert"), "kv_ordering must be an OrderingSpec or None, got str"),
    (lambda: module(group="all"), "group must be a process group, a 1-D DeviceMesh or None, got str"),
    (lambda: module(validate="no"), "validate must be True or False, got 'no'"),
    (lambda: on_grid("window"), "neighbourhood must be a Neighbourhood, or a tuple of .*; got 'window'"),
    (lambda: on_grid(shards=(2, 2)), r"shards must be Rectangles or Runs of an ordering, got \(2, 2\)"),
    (lambda: on_grid(ordering="hilbert"), "ordering must be an Ordering, got 'hilbert'"),
    (lambda: on_grid(order=None), "ring_neighbourhood_attention has no argument 'order'; did you mean 'ordering'"),
    (lambda: grid_module(("window",)), "neighbourhood must be a Neighbourhood"),
    (lambda: grid_module(backend=1), "backend must be a string"),
    (lambda: on_grid(ONE), "got DilatedPattern.*: call ring_dilated_attention, or ring_attend$"),
    (lambda: on_grid(NEAR_AND_FAR), "got Union.*: call ring_attend$"),
    (lambda: sequence_of(NEAR), "got Neighbourhood: call ring_neighbourhood_attention, or ring_attend$"),
    (lambda: sequence_of(SPREAD), "got Union: call ring_attend$"),
    (lambda: of_any_on_one(Band(3)), r"pattern must be a DilatedPattern, a Neighbourhood, a Union of .*; got Band"),
    (lambda: of_any_on_one(Union((SPREAD, Band(3)))), r"pattern must be a DilatedPattern, .*; got Band"),
    (lambda: of_any_on_one(3), r"pattern must be a DilatedPattern, .* of these or a PointShard .*; got int"),
    (lambda: of_any(order=None), "ring_attend has no argument 'order'; did you mean 'ordering'"),
    (lambda: call(shards=None), "ring_dilated_attention has no argument 'shards'"),
    (lambda: call(key_start=None), "ring_dilated_attention has no argument 'key_start'"),
    (lambda: of_any(query_start=None), "ring_attend has no argument 'query_start'"),
    (lambda: on_grid(transport="auto"), "ring_neighbourhood_attention has no argument 'transport'"),
    (lambda: shard("x"), "x must be a tensor, got str"),
    (lambda: gather("x"), "x must be a tensor, got str"),
]
VALUES = [
    (lambda: call(group=dist.init_device_mesh("cpu", (2, 2))), "group must be a mesh of 1 dimension, got 2"),
    (lambda: call(group=DeviceMesh("cpu", [1, 2])), "group must hold this rank, got a mesh of other ranks"),
    (lambda: call(group=dist.new_group([2, 3])), "group must hold this rank, got a group of other ranks"),
    (lambda: on_one(transport="rign"), "transport must be one of .*got 'rign'"),
    (lambda: on_one(weights=(2, 1)), r"weights must have one number a rank \(1\), got 2"),
    (lambda: module(transport="rign"), "transport must be one of auto, ring, all_gather, all_to_all; got 'rign'"),
    (lambda: module(backend="fast"), "backend must be .*got 'fast'"),
    (lambda: module(scale=0), "scale must be .*got 0"),
    (lambda: on_grid(Neighbourhood((8, 4), 2)), r"q must have the 8 cells of rank 0 in Rectangles\(parts=\(2, 2\)"),
    (lambda: on_grid(shards=Rectangles((2, 1))), "shards must be those of 4 ranks, got Rectangles"),
    (lambda: on_grid(shards=Rectangles((4,))), r"parts must have one for each of the 2 axes of \(8, 2\), got \(4,\)"),
    (lambda: on_grid(ordering=Ordering.linear(4)), r"ordering must have the 16 cells of the grid \(8, 2\)"),
    (lambda: on_grid(ordering=Ordering.linear(16), shards=Rectangles((4, 1))), "ordering must be None where"),
    (lambda: on_grid(backend="flex"), "backend='flex' cannot serve"),
    (lambda: on_grid(extra_padding_mask=torch.ones(1, 2).bool()), "extra_padding_mask must be None where extra_k is"),
    (lambda: grid_module(shards=Rectangles((4,))), "parts must have one for each of the 2 axes"),
    (lambda: grid_module(backend="fast"), "backend must be one of auto, .*got 'fast'"),
    (lambda: layer_over_ranks().make_cache(1, 8), "attention must be a DilatedAttention for a cache, got RingDilated"),
    (
        lambda: layer_over_ranks()(X[:, :, 0], is_causal=True, cache=CACHE),
        "cache must be None where ranks share the tokens, got KeyValueCache",
    ),
    (lambda: layer_over_ranks()(X[:, :, 0], key_start=STARTS), "key_start must be None where ranks share the tokens"),
    (lambda: layer_over_ranks()(X[:, :, 0], cu_seqlens=STARTS), "cu_seqlens must be None where ranks share the tokens"),
    (lambda: grid_layer_over_ranks(query_box=((0, 1),)), "query_box must be None where ranks share the tokens"),
    (lambda: grid_layer_over_ranks(key_start=STARTS), "key_start must be None where ranks share the tokens"),
    (lambda: grid_layer_over_ranks(cache=CACHE), "cache must be None where ranks share the tokens"),
    (
        lambda: grid_layer_over_ranks(3),
        r"attention must be over Neighbourhood\(shape=\(8, 2\), window=\(3, 3\).*; got Nei",
    ),
]
ONE_ORDER = Ordering.linear(16)
# What the kind of pattern does not take.
VALUES += [
    (lambda: of_any(transport="ring"), "transport must be left out for a Union, got 'ring'"),
    (lambda: of_any(NEAR, transport="ring"), "transport must be left out for a Neighbourhood, got 'ring'"),
    (lambda: of_any(weights=(1, 1, 1, 1)), r"weights must be left out for a Union, got \(1, 1, 1, 1\)"),
    (lambda: of_any(memory_limit=2**30), "memory_limit must be left out for a Union, got 1073741824"),
    (lambda: of_any(is_causal=True), "is_causal must be left out for a Union, got True"),
    (lambda: of_any(dropout_p=0.1), "dropout_p must be left out for a Union, got 0.1"),
    (lambda: of_any(kv_ordering=OrderingSpec("hilbert")), "kv_ordering must be left out for a Union, got OrderingSpec"),
    (lambda: of_any(backend="flex"), "backend='flex' cannot serve"),
    (lambda: of_any_on_one(shards=Rectangles((1,))), "shards must be left out for a Union, got Rectangles"),
    (lambda: of_any_on_one(ordering=ONE_ORDER), "ordering must be left out for a Union, got Ordering"),
    (lambda: of_any_on_one(extra_k=X, extra_v=X), "extra_k must be left out for a Union, got a tensor of shape"),
    (
        lambda: of_any_on_one(memory_limit=2**30),
        "memory_limit must be None for a Union, whose patterns are",
    ),
    (lambda: of_any(backend="sdpa"), "backend='sdpa' .*serves no Neighbourhood, which is a part of the union"),
]
among_four = pytest.mark.usefixtures("four_ranks")
test_a_wrong_argument_is_refused_by_its_name = among_four(refusals({TypeError: TYPES, ValueError: VALUES}))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_whose_tokens_ranks_share_takes_no_nested_tensor():
    with pytest.raises(TypeError, match="query must be a dense tensor where ranks share the tokens, got a nested one"):
        layer_over_ranks()(torch.nested.nested_tensor([X[0, :, 0]]))


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group first"):
        call()


def test_a_rank_outside_a_group_may_hold_its_module(four_ranks):
    others = dist.new_group([2, 3])
    for module in (
        RingDilatedAttention(DilatedPattern((4,), (1,)), group=others),
        RingNeighbourhoodAttention(NEAR, group=others),
    ):
        other = copy.deepcopy(module)
        assert other is not module
        assert module.group is other.group is others
        assert repr(other) == repr(module)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1.0, 1e22, 1e30])
def test_what_stands_for_out_in_a_backward_is_right_at_every_scale(scale):
    dout = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(0)) * scale
    dout[2] = 0.0
    delta = torch.full((7, 3), 0.5 * scale).where(dout.any(-1), 0.0)
    found = (passes._with_product(dout, delta).double() * dout.double()).sum(-1)
    torch.testing.assert_close(found, delta.double(), rtol=1e-5, atol=0.0)


def test_ranks_are_told_by_the_names_that_they_have_in_the_world():
    asked = {2: (None, {"pattern": "a"}), 3: (None, {"pattern": "b"})}
    assert agreement._difference(asked) == "pattern must be the same on all ranks, got a on rank 2; b on rank 3"


def test_ranks_with_other_kinds_of_pattern_are_told_what_each_says():
    asked = {0: (None, {"pattern": "a", "weights": "b"}), 1: (None, {"neighbourhood": "c"})}
    assert agreement._difference(asked).splitlines() == [
        "pattern must be the same on all ranks, got a on rank 0; nothing on rank 1",
        "weights must be the same on all ranks, got b on rank 0; nothing on rank 1",
        "neighbourhood must be the same on all ranks, got nothing on rank 0; c on rank 1",
    ]


PADDED, WITH_GRADIENT = torch.zeros(1, 4, dtype=torch.bool), X.clone().requires_grad_()
EXTRA = {"extra_k": X[:, :2], "extra_v": X[:, :2]}
# What one rank may ask for that the others do not, beside q, k and v of another shape or dtype.
ASKED = [{"is_causal": True}, {"scale": 0.25}, {"dropout_p": 0.1}, {"key_padding_mask": PADDED}, {"backend": "eager"}]
ASKED += [{"kv_ordering": OrderingSpec("residue", rate=2)}, {"q": WITH_GRADIENT}, {"transport": "ring"}]
ASKED += [{"weights": (1, 1, 1, 2)}, {"memory_limit": 2**30}, {"pattern": DilatedPattern((4,), (2,))}]
ONE = DilatedPattern((4,), (1,))
ON_GRID = [{"scale": 0.25}, {"key_padding_mask": PADDED}, {"backend": "eager"}, {"q": WITH_GRADIENT}, EXTRA]
ON_GRID += [{"neighbourhood": Neighbourhood((8, 2), (3, 2))}, {"shards": Rectangles((2, 2))}]
OF_EXTRA = [{"extra_k": X[:, :2].clone().requires_grad_()}, {"extra_padding_mask": PADDED[:, :2]}]


def words_of(door, q, pattern, **asked):
    """Of the first of four ranks."""
    options = inspect.signature(door).parameters.values()
    defaults = {each.name: each.default for each in options if each.kind is each.KEYWORD_ONLY}
    own = attention._Door("", attention.spread_of(pattern), attention.check_served)
    given = attention.DEFAULTS | {"kv_ordering": None, "ordering": None} | defaults | asked
    group, validate = given.pop("group") or dist.group.WORLD, given.pop("validate")
    return attention._words(attention._checked(own, q, X, X, pattern, given, group, validate))


def request(q=X, pattern=ONE, **asked):
    return words_of(ring_dilated_attention, q, pattern, **asked)


def request_of_any(q=X, pattern=NEAR_AND_FAR, **asked):
    return words_of(ring_attend, q, pattern, **asked)


def request_on_grid(q=X, neighbourhood=NEAR, **asked):
    return words_of(ring_neighbourhood_attention, q, neighbourhood, **asked)


OF_ANY = [each for each in ON_GRID if "neighbourhood" not in each] + [{"pattern": Union((NEAR, NEAR))}]
WORDS = [(request, ASKED), (request_on_grid, ON_GRID), (request_of_any, OF_ANY)]


@pytest.mark.parametrize(("words", "asked"), [(words, asked) for words, each in WORDS for asked in each])
def test_ranks_compare_all_that_they_ask_for(four_ranks, words, asked):
    assert words() == words()
    assert words(**asked) != words()


@pytest.mark.parametrize("asked", OF_EXTRA)
def test_ranks_compare_what_they_ask_of_extra_keys(four_ranks, asked):
    assert request_on_grid(**EXTRA | asked) != request_on_grid(**EXTRA)


@pytest.mark.parametrize("what", ["asks for another", "refused"])
@pytest.mark.parametrize("odd", range(4))
def test_one_rank_that_differs_is_found_wherever_it_stands(four_ranks, monkeypatch, odd, what):
    """The messages of all four are put where they would arrive."""
    refusals = [ValueError("x must be") if (rank, what) == (odd, "refused") else None for rank in range(4)]
    requests = [{"scale": "0.5" if (rank, what) == (odd, "asks for another") else "0.25"} for rank in range(4)]

    def gather(asked, own, group):
        told = (each and f"ValueError: {each}" for each in refusals)
        asked[:] = zip(told, requests, strict=True)

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(agreement, "_companion", lambda group: group)
    made = [Agreement(*each, dist.group.WORLD) for each in zip(requests, [4, 5, 6, 7], refusals, strict=True)]
    told = f"rank {odd} {REFUSED} ValueError: x must be" if what == "refused" else rf"0\.5 on rank {odd}(;|$)"
    for rank, own in enumerate(made):
        own._gathered = [each._own for each in made]
        with pytest.raises(ValueError, match="x must be" if refusals[rank] else told):
            own.lengths()


def test_ranks_that_agree_hear_each_others_lengths(four_ranks, monkeypatch):
    monkeypatch.setattr(agreement, "_companion", lambda group: group)
    made = [Agreement({"scale": "0.5"}, length, None, dist.group.WORLD) for length in (4, 5, 6, 2**40)]
    made[1]._gathered = [each._own for each in made]
    assert made[1].lengths() == (4, 5, 6, 2**40)


def test_a_module_calls_with_what_it_was_made_with(monkeypatch):
    given = {"transport": "ring", "weights": (2.0, 1.0), "memory_limit": 2**30, "backend": "sdpa", "validate": False}
    monkeypatch.setattr(modules, "ring_dilated_attention", lambda *_, **options: options)
    x = torch.ones(1, 4, 1, 4)
    assert RingDilatedAttention(DilatedPattern((4,), (1,)), **given)(x, x, x).items() >= given.items()


SHARDS = (5, 0, 12, 7)  # of which some are shorter than a segment, and one is empty
PIECES = [(transport, is_causal) for transport in ("ring", "all_gather", "all_to_all") for is_causal in (False, True)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("transport", "is_causal"), PIECES)
def test_shards_are_parts_of_the_whole_and_what_several_ranks_add_to_is_a_sum(transport, is_causal, dropout_p):
    """In one process: grouped heads, keys of zeros or dropout, a padding mask, and k and v in an order, at once."""
    pattern = DilatedPattern((4, 16, 24), (1, 3, 2), padding="none" if dropout_p else "zeros")
    spec = OrderingSpec("residue", rate=2)
    q, k, v, dout = drawn(24, 6, 3, 4, batch=2, dtype=torch.float64)
    hidden = torch.rand(2, 24, generator=torch.Generator().manual_seed(1)) < 0.2
    how = {"is_causal": is_causal, "scale": 0.5, "key_padding_mask": hidden}
    exact = differentiated(partial(oracle.attention, pattern=pattern, **how), [q, k, v, dout])
    if dropout_p:
        how |= {"dropout_p": dropout_p, "seed": torch.tensor([7])}
        out, lse = reference.forward(Tensors(q, k, v), Request(pattern, **how))
        grads = reference.backward(dout, Tensors(q, k, v), out, lse, Request(pattern, **how))
        exact = out, lse, *grads[:3]
    sizes = {"batch": 2, "heads": 6, "kv_heads": 3, "head_dim": 4, "dtype": torch.float64, "is_causal": is_causal}
    plan = plan_ring(pattern, SHARDS, **sizes, transport=transport, padded=True, ordered=True)

    def attend(group):
        rows = torch.arange(24).split(SHARDS)[group.own]
        order = spec.ordering(len(rows)) if len(rows) else None
        stored = [x[:, rows] if order is None else order.apply(x[:, rows], 1) for x in (k, v)]
        call, layout = Request(pattern, **how | {"key_padding_mask": hidden[:, rows]}), layout_of(plan, group.own, CPU)
        job = Job(layout, call, "eager", True, order, lambda: group)
        own = Tensors(q[:, rows], *stored)
        out, lse, kept = passes.results(own, job, lambda: None)
        dq, *grads = passes.gradients(dout[:, rows], own, out, lse, job, kept)[:3]
        return rows, out, lse, dq, *(x if order is None else order.undo(x, 1) for x in grads)

    for rows, *found in run_threads(attend, len(SHARDS)):
        assert_close(found, [exact[0][:, rows], exact[1][:, :, rows], *(x[:, rows] for x in exact[2:])], 1e-11)
