"""The limits that a benchmark keeps, from arguments, the environment, a file and defaults, in this order."""

import math
import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

from hilbert_lib.checks import number

PREFIX = "HILBERT_SAFETY_"
LONGEST_SECONDS = 10**8  # the system's clocks end before infinity


@dataclass(frozen=True)
class SafetyConfig:
    """Limits of memory, time and temperature. A GB is 2^30 bytes.

    Attributes:
        max_memory_share: share of a device's memory (of the host's, for the CPU) that may be in use, by anyone,
            above 0 and at most 1.
        min_free_gpu_gb: memory of the GPU that stays free, in GB, at least 0.
        min_free_host_gb: memory of the host that stays free, in GB, at least 0; also while a GPU computes.
        max_seconds: longest run, in seconds, above 0 and at most 10^8, three years.
        growth_factor: from one length of a progressive test to the next, above 1.
        max_temperature_c: hottest GPU allowed, in degrees Celsius, above 0.

    Raises:
        TypeError, ValueError: naming the value and what is allowed.

    >>> SafetyConfig(max_memory_share=0.5).max_memory_share
    0.5
    """

    max_memory_share: float = 0.9
    min_free_gpu_gb: float = 1.0
    min_free_host_gb: float = 1.0
    max_seconds: float = 600.0
    growth_factor: float = 2.0
    max_temperature_c: float = 90.0  # a GPU near its own limit lowers its clocks: times taken there say little

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _checked(field.name, getattr(self, field.name), field.name))

    @classmethod
    def load(cls, path: str | Path | None = None, **overrides: float) -> "SafetyConfig":
        """The limits as they are set: arguments over HILBERT_SAFETY_... variables over a file over defaults.

        Args:
            path: of a TOML file whose keys are the attributes, or None for no file.
            **overrides: attributes. None is not set.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: for a key that is no attribute, naming the nearest, or a file that is no TOML.
            TypeError, ValueError: for a value that is not allowed, naming the file or the variable that it stands in.

        >>> SafetyConfig.load(growth_factor=4).growth_factor
        4.0
        """
        in_file = {} if path is None else _read(Path(path))
        variables = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        _check_names(in_file, list(_ALLOWED), f"keys of {path}")
        names = {PREFIX + name.upper(): name for name in _ALLOWED}
        _check_names(variables, list(names), "variables")
        _check_names(overrides, list(_ALLOWED), "arguments")
        in_file = {name: _checked(name, value, f"{path}: {name}") for name, value in in_file.items()}
        in_environment = {
            names[each]: _checked(names[each], _number(each, text), each) for each, text in variables.items()
        }
        given = {name: value for name, value in overrides.items() if value is not None}
        return cls(**in_file | in_environment | given)


_ALLOWED = {  # least, whether it is allowed itself, most
    "max_memory_share": (0, False, 1),
    "min_free_gpu_gb": (0, True, math.inf),
    "min_free_host_gb": (0, True, math.inf),
    "max_seconds": (0, False, LONGEST_SECONDS),
    "growth_factor": (1, False, math.inf),
    "max_temperature_c": (0, False, math.inf),
}


def _checked(name: str, value: object, called: str) -> float:
    """The value of an attribute, which an error calls as it stands where it was given."""
    value = number(called, value)
    least, includes_least, most = _ALLOWED[name]
    if not (least <= value <= most if includes_least else least < value <= most) or value == math.inf:
        low = "at least" if includes_least else "above"
        high = f" and at most {most}" if most < math.inf else " and finite"
        raise ValueError(f"{called} must be {low} {least}{high}, got {value}")
    return value


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be a TOML file: {error}") from error


def config_or_default(config: object) -> SafetyConfig:
    """The argument `config`; None is what `SafetyConfig.load` finds.

    Raises:
        TypeError: if it is no SafetyConfig.

    >>> config_or_default(SafetyConfig(max_seconds=5)).max_seconds
    5.0
    """
    if config is not None and not isinstance(config, SafetyConfig):
        raise TypeError(f"config must be a SafetyConfig or None, got {config!r}")
    return SafetyConfig.load() if config is None else config


def _check_names(found: Iterable[str], allowed: list[str], what: str) -> None:
    for name in found:
        if name not in allowed:
            (nearest,) = get_close_matches(name, allowed, n=1, cutoff=0.0)
            raise ValueError(f"{what} must be of {', '.join(allowed)}; got {name!r}: did you mean {nearest!r}?")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None
