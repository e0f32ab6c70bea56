"""The attention of one denoising step of a published video model, with windows and without: notebook 06c.

Layers are those of NVIDIA's Cosmos-Predict2 2B video-to-world with its sparse attention, at 720p: 24 frames of 44 x 80
tokens, 16 heads of 128 (github.com/nvidia-cosmos/cosmos-predict2, its configuration of the 2B network).
"""

from collections.abc import Callable, Iterator, Sequence
from math import nan
from typing import TYPE_CHECKING, NamedTuple

import torch

from hilbert_lib.lab.calls import Call, Way
from hilbert_lib.lab.sweeps.options import grid_rivals, option_table
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import Neighbourhood

if TYPE_CHECKING:
    import pandas as pd  # here it would be loaded by every process that measures

VIDEO_SWEEP, FULL = "video", "full attention"
COSMOS_GRID = (24, 44, 80)


class Layers(NamedTuple):
    """Layers of a model that attend in one way."""

    count: int
    window: tuple[int, int, int]
    stride: tuple[int, int, int] = (1, 1, 1)
    dilation: tuple[int, int, int] = (1, 1, 1)

    @property
    def name(self) -> str:
        """The window, with stride and dilation where there are any."""
        words = ["x".join(map(str, self.window))]
        for word, steps in (("stride", self.stride), ("dilation", self.dilation)):
            words += [f"{word} {'x'.join(map(str, steps))}"] if set(steps) != {1} else []
        return ", ".join(words)


COSMOS_LAYERS = (
    Layers(2, (24, 4, 16), dilation=(1, 11, 5)),
    Layers(3, (24, 12, 16), stride=(1, 4, 1), dilation=(1, 1, 5)),
    Layers(7, (24, 12, 24), stride=(1, 4, 8)),
    Layers(15, (24, 20, 40), stride=(1, 4, 8)),
    Layers(1, (24, 28, 56), stride=(1, 4, 8)),
)


def fitted(layers: Layers, shape: Sequence[int]) -> Neighbourhood:
    """The neighbourhood of some layers; on a smaller grid windows, strides and dilations in proportion, rounded down.

    >>> fitted(COSMOS_LAYERS[2], (2, 11, 20)).window
    (2, 3, 6)
    """

    def scaled(steps: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(1, step * side // whole) for step, side, whole in zip(steps, shape, COSMOS_GRID, strict=True))

    window = scaled(layers.window)
    stride = tuple(min(pair) for pair in zip(scaled(layers.stride), window, strict=True))
    return Neighbourhood(tuple(shape), window, stride=stride, dilation=scaled(layers.dilation))


def video_calls(
    shape: Sequence[int], *, heads: int, head_dim: int, device: torch.device, dtype: str
) -> Iterator[tuple[str, str, Call]]:
    """Base, option and call for `run_options`: full attention, then each way in which layers attend."""
    cells = torch.Size(shape).numel()
    sizes = {"length": cells, "heads": heads, "head_dim": head_dim, "device": device, "dtype": dtype}
    dense = "cudnn" if device.type == "cuda" else "sdpa"
    yield VIDEO_SWEEP, FULL, Call(DilatedPattern((cells,), (1,)), **sizes, backend=dense)
    for layers in COSMOS_LAYERS:
        yield VIDEO_SWEEP, layers.name, Call(fitted(layers, shape), **sizes)


def video_rivals(base: str, option: str, call: Call) -> dict[str, Callable[[], Way]]:
    """FlexAttention and NATTEN on the layers with windows. Full attention is what they all stand beside."""
    return {} if option == FULL else grid_rivals(call)


def step_table(records: list[dict], shape: Sequence[int] = COSMOS_GRID) -> "pd.DataFrame":
    """The attention of one denoising step, a row for each way in which layers attend, and one for the step.

    Columns: attention, layers, share (of the pairs of full attention), and where it was timed, in ms of all its layers:
    ours_ms, other_ms (the fastest other way), full_ms (as many layers of full attention); times (full over ours), and
    promised (1 / share); error.
    """
    import pandas as pd

    timed = option_table(records, VIDEO_SWEEP).set_index("option") if records else None
    rows, cells = [], torch.Size(shape).numel()
    for layers in COSMOS_LAYERS:
        row = {"attention": layers.name, "layers": layers.count, "share": fitted(layers, shape).pairs / cells**2}
        row |= dict.fromkeys(("ours_ms", "other_ms", "full_ms", "error"), nan)
        if timed is not None:
            own, full = timed.loc[layers.name], timed.loc[FULL]
            row |= {"ours_ms": layers.count * own.median_ms, "full_ms": layers.count * full.median_ms}
            row |= {"other": own.other, "other_ms": layers.count * own.median_ms * own.ratio, "error": own.error}
        rows.append(row)
    table = pd.DataFrame(rows)
    step = {"attention": "one step", "layers": table.layers.sum()}
    step["share"] = (table.share * table.layers).sum() / table.layers.sum()
    step |= {name: table[name].sum(skipna=False) for name in ("ours_ms", "other_ms", "full_ms")}
    step["error"] = table.error.max()
    table = pd.concat([table, pd.DataFrame([step])], ignore_index=True)
    return table.assign(times=table.full_ms / table.ours_ms, promised=1 / table.share)
