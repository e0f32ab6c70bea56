"""Made clouds: so many distinct cells, row by row, the same each time, of the kind that they are named after."""

import pytest
import torch

from hilbert_lib.lab.clouds import CLOUDS, made_room, made_tissue


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("count", [1, 7, 500])
def test_a_cloud_has_so_many_distinct_cells_row_by_row(name, count):
    cells = CLOUDS[name](count)
    rows = [tuple(cell) for cell in cells.tolist()]
    assert cells.dtype == torch.int64
    assert len(rows) == count
    assert rows == sorted(set(rows))
    assert CLOUDS[name](count).equal(cells)


def test_a_seed_makes_another_cloud():
    assert not made_tissue(200, seed=1).equal(made_tissue(200))
    assert not made_room(200, seed=1).equal(made_room(200))


def test_tissue_fills_a_good_part_of_a_plane_and_a_room_little_of_its_volume():
    tissue, room = made_tissue(2000), made_room(2000)
    filled = [len(cells) / (cells.amax(0) - cells.amin(0) + 1).prod() for cells in (tissue, room)]
    assert tissue.shape[1] == 2
    assert 0.4 < filled[0] < 0.9
    assert room.shape[1] == 3
    assert 0.05 < filled[1] < 0.3
    assert (room[:, 2] == 0).sum() > 600  # the floor


@pytest.mark.parametrize("made", [made_tissue, made_room])
def test_a_cloud_without_points_is_refused(made):
    with pytest.raises(ValueError, match="count must be an integer of at least 1, got 0"):
        made(0)
