"""Dropout in the warp-specialised kernels: one Philox for four neighbouring keys, shared by the threads that hold them.

The bits are those of `attention.dropout.keep_mask`. A thread holds pairs of columns of a product, and every eighth row:

    columns            0 1   2 3   4 5   6 7 | 8 9  10 11 ...
    rows 0 and 8       t0    t1    t2    t3  | t0    t1
    rows 1 and 9       t4    t5    t6    t7  | t4    t5

Four keys are columns of the forward, in two threads, and rows of the backward, in four. Each thread computes the Philox
of other columns, as many as it holds keys of. It packs what is kept into a word a row, and the threads exchange their
words. Nothing of this needs the scores: it is computed beside their product.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hilbert_lib.attention.triton.hopper import tiles

LOW = gl.constexpr(0xFFFFFFFF)
FACTORS = 0xD2511F53, 0xCD9E8D57  # Philox4x32's, as in `attention.dropout`
FACTOR_A, FACTOR_C = gl.constexpr(FACTORS[0]), gl.constexpr(FACTORS[1])
STEPS = 0x9E3779B9, 0xBB67AE85
STEP_LOW, STEP_HIGH = gl.constexpr(STEPS[0]), gl.constexpr(STEPS[1])
ROUNDS_LEFT = 7  # of ten, whose work depends on queries and on keys
QUADS = gl.constexpr(4)  # threads that hold a row


class Drops(NamedTuple):
    """The bits of a group: the call's, and those coordinates that its rows have."""

    low: gl.tensor  # words of the seed, int64
    high: gl.tensor
    bound: gl.tensor  # bits above it are kept; the largest that are dropped
    batch: gl.tensor
    head: gl.tensor  # of q
    rows: gl.tensor  # [rows, 4]: positions of queries, or numbers of four keys in their segment; alike in a row


class Numbers(NamedTuple):
    """Numbers of the keys of a stage, as the copying warp writes them."""

    fours: gl.shared_memory_descriptor  # [stages, 1]: number of the first four keys in their segment
    branches: gl.shared_memory_descriptor  # [stages, 1]: the branch as the pattern numbers it


