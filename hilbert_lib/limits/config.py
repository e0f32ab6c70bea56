"""Safety limits: arguments over the environment over a file over defaults."""

import math
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from hilbert_lib.checks import nearest, number

PREFIX = "HILBERT_SAFETY_"
LONGEST_SECONDS = 10**8  # the system's clocks end before infinity
_ALLOWED = {  # least, whether the least itself is allowed, most
    "max_memory_share": (0, False, 1),
    "min_free_gpu_gb": (0, True, math.inf),
    "min_free_host_gb": (0, True, math.inf),
    "max_seconds": (0, False, LONGEST_SECONDS),
    "growth_factor": (1, False, math.inf),
    "max_temperature_c": (0, False, math.inf),
}


@dataclass(frozen=True)
class SafetyConfig:
    """Limits of memory, time and temperature. A GB is 2^30 bytes.

    Attributes:
        max_memory_share: share of a device's memory (of the host's, for the CPU) that all processes together may use,
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
    max_temperature_c: float = 90.0  # near its own limit a GPU lowers its clocks: times say little there

    def __post_init__(self) -> None:
        for name in _ALLOWED:
            object.__setattr__(self, name, _checked(name, getattr(self, name), name))

    @classmethod
    def load(cls, path: str | Path | None = None, **overrides: float) -> "SafetyConfig":
        """Limits from arguments over HILBERT_SAFETY_... variables over a file over defaults.

        Args:
            path: TOML file whose keys are attributes, or None for no file.
            **overrides: attributes; None leaves one unset.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: for an unknown name (the nearest is suggested) or a file that is no TOML.
            TypeError, ValueError: for a value that is not allowed, naming its file or variable.

        >>> SafetyConfig.load(growth_factor=4).growth_factor
        4.0
        """
        try:
            in_file = {} if path is None else tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} must be a TOML file: {error}") from error
        variables = {name: text for name, text in os.environ.items() if name.startswith(PREFIX)}
        attributes = {PREFIX + name.upper(): name for name in _ALLOWED}
        for what, names, allowed in (
            (f"{path} has no key", in_file, _ALLOWED),
            ("there is no variable", variables, attributes),
            ("SafetyConfig.load has no argument", overrides, _ALLOWED),
        ):
            for name in names:
                if name not in allowed:
                    raise ValueError(f"{what} {name!r}{nearest(name, allowed)}")
        limits = {name: _checked(name, value, f"{path}: {name}") for name, value in in_file.items()}
        for variable, text in variables.items():
            try:
                value = float(text)
            except ValueError:
                raise ValueError(f"{variable} must be a number, got {text!r}") from None
            limits[attributes[variable]] = _checked(attributes[variable], value, variable)
        return cls(**limits | {name: value for name, value in overrides.items() if value is not None})


def config_or_default(config: object) -> SafetyConfig:
    """The argument `config`, checked; None is what `SafetyConfig.load` finds."""
    if config is not None and not isinstance(config, SafetyConfig):
        raise TypeError(f"config must be a SafetyConfig or None, got {config!r}")
    return SafetyConfig.load() if config is None else config


def _checked(name: str, value: object, called: str) -> float:
    """The value of an attribute; an error calls it by the name that its source uses."""
    value = number(called, value)
    smallest, includes_smallest, largest = _ALLOWED[name]
    if not (smallest <= value <= largest if includes_smallest else smallest < value <= largest) or value == math.inf:
        low = "at least" if includes_smallest else "above"
        high = f" and at most {largest}" if largest < math.inf else " and finite"
        raise ValueError(f"{called} must be {low} {smallest}{high}, got {value}")
    return value
