"""What the tests of DTensors run on two ranks, and on four whose rings share the tokens."""

from functools import partial

import oracle
import torch
import torch.distributed as dist
from oracle import attending
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hilbert_lib import DilatedPattern, Neighbourhood, Rectangles, Union, attend, attention_weights, ring_attend
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
    tensors |= {name: torch.rand(2, rows, generator=generator) < 0.3 for name, rows in masks.items()}
    return tensors | {"bias": torch.randn(8, 5, 5, generator=generator, dtype=torch.float64)}


def compared() -> dict[str, float]:
    """The error of out, lse and gradients against brute force, for each pattern and each placement."""
    mesh, tensors, found = init_device_mesh("cpu", (1, 2)), drawn(), {}
    for name, pattern in PATTERNS.items():
        names, masks = arguments_of(pattern)
        expected = expected_of(pattern, tensors)
        for how, placements in PLACED.items():
            of_batch = [Shard(0) if place == Shard(0) else Replicate() for place in placements]
            of_heads = [Shard(0) if place == Shard(2) else Replicate() for place in placements]
            split = [
                distribute_tensor(tensors[x], mesh, of_heads if x == "bias" else placements).requires_grad_()
                for x in names
            ]
            split_masks = {mask: distribute_tensor(tensors[mask], mesh, of_batch) for mask in masks}
            extra = dict(zip(names[3:], split[3:], strict=True))
            out, lse = attend(*split[:3], pattern, return_lse=True, **extra, **split_masks)
            assert out.placements == placements
            grads = torch.autograd.grad(out.square().sum(), split)
            whole = [x.full_tensor() for x in (out, lse, *grads)]
            found[f"{name}, {how}"] = largest_difference(whole, expected)
    return found


LINE = Neighbourhood((12,), 4, is_causal=True)
STARTS = {"query_start": torch.tensor([3, 8]), "key_start": torch.tensor([2, 5])}
# By a name: the pattern, the cells that q has, entries of a bias, tensors by batch, other options.
WITH_OPTIONS = {
    "windows by head with a bias": (BY_HEAD, 12, (5, 5), {}, {}),
    "a box": (NEAR, 4, (5, 5), {}, {"query_box": ((1, 2), (0, 4))}),
    "a union": (PATTERNS["union"], 12, (), {}, {}),
    "unequal starts": (LINE, 3, (7,), STARTS, {}),
}


def compared_with_options() -> dict[str, float]:
    """The error of joint attention with a bias, a box or starts, and of all gradients, against brute force."""
    mesh, drawn_whole, found = init_device_mesh("cpu", (1, 2)), drawn(), {}
    generator = torch.Generator().manual_seed(1)
    for name, (pattern, cells, entries, starts, options) in WITH_OPTIONS.items():
        tensors = {key: drawn_whole[key] for key in ("q", "k", "v", "extra_k", "extra_v")}
        tensors["q"] = tensors["q"][:, :cells].contiguous()
        tensors["extra_q"] = torch.randn(2, 5, 8, 4, generator=generator, dtype=torch.float64)
        if entries:
            tensors["bias"] = torch.randn(8, *entries, generator=generator, dtype=torch.float64)
        by_batch = starts | {key: drawn_whole[key] for key in ("key_padding_mask", "extra_padding_mask")}

        def run(call, leaves, more, pattern=pattern, options=options):
            out, lse, extra_out, extra_lse = call(**leaves, pattern=pattern, **more, **options)
            loss = sum(x.square().sum() for x in (out, extra_out))
            return [out, lse, extra_out, extra_lse, *torch.autograd.grad(loss, list(leaves.values()))]

        leaves = {key: x.clone().requires_grad_() for key, x in tensors.items()}
        expected = run(oracle.joint_attention, leaves, by_batch)
        for how, placements in PLACED.items():
            of_batch = [Shard(0) if place == Shard(0) else Replicate() for place in placements]
            of_heads = [Shard(0) if place == Shard(2) else Replicate() for place in placements]
            split = {
                key: distribute_tensor(x, mesh, of_heads if key == "bias" else placements).requires_grad_()
                for key, x in tensors.items()
            }
            more = {key: distribute_tensor(x, mesh, of_batch) for key, x in by_batch.items()}
            results = run(partial(attend, return_lse=True), split, more)
            found[f"{name}, {how}"] = largest_difference([x.full_tensor() for x in results], expected)
    return found


