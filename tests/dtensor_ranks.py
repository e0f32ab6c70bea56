"""What the tests of DTensors run on two ranks."""

from functools import partial

import torch
from oracle import attending
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hilbert_lib import DilatedPattern, Neighbourhood, Union, attend, attention_weights
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods

NEAR = Neighbourhood((3, 4), 3)
BY_HEAD = HeadNeighbourhoods(tuple(Neighbourhood((3, 4), window) for window in (1, 2, 3, 3)))
ALONG = DilatedPattern((4, 12), (1, 2))  # offsets by head, which repeat from the third of four heads on
PATTERNS = {
    "offsets that repeat": ALONG,
    "zero offsets and keys": DilatedPattern((5, 12), (3, 4), offsets="zero", padding="zeros"),
    "windows by head": BY_HEAD,
    "union": Union((BY_HEAD, NEAR.of_heads(4))),
}
UNLIKE = {
    "rates that do not divide": DilatedPattern((12,), (3,)),
    "blocks of heads": DilatedPattern((12,), (2,), offsets="head_block"),
    "groups of heads": DilatedPattern((4, 12), (1, 2), mixing="head_groups"),
}
PLACED = {
    "replicated": (Replicate(), Replicate()),
    "by batch": (Replicate(), Shard(0)),
    "by heads": (Replicate(), Shard(2)),
    "by both": (Shard(0), Shard(2)),
}


def drawn() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = {"q": (12, 8), "k": (12, 4), "v": (12, 4), "extra_k": (2, 4), "extra_v": (2, 4)}
    tensors = {
        name: torch.randn(2, *sizes, 4, generator=generator, dtype=torch.float64) for name, sizes in heads.items()
    }
    masks = {"key_padding_mask": 12, "extra_padding_mask": 2}
    return tensors | {name: torch.rand(2, rows, generator=generator) < 0.3 for name, rows in masks.items()}


def compared() -> dict[str, float]:
    """The error of out, lse and gradients against brute force, for each pattern and each placement."""
    mesh, tensors, found = init_device_mesh("cpu", (1, 2)), drawn(), {}
    for name, pattern in PATTERNS.items():
        names, masks = ["q", "k", "v"], ["key_padding_mask"]
        if not isinstance(pattern, DilatedPattern):
            names, masks = [*names, "extra_k", "extra_v"], [*masks, "extra_padding_mask"]
        leaves = [tensors[x].clone().requires_grad_() for x in names]
        hidden = {mask: tensors[mask] for mask in masks}
        out, lse = attending(pattern, **hidden)(*leaves)
        expected = [out, lse, *torch.autograd.grad(out.square().sum(), leaves)]
        for how, placements in PLACED.items():
            of_batch = [Shard(0) if place == Shard(0) else Replicate() for place in placements]
            split = [distribute_tensor(tensors[x], mesh, placements).requires_grad_() for x in names]
            split_masks = {mask: distribute_tensor(tensors[mask], mesh, of_batch) for mask in masks}
            extra = dict(zip(names[3:], split[3:], strict=True))
            out, lse = attend(*split[:3], pattern, return_lse=True, **extra, **split_masks)
            assert out.placements == placements
            grads = torch.autograd.grad(out.square().sum(), split)
            whole = [x.full_tensor() for x in (out, lse, *grads)]
            differences = []
            for got, right in zip(whole, expected, strict=True):  # lse may be -inf in both; NaN is wrong
                differences.append(torch.where(got == right, 0.0, (got - right).abs()).nan_to_num(torch.inf).max())
            found[f"{name}, {how}"] = max(differences).item()
    return found


def refused() -> dict[str, str]:
    """The errors of calls that ranks cannot compute alone."""
    mesh, plain = init_device_mesh("cpu", (2,)), drawn()
    hidden = plain["key_padding_mask"]

    def placed(name: str, *placements) -> torch.Tensor:
        return distribute_tensor(plain[name], mesh, placements)

    q, k, v = (placed(name, Shard(2)) for name in "qkv")
    whole = placed("k", Replicate())
    calls = {
        "by rows": partial(attend, *(placed(name, Shard(1)) for name in "qkv"), NEAR),
        "sums": partial(attend, DTensor.from_local(plain["q"], mesh, [Partial()]), k, v, NEAR),
        "another placement": partial(attend, q, whole, v, NEAR),
        "a plain tensor": partial(attend, q, plain["k"], v, NEAR),
        "no k": partial(attend, q, None, v, NEAR),
        "a plain q": partial(attend, plain["q"], k, v, NEAR),
        "a plain mask": partial(attend, q, k, v, NEAR, key_padding_mask=hidden),
        "a mask alone": partial(
            attend, *(plain[x] for x in "qkv"), NEAR, key_padding_mask=placed("key_padding_mask", Shard(0))
        ),
        "dropout": partial(attend, q, k, v, ALONG, dropout_p=0.1),
        "weights": partial(attention_weights, q, k, NEAR, [0]),
        "few heads": partial(attend, q, *(distribute_tensor(plain[x][:, :, :1], mesh, [Shard(2)]) for x in "kv"), NEAR),
        **{name: partial(attend, q, k, v, pattern) for name, pattern in UNLIKE.items()},
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing"
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def on_two_ranks(_arguments: object) -> list:
    return [compared(), refused()]
