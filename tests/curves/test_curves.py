"""Curves: the defining properties on any shape, the classical curve on powers of two, the inverse, and the speed."""

import inspect
from itertools import permutations, product
from math import prod

import hilbert
import numpy as np
import pytest
import torch
from cases import refusals
from counts import ElementsMade, lines_run
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_lib.curves.coordinates import KINDS, curve_coordinates, curve_index
from hilbert_lib.curves.hilbert import raster_index
from hilbert_lib.lab import seeds

SHAPES = st.one_of(
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.tuples(st.integers(1, 14), st.integers(1, 14), st.integers(1, 14)),
    st.tuples(st.integers(1, 3), st.integers(1, 400)),
)


def step_lengths(cells):
    """(cells - 1, 2): the sum and the largest of the changes of the coordinates in each step."""
    change = cells.diff(dim=0).abs()
    return change.sum(dim=1), change.amax(dim=1)


@settings(max_examples=150)
@given(shape=SHAPES, kind=st.sampled_from(KINDS))
def test_every_cell_is_met_once_and_index_is_the_inverse(shape, kind):
    cells = curve_coordinates(kind, shape)
    assert cells.dtype == torch.int64
    assert cells.shape == (prod(shape), len(shape))
    assert (cells >= 0).all()
    assert (cells < torch.tensor(shape)).all()
    assert torch.equal(raster_index(cells, shape).sort().values, torch.arange(prod(shape)))
    assert torch.equal(curve_index(kind, cells, shape), torch.arange(prod(shape)))


def test_hilbert_steps_hold_for_every_small_shape():
    """They are one, but for one diagonal where parity forbids."""
    for shape in [*product(range(1, 20), repeat=2), *product(range(1, 8), repeat=3)]:
        sums, largest = step_lengths(curve_coordinates("hilbert", shape))
        forbids = max(shape) % 2 == 1 and prod(shape) // max(shape) % 2 == 0
        assert (largest <= 1).all()
        assert (sums <= 2).all()
        assert (sums == 2).sum() == forbids


@pytest.mark.parametrize(("order", "ndim"), [(1, 2), (2, 2), (7, 2), (1, 3), (2, 3), (5, 3)])
def test_hilbert_visits_each_quarter_or_octant_whole(order, ndim):
    """On every scale: each aligned run of 2^(ndim * j) cells is one aligned cube of side 2^j."""
    cells = curve_coordinates("hilbert", (2**order,) * ndim)
    for scale in range(order):
        runs = (cells >> scale).view(-1, 2 ** (ndim * scale), ndim)
        assert (runs == runs[:, :1]).all()


def symmetries(cells, side):
    """A curve turned and mirrored in every way, and each of these backwards."""
    for axes in permutations(range(cells.shape[1])):
        for mirrored in product([False, True], repeat=cells.shape[1]):
            turned = cells[:, axes]
            turned = np.where(mirrored, side - 1 - turned, turned)
            yield turned
            yield turned[::-1]


@pytest.mark.parametrize("order", range(1, 7))
def test_hilbert_square_is_the_published_curve_up_to_symmetry(order):
    ours = curve_coordinates("hilbert", (2**order, 2**order)).numpy()
    published = hilbert.decode(np.arange(4**order), 2, order)
    assert any(np.array_equal(turned, published) for turned in symmetries(ours, 2**order))


@pytest.mark.parametrize(
    ("shape", "bound"), [((60, 84), 11), ((13, 200), 16), ((48, 80), 8.5), ((31, 57), 7.5), ((200, 13), 16)]
)
def test_hilbert_rectangle_keeps_near_slots_near(shape, bound):
    """Slots k apart lie at most sqrt(bound k) apart: blocks that are cut without regard to their shape miss it.

    On the continuous curve, of a square, it is sqrt(6 k) (Bauman, Math. Notes 80, 2006).
    """
    cells = curve_coordinates("hilbert", shape)
    assert all((cells[k:] - cells[:-k]).square().sum(dim=1).max() <= bound * k for k in range(1, len(cells)))


def test_morton_of_a_long_box_needs_no_more_than_63_bits():
    """Three axes of 22 bits each would take 66, and the highest of the long side would be lost."""
    side = 2**21 + 2
    assert torch.equal(curve_coordinates("morton", (side, 1, 1))[:, 0], torch.arange(side))


