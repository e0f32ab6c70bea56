"""Three claims of our own, of windows on grids and over points."""

from hilbert_lib.lab.ledger import kernels, models
from hilbert_lib.lab.ledger.claim import Band, Claim

CLAIMS = (
    Claim(
        "G1",
        claim="on a full grid a kernel that reads boxes of cells needs no order of storage",
        source="notebook 08b",
        question=(
            "pairs that attend, of those that a kernel computes: boxes of cells in plain rows over blocks of 128 "
            "tokens in the best order, on grids and windows that users run"
        ),
        quantity="share over share",
        measure=models.boxes_over_orders,
        claimed=(Band(least=1.01),),
        verdict="holds",
        note="counted; the times of both stand in notebook 08b",
    ),
    Claim(
        "G2",
        claim="on a full grid a kernel that reads boxes of plain rows is faster than one of blocks in any order",
        source="notebook 08b",
        question=(
            "time of FlexAttention, alone and over FlashAttention-4, each in its best order, over that of boxes in "
            "plain rows, on grids and windows that users run, forward and backward"
        ),
        quantity="ratio of times",
        record="08b_kernels_on_grids",
        sweeps=("neighbourhood",),
        measure=kernels.over_kernels,
        claimed=(Band(least=1.01),),
        leaves_out={
            "rival != 'boxes, raster'": "boxes take no part",
            "kernel == 'NATTEN'": "tiles of its own, and no blocks of storage",
            "kernel == 'rectangles'": "our plain kernel, which reads rectangles and no blocks",
        },
        verdict="holds",
    ),
    Claim(
        "G3",
        claim="over points tiles hold more useful pairs if the order of work follows a curve",
        source="notebook 13",
        question=(
            "pairs that attend, of those in packed tiles of 64 queries by 64 keys: along Morton's, Hilbert's and the "
            "library's own order over row by row, on a made slide and a made room of 4,096 points"
        ),
        quantity="share over share",
        measure=models.tiles_along_curves,
        claimed=(Band(least=1.01),),
        verdict="holds",
        note="counted; no time is measured yet",
    ),
)
