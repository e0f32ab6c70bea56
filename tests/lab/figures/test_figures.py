"""Figures show all of their table, and can be drawn again from the files beside them."""

import math
from io import BytesIO
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import LineCollection
from PIL import Image

from hilbert_lib.curves.coordinates import curve_coordinates
from hilbert_lib.lab.figures import redraw, show
from hilbert_lib.lab.figures.curves import draw_paths, draw_volumes, path_table
from hilbert_lib.lab.figures.patterns import cell_table, draw_cells
from hilbert_lib.lab.figures.record import _columns, _table, in_256_colours, read_figures, write_figures
from hilbert_lib.ordering import Ordering

CELLS = cell_table({"a": torch.tensor([[0, 1, 2], [2, 0, 0]])})
LOOK = {"shape": [2, 3], "panels": ["a", "empty"], "shades": ["white", "red", "blue"], "xlabel": "key"}
LOOK |= {"ylabel": "query", "title": "Who sees whom", "names": ["no one", "one", "two"]}


def test_cells_are_drawn_in_the_shade_of_their_value():
    figure = draw_cells(CELLS, **LOOK)
    own, empty = (axes.images[0] for axes in figure.axes)
    assert own.get_array().tolist() == [[0, 1, 2], [2, 0, 0]]
    assert empty.get_array().sum() == 0
    colours = own.to_rgba(np.arange(3)[None])[0]
    assert colours[:, :3].tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 1]]
    assert [text.get_text() for text in figure.legends[0].texts] == LOOK["names"]


def test_every_cell_of_a_large_grid_has_a_pixel():
    figure = draw_cells(CELLS, **LOOK | {"shape": [300, 260]})
    figure.canvas.draw()
    extent = figure.axes[1].get_window_extent()
    assert extent.height >= 300
    assert extent.width >= 260


def test_figures_are_kept_in_256_colours_that_look_like_their_own(tmp_path):
    figure = show(draw_cells, CELLS, output_dir=str(tmp_path), **LOOK)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    small = in_256_colours(drawn.getvalue())
    assert len(small) < 0.6 * drawn.getbuffer().nbytes
    with Image.open(BytesIO(small)) as kept, Image.open(drawn) as own:
        difference = np.abs(np.subtract(kept.convert("RGB"), own.convert("RGB"), dtype=int))
        assert difference.max() < 24
    with Image.open(tmp_path / "draw_cells.png") as file:
        assert file.mode == "P"


def test_options_are_saved_as_plain_ones_or_refused_before_a_file_is_written(tmp_path):
    with pytest.raises(AttributeError):
        show(draw_cells, CELLS, output_dir=str(tmp_path), **LOOK | {"shape": {4}})
    assert list(tmp_path.iterdir()) == []
    show(draw_cells, CELLS, output_dir=str(tmp_path), **LOOK | {"shape": [np.int64(2), 3]})
    assert read_figures(tmp_path)["draw_cells"]["options"] == LOOK
    assert len(redraw(tmp_path)) == 1


def test_one_bad_figure_is_named_and_the_others_are_redrawn(tmp_path):
    for name in "mn":
        show(draw_cells, CELLS, output_dir=str(tmp_path), name=name, **LOOK)
    figures = read_figures(tmp_path)
    bad = {"draw": "elsewhere.figures:draw", "options": {}, "table": {}}
    write_figures(tmp_path, {"a": bad, "b": {**figures["m"], "table": {}}, **figures})
    with pytest.warns(UserWarning, match="was not redrawn") as caught:
        assert redraw(tmp_path) == [tmp_path / "m.png", tmp_path / "n.png"]
    assert [str(each.message)[0] for each in caught] == ["a", "b"]


def test_a_table_is_kept_once_and_comes_back_as_it_was(tmp_path):
    table = pd.DataFrame({"x": [1, 2], "y": [0.1, math.nan], "name": ["a", None], "is": [True, False]})
    figure = {"draw": "hilbert_lib.lab.figures.x:y", "options": {}, "table": _columns(table)}
    write_figures(tmp_path, {"one": figure})
    size = (tmp_path / "figures.json.gz").stat().st_size
    write_figures(tmp_path, {"one": figure, "two": figure})
    assert (tmp_path / "figures.json.gz").stat().st_size < size + 60
    other = {**figure, "table": {"x": [3]}}
    write_figures(tmp_path, {"one": figure, "two": figure, "three": other})
    assert read_figures(tmp_path) == {"one": figure, "two": figure, "three": other}
    again = _table(read_figures(tmp_path)["two"]["table"])
    pd.testing.assert_frame_equal(again, table, check_dtype=False)
    assert (again.x.dtype, again.y.dtype, again["is"].dtype) == (table.x.dtype, table.y.dtype, table["is"].dtype)


def test_a_path_shows_its_steps_its_jumps_and_what_it_misses():
    cells = torch.tensor([[0, 0], [0, 1], [1, 1], [3, 1]])  # three steps, the last a jump out of the grid
    axes = draw_paths(path_table({"a path": (cells, (2, 2))}), title="a path").axes[0]
    steps, jumps = (part for part in axes.collections if isinstance(part, LineCollection))
    assert [step.tolist() for step in steps.get_segments()] == [[[0, 0], [1, 0]], [[1, 0], [1, 1]]]
    assert [step.tolist() for step in jumps.get_segments()] == [[[1, 1], [1, 3]]]
    missed, outside = (part.get_offsets().tolist() for part in axes.collections if part not in (steps, jumps))
    assert (missed, outside) == ([[0, 1]], [[1, 3]])
    with pytest.raises(ValueError, match="2 cells or more, got 1: 'here'"):
        path_table({"here": (torch.zeros(1, 3), (1, 1, 1))})


@pytest.mark.parametrize("curve", ["hilbert", "random"])
def test_the_walk_ends_where_the_curve_is(curve):
    order = Ordering.random(20, 0).perm if curve == "random" else Ordering.from_curve(curve, 20, grid=(4, 5)).perm
    cells = torch.stack(torch.unravel_index(order, (4, 5)), dim=1)
    table = path_table({"a walk": (cells, (4, 5))})
    for walked, count in ((1, 1), (50, 10), (100, 20)):
        axes = draw_paths(table, title="a walk", walked=walked).axes[0]
        lines = [part for part in axes.collections if isinstance(part, LineCollection)]
        steps = [step.tolist() for part in lines for step in part.get_segments()]
        assert sorted(steps) == sorted(map(list, pairwise(cells.flip(1).tolist()[:count])))
        heads = [part.get_offsets().tolist() for part in axes.collections if part not in lines]
        assert list(filter(None, heads)) == ([] if walked == 100 else [[cells[count - 1].flip(0).tolist()]])


def test_boxes_and_pictures_are_drawn_with_their_path():
    cells = curve_coordinates("hilbert", (3, 4, 2))
    (axes,) = draw_volumes(path_table({"a box": (cells, (3, 4, 2))}), title="a box").axes[:1]
    assert len(axes.collections[0]._segments3d) == 23
    flat = curve_coordinates("hilbert", (2, 2))
    table = path_table({"": (flat, (2, 2))}).assign(grey=[0.0, 1.0, 0.5, 0.25])
    picture = draw_paths(table, title="a picture").axes[0].images[0].get_array()
    assert [picture[row, col] for row, col in flat.tolist()] == pytest.approx([0.45, 1.0, 0.725, 0.5875])
