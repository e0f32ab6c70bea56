"""Forward and backward of one rank: the shard's own attention, the exchange beside it, then what has arrived.

Sums of several computations are kept in float32 (float64 for float64), and rounded once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hilbert_lib.attention import operators
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.dropout import Branch, name_table, named
from hilbert_lib.attention.merge import add_rows, merge_rows
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.attention.zero_keys import add_zero_keys
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.ordering import Ordering
from hilbert_lib.ring.rank import blocks
from hilbert_lib.ring.rank.blocks import Job
from hilbert_lib.ring.rank.exchange import GATHERING, AllGather, Arriving, Beside, Ring, Saved, exchange
from hilbert_lib.ring.rank.layout import Layers, Layout, Mail
from hilbert_lib.ring.rank.local import Merged, Shard, exchanged_block, none_merged

EXCHANGING = "all_to_all"


def results(tensors: Tensors, job: Job, confirm: Callable[[], None]) -> tuple[Tensor, Tensor, Saved]:
    """Output like q and lse (batch, heads, rows) of a rank's queries, and what the backward needs of other ranks.

    `confirm` is called when the shard's own attention is under way, before anything is sent. The last result holds the
    padding of received rows by transport, and the rows "exchanged".
    """
    q, k, v, *_ = tensors
    beside = Beside(q.device)
    out, lse = _fused_forward(q, k, v, job)
    confirm()
    saved = {}
    if not job.layout.is_fused:
        with beside:
            shard = _shard(job.layout, job.ordering, q.device)
            merged, saved = _beside_forward(q, k, v, lse, shard, job)
        shard.merge(out, lse, merged)
    add_zero_keys(out, lse, job.call, job.layout.start, job.layout.length, job.layout.kv_heads)
    return out, lse, saved


def gradients(
    dout: Tensor, tensors: Tensors, out: Tensor, lse: Tensor, job: Job, saved: Saved, dlse: Tensor | None = None
) -> Tensors:
    """Gradients of a rank's q, k and v, from those of its out and lse, if any, and what `results` returned."""
    q, k, v, *_ = tensors
    beside = Beside(q.device)
    grads = _fused_backward(dout, q, k, v, out, lse, dlse, job)
    if job.layout.is_fused:
        return Tensors(*grads)
    with beside:
        shard = _shard(job.layout, job.ordering, q.device)
        sums = _beside_backward(dout, q, k, v, out, lse, dlse, shard, job, saved)
    shard.add(grads, *sums)
    return Tensors(*grads)


@cached_for_graphs(maxsize=64)
def _shard(layout: Layout, ordering: Ordering | None, device: torch.device) -> Shard:
    return Shard(layout.touched, layout.kv_heads, ordering)


def _beside_forward(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, shard: Shard, job: Job) -> tuple[Merged, Saved]:
    # All but the fused call, for the touched queries. Only the dtype and device of lse are read: it is being computed.
    layout = job.layout
    exchanging = layout.mail.get(EXCHANGING)
    gathers = _start_gathers(k, v, shard, job)
    if exchanging:
        rows = shard.together(exchanging.rows, q, k, v)
        arriving = exchange(rows, exchanging.sent, exchanging.received, job.group)
    padding = shard.padding(job.call.key_padding_mask)
    saved = _exchanged_padding(padding, job)
    merged = none_merged(_shape_of_touched(q, job), lse)
    for block in layout.own_blocks:
        blocks.merge_block(*shard.block(block, [q], k, v), block, job, padding, merged)
    if exchanging:
        saved["exchanged"] = arriving.wait()
        answer = _exchanged_forward(exchanging, saved, job, lse)
    for transport, gather in gathers.items():
        mail = layout.mail[transport]
        for arrived in gather:
            padding = _padding(saved, transport, mail, arrived.source)
            for block in mail.blocks[arrived.source]:
                # Without names, so that these rows are freed before the next block's are copied.
                blocks.merge_block(*shard.received_block(block, [q], arrived.rows), block, job, padding, merged)
        arrived = None  # with what it sent
    if exchanging:
        their_out, their_lse = _apart(answer.wait(), q.shape[3], lse.dtype)
        for rows, places in exchanging.answers[None]:
            merge_rows(*merged, (places,), their_out[rows], their_lse[rows, ..., 0])
    return merged, saved