@given(shape=st.tuples(st.integers(1, 40), st.integers(1, 40)))
@settings(max_examples=50)
def test_morton_is_ascending_in_interleaved_bits(shape):
    codes = [
        sum((row >> bit & 1) << 2 * bit + 1 | (col >> bit & 1) << 2 * bit for bit in range(6))
        for row, col in curve_coordinates("morton", shape).tolist()
    ]
    assert codes == sorted(codes)


@given(shape=SHAPES)
@settings(max_examples=100)
def test_snake_never_jumps_and_runs_along_the_last_axis(shape):
    cells = curve_coordinates("snake", shape)
    assert (step_lengths(cells)[0] == 1).all()
    assert torch.equal(cells[:, 0], curve_coordinates("raster", shape)[:, 0])


def test_tiles_are_visited_whole_in_raster_order():
    cells = curve_coordinates("tile", (16, 20))
    tiles = (cells // 8).unique_consecutive(dim=0)
    assert tiles.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert torch.equal(cells[:64], curve_coordinates("raster", (8, 8)))
    assert torch.equal(curve_coordinates("tile", (8, 8, 8))[:64], curve_coordinates("raster", (4, 4, 4)))


def test_a_large_hilbert_square_takes_no_more_for_a_cell_than_a_small_one():
    """numpy-hilbert-curve, which goes through the bits of every cell's number, takes many times as long."""
    lines_run(lambda: curve_coordinates("hilbert", (512, 512)), 4000)
    per_cell = []
    for side in (64, 512):
        with ElementsMade() as made:
            curve_coordinates("hilbert", (side, side))
        per_cell.append(made.count / side**2)
    assert per_cell[1] < 1.01 * per_cell[0] < 40


def test_the_seed_function_is_no_hilbert_curve_and_one_letter_away_from_it():
    source = inspect.getsource(seeds.seed_hilbert_d2xy)
    scope = {}
    exec(source.replace("n - 1 -", "s - 1 -"), scope)
    for side in (2, 4, 8, 16):
        ours = curve_coordinates("hilbert", (side, side)).numpy()
        seed = np.array([seeds.seed_hilbert_d2xy(side, d) for d in range(side**2)])
        mended = np.array([scope["seed_hilbert_d2xy"](side, d) for d in range(side**2)])
        assert seed.max() >= side
        assert any(np.array_equal(turned, mended) for turned in symmetries(ours, side))


WRONG = {
    TypeError: [
        (lambda: curve_coordinates("morton", (True, 2)), r"shape\[0\] must be an integer.*, got True"),
        (lambda: curve_coordinates("morton", {4, 2}), "shape must be a sequence of integers"),
        (lambda: curve_index("hilbert", torch.tensor([[0.0, 1.0]]), (4, 4)), "integers, got torch.float32"),
        (lambda: curve_index("hilbert", [[0, 1]], (4, 4)), "coordinates must be a tensor of integers, got list"),
    ],
    ValueError: [
        (lambda: curve_coordinates("hilbret", (4, 4)), "hilbert, morton, snake, raster, tile.*'hilbret'"),
        (lambda: curve_coordinates("hilbert", (4,)), r"2 or 3 sides.*\(4,\)"),
        (lambda: curve_coordinates("morton", (4, 0)), r"shape\[1\] must be .* at least 1, got 0"),
        (lambda: curve_coordinates("hilbert", (2, 2), device="gpu"), "device must be a device .*, got 'gpu'"),
        (lambda: curve_index("hilbert", torch.tensor([[0, 4]]), (4, 4)), r"inside the shape \(4, 4\), got \[0, 4\]"),
        (lambda: curve_index("hilbert", torch.tensor([[-1, 0]]), (4, 4)), r"got \[-1, 0\]"),
        (lambda: curve_index("hilbert", torch.tensor([[0, 0, 0]]), (4, 4)), r"2 in the last axis, got \(1, 3\)"),
    ],
}
test_bad_arguments_are_named = refusals(WRONG)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_curves_are_the_same_on_the_gpu(kind):
    for shape in [(64, 64), (13, 21), (5, 6, 9)]:
        cells = curve_coordinates(kind, shape, device="cuda")
        assert torch.equal(cells.cpu(), curve_coordinates(kind, shape))
        assert torch.equal(curve_index(kind, cells, shape).cpu(), torch.arange(prod(shape)))
