"""What published windows along a curve keep, held against sets of keys."""

import pytest
import torch

from hilbert_lib.lab.cache import in_print as counting
from hilbert_lib.lab.ledger.in_print import PUBLICATIONS
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.neighbourhood import Neighbourhood


def share_of_sets(near, keys_of):
    """The share of a neighbourhood's pairs that are also in the sets of another pattern."""
    pairs = [(cell, key) for cell in range(near.length) for key in near.keys(cell).tolist()]
    return sum(key in keys_of(cell) for cell, key in pairs) / len(pairs)


@pytest.mark.parametrize(("shape", "window"), [((6, 9), 3), ((7, 7), 5), ((4, 8), 2)])
def test_windows_along_the_curve_keep_what_sets_of_places_keep(shape, window):
    order = Ordering.from_curve("hilbert", shape[0] * shape[1], grid=shape).perm.tolist()
    place, keys = {cell: n for n, cell in enumerate(order)}, window**2
    if shape[0] % window == 0:
        chunks = {cell: {order[n] for n in range(len(order)) if n // keys == at // keys} for cell, at in place.items()}
        near, pattern = counting.stood_for("window", shape, window), counting.along_curve("window", shape, window)
        assert counting.neighbours_found(near, pattern) == share_of_sets(near, chunks.__getitem__)
    if window % 2:
        around = {cell: set(order[max(0, at - keys // 2) : at + keys // 2 + 1]) for cell, at in place.items()}
        near, pattern = counting.stood_for("slide", shape, window), counting.along_curve("slide", shape, window)
        found = counting.neighbours_found(near, pattern)
        assert found == share_of_sets(near, around.__getitem__)
        assert found < 1


def test_chunks_of_the_curve_are_squares_where_all_sides_are_powers_of_two():
    counts = counting.count_windows([("window", (16, 32), 4), ("window", (12, 12), 3)])
    assert counts.found[0] == 1.0
    assert counts.found[1] < 1.0


def test_the_publications_count_of_empty_blocks_holds():
    (row,) = counting.count_windows([("window", (64, 64), 8)]).itertuples()
    assert (row.empty_raster, row.empty_hilbert) == (0.875, 1 - 1 / 32)
    assert (row.raster, row.hilbert) == (64 / 512, 64 / 128)


TILES = [counting.Tiles((8, 8), 5, 3), counting.Tiles((8, 16), 0, 4)]


@pytest.mark.parametrize("tiles", TILES)
def test_tiles_see_text_centre_and_their_own_run_of_the_curve(tiles):
    positions = torch.arange(tiles.length)
    assert tiles.order.sort().values.equal(positions)
    sees = tiles.pattern.attends(positions[:, None], positions)
    assert int(sees.sum()) == tiles.pairs
    rows, columns = tiles.shape
    centre = {
        tiles.text + row * columns + column
        for row in range(rows * 3 // 8, rows * 5 // 8)
        for column in range(columns * 3 // 8, columns * 5 // 8)
    }
    shared = {*range(tiles.text), *centre}
    assert set(sees.all(1).nonzero()[:, 0].tolist()) == shared
    curve = Ordering.from_curve("hilbert", rows * columns, grid=tiles.shape).perm.tolist()
    rest = [tiles.text + cell for cell in curve if tiles.text + cell not in shared]
    own = rest[: tiles.size]
    assert set(sees[own[0]].nonzero()[:, 0].tolist()) == shared | set(own)


def test_the_window_beside_tiles_has_at_most_as_many_pairs():
    tiles = counting.Tiles((32, 32), 64, 16)

    def pairs(window):
        cells = 32**2
        return tiles.text * tiles.length + cells * (tiles.text + window**2)

    assert pairs(tiles.window) <= tiles.pairs < pairs(tiles.window + 2)
    (row,) = counting.count_tiles([((32, 32), 64, 16)]).itertuples()
    assert row.promised == tiles.length**2 / tiles.pairs
    near = Neighbourhood((32, 32), tiles.window)
    cells = torch.arange(32**2)
    in_window, seen = (
        each.attends(first + cells[:, None], first + cells) for each, first in ((near, 0), (tiles.pattern, 64))
    )
    assert row.found == int((in_window & seen).sum()) / int(in_window.sum())


def test_tiles_divide_what_is_left_of_the_picture():
    with pytest.raises(ValueError, match="tiles must divide the 60 cells outside of the centre, got 7"):
        counting.Tiles((8, 8), 5, 7)


@pytest.mark.parametrize(("shape", "window", "stride"), [((7, 9), (4, 3), (3, 2)), ((10,), (5,), (4,))])
def test_strides_keep_what_sets_of_keys_keep(shape, window, stride):
    near, around = Neighbourhood(shape, window, stride=stride), Neighbourhood(shape, window)
    assert counting.stride_found(near) == pytest.approx(share_of_sets(around, lambda cell: near.keys(cell).tolist()))


def test_cells_are_kept_lost_or_seen_elsewhere():
    for _, near, pattern, cell, first in counting.pictured():
        parts = counting.cells_kept(near, pattern, cell, first).set_index(["row", "col"])
        query = cell[0] * near.shape[1] + cell[1]
        lost = parts[parts.part.isin(["kept", "lost"])].index
        assert [row * near.shape[1] + column for row, column in lost] == near.keys(query).tolist()
        assert parts.part[cell] == "kept"
        assert parts.is_query.sum() == 1
        assert {"kept", "lost", "away"} <= set(parts.part)


def test_what_is_said_of_a_publication_is_what_is_counted():
    said = {each.id: each for each in PUBLICATIONS}
    tiles = counting.count_tiles([((side, side), 512, 16) for side in (64, 128)])
    assert "{:.2f} and {:.2f} times".format(*tiles.promised) in said["P2"].cause
    strides = counting.count_strides().found
    assert f"keeps {100 * strides[0]:.0f} % of the pairs" in said["P5"].sides
    assert f"keep {100 * strides[2]:.0f} % of the pairs" in said["P6"].sides
    flop = 4 * 256**2 * 80**2 * 24 * 128
    rates = [f"{flop / ms / 1e9:.0f}" for ms in (7.914, 10.601)]
    assert f"{' and '.join(rates)} useful TFLOP/s" in said["P6"].claims
