"""The backends that exist: by the kind of pattern that they serve, then by name."""

import torch

from hilbert_lib.attention.backends import (
    dense,
    flex,
    fused,
    fused_grid,
    listed,
    listed_grid,
    packages,
    reference,
    tiles,
)
from hilbert_lib.attention.backends.all_pairs import by_one_segment, on_a_line_where_short
from hilbert_lib.attention.backends.backend import Backend
from hilbert_lib.attention.backends.parts import part_by_part
from hilbert_lib.patterns.all_pairs import AllPairs
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.union import Union

_ROOMS = (fused, fused_grid, dense.HALF, packages, flex, dense, listed_grid, tiles, listed, reference)
_EVERY = [backend for room in _ROOMS for backend in getattr(room, "BACKENDS", room)]
NAMES = tuple(dict.fromkeys(backend.name for backend in _EVERY))  # of every kind
WITHOUT_BUILD = {
    "flash_attn_1": "no build of FlashAttention 1 exists for a current torch; on Turing and Volta sdpa serves instead"
}


def _serving(kind: type[Pattern]) -> dict[str, Backend]:
    # The backends of a kind by name; where several have one name, the one made for the nearest ancestor.
    by_name: dict[str, Backend] = {}
    for ancestor in kind.__mro__:
        for backend in _EVERY:
            if backend.serves is ancestor:
                by_name.setdefault(backend.name, backend)
    return by_name


def backends_for(pattern: Pattern | type[Pattern]) -> dict[str, Backend]:
    """The backends that serve a pattern, or a kind of patterns, by name."""
    kind = pattern if isinstance(pattern, type) else type(pattern)
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    backends = _serving(kind)
    if not torch.compiler.is_compiling():  # which could not make the entry again
        _BY_KIND[kind] = backends
    return backends


def _serving_unions() -> dict[str, Backend]:
    # Part by part, but "reference", and "lists" in some calls.
    by_parts = {name: part_by_part(name, backends_for, _caveats(name), _lse_columns(name)) for name in NAMES}
    by_parts["lists"] = listed_grid.in_one_pass_where_it_pays(by_parts["lists"])
    return by_parts | {"reference": _serving(Union)["reference"]}


def _serving_all_pairs() -> dict[str, Backend]:
    of_any_pattern, of_sequences = _serving(Pattern), _serving(DilatedPattern)
    plain = of_sequences["triton"]
    backends = {
        name: of_any_pattern[name] if name in ("reference", "eager") else by_one_segment(backend, plain)
        for name, backend in of_sequences.items()
    }
    backends["triton"] = on_a_line_where_short(backends["triton"], _serving(HeadNeighbourhoods)["triton"])
    return backends


def _caveats(name: str) -> str:
    # The caveats of all backends of that name.
    return "; ".join(dict.fromkeys(backend.caveat for backend in _EVERY if backend.name == name and backend.caveat))


def _lse_columns(name: str) -> int:
    return max(backend.lse_columns for backend in _EVERY if backend.name == name)


_BY_KIND = {kind: _serving(kind) for kind in (DilatedPattern, HeadNeighbourhoods)}
_BY_KIND |= {Union: _serving_unions(), AllPairs: _serving_all_pairs()}
BACKENDS = _BY_KIND[DilatedPattern]
