"""Cases of models that learn, from the trainings of notebook 10."""

import pandas as pd

from hilbert_lib.lab.sweeps.learning import DILATED, PICTURES, TEXT, TWIN, WINDOWS
from hilbert_lib.lab.training import learning_table


def over_the_spread(records: list[dict]) -> pd.DataFrame:
    """The held-out loss of the twin less that of the model, over the spread of the seeds; on text and on pictures.

    value: the difference of the means. low, high: of the two seeds that are nearest, and farthest. The spread is the
    larger of the two ranges over seeds. model, twin: the mean losses. weights: how many the models have.
    """
    cases = []
    for sweep, name in ((TEXT, DILATED), (PICTURES, WINDOWS)):
        table = learning_table(records, sweep)
        model, twin = (table[table.name == each].loss for each in (name, TWIN))
        spread = max(loss.max() - loss.min() for loss in (model, twin))
        ends = {
            "value": twin.mean() - model.mean(),
            "low": twin.min() - model.max(),
            "high": twin.max() - model.min(),
        }
        over = {end: difference / spread for end, difference in ends.items()}
        means = {"model": model.mean(), "twin": twin.mean()}
        cases.append({"learns from": sweep, "seeds": len(model), "weights": int(table.weights.max()), **means, **over})
    return pd.DataFrame(cases)
