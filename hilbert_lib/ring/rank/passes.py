"""Forward and backward of one rank: the shard's own attention, the exchange beside it, then what has arrived.

What more than one computation adds to is held in float32 (float64 for float64), and rounded once.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hilbert_lib.attention import operators
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.call import Call, working_dtype
from hilbert_lib.attention.choice import choose
from hilbert_lib.attention.dropout import named
from hilbert_lib.attention.merge import add_rows
from hilbert_lib.ring.rank import blocks
from hilbert_lib.ring.rank.blocks import Job
from hilbert_lib.ring.rank.exchange import GATHERING, AllGather, Arriving, Beside, Ring, exchange
from hilbert_lib.ring.rank.layout import Block, Layout, Mail
from hilbert_lib.ring.rank.local import Merged, Shard, Sums

EXCHANGING = "all_to_all"
Kept = dict[str, Tensor]  # what a backward needs of other ranks' rows, by name


def forward(q: Tensor, k: Tensor, v: Tensor, job: Job, confirm: Callable[[], None]) -> tuple[Tensor, Tensor, Kept]:
    """Output like q and lse (batch, heads, rows) of a rank's queries, and what the backward needs of other ranks.

    `confirm` is called when the shard's own attention is under way, before anything is sent.
    """
    shard = Shard(k.shape[2], job.ordering, k.device)
    beside = Beside(q.device)
    out, lse = _fused_forward(q, k, v, job)
    confirm()
    if job.layout.is_fused:
        return out, lse, {}
    with beside:
        merged, kept = _beside_forward(q, k, v, lse, shard, job)
    shard.merge(out, lse, job.layout.touched, merged)
    return out, lse, kept


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, job: Job, kept: Kept
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a rank's q, k and v, from the gradient of its out, and what `forward` returned."""
    shard = Shard(k.shape[2], job.ordering, k.device)
    beside = Beside(q.device)
    grads = _fused_backward(dout, q, k, v, out, lse, job)
    if job.layout.is_fused:
        return grads
    with beside:
        sums = _beside_backward(dout, q, k, v, out, lse, shard, job, kept)
    shard.add(*grads, job.layout.touched, sums)
    return grads


def _beside_forward(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, shard: Shard, job: Job) -> tuple[Merged, Kept]:
    # All but the fused call, for the touched queries. Only the dtype and device of lse are read: it is being computed.
    layout = job.layout
    exchanging = layout.mail.get(EXCHANGING)
    gathers = _start_gathers(k, v, shard, job)
    if exchanging:
        rows = torch.cat([shard.queries(q, exchanging.rows), shard.keys(k, v, exchanging.rows)], 1)
        arriving = exchange(rows, exchanging.sent, exchanging.received, job.group)
    kept = _paddings(shard, job)
    merged = Merged(_shape_of_touched(q, job), lse)

    def add(block: Block, kv: Tensor, padded: Tensor | None) -> None:
        queries = shard.queries(q, block.own_queries)
        merged.add(block.queries, *blocks.forward(queries, kv, block, job, padded))

    for block in layout.own:
        add(block, shard.keys(k, v, block.own_keys), _own_padded(block, shard, job))
    if exchanging:
        kept["exchanged"] = arriving.wait()
        answers = _exchanged_forward(exchanging, kept, job, lse)
    for transport, gather in gathers.items():
        mail = layout.mail[transport]
        for arrived in gather:
            for block in mail.blocks.get(arrived.source, ()):
                add(block, arrived.rows[block.keys], _padded(block, mail, kept, transport, arrived.source))
        arrived = None  # with what it sent
    if exchanging:
        their_out, their_lse = (answer.wait() for answer in answers)
        for rows, places in exchanging.answers[None]:
            merged.add(places, their_out[rows], their_lse[rows])
    return merged, kept


