"""Two claims of our own, of small models that learn."""

from hilbert_lib.lab.ledger import learning
from hilbert_lib.lab.ledger.claim import Band, Claim

CLAIMS = (
    Claim(
        "L1",
        claim="a small LongNet learns from text, and a small model with windows from pictures",
        source="notebook 10",
        question=(
            "held-out loss of a twin whose tokens attend to themselves alone, less that of the model, over the spread "
            "of three seeds; same weights, batches and steps"
        ),
        quantity="difference of losses over their spread",
        record="10_in_a_model",
        sweeps=("text", "pictures"),
        measure=learning.over_the_spread,
        claimed=(Band(least=1.0),),
        verdict="holds",
    ),
    Claim(
        "L2",
        claim="with dilated attention a small model learns more from pictures along a curve than row by row",
        source="notebook 14",
        question=(
            "held-out loss along Morton's and Hilbert's curve over that row by row; same weights, batches, steps and "
            "work; the interval is of seeds and held-out pictures drawn anew"
        ),
        quantity="loss over loss",
        record="14_directions",
        sweeps=("orders",),
        measure=learning.orders_over_rows,
        claimed=(Band(most=1.0),),
        leaves_out={
            "name == 'raster'": "row by row, with which the others are compared",
            "name == 'windows'": "windows, which have no order (notebook 14 shows them)",
        },
        verdict="holds",
        note="the gain is 3 to 4 percent, by its intervals 0.4 to 8; with one seed of four rows learn more; a smaller "
        "model on a CPU gained half of the loss; of a window of the same work the interval reaches above 1 "
        "(notebook 14)",
    ),
)
