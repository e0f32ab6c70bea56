"""Whole segments of a branch of rate 1 that boxes serve: windows on a line, with a stride as large.

    segment_length 4       rows 0 1 2 3 see keys 0 1 2 3, rows 4 5 6 7 see keys 4 5 6 7
    window 4, stride 4     the same

A program of boxes takes one tile after the other, and copies the next one while it computes. A program for sequences
takes one tile, whose begin and end nothing hides. So boxes take less time where a tile has few keys. Where there is
another branch, its launch goes on from their results.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton import limits, schedule
from hilbert_lib.attention.triton.hopper import division
from hilbert_lib.attention.triton.hopper.launch import HOPPER_FORWARD, columns_of, is_cut
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood

# Columns of a row -> the longest segments that took less time by boxes on an H200, forward and both ways
# (reports/HISTORY.md).
LONGEST = {32: 256, 64: 1024, 128: 2048}
# The most keys that a row may see in each of two branches, of which one has rate 1. Three branches were no faster.
MOST_KEYS_OF_TWO = {32: 256, 64: 512, 128: 1024}
# Tiles of rows from which two branches are divided, which is one launch or two more forward, and three more backward.
# With few tiles the host would pay for them. The number is reckoned: only 8,192 tiles were timed.
FEWEST_TILES = 1024
# Rows of a tile and of a box. Segments of whole tiles hold both groups of a tile, which see all its boxes. Elsewhere a
# group passes over boxes, and may multiply one by weights of 0: a NaN would leave its segment. Where a segment is one
# box, a group passes over too few for that.
TILE, BOX = 128, 64
FEWEST_COLUMNS = 16  # of a head that boxes serve


def on_a_line(inputs: Tensors, call: Request) -> tuple[Tensors, Request] | None:
    """The same call as windows on a line, or None where the kernels for sequences serve it.

    >>> import torch
    >>> from hilbert_lib import DilatedPattern
    >>> q = torch.empty(1, 512, 2, 64, dtype=torch.bfloat16)
    >>> _, line = on_a_line(Tensors(q, q, q), Request(DilatedPattern((256,), (1,))))
    >>> line.neighbourhoods[0].axes[0].window, line.neighbourhoods[0].axes[0].stride
    (256, 256)
    """
    if not is_made_of_boxes(inputs, call):
        return None
    q, k, v, *_ = inputs
    pattern = _windows(k.shape[1], min(call.pattern.segment_lengths[0], k.shape[1]), k.shape[2])
    nothing = k.new_empty(k.shape[0], 0, *k.shape[2:])  # of k's own strides none may be 0
    return Tensors(q, k, v, nothing, nothing), Request(pattern, scale=call.scale, is_part=call.is_part)


def is_made_of_boxes(inputs: Tensors, call: Request) -> bool:
    """Whether `on_a_line` gives another call."""
    q, k = inputs.q, inputs.k
    if call.pattern.dilation_rates != (1,) or call.is_causal:
        return False
    if call.query_start is not None or call.cu_seqlens is not None:
        return False
    has_options = call.dropout_p > 0.0 or call.key_padding_mask is not None
    batch, rows, heads, head_dim = q.shape
    if has_options or rows != k.shape[1] or head_dim < FEWEST_COLUMNS or max(batch, heads) > limits.MOST_SEQUENCES:
        return False
    segment_length = min(call.pattern.segment_lengths[0], rows)
    is_short = 0 < segment_length <= LONGEST.get(columns_of(q), 0)
    fills_tiles = segment_length % TILE == 0 or segment_length == BOX
    return is_short and fills_tiles and rows % segment_length == 0


class Beside(NamedTuple):
    """A call of two branches: one as windows, and the launch of the other, which goes on from its results."""

    inputs: Tensors
    call: Request
    other: schedule.Pass


def beside_another(inputs: Tensors, call: Request) -> Beside | None:
    """A branch of a call as windows and its other branch, or None where kernels for sequences serve both.

    >>> import torch
    >>> from hilbert_lib import DilatedPattern
    >>> q = torch.empty(64, 1024, 4, 128, dtype=torch.bfloat16, device="meta")
    >>> beside = beside_another(Tensors(q, q, q), Request(DilatedPattern((256, 1024), (1, 4))))
    >>> beside.call.neighbourhoods[0].axes[0].window, beside.other.branches
    (256, (1,))
    """
    pattern, length, columns = call.pattern, inputs.k.shape[1], columns_of(inputs.q)
    if len(pattern.branches) != 2 or pattern.mixing != "softmax" or 1 not in pattern.dilation_rates:
        return None
    if inputs.q.shape[0] * inputs.q.shape[2] * length < FEWEST_TILES * TILE:
        return None
    number = min((i for i in (0, 1) if pattern.dilation_rates[i] == 1), key=pattern.segment_lengths.__getitem__)
    if max(min(w, length) // r for w, r in pattern.branches) > MOST_KEYS_OF_TWO.get(columns, 0):
        return None
    line = on_a_line(inputs, replace(call, pattern=DilatedPattern((pattern.segment_lengths[number],), (1,))))
    if line is None:
        return None
    ours, plain = division.launches(pattern, length, inputs.k.shape[2], False, without=number)
    has_cut = plain or any(is_cut(pattern, ours, length, HOPPER_FORWARD[columns].block_n))
    return None if has_cut else Beside(*line, *ours)


@lru_cache(maxsize=256)
def _windows(keys: int, segment_length: int, kv_heads: int) -> HeadNeighbourhoods:
    return Neighbourhood((keys,), segment_length, stride=segment_length).of_heads(kv_heads)