def _beside_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, shard: Shard,
    job: Job, saved: Saved,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # All but the fused call: what it adds to the gradients of the touched rows, of q, and of k and v.
    layout, lse_rows = job.layout, lse.transpose(1, 2)[..., None]
    if dlse is not None:  # beside lse
        lse_rows = torch.stack([lse, dlse], -1).transpose(1, 2)
    by_query = dout, q, out, lse_rows
    exchanging = layout.mail.get(EXCHANGING)
    gathers = _start_gathers(k, v, shard, job)
    if exchanging:
        own_dout, own_out, own_sums = shard.queries(exchanging.rows, dout, out, lse_rows)
        own_lse, *own_dlse = own_sums.unbind(-1)
        delta = (own_dout.to(lse.dtype) * own_out.to(lse.dtype)).sum(-1)
        for x in own_dlse:
            delta = delta - x
        rows = _joined(own_dout, torch.stack([own_lse, delta], -1))
        arriving = exchange(rows, exchanging.sent, exchanging.received, job.group)
    padding = shard.padding(job.call.key_padding_mask)
    shape = _shape_of_touched(q, job)
    dq = lse.new_zeros(shape)
    dkv = lse.new_zeros(2, shape[0], *shape[2:]).transpose(0, 1)  # dk and dv each dense, as `Shard.add` reads them
    for block in layout.own_blocks:
        blocks.add_block_gradients(*shard.block(block, by_query, k, v), block, job, padding, dq, dkv)
    if exchanging:
        answer = _exchanged_backward(exchanging, arriving, saved, job, lse.dtype)
    for transport, gather in gathers.items():
        mail, late = layout.mail[transport], None
        for arrived in gather:
            padding = _padding(saved, transport, mail, arrived.source)
            their_dkv = lse.new_zeros(arrived.rows.shape)
            for block in mail.blocks[arrived.source]:
                received_rows = shard.received_block(block, by_query, arrived.rows)
                blocks.add_block_gradients(*received_rows, block, job, padding, dq, their_dkv)
                received_rows = None  # freed before the next block's are copied
            if late:
                _add_answer(dkv, mail.answers[late.source], late.wait())
            late = gather.answer(their_dkv, arrived)  # while it travels, the next step is computed
        arrived = None  # with what it sent
        _add_answer(dkv, mail.answers[late.source], late.wait())
    if exchanging:
        answer_rows = answer.wait()
        _add_answer(dq, exchanging.answers[None], answer_rows[:, :-2])
        _add_answer(dkv, exchanging.answers[None], answer_rows[:, -2:])
    return dq, dkv


def _add_answer(total: Tensor, layers: Layers, answer: Tensor) -> None:
    for rows, places in layers:
        add_rows(total, (places,), answer[rows])


def _shape_of_touched(q: Tensor, job: Job) -> tuple[int, int, int, int]:
    return job.layout.touched.shape[1], q.shape[2] // job.layout.kv_heads, q.shape[0], q.shape[3]


def _start_gathers(k: Tensor, v: Tensor, shard: Shard, job: Job) -> dict[str, AllGather | Ring]:
    packed = partial(shard.keys, k=k, v=v)
    return {
        transport: gather(packed, job.layout.mail[transport], job.group)
        for transport, gather in GATHERING.items()
        if transport in job.layout.mail
    }


def _joined(rows: Tensor, sums: Tensor) -> Tensor:
    # Rows (..., d) and sums (..., n) of a wider dtype as one message.
    return torch.cat([rows, sums.view(rows.dtype)], -1)


