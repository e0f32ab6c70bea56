"""Numbers and places of the tiles of a launch on a grid. All kernels number tiles alike:

    number = ((((sequence * kv_heads + g) * group + member) * tiles0 + tile0) * tiles1 + tile1) * tiles2 + tile2

A program takes every `programs`-th tile. It adds `programs` to its tile digit by digit, without a division.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hilbert_lib.attention.triton.hopper import boxes


@gluon.jit
def _tiled(axes, RULES: gl.constexpr, OF_KEYS: gl.constexpr):
    """First rank and number of ranks that tiles cover, along each axis."""
    if OF_KEYS or not boxes.is_part(RULES):
        return (0, 0, 0), axes.m
    else:
        begin, stop = axes.part.begin, axes.part.stop
        return begin, (stop[0] - begin[0], stop[1] - begin[1], stop[2] - begin[2])


@gluon.jit
def counts_of(axes, heads, group, RULES: gl.constexpr, OF_KEYS: gl.constexpr):
    """Bases of the digits of a tile's number: tiles of axes 2, 1 and 0, heads of a group, KV heads.

    A tile of keys serves all heads of its KV head: its group counts 1.
    """
    _, ranks = _tiled(axes, RULES, OF_KEYS)
    _, residues0 = boxes.residues_of(axes, 0, RULES)
    _, residues1 = boxes.residues_of(axes, 1, RULES)
    _, residues2 = boxes.residues_of(axes, 2, RULES)
    tiles0 = residues0 * gl.cdiv(ranks[0], boxes.size(RULES, 0))
    tiles1 = residues1 * gl.cdiv(ranks[1], boxes.size(RULES, 1))
    tiles2 = residues2 * gl.cdiv(ranks[2], boxes.size(RULES, 2))
    return tiles2, tiles1, tiles0, 1 if OF_KEYS else group, heads // group


@gluon.jit
def tiles_of(total, programs):
    """First tile and end of this program, which takes every `programs`-th tile between them.

    Programs may come in several rounds, and each round has a run of tiles of its own.
    """
    rounds = gl.cdiv(gl.num_programs(0), programs)
    length = gl.cdiv(gl.cdiv(total, programs), rounds) * programs
    begin = gl.program_id(0) // programs * length
    return begin + gl.program_id(0) % programs, gl.minimum(begin + length, total)


@gluon.jit
def digits_of(number, counts):
    """The digits of a number, lowest first; the last one is the sequence."""
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
def added(digits, addend, counts):
    """The digits of a sum. Divisions for every tile would take as long as a box."""
    a, carry = _digit(digits[0], addend[0], 0, counts[0])
    b, carry = _digit(digits[1], addend[1], carry, counts[1])
    c, carry = _digit(digits[2], addend[2], carry, counts[2])
    d, carry = _digit(digits[3], addend[3], carry, counts[3])
    e, carry = _digit(digits[4], addend[4], carry, counts[4])
    return a, b, c, d, e, digits[5] + addend[5] + carry


@gluon.jit
def _digit(digit, addend, carry, count):
    total = digit + addend + carry
    return gl.where(total >= count, total - count, total), gl.where(total >= count, 1, 0)


@gluon.jit
def place_of(digits, axes, group, RULES: gl.constexpr, OF_KEYS: gl.constexpr):
    """The tile with these digits."""
    begin, ranks = _tiled(axes, RULES, OF_KEYS)
    lowest0, _ = boxes.residues_of(axes, 0, RULES)
    lowest1, _ = boxes.residues_of(axes, 1, RULES)
    lowest2, _ = boxes.residues_of(axes, 2, RULES)
    first0, residue0 = _first(digits[2], begin[0], ranks[0], lowest0, boxes.size(RULES, 0), boxes.is_dilated(RULES))
    first1, residue1 = _first(digits[1], begin[1], ranks[1], lowest1, boxes.size(RULES, 1), boxes.is_dilated(RULES))
    first2, residue2 = _first(digits[0], begin[2], ranks[2], lowest2, boxes.size(RULES, 2), boxes.is_dilated(RULES))
    h = digits[4] * group + digits[3]
    return boxes.Place(digits[5], h, digits[4], (first0, first1, first2), (residue0, residue1, residue2))


@gluon.jit
def _first(tile, begin, ranks, lowest, SIZE: gl.constexpr, DILATED: gl.constexpr):
    if not DILATED:
        return begin + tile * SIZE, 0
    per = gl.cdiv(ranks, SIZE)
    return begin + tile % per * SIZE, lowest + tile // per
