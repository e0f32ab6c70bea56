"""Public names that are imported when they are asked for, so that a package loads nothing that is not used."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

Homes = dict[str, tuple[str, ...]]
LABORATORY = "hilbert_lib.lab"  # needs the packages of [suite]


def lazily(package: str, homes: Homes) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose public names live in other modules.

    `from package import *` gives them, but for those of the laboratory, which may lack packages.

    Args:
        package: its `__name__`.
        homes: public names by module, in full.

    >>> get, _ = lazily("hilbert_lib", {"math": ("sqrt",)})
    >>> get("sqrt")(4.0)
    2.0
    """
    home = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> object:
        if name == "__all__" and not _is_called_by("docmodule"):
            return sorted(public for public, module in home.items() if not module.startswith(LABORATORY))
        if name not in home:
            raise _unknown(package, name, home)
        try:
            value = getattr(import_module(home[name]), name)
        except ModuleNotFoundError as error:
            if not (home[name].startswith(LABORATORY) and is_of_a_package(error)):
                raise
            needs = f"{name} needs the packages of [suite]: pip install 'FOLDER[suite]'; {error.name} is missing"
            raise ModuleNotFoundError(needs, name=error.name) from error
        vars(sys.modules[package])[name] = value
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home})


def is_of_a_package(error: ModuleNotFoundError) -> bool:
    """Whether what is missing is another package's: neither this library's nor Python's."""
    top = (error.name or "").partition(".")[0]
    return top not in ("", "hilbert_lib") and top not in sys.stdlib_module_names


def _is_called_by(function: str) -> bool:
    # Whether a function of this name is one of the last few callers. pydoc's `docmodule`, which help() runs, prints the
    # docstring of every name in `__all__`; where there is none, it prints what fits a screen.
    from itertools import islice
    from traceback import walk_stack

    return any(frame.f_code.co_name == function for frame, _ in islice(walk_stack(sys._getframe()), 5))


def _unknown(package: str, name: str, home: dict[str, str]) -> Exception:
    from difflib import get_close_matches

    near = [] if name.startswith("_") else get_close_matches(name, home, 1, 0.8)
    says = f"{package} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    # `from hilbert_lib import name` asks here first, then looks for a module of that name, and loses these words.
    importing = _is_called_by("_handle_fromlist")
    is_module = importing and near and find_spec(f"{package}.{name}")
    return ImportError(says) if importing and near and not is_module else AttributeError(says)
