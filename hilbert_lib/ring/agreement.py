"""The comparison that ranks make before they send rows: if they disagree, all raise and none waits for ever."""

import hashlib
import json
import struct
from functools import cached_property, lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hilbert_lib.internals import group_timeout
from hilbert_lib.launch import REFUSED

_HEADER = struct.Struct("<?q32s")  # whether the arguments were refused, the shard's length, a digest of the request
_companions: "WeakKeyDictionary[ProcessGroup, ProcessGroup]" = WeakKeyDictionary()


def resolved(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """The process group that is meant, which must hold this rank: by default all ranks."""
    check_group(group)
    if isinstance(group, DeviceMesh):
        if group.get_coordinate() is None:
            raise ValueError("group must hold this rank, got a mesh of other ranks")
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must hold this rank, got a group of other ranks")
    if not dist.is_initialized():
        raise ValueError("group must be initialised: call torch.distributed.init_process_group first")
    return dist.group.WORLD if group is None else group


def check_group(group: object) -> ProcessGroup | DeviceMesh | None:
    """The argument, if it is a process group or 1-D mesh, which need not hold this rank, or None for all ranks."""
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ValueError(f"group must be a mesh of 1 dimension, got {group.ndim}: take one, as in mesh['name']")
    # torch represents a group of other ranks by a number.
    is_group = isinstance(group, ProcessGroup | DeviceMesh) or group is dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and not is_group:
        raise TypeError(f"group must be a process group, a 1-D DeviceMesh or None, got {type(group).__name__}")
    return group


def in_words(q: Tensor, k: Tensor, options: dict[str, object]) -> dict[str, str]:
    """A rank's arguments in words, which `Agreement` compares. Of tensors beside q and k only that they exist."""

    def described(x: Tensor) -> str:
        batch, _, heads, head_dim = x.shape
        return f"{x.dtype} of batch {batch}, heads {heads}, head_dim {head_dim} on {x.device.type}"

    words = {name: "a tensor" if isinstance(value, Tensor) else repr(value) for name, value in options.items()}
    return {"q": described(q), "k": described(k)} | words


class Agreement:
    """A comparison of what all ranks ask for (`request`, in words), under way since this object was made.

    Each rank sends 41 bytes, over gloo: no GPU stream waits for them. Only where something is wrong does a second
    message say what. So every rank must call `lengths`, and send nothing before.
    """

    def __init__(self, request: dict[str, str], length: int, refusal: Exception | None, group: ProcessGroup):
        self._request, self._refusal, self._group = request, refusal, group
        header = bytearray(_HEADER.pack(refusal is not None, length, _digest(tuple(request.items()))))
        self._own = torch.frombuffer(header, dtype=torch.uint8)
        self._companion = _companion(group)
        self._gathered = [torch.empty_like(self._own) for _ in range(group.size())]
        self._work = dist.all_gather(self._gathered, self._own, group=self._companion, async_op=True)

    def lengths(self) -> tuple[int, ...]:
        """Every rank's shard length, in rank order. A rank that refused its arguments raises that refusal, the others a
        ValueError; where requests differ, all raise one. It names the ranks, and what each asked for."""
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    @cached_property  # messages are sent once, however often one asks
    def _found(self) -> tuple[int, ...] | Exception:
        self._work.wait()
        ranks, order = dist.get_process_group_ranks(self._group), _order(self._group, self._companion)
        headers = [_HEADER.unpack(self._gathered[place].numpy().tobytes()) for place in order]
        refused, lengths, digests = zip(*headers, strict=True)
        if not any(refused) and len(set(digests)) == 1:
            return lengths
        requests: list = [None] * len(ranks)
        text = None if self._refusal is None else f"{type(self._refusal).__name__}: {self._refusal}"
        dist.all_gather_object(requests, (text, self._request), group=self._companion)
        by_rank = {rank: requests[place] for rank, place in zip(ranks, order, strict=True)}
        return self._refusal or ValueError(_difference(by_rank))


def rows_of_ranks(rows: int, group: ProcessGroup) -> list[int]:
    """The rows of every rank's shard, in rank order; each rank gives its own."""
    companion = _companion(group)
    own = torch.tensor([rows], dtype=torch.int64, device="cpu")
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=companion)
    return [int(gathered[place]) for place in _order(group, companion)]


def _order(group: ProcessGroup, companion: ProcessGroup) -> list[int]:
    # The rank in the companion of each rank of the group: torch sorts the ranks of a group that it makes.
    ranks, companions = (dist.get_process_group_ranks(each) for each in (group, companion))
    return list(map(companions.index, ranks))


@lru_cache(maxsize=64)
def _digest(request: tuple[tuple[str, str], ...]) -> bytes:
    return hashlib.sha256(json.dumps(request).encode()).digest()


def _difference(requests: dict[int, tuple[str | None, dict[str, str]]]) -> str:
    # The disagreement in words, from each rank's refusal and request.
    refusals = [f"rank {rank} {REFUSED} {text}" for rank, (text, _) in requests.items() if text]
    if refusals:
        return "; ".join(refusals)
    differing = []
    # Kinds of pattern have names of their own.
    names = dict.fromkeys(name for _, request in requests.values() for name in request)
    for name in names:
        ranks: dict[str, list[str]] = {}
        for rank, (_, request) in requests.items():
            ranks.setdefault(request.get(name, "nothing"), []).append(str(rank))
        if len(ranks) > 1:
            values = "; ".join(f"{value} on rank {', '.join(where)}" for value, where in ranks.items())
            differing.append(f"{name} must be the same on all ranks, got {values}")
    return "\n".join(differing)


def _companion(group: ProcessGroup) -> ProcessGroup:
    """The gloo group of the same ranks: itself, or one that is made at the group's first call."""
    if dist.get_backend(group) == "gloo" or "cuda:" not in dist.get_backend_config(group):
        return group  # not kept: its threads end with the last reference to it
    if group not in _companions:
        # NCCL makes its communicator at a group's first call, in which all ranks must take part: an exchange does not
        # ask that of a rank that has nothing to send.
        dist.barrier(group)
        # A rank that never comes is missed as soon as in the group.
        timeout = group_timeout(group, torch.device("cuda"))
        ranks = dist.get_process_group_ranks(group)
        _companions[group] = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
    return _companions[group]
