"""A permutation of the positions of a sequence: how tokens are laid out in memory, never which keys a query sees."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from hilbert_lib import checks, ordering_tables
from hilbert_lib.checks import integer
from hilbert_lib.curves.coordinates import KINDS, checked_shape
from hilbert_lib.ordering_tables import Tables

# The arguments of every kind beside length.
_ARGUMENTS = {
    **dict.fromkeys(KINDS, ("grid", "chunk")),
    "residue": ("rate", "chunk"),
    "random": ("seed",),
    "linear": (),
}


@dataclass(frozen=True)
class Ordering:
    """A layout of `length` tokens: slot s of storage holds position `perm[s]`, and `inverse[perm[s]] == s`.

    Make one with `from_curve`, `residue`, `random` or `linear`. An ordering is its recipe: two made alike are equal
    and share their tables, which are computed when first used, kept in the bounded cache of `ordering_tables`, and the
    same on every device, on every rank and in every process.

    Attributes:
        kind: "linear", "residue", "random" or the name of a curve.
        length: number of positions.
        grid: sides of the grid under a curve, or None for the default of `from_curve`.
        chunk: positions after which the layout restarts, or None.
        rate: of a residue ordering, else None.
        seed: of a random ordering, else None.
        device: where `perm` and `inverse` live; it is no part of what makes orderings equal.

    Raises:
        ValueError: if kind is unknown, a number out of range, the grid too small, or an argument is another kind's.
        TypeError: if a number is not an integer.

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

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _ARGUMENTS:
            raise ValueError(f"kind must be one of {', '.join(_ARGUMENTS)}, got {self.kind!r}")
        own = _ARGUMENTS[self.kind]
        for name in ("grid", "chunk", "rate", "seed"):
            if name not in own and getattr(self, name) is not None:
                raise ValueError(f"{name} must be None for kind {self.kind!r}, got {getattr(self, name)!r}")
        length = integer("length", self.length, least=1)
        checked = {"length": length, "device": checks.device(self.device)}
        if self.chunk is not None:
            checked["chunk"] = integer("chunk", self.chunk, least=1)
        if "rate" in own:
            checked["rate"] = integer("rate", self.rate, least=1)
        if "seed" in own:
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

        Returns:
            The ordering, on the CPU.

        Raises:
            ValueError: if kind is unknown, a number is below 1, or the grid is too small.
            TypeError: if a number is not an integer.

        >>> Ordering.from_curve("snake", 6, grid=(2, 3)).perm.tolist()
        [0, 1, 2, 5, 4, 3]
        """
        if kind not in KINDS:  # the other kinds are no curves
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        return cls(kind, length, grid=grid, chunk=chunk)

    @classmethod
    def residue(cls, length: int, rate: int, *, chunk: int | None = None) -> "Ordering":
        """Residue-major: position p sorted by (p mod rate, p div rate), the natural layout of a dilation.

        Args:
            length: positions, at least 1.
            rate: the dilation rate, at least 1.
            chunk: restart every so many positions; by default one layout for all.

        Returns:
            The ordering, on the CPU.

        Raises:
            ValueError: if a number is below 1.
            TypeError: if a number is not an integer.

        >>> Ordering.residue(8, 2, chunk=4).perm.tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
        """
        return cls("residue", length, rate=rate, chunk=chunk)

    @classmethod
    def random(cls, length: int, seed: int) -> "Ordering":
        """A random permutation: the control that has no locality at all.

        Args:
            length: positions, at least 1.
            seed: 0 to 2^63 - 1, of a generator of its own; torch's global one is neither read nor moved.

        Returns:
            The ordering, on the CPU.

        Raises:
            ValueError: if length is below 1, or seed out of range.
            TypeError: if a number is not an integer.

        >>> sorted(Ordering.random(4, seed=0).perm.tolist())
        [0, 1, 2, 3]
        """
        return cls("random", length, seed=seed)

    @classmethod
    def linear(cls, length: int) -> "Ordering":
        """The order of the sequence itself.

        Args:
            length: positions, at least 1.

        Returns:
            The ordering, on the CPU.

        Raises:
            ValueError: if length is below 1.
            TypeError: if length is not an integer.

        >>> Ordering.linear(3).perm.tolist()
        [0, 1, 2]
        """
        return cls("linear", length)

    @property
    def perm(self) -> Tensor:
        """(length,) int64: the position that each slot holds. Shared with the cache: do not write to it."""
        return self._tables(self.device)[0]

    @property
    def inverse(self) -> Tensor:
        """(length,) int64: the slot that holds each position. Shared with the cache: do not write to it."""
        return self._tables(self.device)[1]

    def slots(self, device: torch.device) -> Tensor:
        """(length,) int32 on a device: `inverse` as kernels read it. Shared with the cache: do not write to it.

        >>> Ordering.residue(4, 2).slots(torch.device("cpu"))
        tensor([0, 2, 1, 3], dtype=torch.int32)
        """
        return self._tables(device)[2]

    def to(self, device: torch.device | str) -> "Ordering":
        """The same ordering with its tables on a device.

        >>> Ordering.linear(2).to("cpu").perm.device
        device(type='cpu')
        """
        # An empty tensor turns "cuda" into the current device's full name, so that the cache knows it by one name.
        return replace(self, device=torch.empty(0, device=checks.device(device)).device)

    def apply(self, x: Tensor, dim: int) -> Tensor:
        """A tensor in sequence order, stored in this ordering; differentiable.

        Args:
            x: any tensor of size `length` along dim, on any device.
            dim: the axis of positions.

        Returns:
            A copy of x, with slot s along dim holding position `perm[s]`.

        Raises:
            ValueError: if x has another size along dim, or no such dim.
            TypeError: if x is no tensor, or dim no integer.

        >>> Ordering.residue(4, 2).apply(torch.tensor([10, 11, 12, 13]), dim=0).tolist()
        [10, 12, 11, 13]
        """
        return self._select(x, dim, 0)

    def undo(self, x: Tensor, dim: int) -> Tensor:
        """A tensor stored in this ordering, back in sequence order: the inverse of `apply`; differentiable.

        Args:
            x: any tensor of size `length` along dim, on any device.
            dim: the axis of slots.

        Returns:
            A copy of x, with position p along dim taken from slot `inverse[p]`.

        Raises:
            ValueError: if x has another size along dim, or no such dim.
            TypeError: if x is no tensor, or dim no integer.

        >>> Ordering.residue(4, 2).undo(torch.tensor([10, 12, 11, 13]), dim=0).tolist()
        [10, 11, 12, 13]
        """
        return self._select(x, dim, 1)

    def _select(self, x: Tensor, dim: int, table: int) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}")
        dim = integer("dim", dim, least=-x.dim(), most=x.dim() - 1)
        if x.shape[dim] != self.length:
            raise ValueError(f"x must have size {self.length} along dim {dim}, got shape {tuple(x.shape)}")
        return x.index_select(dim, self._tables(x.device)[table])

    def _tables(self, device: torch.device) -> Tables:
        # One by one, as torch.compile takes constants: in torch 2.11 a dataclass is none, and a plain int that changes
        # between calls becomes a symbol, which `index` fixes.
        numbers = self.length, self.chunk, self.rate, self.seed, *(self.grid or ())
        return _tables_on(device, self.kind, *(None if n is None else operator.index(n) for n in numbers))

    def __repr__(self) -> str:
        if self.kind in KINDS:
            options = {"grid": self.grid, "chunk": self.chunk}
            call, arguments = "from_curve", [repr(self.kind), str(self.length)]
        else:
            options = {"chunk": self.chunk}
            own = {"residue": [self.rate], "random": [self.seed], "linear": []}[self.kind]
            call, arguments = self.kind, [str(number) for number in (self.length, *own)]
        arguments += [f"{name}={value}" for name, value in options.items() if value is not None]
        return f"Ordering.{call}({', '.join(arguments)})"


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


def _tables_on(
    device: torch.device, kind: str, length: int, chunk: int | None, rate: int | None, seed: int | None, *grid: int
) -> Tables:
    # Made outside of fake tensors and tracing, whose tensors have no place among real ones.
    with _disable_current_modes() as modes:
        tables = ordering_tables.CACHE.tables(Ordering(kind, length, grid or None, chunk, rate, seed).to(device))
    fake = next((mode for mode in modes if isinstance(mode, FakeTensorMode)), None)
    if fake is None or fake.allow_non_fake_inputs:  # torch.export takes real tables as constants
        return tables
    return tuple(fake.from_tensor(table) for table in tables)


# torch.compile takes the tables as constants, for it cannot trace a lock. This is all that
# torch.compiler.assume_constant_result does, but that imports torch._dynamo, and with it triton, at once.
_tables_on._dynamo_marked_constant = True
