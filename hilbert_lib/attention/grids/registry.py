"""The backends of neighbourhood attention, by name."""

from hilbert_lib.attention.grids import eager, flex, fused, reference

BACKENDS = {each.name: each for each in (*fused.BACKENDS, flex.BACKEND, eager.BACKEND, reference.BACKEND)}
