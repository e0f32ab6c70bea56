"""Small calls of the kernels on CUDA, for a tool that watches this process; the argument is one of `FAMILIES`.

The last line that it prints names the kernels that Triton made ready for launches.
"""

import sys

import torch
import triton
import triton.language as tl

from hilbert_lib import DilatedPattern, Neighbourhood, Ordering, dilated_attention, neighbourhood_attention
from hilbert_lib.attention.backends import strided
from hilbert_lib.attention.merge import add_rows, merge_results, merge_rows
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.triton import copies, merge
from hilbert_lib.attention.triton.hopper import division
from hilbert_lib.attention.triton.rows import add_zero_keys
from hilbert_lib.curves.coordinates import curve_coordinates, curve_index

DEVICE = "cuda"


@triton.jit
def past_the_end_kernel(x, out, SIZE: tl.constexpr):
    """A mistake that memcheck has to find: the last element that it reads is past x."""
    n = tl.arange(0, SIZE)
    tl.store(out + n, tl.load(x + n + 1))


@triton.jit
def race_kernel(out):
    """A mistake that racecheck has to find: a warp reads what another one writes to shared memory, with no barrier."""
    n = tl.arange(0, 128)  # one a thread
    assembly: tl.constexpr = """{
        .shared .b32 words[128]; .reg .b32 first, mine, other;
        mov.u32 first, words; add.u32 mine, first, $1; add.u32 other, first, $2;
        st.shared.b32 [mine], $1; ld.shared.b32 $0, [other];
    }"""
    read = tl.inline_asm_elementwise(assembly, "=r,r,r", [4 * n, 4 * (127 - n)], tl.int32, is_pure=False, pack=1)
    tl.store(out + n, read)


def attend(
    branches, keys, *, heads=(2, 1), head_dim=64, dtype=torch.bfloat16, queries=None, stored=False, backend="triton",
    **options,
):  # fmt: skip
    """Forward, and backward unless there are few queries, the last ones; stored: k and v in another order.

    Returns what it attended with, and the output.
    """
    shapes = (1, queries or keys, heads[0], head_dim), *[(1, keys, heads[1], head_dim)] * 2
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes)
    options |= {"kv_ordering": Ordering.random(keys, seed=0)} if stored else {}
    options |= {"query_start": keys - queries} if queries else {}
    out = dilated_attention(q, k, v, DilatedPattern(*branches), backend=backend, **options)
    if not queries or queries > 64:
        out.backward(torch.randn_like(out))
    return q, k, v, out


def attend_on_grid(near, dtype, head_dim, extra, **options):
    """Forward and backward of two sequences, with so many extra keys."""
    rows = (near.length, 4), *[(near.length, 2)] * 2, *[(extra, 2)] * 2 * bool(extra)
    leaves = [torch.randn(2, *each, head_dim, device=DEVICE, dtype=dtype, requires_grad=True) for each in rows]
    options |= dict(zip(("extra_k", "extra_v"), leaves[3:], strict=False))
    out = neighbourhood_attention(*leaves[:3], near, **options)
    out.backward(torch.randn_like(out))


