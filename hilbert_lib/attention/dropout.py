"""Dropout bits that are keyed by position, so that they depend neither on tiling nor on ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# A seed is one of two tensors, told apart by their dtype alone (kernels read the same layout):
#
#   int64 (1,): the seed of a whole call. Its coordinates go into Philox as they are.
#
#   int32 (4 + 3 * B + 7 * batch * H,): the seed of a part of a larger call, made by `named`. It drops what the larger
#   call drops, so it says which coordinates of the larger call the part's are (`name_table`).
#
#   word   0    1     2    3    3 for each of B     then 7 words for each (sequence, head) of the part
#         +----+-----+----+----+-------------------+----------------------------------------------------------------+
#         |low |high | H  | B  | branch, segment   | sequence, head, step, first_query, first_key, before, missing   |
#         |seed word | sizes   | length, rate      |                                                                |
#         +----+-----+----+----+-------------------+------------------------ of the larger call --------------------+
_LOW = 0xFFFFFFFF
NAME = 7  # words that name a (sequence, head)
BRANCH = 3  # words that name a branch
_MOST = 2**31 - 1  # a segment that is longer holds all positions, as one of this length does


class Branch(NamedTuple):
    """A branch as dropout knows it."""

    number: int  # in the call
    segment_length: int
    rate: int


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four words of Philox4x32-10, elementwise: 128 random bits of a 128-bit counter and a 64-bit key.

    Every word is an int64 tensor that holds an unsigned 32-bit number; all broadcast. Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011.
    """
    # The first rounds are not of all pairs: a word there depends on few of the counter's, and has no more than their
    # shape.
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        # An int64 product wraps, and so holds all of its 64 bits: the high word is wanted now, the low one in the next
        # round, which drops what stands above it.
        of_a, of_c = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = ((of_c >> 32) ^ b ^ k0) & _LOW, of_c, ((of_a >> 32) ^ d ^ k1) & _LOW, of_a
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return a, b & _LOW, c, d & _LOW


def keep_mask(
    seed: Tensor, dropout_p: float, *, batch: Tensor, head: Tensor, branch: Branch, queries: Tensor, keys: Tensor
) -> Tensor:
    """The attention probabilities that dropout keeps: bool, True with probability 1 - dropout_p.

    A branch numbers the keys of a segment: n = key position mod segment length div rate. The bits of four keys are one
    Philox, word n mod 4 of Philox(seed; n div 4, query position, query head | branch << 16, batch): a kernel computes
    it once for keys that it reads side by side, whatever the rate.

    seed is (1,) int64 or made by `named`; the coordinates are int64 tensors that broadcast, below 2^32 (heads and
    branches below 2^16).
    """
    number, segment_length, rate = branch
    if is_named(seed):
        seed, batch, head, (number, segment_length, rate), queries, keys = _renamed(
            seed, batch, head, number, queries, keys
        )
    key_number = keys % segment_length // rate
    name, key = (head | number << 16, batch), (seed & _LOW, (seed >> 32) & _LOW)
    # As a rule every four keys of a segment are there: then no Philox is computed for more than one of them.
    fours = keys.shape[-1] if isinstance(segment_length, Tensor) else (segment_length - 1) // rate // 4 + 1
    if fours <= keys.shape[-1] // 2:
        four = torch.arange(fours, device=keys.device)
        words = torch.stack(philox((four, queries, *name), key), -1).flatten(-2)
        number = key_number[(None,) * (words.ndim - key_number.ndim)]
        return torch.take_along_dim(words >= drop_below(dropout_p), number, -1)
    first, second, third, fourth = philox((key_number // 4, queries, *name), key)
    which = key_number % 4
    bits = torch.where(which < 2, torch.where(which == 0, first, second), torch.where(which == 2, third, fourth))
    return bits >= drop_below(dropout_p)


def drop_below(dropout_p: float) -> int:
    """Random bits below this bound are dropped."""
    return round(dropout_p * 2**32)


def named(seed: Tensor, table: Tensor) -> Tensor:
    """The int32 seed of a part of a larger call, from that call's seed (1,) int64; every backend takes it for a seed.

    table: of `name_table`, on the seed's device.
    """
    return torch.cat([seed.view(torch.int32), table])


def is_named(seed: Tensor) -> bool:
    """Whether `named` made a seed."""
    return seed.dtype == torch.int32


def of_branches(seed: Tensor, branch_count: int, branches: tuple[int, ...]) -> Tensor:
    """A seed made by `named` for some of its branches, which are numbered anew.

    branch_count: how many branches it names.
    """
    first_name = 4 + BRANCH * branch_count
    index = torch.tensor(branches, device=seed.device)
    count = seed.new_full((1,), len(branches))
    named_branches = seed[4:first_name].view(branch_count, BRANCH)
    return torch.cat([seed[:3], count, named_branches[index].flatten(), seed[first_name:]])


def name_table(names: Tensor, branches: Sequence[Branch]) -> Tensor:
    """The rows of a larger call that the rows of its part are.

    Row i of q and row j of k are at positions first_query + step * i and first_key + step * j of the larger call; from
    row `before` of k on, `missing` more rows of k lie between.

    Args:
        names: (batch, heads, 7) integers: sequence and query head in the larger call; step, first_query, first_key,
            before, missing.
        branches: the branches as those of the larger call.

    Returns:
        int32: the number of heads and of branches, the branches, and the names.
    """
    words = [min(word, _MOST) for branch in branches for word in branch]
    sizes = torch.tensor([names.shape[1], len(branches), *words], dtype=torch.int32, device=names.device)
    return torch.cat([sizes, names.flatten().to(torch.int32)])


def _renamed(table: Tensor, batch: Tensor, head: Tensor, branch: int, queries: Tensor, keys: Tensor) -> tuple:
    # The seed, and the coordinates in the larger call.
    words = table.to(torch.int64)
    seed = words[:1] & _LOW | words[1:2] << 32
    first = 4 + BRANCH * words[3] + (batch * words[2] + head) * NAME
    batch, head, step, first_query, first_key, before, missing = (words[first + n] for n in range(NAME))
    queries = first_query + step * queries
    keys = first_key + step * (keys + torch.where(keys >= before, missing, 0))
    first = 4 + BRANCH * branch
    return seed, batch, head, words[first : first + BRANCH].unbind(), queries & _LOW, keys & _LOW
