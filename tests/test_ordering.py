"""Orderings: permutations that are the same everywhere, cost nothing twice, and never change what is stored."""

import hashlib
import os
import subprocess
import sys
import threading
from math import ceil, sqrt

import numpy as np
import pytest
import torch
from cases import refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from hilbert_lib import Neighbourhood, attend
from hilbert_lib import ordering as module
from hilbert_lib.curves.coordinates import KINDS
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.ordering import Ordering, OrderingSpec, ordering_cache_info

CPU = torch.device("cpu")
LENGTHS = st.integers(1, 500)
CHUNKS = st.one_of(st.none(), st.integers(1, 600))
ORDERINGS = st.one_of(
    st.builds(Ordering.from_curve, st.sampled_from(KINDS), LENGTHS, chunk=CHUNKS),
    st.builds(Ordering.residue, LENGTHS, st.integers(1, 600), chunk=CHUNKS),
    st.builds(Ordering.random, LENGTHS, st.integers(0, 2**63 - 1)),
    st.builds(Ordering.linear, LENGTHS),
)
EXAMPLES = [
    Ordering.from_curve("hilbert", 1000, chunk=300),
    Ordering.from_curve("morton", 60, grid=(4, 4, 4)),
    Ordering.residue(1000, 7, chunk=100),
    Ordering.random(1000, 3),
    Ordering.linear(10),
]


def small_cache():
    """The cache of orderings, for 100 positions."""
    made = module.ordering_tables.__wrapped__
    return cached_for_graphs(100, size=lambda ordering, device: ordering.length)(made)


@settings(max_examples=200)
@given(ordering=ORDERINGS, dim=st.sampled_from([0, 1, -1]))
def test_perm_is_a_permutation_inverse_its_inverse_and_undo_takes_back_apply(ordering, dim):
    positions = torch.arange(ordering.length)
    assert ordering.perm.dtype == ordering.inverse.dtype == torch.int64
    assert torch.equal(ordering.perm.sort().values, positions)
    assert torch.equal(ordering.inverse[ordering.perm], positions)
    x = torch.randn([ordering.length if axis == dim % 3 else 2 for axis in range(3)])
    stored = ordering.apply(x, dim)
    assert torch.equal(stored.select(dim, 0), x.select(dim, int(ordering.perm[0])))
    assert torch.equal(ordering.undo(stored, dim), x)


def test_apply_and_undo_have_exact_gradients():
    ordering = Ordering.random(7, seed=987654321)
    with torch.inference_mode():  # in which the tables are made, of no other test
        ordering.apply(torch.zeros(7), 0)
    x = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ordering.apply(x, 1), x)
    assert torch.autograd.gradcheck(lambda x: ordering.undo(x, 1), x)


@settings(max_examples=100)
@given(length=LENGTHS, rate=st.integers(1, 600))
def test_residue_sorts_by_remainder_then_quotient(length, rate):
    expected = sorted(range(length), key=lambda p: (p % rate, p // rate))
    assert Ordering.residue(length, rate).perm.tolist() == expected


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1000])
def test_default_grid_has_root_of_length_columns(length):
    cols = ceil(sqrt(length))
    grid = (ceil(length / cols), cols)
    for kind in KINDS:
        assert torch.equal(Ordering.from_curve(kind, length).perm, Ordering.from_curve(kind, length, grid=grid).perm)


def test_cells_past_the_length_are_skipped():
    whole = Ordering.from_curve("hilbert", 64, grid=(8, 8)).perm
    assert torch.equal(Ordering.from_curve("hilbert", 50, grid=(8, 8)).perm, whole[whole < 50])


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunked_curve_restarts_and_stays_inside_its_chunk(kind):
    perm = Ordering.from_curve(kind, 250, chunk=100).perm
    full, tail = Ordering.from_curve(kind, 100).perm, Ordering.from_curve(kind, 50).perm
    assert torch.equal(perm, torch.cat([full, 100 + full, 200 + tail]))
    perm = Ordering.from_curve(kind, 40, grid=(2, 8), chunk=16).perm  # the grid is that of one chunk
    one = Ordering.from_curve(kind, 16, grid=(2, 8)).perm
    assert torch.equal(perm, torch.cat([one, 16 + one, 32 + one[one < 8]]))


