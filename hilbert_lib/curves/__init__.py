"""Coordinates along space-filling curves (coordinates); on a GPU by kernels of our own (kernels)."""