def padded(keys):
    """The last third and every fifth key have no weight."""
    n = torch.arange(keys, device=DEVICE)[None]
    return (n % 5 == 0) | (n > keys * 2 // 3)


def plain():
    """The kernels that serve everywhere; the last call in two passes."""
    attend(((128, 256), (1, 2)), 300, is_causal=True)
    attend(((128, 256), (1, 3)), 300, head_dim=72, dtype=torch.float16, stored=True, key_padding_mask=padded(300))
    attend(((128,), (1,)), 300, queries=100, is_causal=True, dropout_p=0.3)
    attend(((64, 256), (1, 64)), 301, head_dim=5, dtype=torch.float32, is_causal=True, stored=True)


def hopper():
    """The warp-specialised kernels: more blocks of keys than they have stages, in tiles that are cut and in whole ones.

    With and without dq, which is the plain kernel's where torch asks for determinism.
    """
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        attend(((256, 1024), (1, 2)), 1000, is_causal=True, backend="hopper")
        attend(((256, 1024), (1, 2)), 1024, head_dim=128, dtype=torch.float16, backend="hopper")
    attend(((256, 512), (1, 3)), 700, head_dim=32, backend="hopper")
    for head_dim in (192, 256):  # whose dk, dv and dq have kernels of their own
        attend(((256, 1024), (1, 2)), 1000, head_dim=head_dim, is_causal=True, backend="hopper")


def divided():
    """Launches of them that go on from another's results, and plain ones that do so for a branch without descriptors.

    In the last call a key that is not attended to gives NaN where a tile is cut off: the plain kernel then begins
    every row anew.
    """
    branches, keys = ((256, 500, 2048), (1, 2, 6)), 1000
    for is_causal in (False, True):
        ours, theirs = division.launches(DilatedPattern(*branches), keys, 1, is_causal)
        assert (len(ours), len(theirs)) == (2, 1)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        attend(branches, keys, is_causal=True, backend="hopper")
        attend(branches, keys, head_dim=128, dtype=torch.float16, backend="hopper")
    anew()


def anew():
    """Two launches, of which neither visits all rows; a NaN that only the later ones see."""
    branches, keys, place = ((500, 768), (2, 3)), 1000, 700
    assert len(division.launches(DilatedPattern(*branches), keys, 1, True)[0]) == 2
    q, k, v, _ = attend(branches, keys, is_causal=True, backend="hopper")
    with torch.no_grad():
        v[:, place : place + 6] = torch.nan  # in both branches
        out = dilated_attention(q, k, v, DilatedPattern(*branches), backend="hopper", is_causal=True)
    assert out[:, :place].isfinite().all()
    assert out[:, place:].isnan().any()


def boxes():
    """The kernels for grids that read boxes: more of them than there are stages, whole and cut, round an axis too."""
    grids = (
        (Neighbourhood((40, 41), 19), 64, 0),
        (Neighbourhood((24, 50), (9, 23), dilation=(1, 2), edge=("clip", "wrap")), 128, 70),
        (Neighbourhood((6, 17, 20), (3, 7, 9), stride=(1, 1, 2), is_causal=(True, False, False)), 40, 5),
    )
    for near, head_dim, extra in grids:
        mask = padded(near.length).expand(2, -1)
        attend_on_grid(near, torch.bfloat16, head_dim, extra, backend="hopper", key_padding_mask=mask)
    attend_on_grid(Neighbourhood((21, 33), (5, 9), dilation=2), torch.bfloat16, 64, 0, backend="hopper")


def wide_boxes():
    """The kernels by boxes for heads above 128: apart, since racecheck stops counting at 10,000,000 hazards."""
    attend_on_grid(Neighbourhood((12, 20), (5, 9)), torch.bfloat16, 192, 5, backend="hopper")


def whole_boxes():
    """The forward of windows of whole boxes."""
    attend_on_grid(Neighbourhood((32, 48), 32, stride=16), torch.bfloat16, 128, 70, backend="hopper")


def decoding():
    """Few queries, the keys split over programs."""
    attend(((128, 512), (1, 2)), 500, heads=(4, 2), queries=1, is_causal=True)
    attend(((128, 512), (1, 2)), 500, dtype=torch.float16, queries=5, stored=True, key_padding_mask=padded(500))
    attend(((512,), (3,)), 500, head_dim=5, dtype=torch.float32, queries=3, is_causal=True, dropout_p=0.3)


def grids():
    """The kernels for grids: every edge and number of axes, in tiles of which the last ones are cut."""
    for near, dtype, head_dim, extra in (
        (Neighbourhood((301,), 33, dilation=3, stride=2, is_causal=True, edge="clip"), torch.float32, 5, 0),
        (Neighbourhood((18, 28), (5, 9), stride=(2, 1), edge="wrap"), torch.float16, 72, 70),
        (Neighbourhood((5, 9, 13), (3, 4, 5)), torch.bfloat16, 64, 3),
    ):
        options = {"extra_padding_mask": padded(extra).expand(2, -1)} if extra else {}
        for order in (None, Ordering.random(near.length, seed=0)):
            options |= {"ordering": order, "key_padding_mask": padded(near.length).expand(2, -1) if order else None}
            attend_on_grid(near, dtype, head_dim, extra, backend="triton", **options)


def merging():
    """Parts as dense kernels leave them, merged and summed at once; drawn, since those kernels are not ours to watch.

    Parts of several segments, of cut ones and of heads whose offsets follow each other; rows that are in no part.
    """
    for dtype, head_dim, branches in (
        (torch.bfloat16, 64, ((64, 256), (1, 4))),
        (torch.float16, 72, ((96, 250), (2, 3))),
        (torch.float32, 40, ((300,), (2,))),
    ):
        q, k, v = (torch.randn(2, 300, heads, head_dim, device=DEVICE, dtype=dtype) for heads in (4, 2, 2))
        parts, summands = [], []
        for step in strided.steps(Request(DilatedPattern(*branches)), [q], [k]):
            (rows,), (keys,) = step.queries, step.keys
            lse = torch.randn(rows.shape[:3], device=DEVICE)
            parts.append(step.query_part(torch.randn_like(rows.contiguous()), lse))
            summands.append(step.key_part(torch.randn_like(keys.contiguous())))
        out, lse = merge.merge_parts(parts, q)
        assert out.isfinite().all()
        assert (lse == -torch.inf).any() == (1 not in branches[1])
        assert merge.sum_parts(summands, v).isfinite().all()


def by_row():
    """Rows of a whole by one index and by two, merged and added to in place, zero keys, and two results."""
    for dtype, head_dim in ((torch.float16, 64), (torch.float32, 40)):
        # (positions, KV heads, group, batch, head_dim), laid out as a tensor of sequences is
        out = torch.randn(2, 100, 6, head_dim, device=DEVICE, dtype=dtype).unflatten(2, (3, 2)).movedim(0, 3)
        lse = torch.randn(2, 100, 6, device=DEVICE).unflatten(2, (3, 2)).movedim(0, 3)
        rows = torch.randperm(300, device=DEVICE)[:77]
        others = torch.randn(77, 2, 2, head_dim, device=DEVICE, dtype=dtype)
        merge_rows(out, lse, (rows // 3, rows % 3), others, torch.full((77, 2, 2), -torch.inf, device=DEVICE))
        add_rows(out, (rows // 3, rows % 3), others)
        add_rows(torch.zeros(300, 2, 2, head_dim, device=DEVICE), (rows,), others)
        out = torch.randn(2, 77, 6, head_dim, device=DEVICE, dtype=dtype)
        lse = torch.randn(2, 6, 77, device=DEVICE)
        add_zero_keys(out, lse, torch.randn(3, 1, 77, device=DEVICE))
        merged, _ = merge_results(out, lse, out, lse, torch.float32)
        assert out.isfinite().all()
        assert merged.isfinite().all()


def copied():
    """Rows of several tensors and of lse, there and back, and sums of rows; tiles are not full."""
    for dtype, head_dim in ((torch.float16, 64), (torch.float32, 40)):
        x, other = (torch.randn(2, n, 3, head_dim, device=DEVICE, dtype=dtype) for n in (100, 30))
        lse = torch.randn(2, 3, 100, device=DEVICE).transpose(1, 2)[..., None]
        at, by_head = torch.randperm(100, device=DEVICE)[:37], torch.arange(-31, 80, device=DEVICE)
        rows, some_lse = x.new_zeros(2, 37, 3, head_dim), torch.zeros(2, 37, 3, 1, device=DEVICE)
        framed = copies.Copy(torch.zeros_like(rows), x, by_head, other[:, :, :1])
        both = [copies.Copy(rows, x, at), copies.Copy(some_lse, lse, at)]
        copies.gather_rows([framed, *both])
        copies.scatter_rows(both)
        part = copies.Part(*torch.randn(2, 2, 9, 3, head_dim, device=DEVICE), by_head[30:67] // 4)
        answers = torch.randn(27, 2, 2, head_dim, device=DEVICE)
        found = torch.arange(111, device=DEVICE)[:, None] // 4 - 1
        copies.sum_rows((x, x.clone()), at, [part], copies.Answers(answers, found))
        assert x.isfinite().all()
        assert framed.dense.isfinite().all()


def curve():
    """Cells and places, in grids of one leaf and of several; places in one whose tables have 64 bits."""
    for shape in ((13, 21), (40, 70), (5, 6, 7), (11, 12, 13)):
        cells = curve_coordinates("hilbert", shape, device=DEVICE)
        assert torch.equal(curve_index("hilbert", cells, shape).cpu(), torch.arange(len(cells)))
    curve_index("hilbert", cells[:, :2], (2**21, 2**21))


def past_the_end():
    past_the_end_kernel[(1,)](torch.ones(128, device=DEVICE), torch.ones(128, device=DEVICE), SIZE=128)


def race():
    race_kernel[(1,)](torch.ones(128, device=DEVICE, dtype=torch.int32), num_warps=4)


CALLS = (
    plain,
    hopper,
    divided,
    boxes,
    wide_boxes,
    whole_boxes,
    decoding,
    grids,
    merging,
    by_row,
    copied,
    curve,
    past_the_end,
    race,
)
FAMILIES = {function.__name__: function for function in CALLS}

if __name__ == "__main__":
    ready = set()
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: ready.add(f"{fn.module}.{fn.name}")
    FAMILIES[sys.argv[1]]()
    torch.cuda.synchronize()
    print("\nready:", *sorted(ready), flush=True)
