"""The weights of torchscale's attention layers by the names that `MultiheadDilatedAttention` gives them, and back."""

from collections.abc import Mapping

import torch
from torch import Tensor

PROJECTIONS = [f"{name}_proj.{kind}" for kind in ("weight", "bias") for name in ("q", "k", "v", "out")]
NORM = ["inner_attn_ln.weight", "inner_attn_ln.bias"]


def layer_of_torchscale(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The state dict of our module from that of a whole model of theirs, in which the layer's names have a prefix.

    Raises TypeError, or ValueError for a name that is missing or not known, or a tensor of another shape.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must map names to tensors, got {type(state_dict).__name__}")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string such as 'encoder.layers.0.self_attn.', got {prefix!r}")
    theirs = {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}
    needed = PROJECTIONS + (NORM if theirs.keys() & set(NORM) else [])
    for name in theirs:
        if name not in needed:
            raise ValueError(
                f"state_dict has {prefix + name!r}, {_kind(name)}; served are {', '.join(PROJECTIONS + NORM)}"
            )
    if missing := [name for name in needed if name not in theirs]:
        raise ValueError(f"state_dict must have {', '.join(prefix + name for name in missing)}")
    size = theirs["out_proj.bias"].numel()
    for name, x in theirs.items():
        shape = (size, size) if name.endswith("proj.weight") else (size,)
        if x.shape != shape:
            raise ValueError(f"state_dict[{prefix + name!r}] must have shape {shape}, got {tuple(x.shape)}")
    layer = {
        f"in_proj.{kind}": torch.cat([theirs[f"{name}_proj.{kind}"] for name in "qkv"]) for kind in ("weight", "bias")
    }
    layer |= {f"out_proj.{kind}": theirs[f"out_proj.{kind}"] for kind in ("weight", "bias")}
    return layer | {name.replace("inner_attn_ln", "inner_norm"): theirs[name] for name in NORM if name in theirs}


def layer_to_torchscale(layer: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The inverse of `layer_of_torchscale`: the names of torchscale, after a prefix, from our module's state dict.

    Raises ValueError for a layer without biases, or with fewer heads of k and v than of q, which torchscale has not.
    """
    if "in_proj.bias" not in layer:
        raise ValueError("bias must be True for a layer of torchscale, got a layer without in_proj.bias")
    size = layer["out_proj.bias"].numel()
    theirs = {}
    for kind in ("weight", "bias"):
        joined = layer[f"in_proj.{kind}"]
        if len(joined) != 3 * size:
            raise ValueError(f"kv_heads must be num_heads for a layer of torchscale, got in_proj of {len(joined)} rows")
        theirs |= {f"{name}_proj.{kind}": x for name, x in zip("qkv", joined.split(size), strict=True)}
        theirs[f"out_proj.{kind}"] = layer[f"out_proj.{kind}"]
    theirs |= {name: layer[ours] for name in NORM if (ours := name.replace("inner_attn_ln", "inner_norm")) in layer}
    return {prefix + name: x for name, x in theirs.items()}


def _kind(name: str) -> str:
    if name.startswith("xpos"):
        return "of XPOS, positions that turn q and k"
    return "of a multiway layer" if {"A", "B"} & set(name.split(".")) else "which is not known"
