"""Measured orders of backends, kept in the user's cache folder: one file for a machine, its software and a shape class.

Files are replaced whole: processes that write at once lose nothing of each other's, and a reader sees no half file.
"""

import hashlib
import json
import os
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from glob import escape, glob
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.backends import presence
from hilbert_lib.attention.backends.registry import BACKENDS, backends_for
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.rules import Rule
from hilbert_lib.files import write_whole
from hilbert_lib.internals import compile_time_constant
from hilbert_lib.machine import get_gpu_info, machine_facts
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.pattern import KINDS as PATTERNS
from hilbert_lib.patterns.pattern import Pattern, Specification, from_specification

VARIABLE = "HILBERT_CACHE"  # names another folder
MEASURED = "measured on this machine"  # how the record of such a rule begins
LOOKS_EVERY = 0.1  # seconds between two looks for what other processes measured, in calls whose form is known
_seen, _seen_until = (Path(), 0), 0.0  # what `changed_lately` saw
VERSION = 2  # of what the names in an order mean; a file without one is of 1


class ShapeClass(NamedTuple):
    """The calls that one measurement speaks for: length and heads up to the next power of two, the rest as it is."""

    device: str  # as `device_name` gives it
    dtype: str  # name of a torch dtype
    length: int
    heads: int  # of all sequences of the batch
    head_dim: int
    is_causal: bool
    gradient: bool  # whether the backward will run
    pattern: Pattern | Specification  # the latter once it is kept: torch.compile reads no other constants
    order: str = ""  # on a grid the kind of order in which tokens are stored; "" row by row, and for sequences

    def kept(self) -> "ShapeClass":
        """The same class, by its largest length and heads."""
        length, heads = (1 << (number - 1).bit_length() for number in (self.length, self.heads))
        return self._replace(length=length, heads=heads, pattern=self.pattern.of_any_heads().specification)

    def fits(self, q: Tensor, call: Request, gradient: bool) -> bool:
        """Whether a call on this device and in this dtype is of the class, which is `kept`."""
        batch, length, heads, head_dim = q.shape
        # Number by number: torch.compile then compiles no length anew.
        for most, number in ((self.length, length), (self.heads, batch * heads)):
            if number > most or number <= most // 2:
                return False
        order = "" if call.ordering is None else call.ordering.kind
        same = self.head_dim == head_dim and self.is_causal == call.is_causal and self.gradient == gradient
        return same and self.order == order and self.pattern == call.pattern.of_any_heads().specification


def device_name(device: torch.device) -> str:
    """The model of a GPU, of which a machine may have several, or "cpu": a measurement speaks for it."""
    return get_gpu_info(device).name if device.type == "cuda" else device.type


def folder() -> Path:
    """The folder of measurements: $HILBERT_CACHE, or hilbert_lib in $XDG_CACHE_HOME, by default ~/.cache."""
    return _folder(*map(os.environ.get, (VARIABLE, "XDG_CACHE_HOME", "HOME")))


@lru_cache(maxsize=8)  # every call of "auto" asks
def _folder(named: str | None, caches: str | None, _home: str | None) -> Path:
    return Path(named) if named else Path(caches or os.path.expanduser("~/.cache")) / "hilbert_lib"


def remember(shape: ShapeClass, order: tuple[str, ...], times_ms: dict[str, float]) -> Path:
    """Keep a measured order; from now on "auto" goes by it, in this process and in later ones.

    Args:
        shape: what was measured.
        order: names of backends, the fastest first; "eager", which serves what the others refuse, is one of them.
        times_ms: what a call takes by each, the device or the host, for a reader.

    Raises:
        ValueError: for another order.
        OSError: if the folder cannot be written.
    """
    names = backends_for(shape.pattern.of_heads(shape.heads))
    if not set(order) <= set(names):
        raise ValueError(f"order must be of {', '.join(names)}; got {order!r}")
    if "eager" not in order:
        raise ValueError(f"order must hold eager, got {order!r}")
    shape, machine = shape.kept()._asdict(), _machine()
    record = f"{MEASURED}, {datetime.now(UTC).isoformat(timespec='seconds')}"
    held = {"version": VERSION, "machine": machine, "shape": shape, "order": order, "record": record}
    held["times_ms"] = times_ms
    path = folder() / f"{_digest(machine)}-{_digest(shape)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({**held, "digest": _digest(held)}, indent=1))
    _rules_in.cache_clear()
    look_again()
    return path


def changed_lately() -> tuple[Path, int]:
    """`changed_at`, as it was at most `LOOKS_EVERY` seconds ago: to look takes as long as a fifth of a short call."""
    global _seen, _seen_until
    now = monotonic()
    if now >= _seen_until:
        _seen, _seen_until = changed_at(), now + LOOKS_EVERY
    return _seen


def look_again() -> None:
    """Have the next `changed_lately` look."""
    global _seen_until
    _seen_until = 0.0


def changed_at() -> tuple[Path, int]:
    """The folder, and when a measurement in it changed last, in ns: another process may have measured."""
    place = folder()
    try:
        return place, os.stat(place).st_mtime_ns
    except OSError:
        return place, 0


@compile_time_constant
def remembered_rules(device: torch.device, dtype: torch.dtype) -> tuple[tuple[ShapeClass, Rule], ...]:
    """Rules measured on this machine with this software; other files are ignored with a warning."""
    place, changed = changed_at()
    kind = device_name(device), str(dtype).removeprefix("torch.")
    return tuple(each for each in _rules_in(place, changed) if (each[0].device, each[0].dtype) == kind)


@lru_cache(maxsize=8)
def _rules_in(place: Path, _changed: int) -> tuple[tuple[ShapeClass, Rule], ...]:
    if not glob(f"{escape(str(place))}/*.json"):  # unlike Path.is_dir, no error where the folder may not be looked at
        return ()
    try:
        machine = _machine()
    except RuntimeError as error:  # a GPU that this torch cannot use
        warnings.warn(f"what {place} remembers is ignored: {error}", stacklevel=2)
        return ()
    _discard_old_names(place, machine["hardware"])
    rules = []
    for path in sorted(place.glob(f"{_digest(machine)}-*.json")):
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            if held.pop("digest") != _digest(held):
                raise ValueError("it was changed")
            words, numbers = held["shape"].pop("pattern")
            pattern = from_specification(words, tuple(numbers))
            shape = ShapeClass(**held["shape"], pattern=pattern)
            rules.append((shape.kept(), Rule(tuple(held["order"]), held["record"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            warnings.warn(f"{path} is ignored, it holds no measured order of backends: {error!r}", stacklevel=2)
    return tuple(rules)


def _discard_old_names(place: Path, hardware: str) -> None:
    # Removes this machine's orders of version 1 for sequences that hold "triton", which then was two backends' name.
    for path in sorted(place.glob("*.json")):
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            is_of_sequences = PATTERNS[held["shape"]["pattern"][0].partition(" ")[0]] is DilatedPattern
            is_old = "version" not in held and held["machine"]["hardware"] == hardware and "triton" in held["order"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # it holds no order, or is another machine's
        if is_old and is_of_sequences:
            warnings.warn(
                f"{path} is discarded: along a sequence 'triton' was the name of the plain kernels and of those that "
                "are 'hopper' now; measure again",
                stacklevel=2,
            )
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _machine() -> dict:
    names = [backend.package for backend in BACKENDS.values() if backend.package]
    found = {name: presence.absence(name) or presence.state(name) for name in names}
    return {**machine_facts(), "backends": found}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
