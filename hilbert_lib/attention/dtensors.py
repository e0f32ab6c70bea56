"""DTensors as q, k and v: every rank attends with the sequences and heads that it holds, and nothing is sent.

The results are DTensors placed as q is. A split of the sequence needs a ring, over ranks outside the mesh. Windows that
differ by head are split with their heads, and so is a bias. Offsets by head are split where the rates divide the number
of heads of a rank.
"""

from collections.abc import Callable, Collection
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.transforms import is_dtensor
from hilbert_lib.attention.validation import check_axes
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods
from hilbert_lib.patterns.pattern import Pattern

BATCH, HEADS = 0, 2  # dimensions of q, k and v
AS_Q = ("extra_q", "extra_k", "extra_v")  # the options that are placed as q is
BY_BATCH = ("key_padding_mask", "extra_padding_mask", "query_start", "key_start")  # those that have no heads
BY_HEADS = "bias"  # the one that has no batch: (heads, ...)
HINT = "x.redistribute() places it anew, x.to_local() is this rank's part, and ring_attend splits a sequence"


class LocalCall(NamedTuple):
    """A rank's part of the arguments of a call of DTensors, and what makes DTensors of the results."""

    tensors: tuple[Tensor, ...]
    pattern: Pattern
    options: dict
    as_dtensor: Callable[[Tensor], Tensor]  # of an output, or of lse, which has 3 dimensions

    def as_dtensors(self, results: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """The results of a call, one or several, as DTensors."""
        return tuple(map(self.as_dtensor, results)) if isinstance(results, tuple) else self.as_dtensor(results)


def local_call(
    tensors: dict[str, Tensor], pattern: Pattern, options: dict, ring_ranks: Collection[int] = ()
) -> LocalCall:
    """This rank's part of a call of DTensors.

    tensors: q, k and v. ring_ranks: those that a sequence or grid is spread over. TypeError or ValueError, on all ranks
    alike, unless all tensors are DTensors and each rank can compute its part alone, or with its ring.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    q = tensors["q"]
    if not is_dtensor(q):
        raise TypeError(
            f"q must be a DTensor, as another tensor is, got {type(q).__name__}: x.to_local() is a plain one"
        )
    mesh, placements = q.device_mesh, q.placements
    shared_ranks = {*mesh.mesh.flatten().tolist()}.intersection(ring_ranks) if ring_ranks else ()
    if len(shared_ranks) > 1:  # as if each held other rows of the same heads, and the same rows of others
        raise ValueError(f"group must share one rank with the mesh of q, got {sorted(shared_ranks)} of {mesh}")
    splits = [place.dim if type(place) is Shard else None for place in placements]
    if any(not isinstance(place, Shard | Replicate) for place in placements) or {*splits} - {BATCH, HEADS, None}:
        allowed = "replicated, or split by batch, Shard(0), or heads, Shard(2)"
        raise ValueError(f"q must be a DTensor that is {allowed}; got {placements}: {HINT}")
    of_batch = tuple(Shard(0) if split == BATCH else Replicate() for split in splits)

    of_heads = tuple(Shard(0) if split == HEADS else Replicate() for split in splits)

    def local(name: str, x: Tensor, expected: tuple, of_gradient: tuple | None = None) -> Tensor:
        if not is_dtensor(x):
            raise TypeError(f"{name} must be a DTensor, as q is, got {type(x).__name__}: distribute_tensor makes one")
        if x.device_mesh != mesh or x.placements != expected:
            where = "" if x.device_mesh == mesh else " on another mesh"
            raise ValueError(f"{name} must be placed by {expected}, as q is, got {x.placements}{where}: {HINT}")
        return x.to_local(grad_placements=of_gradient)

    local_tensors = []
    for name, x in tensors.items():
        local_tensors.append(local(name, x, placements))
        check_axes(name, x)
    local_options = dict(options)
    for name, x in options.items():
        if name in AS_Q + BY_BATCH and isinstance(x, Tensor):
            local_options[name] = local(name, x, placements if name in AS_Q else of_batch)
        elif name == BY_HEADS and isinstance(x, Tensor):
            # A rank's gradient is that of its own sequences.
            pairs = zip(splits, of_heads, strict=True)
            of_gradient = tuple(Partial() if split == BATCH else place for split, place in pairs)
            local_options[name] = local(name, x, of_heads, of_gradient)
        elif isinstance(x, Tensor):
            raise ValueError(f"{name} must be None where q is a DTensor, got a tensor of shape {tuple(x.shape)}")
    if options.get("dropout_p"):
        got = f"got {options['dropout_p']}"
        raise ValueError(f"dropout_p must be 0.0 where q is a DTensor, whose ranks would drop the same places; {got}")
    by_heads = [axis for axis, split in enumerate(splits) if split == HEADS]
    whole, kv_heads = pattern, tensors["k"].shape[HEADS]
    pattern = _local_pattern(whole, kv_heads, [mesh.size(n) for n in by_heads], [
        mesh.get_local_rank(n) for n in by_heads
    ])  # fmt: skip
    if isinstance(local_options.get(BY_HEADS), Tensor):
        local_options[BY_HEADS] = _within_windows(local_options[BY_HEADS], whole.of_heads(kv_heads), pattern)
    batch, heads = q.shape[BATCH], q.shape[HEADS]

    def as_dtensor(x: Tensor) -> Tensor:
        axis_of_heads = 1 if x.dim() == 3 else HEADS  # of lse (batch, heads, queries), and of outputs
        shape = [*x.shape]
        shape[0], shape[axis_of_heads] = batch, heads
        placed = zip(splits, placements, strict=True)
        own = [Shard(axis_of_heads) if split == HEADS else place for split, place in placed]
        strides = tuple(prod(shape[n + 1 :]) for n in range(len(shape)))
        return DTensor.from_local(x, mesh, own, run_check=False, shape=torch.Size(shape), stride=strides)

    return LocalCall(tuple(local_tensors), pattern, local_options, as_dtensor)


def _local_pattern(pattern: Pattern, kv_heads: int, counts: list[int], numbers: list[int]) -> Pattern:
    # The pattern of the heads that this rank holds. counts, numbers: of the parts along each axis of the mesh that
    # splits heads, and this rank's; an earlier axis splits first.
    parts, number = prod(counts), 0
    for count, own in zip(counts, numbers, strict=True):
        number = number * count + own
    if kv_heads % parts:
        raise ValueError(f"k must have a number of heads that the {parts} ranks of Shard(2) divide, got {kv_heads}")
    pattern, size = pattern.of_heads(kv_heads), kv_heads // parts
    # Of every rank: all raise, or none.
    patterns = [pattern.of_head_range(range(n * size, (n + 1) * size), kv_heads) for n in range(parts)]
    return patterns[number]


def _within_windows(bias: Tensor, whole: Pattern, own: Pattern) -> Tensor:
    # A table for the largest windows of all heads, cut to those of this rank's heads; its centre is the query's cell.
    if not isinstance(whole, HeadNeighbourhoods) or tuple(bias.shape[1:]) != whole.bias_sides:
        return bias
    for axis, (entries, kept) in enumerate(zip(whole.bias_sides, own.bias_sides, strict=True)):
        bias = bias.narrow(1 + axis, (entries - kept) // 2, kept)
    return bias
