"""The grammar of figures: every row of a table is drawn, in the panel and the colour that its columns name."""

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import same_color

from hilbert_lib.lab.figures.plots import bars, heat, lines, points, styles

TABLE = pd.DataFrame(
    [(way, name, n, n * scale) for way in ("out", "back") for name, scale in (("a", 1.0), ("b", 3.0)) for n in (1, 2)],
    columns=["way", "name", "n", "ms"],
).assign(low=lambda t: t.ms - 0.5, high=lambda t: t.ms + 0.5)
AXES = {"x": "n", "y": "ms", "by": "name", "across": "way", "title": "b takes three times as long"}


@pytest.mark.parametrize("draw", [lines, points])
def test_each_value_has_its_colour_and_each_panel_its_rows(draw):
    figure = draw(TABLE, **AXES, low="low", high="high", level=1.0)
    assert [axes.get_title() for axes in figure.axes] == ["out", "back"]
    for axes in figure.axes:
        drawn = {each.get_label(): each.lines[0] for each in axes.containers}
        assert [list(line.get_ydata()) for line in drawn.values()] == [[1.0, 2.0], [3.0, 6.0]]
        assert not same_color(*(line.get_color() for line in drawn.values()))
        assert all(each.has_yerr for each in axes.containers)
        assert [1.0, 1.0] in [list(line.get_ydata()) for line in axes.lines]  # the level
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "b"]


def test_what_was_expected_is_a_line_and_a_missing_value_no_marker():
    table = TABLE.assign(expected=TABLE.ms * 2, ms=TABLE.ms.where(TABLE.n == 1))
    (axes, _) = points(table, **AXES, expected="expected", logy=10).axes
    expected, measured = (axes.lines[0], axes.containers[0].lines[0])
    assert list(expected.get_ydata()) == [2.0, 4.0]
    assert pd.Series(measured.get_ydata()).isna().tolist() == [False, True]
    assert same_color(expected.get_color(), measured.get_color())
    assert axes.get_ylim()[1] > 12  # all that was expected is in it


def test_a_scale_from_zero_holds_what_any_panel_draws():
    table = TABLE.assign(ms=TABLE.ms.where(TABLE.way == "out", TABLE.ms * 10))
    for axes in lines(table, **AXES, from_zero=True).axes:
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] >= 60


def test_bars_stand_side_by_side_with_their_intervals_and_numbers():
    (axes, _) = bars(TABLE, **AXES, low="low", high="high", write="{:.0f}").axes
    drawn = {each.get_label(): each.patches for each in axes.containers if hasattr(each, "patches")}
    assert {name: [bar.get_height() for bar in each] for name, each in drawn.items()} == {"a": [1, 2], "b": [3, 6]}
    ends = sorted(x for bar in axes.patches for x in (bar.get_x(), bar.get_x() + bar.get_width()))
    assert ends == pytest.approx([-0.425, 0, 0, 0.425, 0.575, 1, 1, 1.425])  # none hides another
    intervals = [line[:, 1].tolist() for each in axes.collections for line in each.get_segments()]
    assert intervals == [[0.5, 1.5], [1.5, 2.5], [2.5, 3.5], [5.5, 6.5]]
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3", "6"]


def test_a_panel_has_no_bar_of_a_name_without_rows_there(monkeypatch):
    places, bar = [], Axes.bar
    monkeypatch.setattr(Axes, "bar", lambda axes, x, *given, **look: places.append(x) or bar(axes, x, *given, **look))
    table = TABLE.drop(TABLE[(TABLE.way == "back") & (TABLE["name"] == "b")].index)
    of_both, of_one = bars(table, **AXES).axes
    assert [len(of_both.patches), len(of_one.patches)] == [4, 2]
    assert [x.dtype for x in places] == 4 * [float]  # of no rows pandas makes strings, which pyarrow adds nothing to


def test_a_line_goes_by_x_and_panels_stand_in_rows_and_columns():
    (first, *_) = figure = lines(TABLE.iloc[::-1], **AXES | {"across": "name", "by": "", "down": "way"}).axes
    assert [axes.get_title() for axes in figure] == ["back, b", "back, a", "out, b", "out, a"]
    assert [list(line) for line in first.lines[0].get_data()] == [[1, 2], [3.0, 6.0]]


def test_a_map_writes_what_it_knows_and_frames_what_is_marked():
    table = pd.DataFrame({"work": ["w", "v"], "order": ["a", "b"], "gain": [1.25, 0.5], "best": [True, False]})
    (axes,) = heat(table, row="work", column="order", value="gain", frame="best", title="a gains").axes
    assert [text.get_text() for text in axes.texts] == ["1.25", "0.50"]
    assert [frame.get_center().tolist() for frame in axes.patches] == [[0, pytest.approx(0)]]


def test_a_name_without_a_look_takes_no_look_of_the_others():
    looks = styles(["hilbert", "mine", "residue", "yours"])
    assert len({look["color"] for look in looks.values()}) == 4
    assert looks["hilbert"] == styles(["hilbert"])["hilbert"]


@pytest.mark.parametrize("values", [(1.1347, 1.1459), (8.0, 9.0), (3.0, 40.0), (1.0, 1.0), (1e-3, 2e3)])
def test_a_logarithmic_axis_has_ticks_among_its_values(values):
    table = pd.DataFrame({"n": [1, 2], "ms": values})
    (axes,) = lines(table, x="n", y="ms", logy=10, title="").axes
    low, high = axes.get_ylim()
    assert low < min(values) <= max(values) < high
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= (2 if values[0] < values[1] else 1)


def test_a_table_that_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="the table must have the columns kind, ys; it has way, name"):
        lines(TABLE, x="n", y="ys", by="kind", title="")
    with pytest.raises(ValueError, match="the table must have rows to draw, got none: nothing"):
        points(TABLE.iloc[:0], x="n", y="ms", title="nothing")


def test_a_number_over_a_bar_has_no_exponent():
    table = pd.DataFrame({"x": ["a", "b"], "y": [4105.3, 8.13]})
    (axes,) = bars(table, x="x", y="y", title="t", write="{:.3g}", logy=10).axes
    assert [label.get_text() for label in axes.texts] == ["4,105", "8.13"]
