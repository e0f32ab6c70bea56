"""The Hilbert kernels give the bits of the torch version; without a GPU they run here in Triton's interpreter."""

from itertools import product
from math import prod

import pytest
import torch

from hilbert_lib.curves import coordinates as curves
from hilbert_lib.curves.coordinates import curve_coordinates, curve_index
from hilbert_lib.curves.hilbert import raster_index

curves_triton = pytest.importorskip("hilbert_lib.curves.kernels", reason="triton has no build for this platform")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLANES = [(1, 1), (1, 50), (50, 1), (3, 3), (8, 8), (13, 21), (21, 13), (17, 17), (2, 97), (41, 3)]
BOXES = [(1, 1, 1), (1, 9, 1), (30, 1, 1), (8, 8, 8), (5, 6, 7), (7, 7, 7), (2, 3, 40), (1, 9, 8)]


@pytest.fixture
def kernels(monkeypatch):
    """The public functions run the kernels on any device, and small grids have several levels."""
    monkeypatch.setattr(curves, "_has_kernel", lambda device: True)
    monkeypatch.setattr(curves_triton, "LEAF_CELLS", 16)


def check(shape):
    """Cells, and places of all cells in raster order, in that of the curve and at random, against the torch version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "_has_kernel", lambda device: False)
        expected = curve_coordinates("hilbert", shape)
    cells = curve_coordinates("hilbert", shape, device=DEVICE)
    assert cells.dtype == torch.int64
    assert torch.equal(cells.cpu(), expected)
    raster = curve_coordinates("raster", shape, device=DEVICE)
    places = curve_index("hilbert", raster, shape)
    assert places.dtype == torch.int64
    assert torch.equal(places.cpu(), raster_index(expected, shape).argsort())
    curve = torch.arange(len(cells), device=DEVICE)
    assert torch.equal(curve_index("hilbert", cells, shape), curve)
    mixed = torch.randperm(len(cells), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(curve_index("hilbert", cells[mixed], shape), mixed)


# With leaves of a sixteenth of the cells, of one cell and of all; and with leaves of several steps.
SIZED = [(shape, max(1, prod(shape) // 16)) for shape in [*PLANES, *BOXES, (2, 3)]]
SIZED += [*product([(5, 7), (3, 2, 5)], [1, 3, 1024]), ((1024, 3), 1024), ((2, 1, 1100), 1024)]


@pytest.mark.parametrize(("shape", "leaf_cells"), SIZED, ids=str)
def test_cells_and_places_are_bit_equal_to_the_torch_version(kernels, monkeypatch, shape, leaf_cells):
    monkeypatch.setattr(curves_triton, "LEAF_CELLS", leaf_cells)
    check(shape)


@pytest.mark.parametrize("shape", [(13, 21), (5, 6, 7)])
def test_tables_of_64_bits_give_the_same(kernels, monkeypatch, shape):
    rules = curves_triton._rules(shape, 16, DEVICE)
    long = {name: getattr(rules, name).long() for name in ("rows", "before", "layouts", "lists")}
    monkeypatch.setattr(curves_triton, "_rules", lambda *arguments: rules._replace(**long))
    check(shape)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2**28, 4), torch.int32), ((2**29 + 1, 3), torch.int64), ((1, 2**30 + 1), torch.int64)]
)
def test_tables_have_64_bits_where_the_coordinates_of_a_cell_need_them(shape, dtype):
    rules = curves_triton._rules(shape, 1024, torch.device("cpu"))
    assert {table.dtype for table in (rules.rows, rules.before, rules.layouts, rules.lists)} == {dtype}


@pytest.mark.parametrize("shape", [(13, 21), (5, 6, 7), (300, 401, 500)])
def test_a_walk_ends_where_no_child_stands(shape):
    rules = curves_triton._rules(shape, 16, torch.device("cpu"))
    empty = rules.rows[..., 0] == 0
    assert empty.any()
    assert rules.first_cut > 0
    assert rules.rows[empty].eq(0).all()


def test_places_are_found_in_a_grid_that_no_memory_holds(kernels):
    """The first quarter of a square is the curve of half its side, its axes swapped; the last cell ends a side."""
    side = 2**21
    cells = curve_coordinates("raster", (16, 16), device=DEVICE)
    swapped = cells.flip(-1)  # 17 halvings
    assert torch.equal(curve_index("hilbert", cells, (side, side)), curve_index("hilbert", swapped, (16, 16)))
    last = torch.tensor([side - 1, 0], device=DEVICE)
    assert curve_index("hilbert", last, (side, side)).item() == side**2 - 1
    assert curve_index("hilbert", torch.tensor([0, 2**62 - 1], device=DEVICE), (1, 2**62)).item() == 2**62 - 1
    with pytest.raises(ValueError, match=r"at most 62 bits.*\(2147483649, 2147483648\)"):
        curve_index("hilbert", last, (2**31 + 1, 2**31))


@pytest.mark.parametrize("by_kernel", [True, False])
def test_cells_may_come_in_any_shape_stride_and_integer_type(kernels, monkeypatch, by_kernel):
    monkeypatch.setattr(curves, "_has_kernel", lambda device: by_kernel)
    cells = curve_coordinates("hilbert", (6, 10), device=DEVICE)
    places = torch.arange(60, device=DEVICE)
    assert torch.equal(curve_index("hilbert", cells.view(3, 20, 2).mT.contiguous().mT, (6, 10)), places.view(3, 20))
    assert torch.equal(curve_index("hilbert", cells.flip(0)[::2].to(torch.uint16), (6, 10)), places.flip(0)[::2])
    assert curve_index("hilbert", cells[7], (6, 10)).shape == ()
    assert curve_index("hilbert", cells[:0], (6, 10)).shape == (0,)


OUTSIDE = [[0, 8], [4, 0], [-1, 0], [0, 2**31], [0, 2**32], [2**32, 0], [-(2**63), 0], [0, 0, 2], [0, 0, 2**32]]


@pytest.mark.parametrize("cell", OUTSIDE, ids=str)
def test_a_cell_outside_is_named_as_the_torch_version_names_it(kernels, monkeypatch, cell):
    shape = (4, 8, 2)[: len(cell)]
    cells = torch.tensor([[0] * len(shape), cell], device=DEVICE)
    said = []
    for has_kernel in (True, False):
        monkeypatch.setattr(curves, "_has_kernel", lambda device, answer=has_kernel: answer)
        with pytest.raises(ValueError, match="inside the shape") as raised:
            curve_index("hilbert", cells, shape)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert str(cell) in said[0]


@pytest.mark.parametrize("mode", ["compiled", "interpreted", "absent"])
def test_kernels_serve_gpus_and_only_where_they_are_compiled(monkeypatch, mode):
    monkeypatch.setattr(curves, "kernel_mode", lambda: mode)
    assert curves._has_kernel(torch.device("cuda")) == (mode == "compiled")
    assert not curves._has_kernel(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 1024), (300, 4001), (1, 10**5), (64, 64, 64), (101, 67, 83), (3, 2, 50_001)])
def test_large_grids_are_bit_equal_on_the_gpu(shape):
    assert curves._has_kernel(DEVICE)
    check(shape)
