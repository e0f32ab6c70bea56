"""What ranks tell each other before they send rows, so that those who disagree all raise and none waits for ever."""

import hashlib
import json
import struct
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hilbert_lib.launch import REFUSED

_HEADER = struct.Struct("<?q32s")  # whether the arguments were refused, the shard's length, a digest of the request
_companions: "WeakKeyDictionary[ProcessGroup, ProcessGroup]" = WeakKeyDictionary()


def resolved(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """The process group that is meant: that of a 1-D mesh, or by default all ranks.

    Raises:
        TypeError: if group is none of these.
        ValueError: if the mesh has another number of dimensions, or this rank is not in the group.
    """
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
    """The argument, if it is a group of ranks, which need not hold this one, or None for all ranks.

    Raises:
        TypeError: if it is no process group and no mesh.
        ValueError: if the mesh has another number of dimensions than 1.

    >>> check_group(None)
    """
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ValueError(f"group must be a mesh of 1 dimension, got {group.ndim}: take one, as in mesh['name']")
    # A rank is given a number in the place of a group of others.
    is_group = isinstance(group, ProcessGroup | DeviceMesh) or group is dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and not is_group:
        raise TypeError(f"group must be a process group, a 1-D DeviceMesh or None, got {type(group).__name__}")
    return group


class Agreement:
    """What a call asks for, on its way to all other ranks since this was made.

    One message of 41 bytes a rank, over gloo: no GPU stream waits for it. Only where something is wrong do the ranks
    tell each other what, in a second message. So whoever makes one asks for `lengths`, and sends nothing before.

    Args:
        request: what must be equal on all ranks, in words.
        length: of this rank's shard.
        refusal: why this rank refused its arguments, or None.
        group: the ranks.
    """

    def __init__(self, request: dict[str, str], length: int, refusal: Exception | None, group: ProcessGroup):
        self._request, self._refusal, self._group = request, refusal, group
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
        header = bytearray(_HEADER.pack(refusal is not None, length, digest))
        self._own = torch.frombuffer(header, dtype=torch.uint8)
        self._companion = _companion(group)
        self._gathered = [torch.empty_like(self._own) for _ in range(group.size())]
        self._work = dist.all_gather(self._gathered, self._own, group=self._companion, async_op=True)
        self._found: tuple[int, ...] | Exception | None = None

    def lengths(self) -> tuple[int, ...]:
        """Every rank's shard length, in the order of the ranks, once it is known that all ask for the same.

        Raises:
            ValueError: on every rank, if any refused or two ask for different things; it names the ranks and both
                sides.
            Exception: `refusal` itself, on the rank that refused.
        """
        if self._found is None:  # messages are sent once, however often one asks
            self._found = self._compared()
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def _compared(self) -> tuple[int, ...] | Exception:
        self._work.wait()
        ranks, companions = (dist.get_process_group_ranks(group) for group in (self._group, self._companion))
        order = list(map(companions.index, ranks))  # a group that is made has its ranks sorted
        headers = [_HEADER.unpack(self._gathered[at].numpy().tobytes()) for at in order]
        refused, lengths, digests = zip(*headers, strict=True)
        if not any(refused) and len(set(digests)) == 1:
            return lengths
        told: list = [None] * len(ranks)
        text = None if self._refusal is None else f"{type(self._refusal).__name__}: {self._refusal}"
        dist.all_gather_object(told, (text, self._request), group=self._companion)
        return self._refusal or ValueError(_difference(dict(zip(ranks, map(told.__getitem__, order), strict=True))))


def _difference(told: dict[int, tuple[str | None, dict[str, str]]]) -> str:
    refusals = [f"rank {rank} {REFUSED} {text}" for rank, (text, _) in told.items() if text]
    if refusals:
        return "; ".join(refusals)
    differing = []
    for name in next(iter(told.values()))[1]:
        ranks: dict[str, list[str]] = {}
        for rank, (_, request) in told.items():
            ranks.setdefault(request[name], []).append(str(rank))
        if len(ranks) > 1:
            sides = "; ".join(f"{value} on rank {', '.join(where)}" for value, where in ranks.items())
            differing.append(f"{name} must be the same on all ranks, got {sides}")
    return "\n".join(differing)


def _companion(group: ProcessGroup) -> ProcessGroup:
    """The gloo group of the same ranks: itself, or one that is made at the group's first call."""
    if dist.get_backend(group) == "gloo" or torch.device("cuda") not in group._device_types:
        return group  # and not kept: its threads end with the last reference to it
    if group not in _companions:
        _companions[group] = _made(group)
    return _companions[group]


def _made(group: ProcessGroup) -> ProcessGroup:
    # NCCL makes its communicator at the first call, in which all ranks have to take part: no exchange asks that of
    # a rank that has nothing to send.
    dist.barrier(group)
    # A rank that never comes is to be missed as soon as in the group itself.
    timeout = group._get_backend(torch.device("cuda")).options._timeout
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
