"""A claim of our own, of small models that learn."""

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
        measure=learning.over_the_spread,
        claimed=(Band(least=1.0),),
        verdict="holds",
        device="cpu",
    ),
)
