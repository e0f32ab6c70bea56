"""Figures show all of their table, and can be drawn again from the files beside them."""

import math
from io import BytesIO

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from hilbert_lib.lab.figures import redraw, show
from hilbert_lib.lab.figures.curves import path_table
from hilbert_lib.lab.figures.patterns import draw_errors, draw_mixing, draw_pattern, draw_work
from hilbert_lib.lab.figures.record import _columns, _table, in_256_colours, read_figures, write_figures
from hilbert_lib.lab.figures.seeds import draw_key_sets
from hilbert_lib.lab.patterns import mixing, multiplicities
from hilbert_lib.lab.seeds import key_set_table
from hilbert_lib.pattern import DilatedPattern


def panels(figure):
    return [axes.images[0] for axes in figure.axes]


@pytest.mark.parametrize("branches", [1, 2, 5, 9])
def test_every_count_of_branches_has_a_shade_of_its_own(branches):
    seen = multiplicities(DilatedPattern((4,) * branches, (1, *[2] * (branches - 1))), 4, kv_heads=1)
    figure = draw_pattern(seen, length=4)
    (panel,) = panels(figure)
    shades = panel.to_rgba(np.arange(branches + 1)[None])[0].sum(-1)
    assert (np.diff(shades) < 0).all()
    assert panel.get_array().max() == branches
    assert [text.get_text() for text in figure.legends[0].texts] == [str(n) for n in range(branches + 1)]


def test_heads_that_see_nothing_are_drawn_empty():
    pattern = DilatedPattern((2,), (2,), offsets="head_block")
    seen = multiplicities(pattern, 1, kv_heads=4)
    assert set(seen["head"]) == {0, 1}
    figure = draw_pattern(seen, length=1, heads=4)
    assert [axes.get_title() for axes in figure.axes] == [f"head {n}" for n in range(4)]
    assert [panel.get_array().sum() for panel in panels(figure)] == [1, 1, 0, 0]


def test_a_pattern_without_pairs_is_drawn_and_redrawn(tmp_path):
    nothing = multiplicities(DilatedPattern((2,), (2,), offsets="branch"), 2, kv_heads=1).iloc[:0]
    figure = show(draw_pattern, nothing, output_dir=str(tmp_path), length=2, heads=3)
    assert [panel.get_array().sum() for panel in panels(figure)] == [0, 0, 0]
    assert redraw(tmp_path) == [tmp_path / "draw_pattern.png"]


def test_every_curve_of_work_is_drawn_unlike_the_others():
    names = [f"pattern {n}" for n in range(7)]
    table = pd.DataFrame([(n, name, 10 * n + 1) for name in names for n in (1, 2)], columns=["length", "what", "flop"])
    lines = draw_work(table).axes[0].lines
    assert [line.get_label() for line in lines] == names
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == 7


def test_backends_of_any_name_have_markers_of_their_own():
    names = [f"backend {n}" for n in range(8)]
    table = pd.DataFrame([{"backend": name, "dtype": "float32", "out": 0.1} for name in names])
    table = table.assign(lse=0.1, dq=0.0, dk=0.1, dv=0.1)
    for axes in draw_errors(table).axes:
        assert [line.get_label() for line in axes.lines] == names
        assert len({line.get_marker() for line in axes.lines}) == 8
        places = [line.get_xdata()[0] for line in axes.lines]
        assert all(-0.5 < x < 0.5 for x in places)
        assert len(set(places)) == 8


WORK = pd.DataFrame({"length": [1, 2], "what": "dense", "flop": [1, 4]})
SEEN = multiplicities(DilatedPattern((2,), (1,)), 4, kv_heads=1)


def test_figures_are_kept_in_256_colours_that_look_like_their_own(tmp_path):
    figure = show(draw_pattern, SEEN, output_dir=str(tmp_path), length=4)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    small = in_256_colours(drawn.getvalue())
    assert len(small) < 0.6 * drawn.getbuffer().nbytes
    with Image.open(BytesIO(small)) as kept, Image.open(drawn) as own:
        difference = np.abs(np.subtract(kept.convert("RGB"), own.convert("RGB"), dtype=int))
        assert difference.max() < 24
    with Image.open(tmp_path / "draw_pattern.png") as file:
        assert file.mode == "P"


def test_numbers_of_numpy_are_saved_as_plain_ones(tmp_path):
    show(draw_pattern, SEEN, output_dir=str(tmp_path), length=np.int64(4))
    assert read_figures(tmp_path)["draw_pattern"]["options"] == {"length": 4}
    assert len(redraw(tmp_path)) == 1


def test_options_that_cannot_be_saved_leave_no_files(tmp_path):
    with pytest.raises(AttributeError):
        show(draw_pattern, SEEN, output_dir=str(tmp_path), length={4})
    assert list(tmp_path.iterdir()) == []


def test_one_bad_figure_is_named_and_the_others_are_redrawn(tmp_path):
    for name in "mn":
        show(draw_work, WORK, output_dir=str(tmp_path), name=name)
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


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(13,)], "2 sides or all 3, got 13"),
        ([(4, 4, 4), (5, 4)], "2 sides or all 3, got 4 x 4 x 4, 5 x 4"),
        ([(1, 1, 1)], "at least 2 cells, got '1 x 1 x 1' of 1"),
    ],
)
def test_what_is_no_path_through_a_grid_is_named(shapes, words):
    with pytest.raises(ValueError, match=words):
        path_table({" x ".join(map(str, each)): (torch.zeros(math.prod(each), len(each)), each) for each in shapes})


@pytest.mark.parametrize(("rate", "told"), [(1, "One function here"), (4, "Two functions")])
def test_the_figure_of_key_sets_says_whether_they_are_two(rate, told):
    figure = draw_key_sets(key_set_table(256, 64, rate), length=256, dilation_rate=rate)
    assert figure.get_suptitle().startswith(told)


@pytest.mark.parametrize(("query", "told"), [(3, "in no branch, it sees no key"), (4, "two ways, the same weights")])
def test_a_query_without_keys_is_drawn_as_one(query, told):
    x = torch.ones(1, 8, 1, 4)
    table = mixing(x, x, DilatedPattern((8,), (4,), offsets="zero"), query=query)
    assert draw_mixing(table, query=query).axes[0].get_title() == f"Query {query} of head 0: {told}"