def _beside_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shard: Shard, job: Job, kept: Kept
) -> Sums:
    # All but the fused call: what it adds to the gradients of the touched rows.
    layout, lse_rows = job.layout, lse.transpose(1, 2)[..., None]
    exchanging = layout.mail.get(EXCHANGING)
    gathers = _start_gathers(k, v, shard, job)
    if exchanging:
        dout_rows, out_rows, own_lse = (shard.queries(x, exchanging.rows) for x in (dout, out, lse_rows))
        delta = (dout_rows.to(lse.dtype) * out_rows.to(lse.dtype)).sum(-1)
        arriving = [
            exchange(rows, exchanging.sent, exchanging.received, job.group)
            for rows in (dout_rows, torch.stack([own_lse[..., 0], delta], 1))
        ]
    sums = Sums(_shape_of_touched(q, job), lse)

    def add(block: Block, kv: Tensor, padded: Tensor | None) -> Tensor:
        # Adds up dq and returns the gradient of kv.
        mine = (shard.queries(x, block.own_queries) for x in (dout, q, out, lse_rows))
        dq, dkv = blocks.backward(*mine, kv, block, job, padded)
        sums.add_queries(block.queries, dq)
        return dkv

    for block in layout.own:
        kv = shard.keys(k, v, block.own_keys)
        sums.add_keys(block.keys, add(block, kv, _own_padded(block, shard, job)))
    if exchanging:
        answer = _exchanged_backward(exchanging, arriving, kept, job)
    for transport, gather in gathers.items():
        mail, late = layout.mail[transport], None
        for arrived in gather:
            dkv = torch.zeros(arrived.rows.shape, dtype=lse.dtype, device=q.device)
            for block in mail.blocks.get(arrived.source, ()):
                padded = _padded(block, mail, kept, transport, arrived.source)
                add_rows(dkv, (block.keys,), add(block, arrived.rows[block.keys], padded))
            if late:
                sums.add_answer(late[0], late[1].wait())
            # While this answer travels, the next step is computed.
            late = mail.answers[arrived.destination], gather.answer(dkv, arrived)
        arrived = None  # with what it sent
        sums.add_answer(late[0], late[1].wait())
    if exchanging:
        gradients = answer.wait()
        for rows, places in exchanging.answers[None]:
            sums.add_queries(places, gradients[rows, :-2])
            sums.add_keys(places, gradients[rows, -2:])
    return sums


def _shape_of_touched(q: Tensor, job: Job) -> tuple[int, int, int, int]:
    return job.layout.touched.shape[1], q.shape[2] // job.layout.kv_heads, q.shape[0], q.shape[3]


def _start_gathers(k: Tensor, v: Tensor, shard: Shard, job: Job) -> dict[str, AllGather | Ring]:
    gathers = {}
    for transport, gather in GATHERING.items():
        if transport in job.layout.mail:
            mail = job.layout.mail[transport]
            rows_for = dict(enumerate(mail.rows.split(mail.sent, 1))) | {None: mail.rows}

            def packed(destination: int | None, rows_for: dict = rows_for) -> Tensor:
                return shard.keys(k, v, rows_for[destination])

            gathers[transport] = gather(packed, mail.sent, mail.received, job.group)
    return gathers


def _exchanged_forward(mail: Mail, kept: Kept, job: Job, lse: Tensor) -> tuple[Arriving, Arriving]:
    # Attention of all ranks' rows of the heads that this rank computes; sends out and lse back.
    received = kept["exchanged"]  # (rows, group + 2, batch, head_dim): q, k and v
    merged = Merged(received[:, :-2].shape, lse)
    for block in mail.blocks[None]:
        rows = received[block.queries]
        padded = _padded(block, mail, kept, EXCHANGING, None)
        merged.add(block.queries, *blocks.forward(rows[..., :-2, :, :], rows[..., -2:, :, :], block, job, padded))
    back = mail.received, mail.sent, job.group
    return exchange(merged.out.to(received.dtype), *back), exchange(merged.lse, *back)


