"""The tiles of a launch on a grid: how many there are, and where each lies. All kernels number them alike."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hilbert_lib.attention.triton.hopper import boxes


@gluon.jit
def _tiled(axes, RULES: gl.constexpr, OF_KEYS: gl.constexpr):
    """The first rank of which there are tiles, and how many ranks."""
    if OF_KEYS or not boxes.is_part(RULES):
        return (0, 0, 0), axes.m
    else:
        begin, stop = axes.part.begin, axes.part.stop
        return begin, (stop[0] - begin[0], stop[1] - begin[1], stop[2] - begin[2])


@gluon.jit
def counts_of(axes, heads, group, RULES: gl.constexpr, OF_KEYS: gl.constexpr):
    """How many there are of what numbers a tile: tiles along each axis, the last first, then heads and KV heads.

    A tile of keys is one for all heads of its KV head.
    """
    _, ranks = _tiled(axes, RULES, OF_KEYS)
    tiles0 = axes.d[0] * gl.cdiv(ranks[0], boxes.size(RULES, 0))
    tiles1 = axes.d[1] * gl.cdiv(ranks[1], boxes.size(RULES, 1))
    tiles2 = axes.d[2] * gl.cdiv(ranks[2], boxes.size(RULES, 2))
    return tiles2, tiles1, tiles0, 1 if OF_KEYS else group, heads // group


@gluon.jit
def tiles_of(total, programs):
    """The first tile of this program, and where its tiles end: it takes every `programs`-th between.

    Programs may come in several rounds, each with a run of tiles.
    """
    rounds = gl.cdiv(gl.num_programs(0), programs)
    length = gl.cdiv(gl.cdiv(total, programs), rounds) * programs
    begin = gl.program_id(0) // programs * length
    return begin + gl.program_id(0) % programs, gl.minimum(begin + length, total)


@gluon.jit
def digits_of(number, counts):
    """A number in digits, the lowest first, and what is left."""
    a = number % counts[0]
    number = number // counts[0]
    b = number % counts[1]
    number = number // counts[1]
    c = number % counts[2]
    number = number // counts[2]
    d = number % counts[3]
    number = number // counts[3]
    return a, b, c, d, number % counts[4], number // counts[4]


@gluon.jit
def added(one, other, counts):
    """The digits of a sum: divisions for every tile would take as long as a box."""
    a, more = _digit(one[0], other[0], 0, counts[0])
    b, more = _digit(one[1], other[1], more, counts[1])
    c, more = _digit(one[2], other[2], more, counts[2])
    d, more = _digit(one[3], other[3], more, counts[3])
    e, more = _digit(one[4], other[4], more, counts[4])
    return a, b, c, d, e, one[5] + other[5] + more


@gluon.jit
def _digit(one, other, more, count):
    total = one + other + more
    return gl.where(total >= count, total - count, total), gl.where(total >= count, 1, 0)


@gluon.jit
def place_of(digits, axes, group, RULES: gl.constexpr, OF_KEYS: gl.constexpr):
    """The tile with a number."""
    begin, ranks = _tiled(axes, RULES, OF_KEYS)
    first0, residue0 = _first(digits[2], begin[0], ranks[0], boxes.size(RULES, 0), boxes.is_dilated(RULES))
    first1, residue1 = _first(digits[1], begin[1], ranks[1], boxes.size(RULES, 1), boxes.is_dilated(RULES))
    first2, residue2 = _first(digits[0], begin[2], ranks[2], boxes.size(RULES, 2), boxes.is_dilated(RULES))
    h = digits[4] * group + digits[3]
    return boxes.Place(digits[5], h, digits[4], (first0, first1, first2), (residue0, residue1, residue2))


@gluon.jit
def _first(tile, begin, ranks, SIZE: gl.constexpr, DILATED: gl.constexpr):
    if not DILATED:
        return begin + tile * SIZE, 0
    per = gl.cdiv(ranks, SIZE)
    return begin + tile % per * SIZE, tile // per
