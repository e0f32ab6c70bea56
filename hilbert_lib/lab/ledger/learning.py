"""Cases of models that learn, from the trainings of notebooks 10 and 14."""

import numpy as np
import pandas as pd

from hilbert_lib.lab.sweeps.learning import DILATED, LEARNT_ORDERS, PICTURES, TEXT, TWIN, WINDOWS
from hilbert_lib.lab.tables import of_sweep
from hilbert_lib.lab.timing import SEED
from hilbert_lib.lab.training import KIND, learning_table

ROWS = "raster"
RESAMPLED = 2000


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


def orders_over_rows(records: list[dict]) -> pd.DataFrame:
    """The held-out loss with each order, and with a window, over that with rows: of one picture and seed each.

    name; value: the geometric mean over pictures and seeds. low, high: its 95 % interval, of seeds and pictures drawn
    anew with replacement, both at once: so it speaks of other seeds and other pictures. loss: the mean. seeds,
    pictures: how many. ValueError where there is no such training.
    """
    trainings = [record for record in records if record.get("kind") == KIND]
    losses = {}  # of a name: (seeds, pictures)
    for record in sorted(of_sweep(trainings, LEARNT_ORDERS), key=lambda record: record["parameters"]["seed"]):
        losses.setdefault(record["name"], []).append(record["losses"])
    tables = {name: np.array(rows) for name, rows in losses.items()}
    seeds, pictures = tables[ROWS].shape
    random = np.random.default_rng(SEED)
    drawn = random.integers(seeds, size=(RESAMPLED, seeds, 1)), random.integers(pictures, size=(RESAMPLED, 1, pictures))
    cases = []
    for name, table in tables.items():
        ratio = np.log(table / tables[ROWS])
        low, high = np.exp(np.quantile(ratio[drawn].mean((1, 2)), (0.025, 0.975)))
        about = {"name": name, "loss": table.mean(), "seeds": seeds, "pictures": pictures}
        cases.append({**about, "value": np.exp(ratio.mean()), "low": low, "high": high})
    return pd.DataFrame(cases)
