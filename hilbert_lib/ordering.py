"""A permutation of the positions of a sequence: how tokens are laid out in memory, never which keys a query sees."""

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isqrt, prod
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.checks import integer
from hilbert_lib.curves.coordinates import KINDS, checked_shape, curve_coordinates
from hilbert_lib.curves.hilbert import raster_index
from hilbert_lib.graph_cache import CacheInfo, cached_for_graphs
from hilbert_lib.internals import compile_time_constant, is_forward_ad_active, is_functorch_active, made_outside_modes

CACHED_POSITIONS = 2**24  # 20 bytes each (perm, inverse and slots): 320 MiB

Tables = tuple[Tensor, Tensor, Tensor]  # perm, inverse and slots

# The arguments of every kind beside length.
_ARGUMENTS = {
    **dict.fromkeys(KINDS, ("grid", "chunk")),
    "residue": ("rate", "chunk"),
    "random": ("seed",),
    "permutation": ("seed", "table"),
    "linear": (),
}


class CheckedPermutation(NamedTuple):
    """Values that are known to be a permutation; `Ordering.from_permutation` looks."""

    perm: Tensor  # (length,) int64


@dataclass(frozen=True)
class Ordering:
    """A layout of `length` tokens: slot s of storage holds position `perm[s]`, and `inverse[perm[s]] == s`.

    Make one with `from_curve`, `residue`, `random`, `linear` or `from_permutation`, which refuse what this does. An
    ordering is its recipe: two made alike are equal and share their tables. These are computed when first used, kept in
    a bounded cache, and the same on every device, on every rank and in every process.

    Args:
        kind: "linear", "residue", "random", "permutation" or the name of a curve.
        length: number of positions, at least 1.
        grid: sides of the grid under a curve, or None for the default of `from_curve`.
        chunk: positions after which a curve or a residue layout restarts, or None.
        rate: the dilation rate of a residue ordering, at least 1, else None.
        seed: of a random ordering, 0 to 2^63 - 1; of a permutation a number made of its values; else None.
        table: of a permutation its values, which `from_permutation` alone makes, else None.
        device: where `perm` and `inverse` live; orderings that differ in it alone are equal.

    Raises:
        ValueError: if kind is unknown, a number out of range, the grid too small, or an argument is another kind's.
        TypeError: if kind is no string or a number no integer.

    >>> Ordering.residue(6, 3).perm.tolist()
    [0, 3, 1, 4, 2, 5]
    >>> Ordering.from_curve("hilbert", 4) == Ordering.from_curve("hilbert", 4)
    True
    """

    kind: str
    length: int
    grid: tuple[int, ...] | None = None
    chunk: int | None = None
    rate: int | None = None
    seed: int | None = None
    device: torch.device = field(default=torch.device("cpu"), compare=False)
    table: CheckedPermutation | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        arguments = _ARGUMENTS[checks.one_of("kind", self.kind, _ARGUMENTS)]
        for name in ("grid", "chunk", "rate", "seed", "table"):
            if name not in arguments and getattr(self, name) is not None:
                raise ValueError(f"{name} must be None for kind {self.kind!r}, got {getattr(self, name)!r}")
        if "table" in arguments and not isinstance(self.table, CheckedPermutation):
            raise ValueError(
                "table must be values that were looked at, for kind 'permutation': use Ordering.from_permutation; "
                f"got {type(self.table).__name__}"
            )
        length = integer("length", self.length, least=1, most=checks.LARGEST_SIZE)
        checked = {"length": length, "device": checks.device(self.device)}
        if self.chunk is not None:
            checked["chunk"] = integer("chunk", self.chunk, least=1)
        if "rate" in arguments:
            checked["rate"] = integer("rate", self.rate, least=1)
        if "seed" in arguments:
            checked["seed"] = integer("seed", self.seed, least=0, most=2**63 - 1)
        if self.grid is not None:
            grid = checked["grid"] = checked_shape(self.grid, "grid")
            needed = min(checked.get("chunk", length), length)
            if prod(grid) < needed:
                raise ValueError(f"grid must hold {needed} positions, got {grid} with {prod(grid)} cells")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_curve(
        cls, kind: str, length: int, *, grid: Sequence[int] | None = None, chunk: int | None = None
    ) -> "Ordering":
        """Positions in the order in which a curve meets them on a grid that is filled in raster order.

        Args:
            kind: "hilbert", "morton", "snake", "raster" or "tile".
            length: positions, at least 1.
            grid: 2 or 3 sides that hold the positions (of one chunk, if there are chunks); cells past the last position
                are skipped. By default ceil(sqrt(length)) columns and as many rows as it takes.
            chunk: restart the curve every so many positions, so that a split of the sequence between chunks keeps it
                whole; a shorter last chunk has the curve of its own length. By default one curve for all.

        >>> Ordering.from_curve("snake", 6, grid=(2, 3)).perm.tolist()
        [0, 1, 2, 5, 4, 3]
        """
        checks.one_of("kind", kind, KINDS)  # the other kinds are no curves
        return cls(kind, length, grid=grid, chunk=chunk)

    @classmethod
    def residue(cls, length: int, rate: int, *, chunk: int | None = None) -> "Ordering":
        """Residue-major: p sorted by (p mod rate, p div rate), in each `chunk`; the natural layout of a dilation.

        >>> Ordering.residue(8, 2, chunk=4).perm.tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
        """
        return cls("residue", length, rate=rate, chunk=chunk)

    @classmethod
    def random(cls, length: int, seed: int) -> "Ordering":
        """A random permutation, the control without locality; torch's global generator is neither read nor moved.

        >>> sorted(Ordering.random(4, seed=0).perm.tolist())
        [0, 1, 2, 3]
        """
        return cls("random", length, seed=seed)

    @classmethod
    def linear(cls, length: int) -> "Ordering":
        """The order of the sequence itself.

        >>> Ordering.linear(3).perm.tolist()
        [0, 1, 2]
        """
        return cls("linear", length)

    @classmethod
    def from_permutation(cls, perm: Tensor) -> "Ordering":
        """An order of one's own: slot s holds position `perm[s]`.

        perm: (length,) integers on any device, each of 0 to length - 1 once. It is copied, and the host waits for its
        values. TypeError or ValueError for anything else.

        >>> Ordering.from_permutation(torch.tensor([2, 0, 1])).inverse.tolist()
        [1, 2, 0]
        """
        checks.dense_tensor("perm", perm)
        if perm.dim() != 1 or perm.is_floating_point() or perm.is_complex() or perm.dtype == torch.bool:
            raise TypeError(f"perm must be integers of one axis, got shape {tuple(perm.shape)} and {perm.dtype}")
        if perm.is_meta or not len(perm):
            raise ValueError(f"perm must hold at least one position, and its values; got {perm!r}")
        with torch.inference_mode(False):  # a table of inference mode could not serve a later backward pass
            table = perm.detach().to("cpu", torch.int64, copy=True)
        if not table.sort().values.equal(torch.arange(len(table), device="cpu")):
            raise ValueError(f"perm must hold each of 0 to {len(table) - 1} once, got {_some(table)}")
        digest = hashlib.blake2b(table.numpy().tobytes(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
        return cls("permutation", len(table), seed=seed, table=CheckedPermutation(table))

    @property
    def perm(self) -> Tensor:
        """(length,) int64: the position that each slot holds. Shared with the cache: do not write to it."""
        return self._tables(self.device)[0]

    @property
    def inverse(self) -> Tensor:
        """(length,) int64: the slot that holds each position. Shared with the cache: do not write to it."""
        return self._tables(self.device)[1]

    def slots(self, device: torch.device) -> Tensor:
        """(length,) int32 on a device: `inverse` as kernels read it. Shared with the cache: do not write to it."""
        return self._tables(device)[2]

    def to(self, device: torch.device | str) -> "Ordering":
        """The same ordering with its tables on a device.

        >>> Ordering.linear(2).to("cpu").perm.device
        device(type='cpu')
        """
        return replace(self, device=checks.device_here(device))  # so that the cache knows it by one name

    def apply(self, x: Tensor, dim: int) -> Tensor:
        """A tensor in sequence order, stored in this ordering: slot s along dim holds position `perm[s]`.

        Args:
            x: any tensor of size `length` along dim, on any device; it is copied, differentiably.
            dim: the axis of positions.

        Raises ValueError if x has another size along dim or no such dim, TypeError if x is no tensor or dim no integer.

        >>> Ordering.residue(4, 2).apply(torch.tensor([10, 11, 12, 13]), dim=0).tolist()
        [10, 12, 11, 13]
        """
        return self._select(x, dim, 0)

    def undo(self, x: Tensor, dim: int) -> Tensor:
        """A tensor stored in this ordering, back in sequence order; arguments and errors as those of `apply`.

        >>> Ordering.residue(4, 2).undo(torch.tensor([10, 12, 11, 13]), dim=0).tolist()
        [10, 11, 12, 13]
        """
        return self._select(x, dim, 1)

    def _select(self, x: Tensor, dim: int, table: int) -> Tensor:
        is_selected = isinstance(x, Tensor) and (x.layout is torch.sparse_coo or x.is_quantized)
        if not is_selected:  # by index_select, which serves these besides
            checks.dense_tensor("x", x)
        dim = integer("dim", dim, least=-x.dim(), most=x.dim() - 1)
        if x.shape[dim] != self.length:
            raise ValueError(f"x must have size {self.length} along dim {dim}, got shape {tuple(x.shape)}")
        return x.index_select(dim, self._tables(x.device)[table])

    def _tables(self, device: torch.device) -> Tables:
        if self.kind == "permutation":
            if torch.compiler.is_compiling():
                return ordering_tables.__wrapped__(self, torch.empty(0, device=device).device)
            return made_outside_modes(lambda: ordering_tables(self, self.to(device).device))
        # One by one, as torch.compile takes constants: in torch 2.11 a dataclass is none, and a plain int that changes
        # between calls becomes a symbol, which `index` fixes.
        numbers = self.length, self.chunk, self.rate, self.seed, *(self.grid or ())
        return _tables_on(device, self.kind, *(None if n is None else operator.index(n) for n in numbers))

    def __repr__(self) -> str:
        if self.kind == "permutation":
            return f"Ordering.from_permutation({_some(self.table.perm)})"
        is_curve = self.kind in KINDS
        arguments = [repr(self.kind)] if is_curve else []
        arguments += [str(number) for number in (self.length, self.rate, self.seed) if number is not None]
        arguments += [f"{name}={value}" for name in ("grid", "chunk") if (value := getattr(self, name)) is not None]
        return f"Ordering.{'from_curve' if is_curve else self.kind}({', '.join(arguments)})"


@dataclass(frozen=True)
class OrderingSpec:
    """The recipe of an ordering without its length: what ranks agree on whose shards differ in length.

    Args:
        kind, chunk, grid, rate, seed: as in `Ordering`.

    Raises:
        ValueError, TypeError: as `Ordering`; a grid must hold the length that `ordering` is given.

    >>> OrderingSpec("residue", rate=2).ordering(4) == Ordering.residue(4, 2)
    True
    """

    kind: str
    chunk: int | None = None
    grid: tuple[int, ...] | None = None
    rate: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        checked = self.ordering(1)
        for name in ("chunk", "grid", "rate", "seed"):
            object.__setattr__(self, name, getattr(checked, name))

    def ordering(self, length: int) -> Ordering:
        """The ordering of so many positions."""
        return Ordering(self.kind, length, self.grid, self.chunk, self.rate, self.seed)


@compile_time_constant  # torch.compile cannot trace a lock
def _tables_on(
    device: torch.device, kind: str, length: int, chunk: int | None, rate: int | None, seed: int | None, *grid: int
) -> Tables:
    # Tensors of fake modes and of tracing have no place among the real ones of the cache.
    def tables() -> Tables:
        ordering = Ordering(kind, length, grid or None, chunk, rate, seed)
        return ordering_tables(ordering, ordering.to(device).device)

    return made_outside_modes(tables)


@cached_for_graphs(CACHED_POSITIONS, size=lambda ordering, device: ordering.length)
@torch.inference_mode(False)  # tables made in inference mode could not serve a later backward pass
def ordering_tables(ordering: Ordering, device: torch.device) -> Tables:
    """`perm`, `inverse` and `slots` of an ordering on a device; `__wrapped__` makes them anew."""
    length = ordering.length
    if device.type == "meta":  # nothing to compute, and some kinds select by values, which it has none of
        perm = torch.empty(length, dtype=torch.int64, device=device)
        return perm, torch.empty_like(perm), perm.int()
    chunk = min(ordering.chunk or length, length)
    starts = torch.arange(0, length - length % chunk, chunk, device=device)
    perm = (starts[:, None] + _chunk_perm(ordering, chunk, device)).flatten()
    if tail := length % chunk:
        perm = torch.cat([perm, length - tail + _chunk_perm(ordering, tail, device)])
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(length, device=device)
    # 32 bits: an int64 index read at a stride costs a sector a row twice as soon.
    return perm, inverse, inverse.int()


def _chunk_perm(ordering: Ordering, length: int, device: torch.device) -> Tensor:
    """The layout of one chunk: (length,) int64."""
    if ordering.kind == "permutation":
        return ordering.table.perm.to(device)
    if ordering.kind == "linear":
        return torch.arange(length, device=device)
    if ordering.kind == "residue":
        rate = min(ordering.rate, length)  # a larger rate leaves one position in each residue class
        padded = torch.arange(-(-length // rate) * rate, device=device).view(-1, rate).T.flatten()
        return padded[padded < length]
    if ordering.kind == "random":
        # On the CPU always: each device's own generator would give another permutation.
        generator = torch.Generator("cpu").manual_seed(ordering.seed)
        return torch.randperm(length, generator=generator, device="cpu").to(device)
    cols = isqrt(length - 1) + 1
    grid = ordering.grid or (-(-length // cols), cols)
    perm = raster_index(curve_coordinates(ordering.kind, grid, device=device), grid)
    return perm[perm < length]


def _some(table: Tensor) -> str:
    # The first values of a table and their number, in words.
    return str(table.tolist()) if len(table) <= 8 else f"{str(table[:6].tolist())[:-1]}, ...] of {len(table)}"


def ordering_cache_info() -> CacheInfo:
    """Hits and misses of the cache of tables since the process began, and its size in positions."""
    return ordering_tables.cache_info()


class Permuted(torch.autograd.Function):
    """Rows of x along dim 1 in another order. A gather both ways: the gradient of index_select adds row by row."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(1, index)

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None, None]:
        return dx.index_select(1, ctx.inverse), None, None


def _is_transformed() -> bool:
    # Whether torch.func or forward-mode differentiation runs, for which `Permuted` has no rules, but index_select has.
    return is_functorch_active() or is_forward_ad_active()


def in_sequence(x: Tensor, ordering: Ordering) -> Tensor:
    """`Ordering.undo` along dim 1, for what is differentiated once."""
    if not torch.compiler.is_compiling() and _is_transformed():
        return ordering.undo(x, 1)
    perm, inverse, _ = ordering._tables(x.device)
    return Permuted.apply(x, inverse, perm)
