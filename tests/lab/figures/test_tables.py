"""Tables as HTML: headings with units, and numbers as one reads them."""

import re

import numpy as np
import pandas as pd
import pytest

from hilbert_lib.lab.figures.tables import plain, table_html

TABLE = pd.DataFrame({"mhz": [1980.4], "error": [2.34e-7], "none": [np.nan], "is_held": [np.bool_(True)], "more": [1]})


def test_headings_are_those_that_are_given_and_no_number_of_a_measurement_has_an_exponent():
    html = table_html(TABLE, {"mhz": "clock [MHz]", "none": "peak [GB]", "is_held": "held"}, title="an H100")
    assert html.startswith("<b>an H100</b>")
    assert re.findall("<th>(.*?)</th>", html) == ["clock [MHz]", "peak [GB]", "held"]
    assert "<td>1,980</td>" in html
    assert "<td>yes</td>" in html
    assert "more" not in html


def test_an_index_with_a_name_is_a_column_and_one_without_is_none():
    rows = pd.Series([0.5, 2.0], pd.Index(["a", "b"], name="side"), name="ratio")
    assert "<th>side</th>" in table_html(rows)
    assert "<th>index</th>" not in table_html(TABLE)
    with pytest.raises(ValueError, match=r"columns must be of the table's .*, got speed"):
        table_html(TABLE, {"speed": "TFLOP/s"})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12345.6, "12,346"), (682.04, "682"), (1.2314, "1.23"), (0.0216, "0.0216"), (3e-15, "3e-15"), (-0.5, "-0.500"),
        (np.int64(1048576), "1,048,576"), (None, ""), ("auto", "auto"), (np.inf, "inf"), (False, "no"),
    ],
)  # fmt: skip
def test_a_number_is_plain(value, text):
    assert plain(value) == text


def test_a_folded_table_is_behind_its_line():
    html = table_html(TABLE, title="an H100", fold="all rows")
    assert html.startswith("<details><summary>all rows</summary><b>an H100</b><table")
    assert html.endswith("</table></details>")
    assert "<details>" not in table_html(TABLE)
