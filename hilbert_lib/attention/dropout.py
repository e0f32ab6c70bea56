"""Dropout bits that are keyed by position, so that they depend neither on tiling nor on ranks."""

import torch
from torch import Tensor

# A seed is one of two tensors, told apart by their dtype alone (kernels read the same layout):
#
#   int64 (1,): the seed of a whole call. Its coordinates go into Philox as they are.
#
#   int32 (4 + B + 7 * batch * H,): the seed of a part of a larger call, made by `named`. It drops what the larger call
#   drops, so it says which coordinates of the larger call the part's are (`name_table`).
#
#   word   0    1     2    3    4 .. 3 + B          then 7 words for each (sequence, head) of the part
#         +----+-----+----+----+-------------------+----------------------------------------------------------------+
#         |low |high | H  | B  | B branches of the | sequence, head, step, first_query, first_key, before, missing   |
#         |seed word | sizes   | larger call       | of the larger call                                              |
#         +----+-----+----+----+-------------------+----------------------------------------------------------------+
_LOW = 0xFFFFFFFF
NAME = 7  # words that name a (sequence, head)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """First word of Philox4x32-10, elementwise: 32 random bits of a 128-bit counter and a 64-bit key.

    Every word is an int64 tensor that holds an unsigned 32-bit number; all broadcast. Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011.
    """
    a, b, c, d = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(10):
        high_a, low_a = _multiply(a, 0xD2511F53)
        high_c, low_c = _multiply(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ k0, low_c, high_a ^ d ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return a


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    # High and low word of a 32 by 32 bit product. An int64 product wraps, and so holds all of its 64 bits.
    product = word * factor
    return (product >> 32) & _LOW, product & _LOW


def keep_mask(
    seed: Tensor, dropout_p: float, *, batch: Tensor, head: Tensor, branch: int, queries: Tensor, keys: Tensor
) -> Tensor:
    """The attention probabilities that dropout keeps: bool, True with probability 1 - dropout_p.

    The bits are Philox(seed; key position, query position, query head | branch << 16, batch). seed is (1,) int64 or
    made by `named`; the coordinates are int64 tensors that broadcast, below 2^32 (heads and branches below 2^16).
    """
    if is_named(seed):
        seed, batch, head, branch, queries, keys = _renamed(seed, batch, head, branch, queries, keys)
    key = seed & _LOW, (seed >> 32) & _LOW
    bits = philox((keys, queries, head | branch << 16, batch), key)
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
    first_name = 4 + branch_count
    index = torch.tensor(branches, device=seed.device)
    count = seed.new_full((1,), len(branches))
    return torch.cat([seed[:3], count, seed[4:first_name][index], seed[first_name:]])


def name_table(names: Tensor, branches: tuple[int, ...]) -> Tensor:
    """The rows of a larger call that the rows of its part are.

    Row i of q and row j of k are at positions first_query + step * i and first_key + step * j of the larger call; from
    row `before` of k on, `missing` more rows of k lie between.

    Args:
        names: (batch, heads, 7) integers: sequence and query head in the larger call; step, first_query, first_key,
            before, missing.
        branches: indices of the branches in the larger call.

    Returns:
        int32: the number of heads and of branches, the branches, and the names.
    """
    sizes = torch.tensor([names.shape[1], len(branches), *branches], dtype=torch.int32, device=names.device)
    return torch.cat([sizes, names.flatten().to(torch.int32)])


def _renamed(
    table: Tensor, batch: Tensor, head: Tensor, branch: int, queries: Tensor, keys: Tensor
) -> tuple[Tensor, ...]:
    # The seed, and the coordinates in the larger call.
    words = table.to(torch.int64)
    seed = words[:1] & _LOW | words[1:2] << 32
    first = 4 + words[3] + (batch * words[2] + head) * NAME
    batch, head, step, first_query, first_key, before, missing = (words[first + n] for n in range(NAME))
    queries = first_query + step * queries
    keys = first_key + step * (keys + torch.where(keys >= before, missing, 0))
    return seed, batch, head, words[4 + branch], queries & _LOW, keys & _LOW
