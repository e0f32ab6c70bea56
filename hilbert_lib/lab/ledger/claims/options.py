"""Three claims of our own, of the options of a call and of a published video model."""

from hilbert_lib.lab.ledger import options
from hilbert_lib.lab.ledger.claim import Band, Claim

RECORD = "06c_options"

CLAIMS = (
    Claim(
        "O1",
        claim="every option in half precision runs at 0.85 of the speed of its base work, or more",
        source="notebook 06c",
        question=(
            "useful FLOP a second of each option over that of its base, grids and sequences, forward, and forward and "
            "backward; single calls"
        ),
        quantity="rate over the base's",
        record=RECORD,
        sweeps=("options",),
        measure=options.shares,
        claimed=(Band(least=0.85),),
        leaves_out={"dtype not in ['float16', 'bfloat16']": "the claim is of half precision"},
        verdict="does not hold (28 of 79 cases)",
        note="windows of few cells, short segments and decoding compute little, and are judged with the others",
    ),
    Claim(
        "O2",
        claim="no option has a faster other way than ours",
        source="notebook 06c",
        question=(
            "time of the fastest other way that serves an option and is exact over ours, in turn; single calls, "
            "forward, and forward and backward"
        ),
        quantity="ratio of times",
        record=RECORD,
        sweeps=("options",),
        measure=options.over_others,
        claimed=(Band(least=1.0),),
        verdict="does not hold (78 of 83 cases)",
        note="options that no other way serves have no case; NATTEN and FlashAttention's packages were not installed",
    ),
    Claim(
        "O3",
        claim="a layer with windows saves at least half of what its share of the pairs promises",
        source="notebook 06c",
        question=(
            "Cosmos-Predict2's layers: time of full attention by cuDNN over that of the layer, times the layer's share "
            "of the pairs, forward"
        ),
        quantity="gain over the promised gain",
        record=RECORD,
        sweeps=("video",),
        measure=options.of_promised,
        claimed=(Band(least=0.5),),
        verdict="holds",
    ),
)