def arguments_of(pattern) -> tuple[list[str], list[str]]:
    """The tensors and the masks that a pattern is called with."""
    if isinstance(pattern, DilatedPattern):
        return ["q", "k", "v"], ["key_padding_mask"]
    bias = ["bias"] * isinstance(pattern, HeadNeighbourhoods)
    return ["q", "k", "v", "extra_k", "extra_v", *bias], ["key_padding_mask", "extra_padding_mask"]


def expected_of(pattern, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Out, lse and gradients by brute force."""
    names, masks = arguments_of(pattern)
    leaves = [tensors[x].clone().requires_grad_() for x in names]
    out, lse = attending(pattern, **{mask: tensors[mask] for mask in masks})(*leaves)
    return [out, lse, *torch.autograd.grad(out.square().sum(), leaves)]


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    differences = []
    for got, right in zip(found, expected, strict=True):  # lse may be -inf in both; NaN is wrong
        differences.append(torch.where(got == right, 0.0, (got - right).abs()).nan_to_num(torch.inf).max())
    return max(differences).item()


def in_rings() -> dict[str, float]:
    """The same errors where two ranks share the tokens and two of each the heads or the batch."""
    mesh, tensors, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tokens", "heads")), drawn(), {}
    tokens, heads, shards = mesh["tokens"], mesh["heads"], Rectangles((1, 2))
    for name, pattern in PATTERNS.items():
        names, masks = arguments_of(pattern)
        expected = expected_of(pattern, tensors)
        is_along = isinstance(pattern, DilatedPattern)
        rank = tokens.get_local_rank()
        own = torch.arange(6 * rank, 6 * rank + 6) if is_along else shards.cells((3, 4), rank)
        expected = [
            expected[0][:, own], expected[1][:, :, own], *(x[:, own] for x in expected[2:5]), *expected[5:]
        ]  # fmt: skip
        shared = "extra_k", "extra_v", "extra_padding_mask", "bias"
        local = {x: tensors[x] if x in shared else tensors[x][:, own] for x in (*names, *masks)}
        for placement in (Replicate(), Shard(0), Shard(2)):
            of_batch = placement if placement == Shard(0) else Replicate()
            of_heads = Shard(0) if placement == Shard(2) else Replicate()
            split = [
                distribute_tensor(local[x], heads, [of_heads if x == "bias" else placement]).requires_grad_()
                for x in names
            ]
            options = {mask: distribute_tensor(local[mask], heads, [of_batch]) for mask in masks}
            options |= dict(zip(names[3:], split[3:], strict=True))
            options |= {} if is_along else {"shards": shards}
            out, lse = ring_attend(*split[:3], pattern, group=tokens, return_lse=True, **options)
            assert out.placements == (placement,)
            grads = torch.autograd.grad(out.square().sum(), split)
            whole = [x.full_tensor() for x in (out, lse, *grads)]
            for gradient in whole[5:]:  # of extra keys and a bias: each rank has the part of its own queries
                dist.all_reduce(gradient, group=tokens.get_group())
            found[f"{name}, {placement}"] = largest_difference(whole, expected)
    return found


def refused_in_rings() -> list[str]:
    """The errors of a ring whose ranks share a mesh with q, and of one in which a single rank's q is split by rows."""
    mesh, plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tokens", "heads")), drawn()
    is_first = dist.get_rank() == 0

    def placed(name: str, mesh, placement) -> torch.Tensor:
        return DTensor.from_local(plain[name], mesh, [placement], run_check=False)

    same_mesh = [placed(name, mesh["tokens"], Shard(0)) for name in "qkv"]
    by_rows = [placed(name, mesh["heads"], Shard(1) if is_first else Shard(2)) for name in "qkv"]
    found = []
    for q, k, v in (same_mesh, by_rows):
        try:
            ring_attend(q, k, v, ALONG, group=mesh["tokens"])
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))
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
        "a plain bias": partial(attend, q, k, v, NEAR, bias=torch.zeros(8, 5, 5, dtype=torch.float64)),
        "a bias by batch": partial(
            attend, q, k, v, NEAR, bias=distribute_tensor(torch.zeros(8, 5, 5).double(), mesh, [Replicate()])
        ),
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
