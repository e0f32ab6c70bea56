"""Rows that a rank copies and sums by index: a kernel gives the bits that torch gives, tensor by tensor."""

from math import prod

import pytest
import torch

from hilbert_lib import Neighbourhood, Ordering
from hilbert_lib.attention.request import Tensors
from hilbert_lib.ring import Rectangles, Runs, plan_halo
from hilbert_lib.ring.rank import copies, local
from hilbert_lib.ring.rank.halo_layout import layout_of
from hilbert_lib.ring.rank.layout import Block

pytest.importorskip("hilbert_lib.attention.triton.copies", reason="triton has no build for this platform")

# Corners that two slabs reach, strips whose rows two others reach, a rank without an interior, and one without cells.
COPIED = {
    "rectangles": Rectangles((2, 2)),
    "strips": Rectangles((3, 1), ((1, 6), None)),
    "empty": Rectangles((3, 1), ((0, 5), None)),
    "runs": Runs(Ordering.random(48, 1), (20, 3, 25)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shards", COPIED.values(), ids=COPIED)
def test_rows_that_kernels_copy_and_sum_are_those_of_torch_to_the_bit(shards, dtype, monkeypatch):
    """Of a rank alone: what it sends, computes of what it receives, and makes of what comes back."""
    near = Neighbourhood((8, 6), (5, 3)), Neighbourhood((8, 6), (3, 3))
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 5, "dtype": dtype}
    plan, generator = plan_halo(near, shards, **sizes), torch.Generator().manual_seed(0)

    def drawn(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    for rank in range(shards.ranks):
        layout, cells = layout_of(plan, rank, torch.device("cpu")), shards.count((8, 6), rank)
        if not cells:
            continue
        q, dout, out = drawn(3, 2, 4, cells, 5).transpose(2, 3)  # of heads first
        k, v = drawn(2, 2, cells, 2, 2, 5)[..., 1, :].flip(0)  # every other row
        lse, dlse = drawn(2, 2, 4, cells, dtype=torch.float32)
        received = drawn(sum(layout.received), 2, 2, 5)
        mask = drawn(2, cells) > 0
        padding = (drawn(48, 2) > 0)[plan.arriving[rank][0]].byte()  # of a cell, whichever of its heads comes
        grads, dq = drawn(2, 2, cells, 2, 5), drawn(2, cells, 4, 5)
        answer, found, results, lses = drawn(sum(layout.sent), 2, 2, 5, dtype=torch.float32), [], [], []
        for border in layout.borders:
            (batch, keys, count), own = (2, len(border.filled), cells), border.queries
            count = cells if own is None else len(own)
            sums = drawn(2, batch, keys, 2, 5, dtype=torch.float32)
            found.append(Tensors(drawn(batch, count, 4, 5), *sums))
            lses.append(drawn(batch, 4, count, dtype=torch.float32))
        got = []
        for by_kernel in (False, True):
            monkeypatch.setattr(copies, "kernel_serves", lambda x, answer=by_kernel: answer)
            sent = copies.packed(k, v, layout, mask)
            sides = (q, dout, out), (lse, dlse, None), (mask, padding)
            frames = copies.framed(k, v, received, layout.borders, *sides)
            results = [*sent, *copies.packed(k, v, layout)]
            for border, frame in zip(layout.borders, frames, strict=True):
                assert frame.by_lse[2] is None
                results += [frame.k, frame.v, *frame.by_query, *frame.by_lse[:2]]
                results.append(frame.mask & (border.cells != -1))  # nobody sees the others
            results.append(copies.answered(found, received, layout, torch.float32))
            if layout.interior:
                whole, whole_lse, both = dq.clone(), lse.clone(), [x.clone() for x in grads]
                copies.placed(whole, [more.q for more in found], layout, whole_lse, lses)
                results += [whole, whole_lse, *copies.added(both, found, answer, k, layout)]
            else:
                results += copies.added(None, found, answer, k, layout)
            got.append(results)
        for by_torch, by_kernel in zip(*got, strict=True):
            assert by_torch.dtype == by_kernel.dtype
            assert by_torch.equal(by_kernel)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_rows_of_a_shard_that_a_kernel_copies_are_those_of_torch(heads, kv_heads, batch, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    positions = 30

    def drawn(*shape):
        return torch.randn(shape, generator=generator)

    touched = torch.randperm(positions * kv_heads, generator=generator)[:50]
    order = Ordering.random(positions, 1)
    shard = local.Shard(torch.stack([touched // kv_heads, touched % kv_heads]), kv_heads, order)
    q, dout = drawn(2, batch, heads, positions, 5).transpose(2, 3)
    k, v = drawn(2, batch, positions, kv_heads, 2, 5)[..., 1, :]
    lse = drawn(batch, heads, positions).transpose(1, 2)[..., None]
    got = []
    for by_kernel in (False, True):
        monkeypatch.setattr(local, "kernel_serves", lambda x, answer=by_kernel: answer)
        for rows in (torch.randperm(len(touched), generator=generator.manual_seed(1))[:24].view(2, 3, 4), touched[:0]):
            got.append([*shard.queries(rows, dout, q, lse), shard.keys(rows, k, v)])
    for by_torch, by_kernel in zip(got[:2], got[2:], strict=True):
        assert all(map(torch.equal, by_torch, by_kernel))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_rows_and_sums_of_a_block_that_one_kernel_makes_are_those_of_torch(heads, kv_heads, batch, dtype, monkeypatch):
    """Of a block's queries, its keys in the shard and among received rows, and of its gradients."""
    generator, positions, group = torch.Generator().manual_seed(0), 30, heads // kv_heads

    def drawn(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    numbers = torch.randperm(positions * kv_heads, generator=generator)
    touched = torch.stack([numbers[:50] // kv_heads, numbers[:50] % kv_heads])
    shard, queries, keys = local.Shard(touched, kv_heads, Ordering.random(positions, 1)), (2, 3, 2), (2, 4, 2)
    places = [
        torch.randperm(touched.shape[1], generator=generator)[: prod(shape)].view(shape) for shape in (queries, keys)
    ]
    block = Block(None, False, *places, None)
    q, dout = drawn(2, batch, positions, heads, 5)
    k, v = drawn(2, batch, positions, kv_heads, 5)
    received, their_q = drawn(touched.shape[1], 2, batch, 5), drawn(touched.shape[1], group, batch, 5)
    their_sums = drawn(touched.shape[1], group, batch, 2, dtype=torch.float32)
    # Gradients as a call returns them, whose batch lies between the segments and the rows.
    dq = drawn(2, batch, 3, 2, group, 5).permute(0, 2, 3, 4, 1, 5)
    dk, dv = drawn(2, 2, batch, 4, 2, 1, 5).permute(0, 1, 3, 4, 5, 2, 6)
    sums = drawn(touched.shape[1], group + 2, batch, 5, dtype=torch.float32)
    grads = drawn(batch, positions, heads, 5), *drawn(2, batch, positions, kv_heads, 5)
    got = []
    for by_kernel in (False, True):
        monkeypatch.setattr(local, "kernel_serves", lambda x, answer=by_kernel: answer)
        rows = [*shard.block(block, [q, dout], k, v), *shard.received_block(block, [q, dout], received)]
        rows.append(shard.together(places[1].flatten(), q, k, v))
        rows += local.exchanged_block(block, [their_q, their_sums], received)
        all_dq, all_dkv = (x.clone() for x in (sums[:, :group], sums[:, group:]))
        local.add_block(all_dq, all_dkv, block, dq, dk, dv)
        totals = tuple(x.clone() for x in grads)
        shard.add(totals, all_dq, all_dkv)
        got.append([*rows, all_dq, all_dkv, *totals])
    for by_torch, by_kernel in zip(*got, strict=True):
        assert by_torch.dtype == by_kernel.dtype
        assert by_torch.equal(by_kernel)
