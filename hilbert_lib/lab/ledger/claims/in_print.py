"""Six claims of publications about orders and windows: notebook 12."""

from hilbert_lib.lab.ledger import in_print
from hilbert_lib.lab.ledger.claim import Band, Claim

RECORD, POINTS = "12_in_print", "13_points"
COST = {"reordered": "the same call with its layout made inside: what the reordering costs"}

CLAIMS = (
    Claim(
        "P1",
        claim="in FlexAttention the Hilbert curve makes window attention 4 and slide attention 18 times as fast",
        source="arXiv 2511.05832",
        question=(
            "time of every other way over that of FlexAttention along the curve, forward: both sides as its notebook "
            "is committed, and one function on both sides at its sizes"
        ),
        quantity="ratio of times",
        record=RECORD,
        sweeps=("in print, P1",),
        measure=in_print.curve_windows,
        claimed=(Band(least=4.0, where="attention == 'window'"), Band(least=18.0, where="attention == 'slide'")),
        leaves_out=COST,
        verdict="does not hold (4 of 15 cases)",
        note="it holds as printed, where other functions of other sizes are compared",
    ),
    Claim(
        "P2",
        claim="tiles along the curve make FLUX's attention 2.3 (1024 x 1024) and 4.17 (2048 x 2048) times as fast",
        source="arXiv 2509.26538",
        question=(
            "time of dense attention by cuDNN over that of tiles in their faster way, forward; and of exact windows "
            "of as many pairs, which tiles should beat"
        ),
        quantity="ratio of times",
        record=RECORD,
        sweeps=("in print, P2",),
        measure=in_print.curve_tiles,
        claimed=(
            Band(least=2.3, where="beside == 'dense' and side <= 64"),
            Band(least=4.17, where="beside == 'dense' and side > 64"),
            Band(least=1.01, where="beside == 'windows'"),
        ),
        leaves_out=COST,
        verdict="does not hold",
        note="tiles are computed by FlexAttention and in batches; the publication's kernel is not rebuilt",
    ),
    Claim(
        "P3",
        claim="dense patches of 1,024 points along a curve are faster than attention to every neighbour",
        source="arXiv 2312.10035",
        question="time of lists of every neighbour over that of patches, forward and backward",
        quantity="ratio of times",
        record=POINTS,
        sweeps=("points",),
        measure=in_print.patches_over_lists,
        claimed=(Band(least=1.01),),
        leaves_out={"base != 'patches'": "the claim is of patches"},
        verdict="does not hold (3 of 14 cases)",
        note="the cases that hold are of a window of 17 x 17 over tissue; patches lose 7 to 39 % of the neighbours of "
        "made clouds of 4,096 points, counted; whole models are not rebuilt",
    ),
    Claim(
        "P4",
        claim="2-D Morton order makes a kernel of blocks over 256 x 256 tokens faster than rows",
        source="arXiv 2512.16615",
        question="time of exact windows in FlexAttention, cells stored row by row over cells in Morton order, forward",
        quantity="ratio of times",
        record=RECORD,
        sweeps=("in print, P4",),
        measure=in_print.orders_beside_morton,
        claimed=(Band(least=1.01),),
        leaves_out={"beside != 'raster'": "the claim is of rows; Hilbert order and boxes stand beside"},
        verdict="does not hold (1 of 2 cases)",
        note="the publication's 28.27 times over dense attention are not rebuilt: its blocks are as many in any order",
    ),
    Claim(
        "P5",
        claim="windows that slide by tiles reach 58.79 % of the GPU's peak, and windows that slide by cells do not",
        source="arXiv 2502.04507",
        question="useful FLOP/s of windows of 18 x 24 x 24 on 30 x 48 x 80 tokens over 989 TFLOP/s, by every way",
        quantity="share of the peak",
        record=RECORD,
        sweeps=("in print, P5",),
        measure=in_print.shares_of_peak,
        claimed=(
            Band(least=0.5879, where="moves == 'by tiles'"),
            Band(most=0.5879, where="moves == 'by cells'"),
        ),
        leaves_out={"moves == 'nowhere'": "dense attention has no window"},
        verdict="does not hold (2 of 3 cases)",
        note="by this library and by FlexAttention; the publication's kernel is not rebuilt",
    ),
    Claim(
        "P6",
        claim="windows with a stride of a tile run at 486 useful TFLOP/s or more",
        source="arXiv 2504.16922",
        question="useful TFLOP/s at the sizes of NATTEN's profiler pages, with their strides, by every way",
        quantity="useful TFLOP/s",
        record=RECORD,
        sweeps=("in print, P6",),
        measure=in_print.rates_of_strides,
        claimed=(Band(least=486.0),),
        leaves_out={"moves != 'by tiles'": "windows without stride, and dense attention, stand beside"},
        verdict="does not hold (2 of 4 cases)",
        note="486 is NATTEN's with permutes on an H100, 651 without; it is a case itself where it is installed",
    ),
)