def test_random_neither_reads_nor_moves_the_global_generator():
    torch.manual_seed(0)
    expected_next = torch.rand(1)
    torch.manual_seed(0)
    first = Ordering.random(501, seed=5).perm.clone()
    assert torch.equal(torch.rand(1), expected_next)
    assert torch.equal(module.ordering_tables.__wrapped__(Ordering.random(501, seed=5), CPU)[0], first)
    assert not torch.equal(Ordering.random(501, seed=6).perm, first)


def test_a_default_device_elsewhere_leaves_the_tables_alone(monkeypatch):
    for example in EXAMPLES:
        expected = example.perm.clone()
        monkeypatch.setattr(module, "ordering_tables", small_cache())
        with torch.device("meta"):
            assert torch.equal(example.perm, expected)


@pytest.mark.parametrize("example", EXAMPLES, ids=repr)
def test_an_ordering_serves_tensors_on_meta(example):
    x = torch.empty(2, example.length, device="meta")
    assert example.undo(example.apply(x, 1), 1).shape == x.shape
    there, slots = example.to("meta"), example.slots(torch.device("meta"))
    assert there.perm.is_meta
    assert there.perm.shape == there.inverse.shape == slots.shape == example.perm.shape
    assert (there.perm.dtype, there.inverse.dtype, slots.dtype) == (torch.int64, torch.int64, torch.int32)


def test_fake_tensors_neither_enter_nor_stop_the_cache(monkeypatch):
    monkeypatch.setattr(module, "ordering_tables", small_cache())
    ordering = Ordering.from_curve("hilbert", 10)
    with FakeTensorMode():
        assert ordering.apply(torch.empty(3, 10), 1).shape == (3, 10)
    assert type(ordering.perm) is torch.Tensor
    assert ordering.apply(torch.arange(10), 0).tolist() == ordering.perm.tolist()
    with FakeTensorMode():  # the tables are in the cache now
        assert ordering.undo(torch.empty(10, 3), 0).shape == (10, 3)


class Stored(torch.nn.Module):
    def __init__(self, ordering):
        super().__init__()
        self.ordering = ordering

    def forward(self, x):
        return self.ordering.apply(x, 1) * 2


def test_apply_compiles_into_one_graph_and_exports():
    x = torch.randn(2, 12)
    compiled = torch.compile(lambda x, ordering: ordering.apply(x, 1) * 2, fullgraph=True, backend="eager")
    for ordering in (Ordering.from_curve("hilbert", 12), Ordering.residue(12, 3), Ordering.residue(12, 4)):
        assert torch.equal(compiled(x, ordering), 2 * ordering.apply(x, 1))
        exported = torch.export.export(Stored(ordering), (x,)).module()
        assert torch.equal(exported(x), 2 * ordering.apply(x, 1))
    assert type(ordering.perm) is torch.Tensor


def test_every_process_makes_the_same_tables():
    """Another process, with another hash seed and another global random state, evaluates the same recipes."""
    digest = "hashlib.sha256(b''.join(o.perm.numpy().tobytes() for o in EXAMPLES)).hexdigest()"
    program = f"import hashlib, torch; from hilbert_lib.ordering import Ordering; EXAMPLES = {EXAMPLES!r};"
    program += f"torch.manual_seed(99); print({digest})"
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == eval(digest, {"hashlib": hashlib, "EXAMPLES": EXAMPLES})


@pytest.mark.parametrize("example", EXAMPLES, ids=repr)
def test_orderings_are_values_and_repr_is_the_call_that_makes_one(example):
    again = eval(repr(example), {"Ordering": Ordering})
    assert again == example
    assert hash(again) == hash(example)
    with pytest.raises(AttributeError):
        example.length = 5


def test_recipes_that_differ_are_unequal_and_numbers_may_be_of_numpy():
    one = Ordering.residue(100, 4)
    assert one not in (Ordering.residue(100, 5), Ordering.residue(100, 4, chunk=50))
    assert one == Ordering("residue", np.int64(100), rate=4)
    boxed = Ordering("tile", 6, grid=[2, 3])
    assert boxed == Ordering.from_curve("tile", 6, grid=np.array([2, 3]))
    assert hash(boxed) == hash(Ordering.from_curve("tile", 6, grid=(2, 3)))
    assert boxed.grid == (2, 3)