@gluon.jit
def by_threads(tile):
    """A product as [rows, columns // 8, threads of a row, 2]."""
    return tile.reshape([tile.shape[0], tile.shape[1] // 8, QUADS, 2])


@gluon.jit
def drops_of(seed, drop_below, batch, head, rows):
    """`Drops` of rows [rows, 4]."""
    words = gl.load(seed)
    bound = (gl.zeros_like(rows) + (drop_below - 1)).to(gl.uint32)  # [GROUP_ROWS, 4]
    return Drops(words & LOW, (words >> 32) & LOW, bound, batch, head, rows)


@gluon.jit
def _wide(word, FACTOR: gl.constexpr):
    """High and low word of a 32 by 32 bit product."""
    product = word.to(gl.uint32, bitcast=True).to(gl.int64) * FACTOR  # [rows, columns]
    return ((product >> 32) & LOW).to(gl.int32), (product & LOW).to(gl.int32)


@gluon.jit
def _key(word, ROUND: gl.constexpr, STEP: gl.constexpr):
    """A word of the key in a round."""
    return ((word + ROUND * STEP) & LOW).to(gl.int32)


@gluon.jit
def _of_queries(drops, query, branch):
    """Words of two rounds that queries alone decide: one to be joined to the third, and the fourth."""
    high_c, _ = _wide(drops.head | branch << 16, FACTOR_C)
    first = high_c ^ query ^ _key(drops.low, 0, STEP_LOW)  # [GROUP_ROWS, columns]
    high_a, low_a = _wide(first, FACTOR_A)  # [GROUP_ROWS, columns] each
    return high_a ^ _key(drops.high, 1, STEP_HIGH), low_a


@gluon.jit
def _of_keys(drops, four, branch):
    """The same of four keys: two words to be joined in each of two rounds."""
    _, second = _wide(drops.head | branch << 16, FACTOR_C)
    high_a, fourth = _wide(four, FACTOR_A)  # [rows, columns] each
    high_c, next_second = _wide(high_a ^ drops.batch ^ _key(drops.high, 0, STEP_HIGH), FACTOR_C)  # [rows, columns] each
    high_a, next_fourth = _wide(high_c ^ second ^ _key(drops.low, 1, STEP_LOW), FACTOR_A)  # [rows, columns] each
    return (
        fourth,
        next_second ^ _key(drops.low, 2, STEP_LOW),
        high_a ^ _key(drops.high, 2, STEP_HIGH),
        next_fourth,
    )


@gluon.jit
def _with_philox(kept, drops, of_queries, of_keys, NUMBER: gl.constexpr, OF_KEYS: gl.constexpr):
    """`kept` with the bits of what is kept by the four words of Philox of queries and four keys.

    It is the Philox of that number of a row of keys, with OF_KEYS, or of a row of queries. Assembly packs each word as
    soon as it is there: LLVM would pack all words of a block at its end, for which there are too few registers.
    """
    return gl.inline_asm_elementwise(
        _philox_asm(NUMBER, OF_KEYS),
        _philox_constraints(),
        [
            kept, drops.bound, of_queries[0], of_queries[1], of_keys[0], of_keys[1], of_keys[2], of_keys[3],
            drops.low.to(gl.int32), drops.high.to(gl.int32),
        ],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _philox_constraints():
    return "=r" + ",r" * 10


@gluon.constexpr_function
def _philox_asm(number, of_keys):
    """All rounds but the first two of Philox, and a bit of $0 for each word that is kept.

    The first word of a round depends on the third and second of the one before, and the third on the first and fourth.
    So half of the work of the first three rounds is that of queries alone, or of keys alone: `_of_queries`, `_of_keys`.
    """
    a, c = (f"{factor:#010x}" for factor in FACTORS)
    bits = [number + 8 * word if of_keys else 2 * number + word % 2 + 16 * (word // 2) for word in range(4)]
    lines = [
        ".reg .b32 all, first, second, third, fourth, high_a, low_a, high_c, low_c, key;",
        ".reg .b64 wide;",
        ".reg .pred is_kept;",
        "xor.b32 third, $3, $5;",
        f"mul.wide.u32 wide, third, {c};",
        "mov.b64 {second, high_c}, wide;",
        "xor.b32 first, high_c, $6;",
        "xor.b32 third, $7, $4;",
        "mov.b32 fourth, $8;",
    ]
    low_step, high_step = STEPS
    for number in range(10 - ROUNDS_LEFT, 10):
        lines += [
            f"mul.wide.u32 wide, first, {a};",
            "mov.b64 {low_a, high_a}, wide;",
            f"mul.wide.u32 wide, third, {c};",
            "mov.b64 {low_c, high_c}, wide;",
            "xor.b32 first, high_c, second;",
            f"add.s32 key, $9, {low_step * number & 0xFFFFFFFF:#010x};",
            "xor.b32 first, first, key;",
            "xor.b32 third, high_a, fourth;",
            f"add.s32 key, $10, {high_step * number & 0xFFFFFFFF:#010x};",
            "xor.b32 third, third, key;",
            "mov.b32 second, low_c;",
            "mov.b32 fourth, low_a;",
        ]
    lines.append("mov.b32 all, $1;")
    for word, bit in zip(("first", "second", "third", "fourth"), bits, strict=True):
        lines += [f"setp.gt.u32 is_kept, {word}, $2;", f"@is_kept or.b32 all, all, {1 << bit:#010x};"]
    lines.append("mov.b32 $0, all;")
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def _anew(words):
    """The same words. What is computed from them in a loop is not computed before it: it would take registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _exchanged(kept, is_odd, LANES: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr):
    """Bytes of a thread's word and of that of the thread whose number differs by LANES, chosen as prmt does."""
    selector = gl.where(is_odd != 0, ODD, EVEN) + gl.zeros_like(kept)  # [rows, columns]
    return gl.inline_asm_elementwise(
        f"""{{
            .reg .b32 other;
            shfl.sync.bfly.b32 other, $1, {LANES}, 31, 0xffffffff;
            prmt.b32 $0, $1, other, $2;
        }}""",
        "=r,r,r",
        [kept, selector],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def kept_columns(drops, numbers, block, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Bits of what is kept of COLUMNS keys of a block from key FIRST on, of rows of queries: a word a thread and row.

    Bit 2 p + c is that of column 16 p + 2 q + c for thread q of a row, and bit 16 + 2 p + c that of the column 8 on.
    """
    gl.static_assert(COLUMNS <= 128, "a word has 32 bits")
    four = tiles.told(numbers.fours, block) + FIRST // 4
    branch = tiles.told(numbers.branches, block)
    quad = gl.arange(0, QUADS, gl.SliceLayout(0, drops.rows.type.layout))[None, :]  # [1, QUADS]
    of_queries = _of_queries(drops, drops.rows, branch)  # [rows, QUADS] each
    kept = gl.zeros_like(drops.rows)  # [GROUP_ROWS, 4]
    for pair in gl.static_range(COLUMNS // 16):
        # Threads 0 and 1 share four keys, and 2 and 3 do. Those of odd number take the keys 8 on.
        of_keys = _of_keys(drops, four + (4 * pair + 2 * (quad & 1) + (quad >> 1)), branch)  # [1, QUADS] each
        kept = _with_philox(kept, drops, of_queries, of_keys, pair, False)  # [rows, columns]
    return _exchanged(kept, quad & 1, 1, 0x5410, 0x3276)


@gluon.jit
def kept_rows(drops, branch, first_query, rate, COLUMNS: gl.constexpr):
    """The same of rows of keys, and of COLUMNS queries at first_query, first_query + rate, ...

    Bit 8 (2 a + c) + p is that of column 16 p + 8 a + 2 q + c for thread q of a row.
    """
    LAYOUT: gl.constexpr = drops.rows.type.layout
    gl.static_assert(COLUMNS <= 128, "a word has 32 bits")
    row = gl.arange(0, drops.rows.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]  # [GROUP_ROWS, 1]
    quad = gl.arange(0, QUADS, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, QUADS]
    of_keys = _of_keys(drops, _anew(drops.rows), branch)  # [rows, QUADS] each
    kept = gl.zeros_like(drops.rows)  # [GROUP_ROWS, 4]
    for pair in gl.static_range(COLUMNS // 16):
        # Four threads share four keys: each takes one of the four columns that all of them hold.
        column = 16 * pair + 8 * ((row >> 1) & 1) + (row & 1) + 2 * quad  # [GROUP_ROWS, QUADS]
        of_queries = _of_queries(drops, first_query + column * rate, branch)  # [rows, QUADS] each
        kept = _with_philox(kept, drops, of_queries, of_keys, pair, True)  # [GROUP_ROWS, 4]
    # Bytes of threads by key become bytes of keys by thread, as a matrix is transposed.
    kept = _exchanged(kept, row & 1, 4, 0x6240, 0x3715)  # [GROUP_ROWS, 4]
    return _exchanged(kept, row & 2, 8, 0x5410, 0x3276)


@gluon.jit
def without_dropped(tile, kept, OF_KEYS: gl.constexpr):
    """A tile of a product, 0 where it is dropped; kept: of `kept_rows` with OF_KEYS, else of `kept_columns`.

    A thread holds two rows, two elements of each in turn. LLVM would choose after the tile is rounded, one by one.
    """
    ELEMENTS: gl.constexpr = tiles.of_a_thread(tile.shape)
    shaped = by_threads(tile)  # [GROUP_ROWS, columns, QUADS, 2]
    LAYOUT: gl.constexpr = shaped.type.layout
    words = kept.expand_dims(1).expand_dims(3) + gl.zeros(
        shaped.shape, gl.int32, LAYOUT
    )  # [GROUP_ROWS, columns, cells, 2]
    words = gl.convert_layout(words.reshape(tile.shape), tile.type.layout)  # [GROUP_ROWS, columns]
    return gl.inline_asm_elementwise(
        _without_dropped_asm(ELEMENTS, OF_KEYS), _without_dropped_constraints(ELEMENTS), [tile, words],
        dtype=gl.float32, is_pure=True, pack=ELEMENTS,
    )  # fmt: skip


@gluon.constexpr_function
def _without_dropped_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * n)


@gluon.constexpr_function
def _without_dropped_asm(n, of_keys):
    lines = [".reg .b32 bit;", ".reg .pred is_kept;"]
    for i in range(n):
        eight, row, column = i // 4, i // 2 % 2, i % 2
        within = 8 * column + eight // 2 if of_keys else 2 * (eight // 2) + column
        bit = 16 * (eight % 2) + within
        lines += [
            f"and.b32 bit, ${2 * n + 2 * row}, {1 << bit:#010x};",
            "setp.ne.b32 is_kept, bit, 0;",
            f"selp.f32 ${i}, ${i}, 0f00000000, is_kept;",
        ]
    return "{ " + " ".join(lines) + " }"
