"""The backends of neighbourhood attention, by name."""

from hilbert_lib.attention.grids import eager, flex, fused, reference

BACKENDS = {each.BACKEND.name: each.BACKEND for each in (fused, flex, eager, reference)}