@pytest.mark.parametrize("example", EXAMPLES, ids=repr)
def test_a_spec_makes_the_ordering_of_all_that_it_holds(example):
    recipe = {name: getattr(example, name) for name in ("chunk", "grid", "rate", "seed")}
    small = recipe | ({"grid": None} if example.grid else {})  # a grid must hold the one position of the first check
    made = OrderingSpec(example.kind, **small).ordering(example.length)
    assert made == Ordering(example.kind, example.length, **small)
    assert OrderingSpec(example.kind, **recipe).ordering(example.length) == example
    for name, value in recipe.items():
        assert getattr(OrderingSpec(example.kind, **recipe), name) == value


def test_tables_are_of_the_whole_recipe():
    """Written out: a test that makes both sides by the same code does not see what both leave out."""
    assert OrderingSpec("residue", rate=2, chunk=4).ordering(8).perm.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert OrderingSpec("snake", grid=(2, 2), chunk=4).ordering(8).perm.tolist() == [0, 1, 3, 2, 4, 5, 7, 6]
    assert OrderingSpec("snake", grid=(4, 2)).ordering(8).perm.tolist() == [0, 1, 3, 2, 4, 5, 7, 6]
    generator = torch.Generator().manual_seed(3)
    assert OrderingSpec("random", seed=3).ordering(8).perm.equal(torch.randperm(8, generator=generator))


# Each in turn on a cache for 100 positions. The third use leaves 41 the oldest; what is larger than the bound is kept
# until the next.
@pytest.mark.parametrize(
    ("lengths", "told"),
    [((40, 41, 40, 42), (1, 3, 2, 82)), ((40, 41, 40, 42, 40, 41), (2, 4, 2, 81)), ((1000, 1000, 5), (1, 2, 1, 5))],
)
def test_the_cache_drops_the_least_recently_used_beyond_its_bound(monkeypatch, lengths, told):
    monkeypatch.setattr(module, "ordering_tables", small_cache())
    for length in lengths:
        Ordering.linear(length).perm.sum()
    assert ordering_cache_info()[:4] == told


def test_tables_are_made_while_others_are_found():
    known, new = Ordering.linear(5), Ordering.linear(6)

    def make(ordering, device):
        if ordering == new:
            finder = threading.Thread(target=cache, args=[known, CPU], daemon=True)
            finder.start()
            finder.join(20.0)
            assert not finder.is_alive()
        return ordering

    cache = cached_for_graphs(100, size=lambda ordering, device: ordering.length)(make)
    assert cache(known, CPU) is known
    cache(new, CPU)
    assert cache.cache_info() == (1, 2, 2, 11, 100)


WRONG = {
    TypeError: [
        (lambda: Ordering("residue", 4), "rate must be an integer.*, got None"),
        (lambda: Ordering("random", 4), "seed must be an integer.*, got None"),
        (lambda: Ordering.linear(4).apply([0, 1, 2, 3], 0), "x must be a tensor, got list"),
    ],
    ValueError: [
        (lambda: Ordering.from_curve("hilbert", 4, chunk=0), "chunk must be .* at least 1, got 0"),
        (lambda: Ordering.from_curve("hilbert", 10, grid=(3, 3)), "hold 10 positions.* 9 cells"),
        (lambda: Ordering.from_curve("hilbert", 9, grid=(3, 0)), r"grid\[1\] must be .* at least 1, got 0"),
        (lambda: Ordering.from_curve("hilbert", 99, grid=(3, 3), chunk=10), "hold 10 positions"),
        (lambda: Ordering.residue(8, 0), "rate must be .* at least 1, got 0"),
        (lambda: Ordering.random(8, seed=-1), "seed must be .*from 0 to .*, got -1"),
        (lambda: Ordering.from_curve("linear", 4), "kind must be one of hilbert.*'linear'"),
        (lambda: Ordering.from_curve("tile", 4, grid=(2, 2, 1, 1)), "grid must have 2 or 3 sides"),
        (lambda: Ordering("hilbret", 4), "kind must be one of hilbert.*random, permutation, linear; got 'hilbret'"),
        (lambda: Ordering("hilbert", 0), "length must be .* from 1 to 1099511627776, got 0"),
        (lambda: Ordering("linear", 4, chunk=2), "chunk must be None for kind 'linear', got 2"),
        (lambda: Ordering("residue", 4, rate=2, seed=1), "seed must be None for kind 'residue', got 1"),
        (lambda: Ordering.linear(4).to("gpu"), "device must be .*, got 'gpu'"),
        (lambda: Ordering.linear(4).to("cuda:63"), "device must be one of this machine, got 'cuda:63': "),
        (lambda: Ordering("linear", 4, device="gpu"), "device must be .*, got 'gpu'"),
        (lambda: Ordering.linear(4).apply(torch.zeros(4), 1), "dim must be .* from -1 to 0, got 1"),
        (lambda: Ordering.linear(4).apply(torch.zeros(2, 5), 1), r"size 4 along dim 1.*\(2, 5\)"),
    ],
}
test_bad_arguments_are_named = refusals(WRONG)


