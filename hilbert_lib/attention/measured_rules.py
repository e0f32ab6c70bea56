"""Measured orders of backends, kept in the user's cache folder: one file for a machine, its software and a shape class.

Files are replaced whole: processes that write at once lose nothing of each other's, and a reader sees no half file.
"""

import hashlib
import json
import os
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from glob import escape, glob
from pathlib import Path

import torch

from hilbert_lib.attention.backends import presence
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.rules import Rule
from hilbert_lib.files import write_whole
from hilbert_lib.machine import get_gpu_info, machine_facts
from hilbert_lib.pattern import DilatedPattern

VARIABLE = "HILBERT_CACHE"  # names another folder
MEASURED = "measured on this machine"  # how the record of such a rule begins


@dataclass(frozen=True)
class ShapeClass:
    """The calls that one measurement speaks for: length and heads up to the next power of two, the rest as it is.

    Attributes:
        device: as `device_name` gives it.
        dtype: name of a torch dtype.
        length: of the sequences.
        heads: of all sequences of the batch.
        head_dim: size of a head.
        is_causal, gradient: as in `Rule`.
        pattern: which keys a query sees.
    """

    device: str
    dtype: str
    length: int
    heads: int
    head_dim: int
    is_causal: bool
    gradient: bool
    pattern: DilatedPattern

    def rule(self, order: tuple[str, ...], record: str) -> Rule:
        """The order for this class."""
        ranges = (self.head_dim, self.head_dim), _octave(self.length), _octave(self.heads)
        return Rule(order, record, *ranges, self.is_causal, self.gradient, pattern_key(self.pattern))


def pattern_key(pattern: DilatedPattern) -> tuple:
    """A pattern as `Rule.pattern` holds it."""
    return pattern.segment_lengths, pattern.dilation_rates, pattern.offsets, pattern.mixing


def device_name(device: torch.device) -> str:
    """What a measurement on a device speaks for: the model of a GPU, of which a machine may have several, or "cpu".

    >>> device_name(torch.device("cpu"))
    'cpu'
    """
    return get_gpu_info(device).name if device.type == "cuda" else device.type


def folder() -> Path:
    """Where measurements are kept: $HILBERT_CACHE, or hilbert_lib in $XDG_CACHE_HOME, by default ~/.cache."""
    return _folder(*map(os.environ.get, (VARIABLE, "XDG_CACHE_HOME", "HOME")))


@lru_cache(maxsize=8)  # every call of "auto" asks
def _folder(named: str | None, caches: str | None, _home: str | None) -> Path:
    return Path(named) if named else Path(caches or os.path.expanduser("~/.cache")) / "hilbert_lib"


def remember(shape: ShapeClass, order: tuple[str, ...], times_ms: dict[str, float]) -> Path:
    """Keep a measured order; from now on "auto" goes by it, in this process and in later ones.

    Args:
        shape: what was measured.
        order: names of backends, the fastest first.
        times_ms: what a call takes by each, the device or the host, for a reader.

    Raises:
        ValueError: if order holds a name that no backend has, or not "eager", which serves what the others refuse.
        OSError: if the folder cannot be written.
    """
    _check_order(order)
    machine = _machine()
    rule = shape.rule(order, f"{MEASURED}, {datetime.now(UTC).isoformat(timespec='seconds')}")
    held = {
        "machine": machine,
        "device": shape.device,
        "dtype": shape.dtype,
        "times_ms": times_ms,
        "rule": rule._asdict(),
    }
    key = _digest([shape.device, shape.dtype, *rule[2:]])
    path = folder() / f"{_digest(machine)}-{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(held, indent=1))
    _rules_in.cache_clear()
    return path


def remembered_rules(device: str, dtype: torch.dtype) -> tuple[Rule, ...]:
    """The rules measured on this machine with this software; files that hold none are ignored with a warning.

    Args:
        device: as `device_name` gives it.
        dtype: of q, k and v.
    """
    place = folder()
    try:
        changed = os.stat(place).st_mtime_ns  # another process may have measured
    except OSError:
        changed = 0
    return _rules_in(place, changed).get((device, str(dtype).removeprefix("torch.")), ())


@lru_cache(maxsize=8)
def _rules_in(place: Path, _changed: int) -> dict[tuple[str, str], tuple[Rule, ...]]:
    rules: dict[tuple[str, str], tuple[Rule, ...]] = {}
    if not glob(f"{escape(str(place))}/*.json"):  # unlike Path.is_dir, no error where the folder may not be looked at
        return rules
    try:
        machine = _machine()
    except RuntimeError as error:  # a GPU that this torch cannot use
        warnings.warn(f"what {place} remembers is ignored: {error}", stacklevel=2)
        return rules
    for path in sorted(place.glob(f"{_digest(machine)}-*.json")):
        try:
            held = json.loads(path.read_text())
            rule = _parsed(held, machine)
            kind = held["device"], held["dtype"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            warnings.warn(f"{path} is ignored, it holds no measured order of backends: {error!r}", stacklevel=2)
            continue
        rules[kind] = (*rules.get(kind, ()), rule)
    return rules


def _parsed(held: dict, machine: dict) -> Rule:
    if held["machine"] != machine:
        raise ValueError("it is of another machine or of other software")
    if not isinstance(held["device"], str) or not isinstance(held["dtype"], str):
        raise TypeError(f"device and dtype must be strings, got {held['device']!r} and {held['dtype']!r}")
    rule = Rule(**{name: _tupled(value) for name, value in held["rule"].items()})
    _check_order(rule.order)
    for least, most in (rule.head_dims, rule.lengths, rule.heads):
        if not isinstance(least, int) or not isinstance(most, int):
            raise TypeError(f"bounds must be integers, got {least!r} and {most!r}")
    for name in ("is_causal", "gradient"):
        if getattr(rule, name) not in (None, True, False):
            raise TypeError(f"{name} must be true, false or null, got {getattr(rule, name)!r}")
    if not isinstance(rule.record, str):
        raise TypeError(f"record must be a string, got {rule.record!r}")
    pattern_key(DilatedPattern(*rule.pattern))
    return rule


def _check_order(order: tuple[str, ...]) -> None:
    if not set(order) <= set(BACKENDS):
        raise ValueError(f"order must be of {', '.join(BACKENDS)}; got {order!r}")
    if "eager" not in order:
        raise ValueError(f"order must hold eager, got {order!r}")


def _machine() -> dict:
    names = [backend.package for backend in BACKENDS.values() if backend.package]
    found = {name: presence.absence(name) or presence.state(name) for name in names}
    return {**machine_facts(), "backends": found}


def _octave(number: int) -> tuple[int, int]:
    """The least and the most number with the same next power of two.

    >>> _octave(5), _octave(8), _octave(9), _octave(1)
    ((5, 8), (5, 8), (9, 16), (1, 1))
    """
    most = 1 << (number - 1).bit_length()
    return most // 2 + 1, most


def _tupled(value: object) -> object:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
