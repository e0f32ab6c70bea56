"""Keys and values of a module's earlier tokens, in buffers of a fixed size: unequal lengths, and CUDA graphs.

row of the buffers   0  1  2  3  4  5  6  7
sequence 0           a  b  c  n  .  .  .  .     lengths[0] = 3: the next token is written into row 3
sequence 1           a  b  c  d  e  n  .  .     lengths[1] = 5: and into row 5
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.attention.validation import autocast_dtype
from hilbert_lib.internals import assert_async, has_values


@dataclass(eq=False)
class KeyValueCache:
    """Keys and values of one module, made by its `make_cache` and written by its calls.

    `lengths` counts the tokens of each sequence. It may be written in place between calls: after prompts that are
    padded on the right, or to take tokens back. Rows after a sequence's length have no weight. A cache that is made
    under torch.inference_mode() is used there.

    Args:
        k, v: (batch, max_length, kv_heads, head_dim).
        lengths: (batch,) int32 on their device.
        is_empty: whether no token was written. The first call then attends to its own tokens alone, by any backend.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    is_empty: bool = True

    @property
    def max_length(self) -> int:
        """Tokens of a sequence that there is room for."""
        return self.k.shape[1]

    def reset(self) -> None:
        """Forget all tokens."""
        self.lengths.zero_()
        self.is_empty = True

    def rows(self, count: int) -> Tensor:
        """The rows that the next tokens of each sequence are written into: (batch, count) int64."""
        return self.lengths.long()[:, None] + torch.arange(count, device=self.lengths.device)

    def check_room(self, k: Tensor) -> None:
        """Raise TypeError or ValueError unless keys of the next tokens fit, (batch, tokens, kv_heads, head_dim).

        Modules ask before a user's `prepare` meets positions of another batch, or past its tables. A GPU is not waited
        for: a sequence without room stops the device.
        """
        self._check(k)
        if self.is_empty:
            self._ensure(self.lengths == 0, "0 where cache.is_empty is True")
            return
        room = self.max_length - k.shape[1]
        has_room = (self.lengths >= 0) & (self.lengths <= room)
        self._ensure(has_room, f"from 0 to {room}, max_length {self.max_length} less the tokens of the call")

    def write(self, k: Tensor, v: Tensor) -> None:
        """Write keys and values of the next tokens, after `check_room`; they count as soon as `advance` says so.

        k, v: (batch, tokens, kv_heads, head_dim). Raises TypeError or ValueError.
        """
        count = k.shape[1]
        self._check(k)  # again: what `prepare` returns may need a gradient
        if self.is_empty:
            self.k[:, :count], self.v[:, :count] = k, v
            return
        rows = self.rows(count)
        sequence = torch.arange(len(rows), device=rows.device)[:, None]
        self.k[sequence, rows], self.v[sequence, rows] = k.to(self.k.dtype), v.to(self.v.dtype)

    def advance(self, count: int) -> None:
        """Count tokens that were written."""
        self.lengths.add_(count)
        self.is_empty = self.is_empty and not count

    def _ensure(self, are_allowed: Tensor, allowed: str) -> None:
        # A GPU's values are not waited for, and a program cannot branch on any.
        condition, message = are_allowed.all(), f"cache.lengths must be {allowed}"
        if condition.is_cuda or torch.compiler.is_compiling() or not has_values(condition):
            assert_async(condition, message)
        elif not condition:
            raise ValueError(f"{message}; got {self.lengths.tolist()}")

    def _check(self, k: Tensor) -> None:
        batch, count, *heads = k.shape
        room, own = self.k.shape[:2], self.k.shape[2:]
        if (batch, tuple(heads)) != (room[0], tuple(own)) or count > room[1]:
            allowed = f"{room[0]} sequences of at most {room[1]} tokens, with {own[0]} heads of {own[1]}"
            raise ValueError(f"cache is for {allowed}; got keys of shape {tuple(k.shape)}")
        if k.device != self.k.device:
            raise ValueError(f"cache must be on the device of the tokens ({k.device}), got {self.k.device}")
        if autocast_dtype(k) != autocast_dtype(self.k):
            raise TypeError(
                f"cache must have the dtype of the keys ({k.dtype}), got {self.k.dtype}: give make_cache one"
            )
        is_outside = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
        if is_outside and any(x.is_inference() for x in (self.k, self.v, self.lengths)):
            raise ValueError("cache must be used under torch.inference_mode(), where it was made; got a call outside")
        if torch.is_grad_enabled() and k.requires_grad:
            raise ValueError("cache must be None where gradients are recorded: decode under torch.no_grad()")

    def check_lengths(self) -> None:
        """Raise TypeError or ValueError where a user put something else in the place of `lengths`."""
        checks.dense_tensor("cache.lengths", self.lengths)
        if self.lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cache.lengths must be int32 or int64, got {self.lengths.dtype}")
        checks.rows_of_keys("cache.lengths", self.lengths, "batch", self.k)


def check_cache(cache: object, **excluded: object) -> KeyValueCache:
    """The argument, if it is a cache; the other options must not be given beside it."""
    if not isinstance(cache, KeyValueCache):
        raise TypeError(f"cache must be what make_cache returns, or None; got {type(cache).__name__}")
    for name, value in excluded.items():
        if value is not None:
            raise ValueError(f"{name} must be None with a cache, got {type(value).__name__}")
    cache.check_lengths()
    return cache
