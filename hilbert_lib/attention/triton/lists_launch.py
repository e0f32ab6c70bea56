"""Launches of the plain kernels for packed lists: arguments of the kernels of `lists`."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton.arguments import (
    Config,
    as_asked,
    as_computed,
    fitting,
    for_device,
    is_interpreted,
    strides_of,
)
from hilbert_lib.attention.triton.geometry import block_d, products_of_float32
from hilbert_lib.attention.triton.limits import parts_of_queries, query_tiles
from hilbert_lib.attention.triton.lists import backward_kernel, delta_kernel, key_kernel, query_kernel
from hilbert_lib.attention.triton.start import Made, Start, start
from hilbert_lib.patterns.packed_lists import BLOCK, PackedLists, both_ways

# Parts of tiles are small ones, so that tests without a GPU see them.
INTERPRETED = {"forward": Config(64, 64), "dq": Config(32, 32), "dkv": Config(32, 64)}
# (bytes of an element, largest head_dim) -> configuration, for Hopper. Lists are a few tiles long, so that latency
# binds: many programs on a multiprocessor, and one or two stages. These were fastest on an H200 for a room of a million
# voxels and a window of 5; those of float32 for a grid of 128 x 128 cells and a window of 33. Above a head_dim of 128
# nothing is measured.
CONFIGS = {
    "forward": {
        (2, 16): Config(64, 64, 4, 1), (2, 64): Config(64, 64, 4, 2, 128), (2, 128): Config(64, 64, 4, 1, 168),
        (2, 256): Config(64, 32, 8, 1),
        (4, 64): Config(64, 32, 4, 1), (4, 128): Config(32, 32, 4, 1), (4, 256): Config(16, 16, 8, 1),
    },
    "dq": {
        (2, 64): Config(64, 64, 4, 2, 128), (2, 128): Config(64, 32, 4, 1, 168), (2, 256): Config(64, 32, 8, 1),
        (4, 64): Config(64, 32, 4, 1), (4, 128): Config(32, 32, 4, 1), (4, 256): Config(16, 16, 8, 1),
    },
    "dkv": {
        (2, 32): Config(64, 64, 4, 1, 128), (2, 64): Config(64, 64, 4, 1, 168), (2, 128): Config(64, 64, 4, 1),
        (2, 256): Config(32, 32, 8, 1),
        (4, 64): Config(32, 64, 4, 1), (4, 128): Config(16, 32, 4, 1), (4, 256): Config(16, 16, 8, 1),
    },
}  # fmt: skip

# The same for every other GPU, as `arguments.ELSEWHERE`. Their products need more registers: none is limited. Heads of
# 16, as Point Transformer V3 has them, leave room for whole tiles, which take the fewest instructions a pair.
ELSEWHERE = {
    "forward": {
        (2, 16): Config(64, 64, 4, 1), (2, 64): Config(64, 32, 4, 1), (2, 128): Config(64, 16, 4, 1),
        (2, 256): Config(64, 32, 8, 1),
        (4, 64): Config(32, 32, 4, 1), (4, 128): Config(32, 32, 4, 1), (4, 256): Config(16, 16, 8, 1),
    },
    "dq": {
        (2, 32): Config(64, 64, 4, 1), (2, 128): Config(64, 32, 4, 1), (2, 256): Config(64, 32, 8, 1),
        (4, 64): Config(32, 32, 4, 1), (4, 128): Config(32, 32, 4, 1), (4, 256): Config(16, 16, 8, 1),
    },
    "dkv": {
        (2, 16): Config(64, 32, 2, 1), (2, 64): Config(32, 64, 4, 1), (2, 128): Config(16, 64, 4, 1),
        (2, 256): Config(32, 32, 8, 1),
        (4, 64): Config(32, 32, 4, 1), (4, 128): Config(16, 32, 4, 1), (4, 256): Config(16, 16, 8, 1),
    },
}  # fmt: skip
ON_B200 = ELSEWHERE | {"dkv": ELSEWHERE["dkv"] | {(2, 128): Config(32, 64, 4, 1)}}

# Of the lists, in all heads and sequences: of more, the device takes longer than the host for the launches that are
# saved. 512 tiles are 2^21 pairs: at 50 TFLOP/s seven products of 64 columns take 38 us.
MOST_TILES_AT_ONCE = 512


def config_of(kernel: str, q: Tensor) -> Config:
    """The configuration of a kernel for the dtype, the head_dim and the device of q."""
    if is_interpreted():
        return INTERPRETED[kernel]
    return fitting(for_device(q.device, CONFIGS, ELSEWHERE, ON_B200)[kernel], q)


def forward(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output like q, and lse (batch, heads, queries)."""
    dtype, inputs = inputs.q.dtype, Tensors(*as_computed(*inputs.with_rows))
    q = inputs.q

    def starts(out: Tensor, lse: Tensor) -> list[Start]:
        return [of_queries(inputs, request, {"out": out, "lse": lse})]

    tensors = (*inputs.with_rows, *tensors_of(request))
    made = Made(q.shape, q.dtype), Made((q.shape[0], q.shape[2], q.shape[1]), torch.float32)
    finish = list if q.dtype == dtype else partial(_out_and_lse, dtype)
    return start(starts, tensors, "lists forward", *request.options, made=made, finish=finish)


