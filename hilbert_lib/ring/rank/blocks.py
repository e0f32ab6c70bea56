"""Dense attention over gathered rows, by the library's own backends: one branch of rate 1, whose segment is all."""

from dataclasses import dataclass, field, replace
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hilbert_lib.attention import operators
from hilbert_lib.attention.backends.all_pairs import as_counted
from hilbert_lib.attention.choice import choose
from hilbert_lib.attention.dropout import NAME, name_table, named
from hilbert_lib.attention.merge import merge_rows
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.ordering import Ordering
from hilbert_lib.ring.rank.exchange import alive
from hilbert_lib.ring.rank.layout import Block, Layout
from hilbert_lib.ring.rank.local import Merged, add_block


@dataclass(frozen=True, eq=False)
class Job:
    """The work of a rank, without q, k and v."""

    layout: Layout
    call: Request  # of the whole sequence, but with the shard's padding mask
    backend: str  # its name, or "auto"
    gradient: bool  # whether the backward will run
    ordering: Ordering | None  # in which the shards of k and v are stored
    known_group: "ref[ProcessGroup]"
    lse_gradient: bool = False  # whether the backward of some rank may be given a gradient of lse
    chosen: dict[Block | None, str] = field(default_factory=dict)  # backends by block; None: of the fused call

    @property
    def group(self) -> ProcessGroup:
        """The ranks."""
        return alive(self.known_group)

    def backend_for(self, q: Tensor, k: Tensor, call: Request, block: Block | None = None) -> str:
        """The backend of a block, or of the fused call, in the backward that of the forward."""
        if block not in self.chosen:
            through_table = self.ordering is not None and block is None  # the rows of a block are gathered anyway
            how = {"gradient": self.gradient, "lse_gradient": self.lse_gradient, "through_table": through_table}
            self.chosen[block] = choose(q, k, call, self.backend, **how)
        return self.chosen[block]


def merge_block(q: Tensor, kv: Tensor, block: Block, job: Job, padding: Tensor | None, merged: Merged) -> None:
    """Merges the output and lse of a block into those of all rows among which its queries have their places.

    q: (segments, queries, kv_heads, group, batch, head_dim). kv: (segments, keys, kv_heads, 2, batch, head_dim).
    padding: (rows, batch), of all rows among which the keys have their places; 0 = with weight. Or None.
    """
    segments, group = q.shape[0], q.shape[3]
    q = _dense(q)
    k, v, call, name = _prepared(q, kv, block, job, padding)
    out, lse = operators.attention(Tensors(q, k, v), call, name)
    lse = _by_row(lse.transpose(1, 2)[..., None], segments, group)[..., 0]
    merge_rows(*merged, (block.queries,), _by_row(out, segments, group), lse)


def add_block_gradients(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, kv: Tensor, block: Block, job: Job, padding: Tensor | None,
    all_dq: Tensor, all_dkv: Tensor,
) -> None:  # fmt: skip
    """Adds the gradients of q and kv, from the merged out and lse, to those of all rows among which these are.

    dout and out are shaped like q, and so is lse, with 1 for head_dim, or 2 where its gradient stands beside it. The
    rest is as for `merge_block`.
    """
    segments, keys, group = *kv.shape[:2], q.shape[3]
    dout, q, out, lse = map(_dense, (dout, q, out, lse))
    k, v, call, name = _prepared(q, kv, block, job, padding)
    # The operators return out and lse dense, and kernels take them so.
    lse, *dlse = (x.transpose(1, 2).contiguous() for x in lse.unbind(-1))
    dq, *grads = operators.attention_backward(dout, Tensors(q, k, v), out.contiguous(), lse, call, name, *dlse)[:3]
    dk, dv = (_by_row(x[:, :keys], segments, 1) for x in grads)
    add_block(all_dq, all_dkv, block, _by_row(dq, segments, group), dk, dv)


def _prepared(
    q: Tensor, kv: Tensor, block: Block, job: Job, padding: Tensor | None
) -> tuple[Tensor, Tensor, Request, str]:
    # k and v, the call and the backend for dense queries.
    k, v = map(_dense, kv.split(1, 3))
    mask = None
    if padding is not None:  # the heads of a block are alike
        mask = padding[block.keys[:, :, 0]].bool().transpose(1, 2).flatten(0, 1)
    call = replace(
        job.call,
        pattern=block.pattern,
        is_causal=block.is_causal,
        seed=_seed(block, job.call.seed, q.shape[0], q.shape[2]),
        key_padding_mask=mask,
        is_part=True,
    )
    name = job.backend_for(q, k, call, block)
    return *as_counted(q.shape[1], k, v, call, name), name


def _seed(block: Block, seed: Tensor | None, rows: int, heads: int) -> Tensor | None:
    # The seed of a call of so many rows (a segment of a sequence each) and query heads.
    return None if seed is None else named(seed, _names(block, rows, heads, seed.device))


@cached_for_graphs()
def _names(block: Block, rows: int, heads: int, device: torch.device) -> Tensor:
    segments, kv_heads = block.names.shape[1:]
    batch, group = (torch.arange(n, device=device) for n in (rows // segments, heads // kv_heads))
    kv_head, *words = block.names[:, :, None, :, None]
    words = torch.broadcast_tensors(batch[:, None, None], kv_head * len(group) + group, *words)
    return name_table(torch.stack(words, -1).view(rows, heads, NAME), (block.branch,))


def _dense(x: Tensor) -> Tensor:
    """(segments, rows, kv_heads, group, batch, d) -> (segments * batch, rows, heads, d)."""
    segments, rows, kv_heads, group, batch, d = x.shape
    return x.permute(0, 4, 1, 2, 3, 5).reshape(segments * batch, rows, kv_heads * group, d)


def _by_row(x: Tensor, segments: int, group: int) -> Tensor:
    sequences, rows, heads, d = x.shape
    return x.view(segments, sequences // segments, rows, heads // group, group, d).permute(0, 2, 3, 4, 1, 5)
