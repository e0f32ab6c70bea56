"""Patterns: the keys that a query sees. Kernels, counts and the ring all read the same pattern.

pattern        the answers of every pattern
dilated        LongNet's branches along a sequence
residues       number of positions that a set of branches covers
neighbourhood  windows on a grid of 1 to 3 axes
blocks         neighbourhoods as kernels read them: rectangles, and blocks of a mask
union          several patterns in one softmax
all_pairs      every query sees every key: queries beside a grid
points         points, each of which sees those in a window around it
point_lists    their packed lists, found without n squared tests
packed_lists   rows of the keys that 64 queries see, and who sees whom, for kernels that know no geometry
"""

from hilbert_lib.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "hilbert_lib.patterns.blocks": ("mask_blocks",),
        "hilbert_lib.patterns.dilated": ("MIXING_RULES", "DilatedPattern"),
        "hilbert_lib.patterns.neighbourhood": ("EDGES", "Neighbourhood"),
        "hilbert_lib.patterns.points": ("PointNeighbourhood", "point_order"),
        "hilbert_lib.patterns.union": ("Union",),
    },
)
