"""Public names that are imported when they are asked for, so that a package loads nothing that is not used."""

import sys
from collections.abc import Callable
from importlib import import_module

Homes = dict[str, tuple[str, ...]]


def lazily(package: str, homes: Homes) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose public names live in other modules.

    Args:
        package: its `__name__`.
        homes: public names by module, in full.

    >>> get, _ = lazily("hilbert_lib", {"math": ("sqrt",)})
    >>> get("sqrt")(4.0)
    2.0
    """
    home = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> object:
        if name not in home:
            raise _unknown(package, name, home)
        try:
            value = getattr(import_module(home[name]), name)
        except ModuleNotFoundError as error:
            if not home[name].startswith("hilbert_lib.lab"):
                raise
            needs = f"{name} needs the packages of [suite]: pip install 'FOLDER[suite]'; {error.name} is missing"
            raise ModuleNotFoundError(needs, name=error.name) from error
        vars(sys.modules[package])[name] = value
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home})


def _unknown(package: str, name: str, home: dict[str, str]) -> Exception:
    from difflib import get_close_matches
    from importlib.util import find_spec

    near = [] if name.startswith("_") or find_spec(f"{package}.{name}") else get_close_matches(name, home, 1, 0.8)
    # An AttributeError's words would be lost in `from hilbert_lib import name`.
    error = ImportError if near else AttributeError
    return error(f"{package} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
