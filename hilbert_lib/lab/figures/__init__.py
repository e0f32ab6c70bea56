"""Every plot of the notebooks: functions from a table to a figure, and the means to save and redraw them.

record    figures saved with their data, and drawn again from it
plots     lines, bars, points and heat maps of one table
explore   widgets above a figure
curves    paths through grids
patterns  who sees whom
locality  what a branch reads of what is stored
grids     what a block of queries reads on a grid
ring      what ranks send
verdict   what is claimed beside what was measured
"""

from hilbert_lib.lab.figures.record import redraw, show

__all__ = ["redraw", "show"]
