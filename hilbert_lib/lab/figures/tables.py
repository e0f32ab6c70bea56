"""A table as a reader sees it: HTML, with headings in words and units, and numbers without exponents."""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from IPython.display import HTML, display

DIGITS = 3


def show_table(
    table: pd.DataFrame | pd.Series,
    columns: Mapping[str, str] | None = None,
    *,
    digits: int = DIGITS,
    title: str = "",
    fold: str = "",
) -> None:
    """Display a table as HTML below a cell.

    Args:
        table: what is shown. An index with names becomes columns.
        columns: the heading of each column that is shown, with its unit, in this order; by default all, by their names.
        digits: significant digits of a number that is no integer. A larger number keeps its whole part.
        title: a line above.
        fold: a line in place of the table, which a click on it opens. By default the table is open.

    Raises:
        ValueError: for a column that the table lacks.

    >>> show_table(pd.DataFrame({"ms": [1234.56]}), {"ms": "time [ms]"}, title="a call")
    <IPython.core.display.HTML object>
    """
    display(HTML(table_html(table, columns, digits=digits, title=title, fold=fold)))


def table_html(
    table: pd.DataFrame | pd.Series,
    columns: Mapping[str, str] | None = None,
    *,
    digits: int = DIGITS,
    title: str = "",
    fold: str = "",
) -> str:
    """The HTML of `show_table`."""
    table = table.to_frame() if isinstance(table, pd.Series) else table
    if any(table.index.names):
        table = table.reset_index()
    columns = columns or {name: name for name in table}
    if missing := [name for name in columns if name not in table]:
        raise ValueError(f"columns must be of the table's ({', '.join(map(str, table))}), got {', '.join(missing)}")
    shown = table[[*columns]].map(lambda value: plain(value, digits))
    html = shown.rename(columns=columns).rename_axis(columns=None).to_html(index=False, border=0)
    html = (f"<b>{title}</b>" if title else "") + html
    return f"<details><summary>{fold}</summary>{html}</details>" if fold else html


def plain(value: object, digits: int = DIGITS) -> str:
    """A value as text: thousands apart, no exponent, nothing for what is missing.

    >>> plain(1975.4), plain(0.02157), plain(1048576), plain(float("nan")), plain(True), plain(2.3e-7)
    ('1,975', '0.0216', '1,048,576', '', 'yes', '2.3e-07')
    """
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return "" if value is None else str(value)
    if math.isnan(number):
        return ""
    if math.isinf(number):
        return str(number)
    if number == int(number) and abs(number) < 1e15:
        return f"{int(number):,}"
    if abs(number) < 1e-3:
        return f"{number:.{digits - 1}g}"  # an error, whose size alone is of interest
    places = max(0, digits - 1 - math.floor(math.log10(abs(number))))
    return f"{number:,.{places}f}"
