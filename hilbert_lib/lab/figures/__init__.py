"""Every plot of the notebooks: functions from a table to a figure, and the means to save and redraw them."""

from hilbert_lib.lab.figures.record import redraw, show

__all__ = ["redraw", "show"]