def _apart(joined: Tensor, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # The inverse of `_joined`. The sums are copied: they begin at an address that their dtype does not allow. `clone`
    # copies even a slice without rows, which counts as contiguous wherever it begins.
    return joined[..., :d], joined[..., d:].clone(memory_format=torch.contiguous_format).view(dtype)


def _exchanged_forward(mail: Mail, saved: Saved, job: Job, lse: Tensor) -> Arriving:
    # Attention of all ranks' rows of the heads that this rank computes; sends out and lse back.
    q, kv = saved["exchanged"][:, :-2], saved["exchanged"][:, -2:]  # (rows, group or 2, batch, head_dim)
    out, lse = none_merged(q.shape, lse)
    padding = _padding(saved, EXCHANGING, mail, None)
    for block in mail.blocks[None]:
        blocks.merge_block(*exchanged_block(block, [q], kv), block, job, padding, (out, lse))
    return exchange(_joined(out.to(q.dtype), lse[..., None]), mail.received, mail.sent, job.group)


def _exchanged_backward(mail: Mail, arriving: Arriving, saved: Saved, job: Job, dtype: torch.dtype) -> Arriving:
    # Gradients of all ranks' rows of these heads; sends dq, dk and dv back. dtype: that of sums.
    received = saved["exchanged"]
    dout, sums = _apart(arriving.wait(), received.shape[-1], dtype)
    lse, delta = sums.unbind(-1)
    if job.lse_gradient:  # delta is less dlse, and may be all that a row with a dout of 0 has
        out, sums = torch.zeros_like(dout), torch.stack([lse, -delta], -1)
    else:
        out, sums = _with_product(dout, delta), lse[..., None]
    by_query = dout, received[:, :-2], out, sums
    sums = lse.new_zeros(received.shape)
    padding = _padding(saved, EXCHANGING, mail, None)
    for block in mail.blocks[None]:
        block_rows = exchanged_block(block, by_query, received[:, -2:])
        blocks.add_block_gradients(*block_rows, block, job, padding, sums[:, :-2], sums[:, -2:])
        block_rows = None  # freed before the next block's are copied
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
        return q.new_zeros(q.shape), q.new_full((batch, heads, rows), -torch.inf, dtype=WORKING_DTYPE[q.dtype])
    k, v, call, name = _fused_call(q, k, v, job)
    return operators.attention(Tensors(q, k, v), call, name)


def _fused_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, job: Job
) -> tuple[Tensor, Tensor, Tensor]:
    if job.layout.fused is None:
        return tuple(x.new_zeros(x.shape) for x in (q, k, v))
    k, v, call, name = _fused_call(q, k, v, job)
    dq, dk, dv = operators.attention_backward(dout, Tensors(q, k, v), out, lse, call, name, dlse)[:3]
    if job.ordering is not None and call.inverse is None:  # k and v came in sequence order
        dk, dv = (job.ordering.apply(x, dim=1) for x in (dk, dv))
    return dq, dk, dv


def _fused_call(q: Tensor, k: Tensor, v: Tensor, job: Job) -> tuple[Tensor, Tensor, Request, str]:
    # k and v as the backend reads them: as they are stored, or in sequence order.
    layout, seed = job.layout, job.call.seed
    if seed is not None:
        seed = named(seed, _shard_names(layout, *q.shape[::2], q.device))
    is_part = job.call.is_part or not layout.is_fused or job.call.pattern.padding == "zeros"
    call = replace(job.call, pattern=layout.fused, seed=seed, is_part=is_part)
    name = job.backend_for(q, k, call)
    if job.ordering is not None and BACKENDS[name].reads_orderings:
        call = replace(call, inverse=job.ordering.slots(k.device))
    elif job.ordering is not None:
        k, v = (job.ordering.undo(x, dim=1) for x in (k, v))
    return k, v, call, name


@cached_for_graphs(maxsize=64)
def _shard_names(layout: Layout, batch: int, heads: int, device: torch.device) -> Tensor:
    names = torch.tensor([0, 0, 1, layout.start, layout.start, 0, 0], device=device).repeat(batch, heads, 1)
    names[..., 0] = torch.arange(batch, device=device)[:, None]
    names[..., 1] = torch.arange(heads, device=device)
    branches = zip(layout.branches, layout.fused.branches, strict=True)
    return name_table(names, [Branch(number, *branch) for number, branch in branches])


def _exchanged_padding(padding: Tensor | None, job: Job) -> Saved:
    # Padding of received rows by transport: (rows, batch) uint8. `padding` is that of the own rows.
    if padding is None:
        return {}
    arriving = {
        transport: exchange(padding.byte()[mail.rows], mail.sent, mail.received, job.group)
        for transport, mail in job.layout.mail.items()
    }
    return {transport: message.wait() for transport, message in arriving.items()}


def _padding(saved: Saved, transport: str, mail: Mail, source: int | None) -> Tensor | None:
    # Padding of the rows received from one source, or from all (None).
    padding = saved.get(transport)
    return padding if padding is None or source is None else padding.split(mail.received)[source]