def _exchanged_backward(mail: Mail, arriving: list[Arriving], kept: Kept, job: Job) -> Arriving:
    # Likewise; sends dq, dk and dv back.
    received = kept["exchanged"]
    dout, (lse, delta) = arriving[0].wait(), arriving[1].wait().unbind(1)
    out = _with_product(dout, delta)
    sums = torch.zeros(received.shape, dtype=lse.dtype, device=received.device)
    for block in mail.blocks[None]:
        rows = received[block.queries]
        mine = dout[block.queries], rows[..., :-2, :, :], out[block.queries], lse[block.queries][..., None]
        padded = _padded(block, mail, kept, EXCHANGING, None)
        some = blocks.backward(*mine, rows[..., -2:, :, :], block, job, padded)
        add_rows(sums, (block.queries,), torch.cat(some, 3))
    return exchange(sums, mail.received, mail.sent, job.group)


def _with_product(dout: Tensor, delta: Tensor) -> Tensor:
    # A backward uses out only for delta = rowsum(dout * out): the part of out along dout has the same delta, and saves
    # sending out. Where dout is 0, so is delta.
    largest = dout.abs().amax(-1, keepdim=True).to(delta.dtype)
    unit = dout / largest.where(largest > 0.0, 1.0)  # whose squares neither overflow nor vanish
    share = delta[..., None] / largest / unit.square().sum(-1, keepdim=True)
    return torch.where(largest > 0.0, unit * share, 0.0).to(dout.dtype)


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    if job.layout.fused is None:
        batch, rows, heads, _ = q.shape
        lse = torch.full((batch, heads, rows), -torch.inf, dtype=working_dtype(q.dtype), device=q.device)
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), lse
    return operators.forward(q, *_fused_call(q, k, v, job))


def _fused_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, job: Job
) -> tuple[Tensor, Tensor, Tensor]:
    if job.layout.fused is None:
        return tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    k, v, call, name = _fused_call(q, k, v, job)
    dq, dk, dv = operators.backward(dout, q, k, v, out, lse, call, name)
    if job.ordering is not None and call.inverse is None:  # k and v came in sequence order
        dk, dv = (job.ordering.apply(x, dim=1) for x in (dk, dv))
    return dq, dk, dv


def _fused_call(q: Tensor, k: Tensor, v: Tensor, job: Job) -> tuple[Tensor, Tensor, Call, str]:
    # k and v as the backend reads them: as they are stored, or in sequence order.
    layout, seed = job.layout, job.call.seed
    if seed is not None:
        seed = _shard_seed(seed, layout, *q.shape[::2])
    call = replace(job.call, pattern=layout.fused, seed=seed, is_part=not layout.is_fused)
    name = choose(q, call, job.backend, gradient=job.gradient)
    if job.ordering is not None and BACKENDS[name].reads_orderings:
        call = replace(call, inverse=job.ordering.slots(k.device))
    elif job.ordering is not None:
        k, v = (job.ordering.undo(x, dim=1) for x in (k, v))
    return k, v, call, name


def _shard_seed(seed: Tensor, layout: Layout, batch: int, heads: int) -> Tensor:
    names = torch.tensor([0, 0, 1, layout.start, layout.start, 0, 0], device=seed.device).repeat(batch, heads, 1)
    names[..., 0] = torch.arange(batch, device=seed.device)[:, None]
    names[..., 1] = torch.arange(heads, device=seed.device)
    return named(seed, names, layout.branches)


def _paddings(shard: Shard, job: Job) -> Kept:
    # Whether received rows are padded, by transport: (rows, batch) uint8.
    if job.call.key_padding_mask is None:
        return {}
    masks = job.call.key_padding_mask.byte()
    arriving = {
        transport: exchange(shard.padding(masks, mail.rows), mail.sent, mail.received, job.group)
        for transport, mail in job.layout.mail.items()
    }
    return {f"padded {transport}": one.wait() for transport, one in arriving.items()}


def _padded(block: Block, mail: Mail, kept: Kept, transport: str, source: int | None) -> Tensor | None:
    # Of a block whose keys were received: (segments, keys, batch) bool.
    padded = kept.get(f"padded {transport}")
    if padded is None:
        return None
    keys = block.keys[:, :, 0] + (0 if source is None else sum(mail.received[:source]))
    return padded[keys].bool()  # the heads of a block are alike


def _own_padded(block: Block, shard: Shard, job: Job) -> Tensor | None:
    mask = job.call.key_padding_mask
    return None if mask is None else shard.padding(mask, block.own_keys[..., 0])
