"""Small models trained from seeds, and a record of each: its loss while it learns, and on what it has not seen."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hilbert_lib.lab.first_pass import first_pass
from hilbert_lib.lab.records import Kept
from hilbert_lib.lab.tables import of_sweep

KIND = "training"
WARM_UP = 0.1  # share of the steps in which the rate rises; then it falls
SHOWN_LOSSES = 20  # points of a curve, each a mean over steps


@dataclass(frozen=True)
class Training:
    """A model and what it learns.

    name: of what its tokens attend to. parameters: what else tells it from others; "sweep" and "seed" are among them.
    make: the model, after torch's seed is set. loss: of the model on a batch that a generator draws. held_out: the
    same on what is not learnt, a tensor of one loss, or of several: one for each picture. steps: batches. tokens: of a
    batch. rate: the largest, of AdamW.
    """

    name: str
    parameters: dict
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], Tensor]
    held_out: Callable[[nn.Module], Tensor]
    steps: int
    tokens: int
    rate: float


def fit(training: Training, *, device: torch.device | str) -> tuple[nn.Module, dict]:
    """The trained model, and its record: see `run_trainings`."""
    if compiling := first_pass():
        compiling.leave_out("training")
    device = torch.device(device)
    seed = training.parameters["seed"]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = training.make().to(device)
    start = time.perf_counter()
    losses = _learn(model, training, generator, device)
    seconds = time.perf_counter() - start
    with torch.no_grad(), _precision(device):
        held_out = training.held_out(model).float()
    record = {
        "kind": KIND,
        "name": training.name,
        "parameters": training.parameters,
        "loss": held_out.mean().item(),
        "curve": _curve(losses, training.tokens),
        "weights": sum(weight.numel() for weight in model.parameters()),
        "seconds": seconds,
    }
    if held_out.dim():
        record["losses"] = held_out.tolist()
    return model, record


def run_trainings(trainings: Iterable[Training], *, device: torch.device | str, output_dir: str = "") -> list[dict]:
    """Train each model, and keep its record in a folder's results.jsonl. What is there already is not trained again.

    A record has name, parameters, loss (held-out; the mean of several, which are `losses`), curve (pairs of tokens and
    the loss while learning, a mean over steps), weights (how many the model has) and seconds.
    """
    kept = Kept(output_dir, _key)
    records = []
    for training in trainings:
        known = kept.known.get(_key({"kind": KIND, "name": training.name, "parameters": training.parameters}))
        records.append(known or kept.add(fit(training, device=device)[1]))
    return records


def learning_table(records: list[dict], sweep: str):
    """Every training of a sweep: name, its parameters, loss, weights, seconds. ValueError where there is none."""
    import pandas as pd

    rows = of_sweep([record for record in records if record.get("kind") == KIND], sweep)
    numbers = ("loss", "weights", "seconds")
    return pd.DataFrame(
        {"name": row["name"], **row["parameters"], **{name: row[name] for name in numbers}} for row in rows
    )


def curve_table(records: list[dict], sweep: str):
    """The curves of a sweep: name, seed, tokens and loss, a row for each point."""
    import pandas as pd

    rows = of_sweep([record for record in records if record.get("kind") == KIND], sweep)
    points = []
    for row in rows:
        about = {"name": row["name"], "seed": row["parameters"]["seed"]}
        points += [{**about, "tokens": tokens, "loss": loss} for tokens, loss in row["curve"]]
    return pd.DataFrame(points)


def _precision(device: torch.device) -> torch.autocast:
    # Entered anew in each step: autocast keeps its copies of the weights, in half precision, until it is left.
    return torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda")


def _learn(model: nn.Module, training: Training, generator: torch.Generator, device: torch.device) -> list[float]:
    # The loss of each step.
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, training.rate, total_steps=training.steps, pct_start=WARM_UP
    )
    losses = []
    for _ in range(training.steps):
        with _precision(device):
            loss = training.loss(model, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def _curve(losses: list[float], tokens: int) -> list[tuple[int, float]]:
    steps = -(-len(losses) // SHOWN_LOSSES)  # of a point
    chunks = [losses[start : start + steps] for start in range(0, len(losses), steps)]
    return [(tokens * (steps * place + len(chunk)), sum(chunk) / len(chunk)) for place, chunk in enumerate(chunks)]


def _key(record: dict) -> str | None:
    return json.dumps([record["name"], record["parameters"]], sort_keys=True) if record.get("kind") == KIND else None
