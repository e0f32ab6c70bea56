"""Public names that are imported when they are asked for, so that a package loads nothing that is not used."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

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
            if not (home[name].startswith("hilbert_lib.lab") and is_of_a_package(error)):
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


def _unknown(package: str, name: str, home: dict[str, str]) -> Exception:
    from difflib import get_close_matches
    from itertools import islice
    from traceback import walk_stack

    near = [] if name.startswith("_") else get_close_matches(name, home, 1, 0.8)
    says = f"{package} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    # `from hilbert_lib import name` asks here first, then looks for a module of that name, and loses these words.
    callers = islice(walk_stack(sys._getframe()), 4)
    importing = any(frame.f_code.co_name == "_handle_fromlist" for frame, _ in callers)
    is_module = importing and near and find_spec(f"{package}.{name}")
    return ImportError(says) if importing and near and not is_module else AttributeError(says)