def _out_and_lse(dtype: torch.dtype, made: list[Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = made
    return *as_asked(dtype, out), lse


def backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request, dlse: Tensor | None = None
) -> Tensors:
    """Gradients of q, k, v and of the extra keys, from the merged out and lse. The bits are the same every time."""
    dtype, in_float = inputs.q.dtype, request.part is not None and request.part.in_float
    dout, out, *computed = as_computed(dout, out, *inputs.with_rows)
    inputs = Tensors(*computed)
    out, lse, dlse = out.contiguous(), lse.contiguous(), None if dlse is None else dlse.contiguous()
    key_dtype = torch.float32 if in_float else inputs.k.dtype
    dtypes = inputs.q.dtype, key_dtype, key_dtype
    grads = [Made(x.shape, each) for x, each in zip(inputs[:3], dtypes, strict=True)]
    tensors = (*inputs.with_rows, dout, out, lse, dlse, *tensors_of(request))
    if is_at_once(inputs, max(map(len, request.lists[2::4]))):
        extra_grads = [Made(x.shape, x.dtype) if x.shape[1] else None for x in inputs.extra]

        def start_at_once(*grads: Tensor) -> list[Start]:
            return [at_once(dout, inputs, out, lse, dlse, request, grads)]

        finish = partial(_gradients_at_once, dtype, in_float)
        made = *grads, *extra_grads
        return start(start_at_once, tensors, "lists backward at once", *request.options, made=made, finish=finish)
    splits = splits_of(inputs)
    extra_grads = [Made((splits, *x.shape), torch.float32) for x in inputs.extra]

    def starts(lse_and_delta: Tensor, *grads: Tensor) -> list[Start]:
        grads, extra_grads = grads[:3], grads[3:]
        launches = [
            of_deltas(dout, out, lse, dlse, lse_and_delta),
            of_queries(inputs, request, {"dout": dout, "lse_and_delta": lse_and_delta, "dq": grads[0]}),
            of_keys(dout, inputs, lse_and_delta, request, grads[1:]),
        ]
        if splits:
            launches.append(of_extra_keys(dout, inputs, lse_and_delta, request, extra_grads))
        return launches

    made = Made(lse.shape, torch.int64), *grads, *extra_grads
    finish = partial(_gradients, dtype, in_float)
    return start(starts, tensors, "lists backward", *request.options, made=made, finish=finish)


def _gradients(dtype: torch.dtype, in_float: bool, made: list[Tensor]) -> Tensors:
    # Those of extra keys are sums of their parts, always in the same order.
    _, *grads, extra_k, extra_v = made
    return _gradients_at_once(dtype, in_float, [*grads, extra_k.sum(0), extra_v.sum(0)])


def _gradients_at_once(dtype: torch.dtype, in_float: bool, made: list[Tensor | None]) -> Tensors:
    dq, dk, dv, *extra = made
    extra = [x if x is None else as_asked(dtype, x)[0] for x in extra]
    return Tensors(*as_asked(dtype, dq), *((dk, dv) if in_float else as_asked(dtype, dk, dv)), *extra)


def is_at_once(inputs: Tensors, tiles: int) -> bool:
    """Whether one launch computes all gradients: the host of a short call takes longer than its device.

    tiles: of the lists, or of those turned round where these are more.
    """
    batch, queries, heads, _ = inputs.q.shape
    of_extra = -(-inputs.extra_k.shape[1] // BLOCK) * -(-queries // BLOCK)
    return batch * heads * max(tiles, of_extra) <= MOST_TILES_AT_ONCE


def splits_of(inputs: Tensors) -> int:
    """Number of parts of the queries of which gradients of extra keys are sums; 0 without extra keys."""
    batch, extra, kv_heads, _ = inputs.extra_k.shape
    return parts_of_queries(inputs.q.shape[1], batch * kv_heads * -(-extra // config_of("dkv", inputs.q).block_n))


def tensors_of(request: Request) -> tuple[Tensor | None, ...]:
    """Tensors of a call that kernels read and that have no gradient."""
    return request.key_padding_mask, request.extra_padding_mask, *request.lists


def of_deltas(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, lse_and_delta: Tensor) -> Start:
    """The launch that puts lse and delta of each row side by side."""
    batch, queries, heads, head_dim = out.shape
    rows, block = batch * queries * heads, 4096 // block_d(head_dim)
    tensors = out, dout, lse, dlse, lse_and_delta
    sizes = {"rows": rows, "q_rows": queries, "heads": heads, "HEAD_DIM": head_dim}
    sizes |= {"BLOCK_D": block_d(head_dim), "BLOCK_M": block}
    return Start(delta_kernel, (-(-rows // block),), (*tensors, *dout.stride()[:3]), sizes)


def of_queries(inputs: Tensors, request: Request, results: dict[str, Tensor]) -> Start:
    """The launch of the forward or, where `results` hold dq, of dq. q stands in for tensors that are not used."""
    q, backward = inputs.q, "dq" in results
    lists, _ = both_ways(request.lists, q.shape[1], inputs.k.shape[1])
    config = config_of("dq" if backward else "forward", q)
    named = dict.fromkeys(("out", "lse", "dout", "lse_and_delta", "dq"), q) | results
    named |= dict(zip(("k", "v", "extra_k", "extra_v"), inputs.with_rows[1:], strict=True))
    named |= (
        strides_of("qkvefd", (*inputs.with_rows, named["dout"])) | _of_lists(lists) | _common(inputs, request, config)
    )
    named |= _padding("padding", request.key_padding_mask, q) | _padding("extra_padding", request.extra_padding_mask, q)
    named |= {"EXTRA": inputs.extra_k.shape[1] > 0, "BACKWARD": backward}
    programs = lists.blocks * (named["OWN"] // config.block_m) * q.shape[2]
    return Start(query_kernel, (programs, q.shape[0]), (q,), named)


def of_keys(
    dout: Tensor, inputs: Tensors, lse_and_delta: Tensor, request: Request, results: list[Tensor]
) -> Start:  # fmt: skip
    """The launch of dk and dv of the listed keys."""
    config = config_of("dkv", inputs.q)
    blocks = both_ways(request.lists, inputs.q.shape[1], inputs.k.shape[1])[1].blocks
    named = _of_keys(dout, inputs, inputs.k, inputs.v, lse_and_delta, request, config, results)
    named |= _padding("padding", request.key_padding_mask, inputs.q) | {"tiles": 0, "EXTRA": False}
    programs = blocks * (named["OWN"] // config.block_n) * inputs.k.shape[2]
    return Start(key_kernel, (programs, inputs.q.shape[0]), (inputs.q,), named)


def of_extra_keys(
    dout: Tensor, inputs: Tensors, lse_and_delta: Tensor, request: Request, results: list[Tensor]
) -> Start:  # fmt: skip
    """The launch of dk and dv of the extra keys, in parts."""
    config, splits = config_of("dkv", inputs.q), len(results[0])
    named = _of_keys(dout, inputs, *inputs.extra, lse_and_delta, request, config, results)
    named |= _padding("padding", request.extra_padding_mask, inputs.q) | {"EXTRA": True}
    named |= {"tiles": -(-query_tiles(inputs.q.shape[1]) // splits)}
    programs = -(-inputs.extra_k.shape[1] // config.block_n) * inputs.k.shape[2]
    return Start(key_kernel, (programs, inputs.q.shape[0], splits), (inputs.q,), named)


def at_once(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, dlse: Tensor | None, request: Request, results: Sequence
) -> Start:  # fmt: skip
    """The launch of every gradient. results: those of `inputs.with_rows`, None for those of no extra keys."""
    q, config = inputs.q, config_of("dkv", inputs.q)
    lists, turned = both_ways(request.lists, q.shape[1], inputs.k.shape[1])
    names = "dq", "dk", "dv", "extra_dk", "extra_dv"
    named = {name: q if x is None else x for name, x in zip(names, results, strict=True)}
    named |= dict(zip(("k", "v", "extra_k", "extra_v"), inputs.with_rows[1:], strict=True))
    named |= {"out": out, "lse": lse, "dout": dout, "dlse": dlse, "EXTRA": inputs.extra_k.shape[1] > 0}
    named |= strides_of("qkvefd", (*inputs.with_rows, dout)) | _of_lists(lists) | _common(inputs, request, config)
    named |= dict(zip(("key_own", "key_starts", "key_listed", "key_words"), turned.tensors, strict=True))
    named |= _padding("padding", request.key_padding_mask, q) | _padding("extra_padding", request.extra_padding_mask, q)
    own, kv_heads = named["OWN"], inputs.k.shape[2]
    named["key_programs"] = turned.blocks * (own // config.block_n) * kv_heads
    named["extra_programs"] = -(-inputs.extra_k.shape[1] // config.block_n) * kv_heads
    of_queries = lists.blocks * (own // config.block_m) * q.shape[2]
    programs = named["key_programs"] + named["extra_programs"] + of_queries
    return Start(backward_kernel, (programs, q.shape[0]), (q,), named)


def _of_keys(
    dout: Tensor, inputs: Tensors, k: Tensor, v: Tensor, lse_and_delta: Tensor, request: Request,
    config: Config, results: list[Tensor],
) -> dict:  # fmt: skip
    # What both launches of `key_kernel` share.
    _, turned = both_ways(request.lists, inputs.q.shape[1], inputs.k.shape[1])
    named = {"k": k, "v": v, "dout": dout, "lse_and_delta": lse_and_delta, "dk": results[0], "dv": results[1]}
    return named | strides_of("qkvd", (inputs.q, k, v, dout)) | _of_lists(turned) | _common(inputs, request, config)


def _padding(name: str, mask: Tensor | None, q: Tensor) -> dict:
    return {name: q if mask is None else mask.contiguous(), name.upper(): mask is not None}


def _of_lists(lists: PackedLists) -> dict:
    own, starts, listed, words = lists.tensors
    return {"own": own, "starts": starts, "listed": listed, "words": words, "OWN": words.shape[1]}


def _common(inputs: Tensors, request: Request, config: Config) -> dict:
    q, k, head_dim = inputs.q, inputs.k, inputs.q.shape[3]
    named = {
        "scale": request.scale, "heads": q.shape[2], "group": q.shape[2] // k.shape[2],
        "extra": inputs.extra_k.shape[1], "q_rows": q.shape[1], "k_rows": k.shape[1],
        "HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "PRECISION": products_of_float32(), "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    return named if config.maxnreg is None else named | {"maxnreg": config.maxnreg}
