"""Coordinates along space-filling curves, for any rectangle or box.

hilbert      the recursion of the Hilbert curve
kernels      the same on a GPU
codes        places of single cells along the Hilbert and the Morton curve of a cube
coordinates  every curve, and its inverse
"""

from hilbert_lib.curves.coordinates import KINDS, curve_coordinates, curve_index

__all__ = ["KINDS", "curve_coordinates", "curve_index"]