@pytest.mark.gpu
@pytest.mark.parametrize("example", EXAMPLES, ids=repr)
def test_tables_are_the_same_on_the_gpu(example):
    there = example.to("cuda")
    assert there == example
    assert there.perm.is_cuda
    assert torch.equal(there.perm.cpu(), example.perm)
    assert torch.equal(there.inverse.cpu(), example.inverse)


def test_a_permutation_of_ones_own_is_an_ordering():
    perm = torch.tensor([4, 0, 3, 1, 2], dtype=torch.int32)
    order, same = Ordering.from_permutation(perm), Ordering.from_permutation(perm.long())
    assert order == same
    assert hash(order) == hash(same)
    assert order != Ordering.from_permutation(perm.flip(0))
    assert order.perm.tolist() == perm.tolist()
    assert order.inverse[order.perm].tolist() == [0, 1, 2, 3, 4]
    x = torch.arange(10.0).view(5, 2)
    assert order.undo(order.apply(x, dim=0), dim=0).equal(x)
    assert order.apply(x, dim=0)[:, 0].tolist() == [8.0, 0.0, 6.0, 2.0, 4.0]
    perm[0] = 0  # what is given is copied
    assert order.perm.tolist() == [4, 0, 3, 1, 2]
    assert repr(order) == "Ordering.from_permutation([4, 0, 3, 1, 2])"


@pytest.mark.parametrize(
    ("perm", "error", "words"),
    [
        (torch.tensor([0, 2]), ValueError, "each of 0 to 1 once, got"),
        (torch.tensor([0, 0, 1]), ValueError, "each of 0 to 2 once"),
        (torch.empty(0, dtype=torch.int64), ValueError, "perm must hold at least one position"),
        (torch.arange(3, device="meta"), ValueError, "and its values"),
        (torch.tensor([0.0, 1.0]), TypeError, "integers of one axis"),
        (torch.zeros(2, 2, dtype=torch.int64), TypeError, "integers of one axis"),
        ([1, 0], TypeError, "perm must be a"),
    ],
)
def test_what_is_no_permutation_is_refused(perm, error, words):
    with pytest.raises(error, match=words):
        Ordering.from_permutation(perm)


def test_a_permutation_has_no_recipe_for_other_lengths():
    with pytest.raises(ValueError, match=r"use Ordering\.from_permutation"):
        OrderingSpec("permutation", seed=1)


def test_a_permutation_made_in_inference_mode_serves_a_backward():
    with torch.inference_mode():
        order = Ordering.from_permutation(torch.tensor([2, 0, 1, 3]))
    x = torch.randn(1, 4, 1, 2, requires_grad=True)
    attend(x, x, x, Neighbourhood((4,), 3), ordering=order).sum().backward()
    assert x.grad.shape == x.shape


def test_a_permutation_serves_fake_tensors_and_real_ones_after_them():
    perm = torch.tensor([2, 0, 1, 3])
    order = Ordering.from_permutation(perm)
    with FakeTensorMode():
        assert order.apply(torch.empty(4, 5), dim=0).shape == (4, 5)
    assert type(order.perm) is torch.Tensor
    assert order.perm.equal(perm)


@pytest.mark.parametrize("table", [None, torch.arange(4), torch.zeros(4, dtype=torch.int64), [0, 1, 2, 3]])
def test_a_permutation_that_nobody_looked_at_is_refused(table):
    """It may hold a position twice, and its seed may be another permutation's, whose tables it would share."""
    with pytest.raises(
        ValueError, match=r"table must be values that were looked at, .* use Ordering\.from_permutation"
    ):
        Ordering("permutation", 4, seed=0, table=table)


def test_fake_tensors_of_a_grid_are_attended_to_in_an_order_of_ones_own():
    order = Ordering.from_permutation(torch.tensor([2, 0, 1, 3]))
    with FakeTensorMode():
        x = torch.empty(1, 4, 1, 2, requires_grad=True)
        out = attend(x, x, x, Neighbourhood((4,), 3), ordering=order)
        out.sum().backward()
    assert x.grad.shape == out.shape == (1, 4, 1, 2)
