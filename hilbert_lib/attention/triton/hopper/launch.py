"""The warp-specialised kernels of Hopper: which calls they serve, and their launches."""

from functools import lru_cache

import torch
from torch import Tensor

from hilbert_lib.attention import dropout
from hilbert_lib.attention.failures import importing
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.triton import decode, schedule
from hilbert_lib.attention.triton.arguments import Config, launch_arguments
from hilbert_lib.attention.triton.geometry import power_of_2
from hilbert_lib.attention.triton.hopper import division
from hilbert_lib.attention.triton.packed import Places, scheduled_length
from hilbert_lib.attention.triton.start import Start
from hilbert_lib.patterns.dilated import DilatedPattern

# By columns: on the reference work the fastest of those tried on an H200 (reports/HISTORY.md). What they reach is
# recorded in reports/h200.
HOPPER_FORWARD = {
    32: Config(128, 128, 4, 2, maxnreg=80, together=2 * schedule.TILES_TOGETHER),
    64: Config(128, 128, 4, 2, maxnreg=80, together=2 * schedule.TILES_TOGETHER),
    128: Config(128, 128, 4, 2),
    256: Config(128, 64, 4, 2),
}
# Of dq alone. At 256 columns scores of 64 keys would have too few registers.
HOPPER_DQ = {
    32: Config(128, 64, 4, 4),
    64: Config(128, 64, 4, 4),
    128: Config(128, 64, 4, 4),
    256: Config(128, 32, 4, 3),
}
HOPPER_BACKWARD = {32: Config(64, 128, 4, 3), 64: Config(64, 128, 4, 3), 128: Config(64, 128, 4, 2)}
# Of dk and dv alone, by the columns past 128 of a wide row: steps with the stages of q; and the stages of dout.
HOPPER_KEYS = {64: (Config(64, 64, 4, 4), 2), 128: (Config(64, 64, 4, 2), 2)}
# The same of dq: steps with the stages of k; and the stages of v.
HOPPER_WIDE_DQ = {64: (Config(128, 64, 4, 3), 2)}
LOW = 128  # columns of the first part of a wide row
SEE_PLAIN = "; 'triton' serves it"


def refusal(q: Tensor, call: Request) -> str:
    """The part of a call, by shapes and options alone, that the warp-specialised kernels do not serve, or ""."""
    if q.element_size() != 2:
        return f"serves float16 and bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] % 8 or q.shape[-1] > max(HOPPER_FORWARD):
        return f"serves a head_dim up to {max(HOPPER_FORWARD)}, a multiple of 8; got {q.shape[-1]}"
    if call.seed is not None and dropout.is_named(call.seed):
        return f"no dropout of a part of a larger call, got dropout_p={call.dropout_p}{SEE_PLAIN}"
    if call.inverse is not None:
        return f"reads k and v in sequence order alone{SEE_PLAIN}"
    return ""


def refusal_of_keys(q: Tensor, k: Tensor, call: Request) -> str:
    """The reason why they do not serve so many keys and KV heads as k has, or ""."""
    if q.shape[1] > k.shape[1]:  # in a ring, whose blocks have queries and keys of their own
        return f"has no query without a key at its position, got {q.shape[1]} queries of {k.shape[1]} keys{SEE_PLAIN}"
    if q.shape[1] != k.shape[1] and decode.has_few_rows(q, k) and decode.serves(q, k, call):
        return f"decodes nothing: {q.shape[1]} queries of {k.shape[1]} keys are shared out key by key{SEE_PLAIN}"
    if not _reaches_some(call.pattern, k.shape[1]):
        return f"needs a branch all of whose rows TMA can load, and no branch of {k.shape[1]} keys is one{SEE_PLAIN}"
    return ""


def _reaches_some(pattern: DilatedPattern, keys: int) -> bool:
    # A rate of 1 is asked about first: torch.compile then compiles no length anew.
    return 1 in pattern.dilation_rates or any(division.is_reached(w, r, keys) for w, r in pattern.branches)


def as_read(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as the copy engine takes them: one that is expanded is copied once."""
    return tuple(x.clone(memory_format=torch.contiguous_format) if 0 in x.stride() else x for x in tensors)


def columns_of(q: Tensor) -> int:
    """Columns of a tile; narrower heads are padded."""
    return max(min(HOPPER_FORWARD), power_of_2(q.shape[-1]))


def high_columns_of(q: Tensor) -> int:
    """Columns past 128 of a tile of wide rows."""
    return 64 if q.shape[-1] <= LOW + 64 else LOW


def has_dq(q: Tensor, k: Tensor, call: Request) -> bool:
    """Whether the kernel of dq alone serves a call: otherwise the plain one does. `segments` is asked before.

    It would read the keys that a mask hides, and the plain kernel's sums of other branches are without the scale.
    Without dropout and up to a head_dim of 128 it is no faster than the plain one (13.8 ms for 13.7 on an H200).
    """
    is_asked = call.dropout_p > 0.0 or q.shape[-1] > division.NARROW
    _, theirs = launches_of(k, call)
    return is_asked and call.key_padding_mask is None and not theirs


def launches_of(k: Tensor, call: Request) -> tuple[tuple[schedule.Pass, ...], tuple[schedule.Pass, ...]]:
    """The launches of a call: of the warp-specialised kernels, and of the plain ones (`division.launches`)."""
    reached = None
    if call.cu_seqlens is not None:
        reached = tuple(i for i, (w, r) in enumerate(call.pattern.branches) if division.is_reached(w, r, k.shape[1]))
    length = scheduled_length(call, k.shape[1])
    return division.launches(call.pattern, length, k.shape[2], call.is_causal, reached=reached)


def masked(q: Tensor, k: Tensor, call: Request, passes: tuple[schedule.Pass, ...]) -> tuple[bool, ...]:
    """Whether a tile of keys may be cut off in each pass of the forward: by causality, a mask, or a segment's end."""
    if call.is_causal or call.key_padding_mask is not None or call.cu_seqlens is not None:
        return (True,) * len(passes)
    return is_cut(call.pattern, passes, k.shape[1], HOPPER_FORWARD[columns_of(q)].block_n)


@lru_cache(maxsize=1024)
def is_cut(pattern: DilatedPattern, passes: tuple[schedule.Pass, ...], keys: int, block_n: int) -> tuple[bool, ...]:
    """Whether the end of a segment cuts off a tile of block_n keys in each pass."""
    branches = [[pattern.branches[i] for i in one.branches] for one in passes]
    return tuple(any(min(w, keys) % (r * block_n) or keys % min(w, keys) for w, r in some) for some in branches)


def forward_start(
    q: Tensor, k: Tensor, v: Tensor, call: Request, one: schedule.Pass, out: Tensor, lse: Tensor, flag: Tensor | None,
    *, first: bool, places: Places,
) -> Start:  # fmt: skip
    """The start of a launch that writes out and lse; unless it is the first, it goes on from them.

    flag is the kernel's, or None where no tile can be cut off.
    """
    # Imported only where it runs: the interpreter knows no Gluon.
    with importing("the module of the warp-specialised forward"):
        from hilbert_lib.attention.triton.hopper import forward as kernels
        from hilbert_lib.attention.triton.hopper import tiles

    columns = columns_of(q)
    config = HOPPER_FORWARD[columns]
    rates = [call.pattern.dilation_rates[i] for i in one.branches]
    descriptors = [tiles.descriptor(x, r, config.block_n, columns) for r in rates for x in (k, v)]
    descriptors += [None] * (2 * division.BRANCHES - len(descriptors))
    grid, shared = launch_arguments(q, k, v, call, one, config, rows="queries", first=first, last=True, places=places)
    named = _named(kernels.forward_kernel, shared, config, len(rates)) | {"BLOCK_D": columns}
    named |= {"MASKED": flag is not None, "maxnreg": config.maxnreg}
    return Start(kernels.forward_kernel, grid, (q, out, lse, q if flag is None else flag, *descriptors), named)


def backward_start(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, call: Request,
    one: schedule.Pass, sums: Tensor | None, *, first: bool, places: Places,
) -> Start:  # fmt: skip
    """The start of a launch that writes dk and dv; unless it is the first, it adds to them.

    It adds dq, without its scale, to sums in an order that varies. Without sums the bits are always the same.
    """
    with importing("the module of the warp-specialised backward"):
        from hilbert_lib.attention.triton.hopper import backward as kernels
        from hilbert_lib.attention.triton.hopper import tiles

    columns = columns_of(q)
    config = HOPPER_BACKWARD[columns]
    rates = [call.pattern.dilation_rates[i] for i in one.branches]
    part = (config.block_m, columns // 2)  # of one group of warps
    descriptors = []
    for r in rates:
        descriptors += [tiles.descriptor(x, r, config.block_m, columns) for x in (q, dout)]
        descriptors.append(descriptors[-1] if sums is None else tiles.descriptor(sums, r, *part))
    descriptors += [None] * (3 * division.BRANCHES - len(descriptors))
    grid, shared = launch_arguments(q, k, v, call, one, config, rows="keys", first=first, last=True, places=places)
    named = _named(kernels.backward_kernel, shared, config, len(rates)) | {"BLOCK_D": columns}
    named |= {"CUT": _is_cut_in_keys(k, call, one, config), "WITH_DQ": sums is not None}
    return Start(kernels.backward_kernel, grid, (k, v, lse, delta, dk, dv, *descriptors), named)


def _is_cut_in_keys(k: Tensor, call: Request, one: schedule.Pass, config: Config) -> bool:
    # Whether some tile of keys has fewer rows than others.
    if call.cu_seqlens is not None:
        return True
    return schedule.tables(call.pattern, one, *k.shape[1:3], config.block_n, config.together, k.device).cut


def keys_start(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, call: Request,
    one: schedule.Pass, *, first: bool, places: Places,
) -> Start:  # fmt: skip
    """The same at a head_dim above 128, where it adds no dq: the bits are always the same."""
    with importing("the module of the warp-specialised dk and dv of wide heads"):
        from hilbert_lib.attention.triton.hopper import wide_keys as kernels

    high = high_columns_of(q)
    config, b_stages = HOPPER_KEYS[high]
    rates = [call.pattern.dilation_rates[i] for i in one.branches]
    descriptors = _of_parts((q, dout), rates, config.block_m, high)
    grid, shared = launch_arguments(q, k, v, call, one, config, rows="keys", first=first, last=True, places=places)
    named = _named(kernels.wide_keys_kernel, shared, config, len(rates))
    named |= {"BLOCK_E": high, "B_STAGES": b_stages}
    return Start(kernels.wide_keys_kernel, grid, (k, v, lse, delta, dk, dv, *descriptors), named)


def _of_parts(tensors: tuple[Tensor, Tensor], rates: list[int], rows: int, high: int) -> list:
    # Descriptors of two tensors: of low parts, then of high ones. Low ones serve both where both are as wide.
    from hilbert_lib.attention.triton.hopper import tiles

    found = []
    for columns in (LOW, high) if high < LOW else (LOW,):
        found += [tiles.descriptor(x, r, rows, columns) for r in rates for x in tensors]
        found += [None] * (2 * (division.BRANCHES - len(rates)))
    return found + [None] * (4 * division.BRANCHES - len(found))


def dq_start(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, call: Request,
    one: schedule.Pass, *, first: bool, places: Places,
) -> Start:  # fmt: skip
    """The start of a launch that writes dq, with the same bits every time; unless it is the first, it adds to it."""
    if q.shape[-1] > LOW and high_columns_of(q) in HOPPER_WIDE_DQ:
        return _dq_of_parts(dout, q, k, v, lse, delta, dq, call, one, first=first, places=places)
    with importing("the module of the warp-specialised dq"):
        from hilbert_lib.attention.triton.hopper import queries as kernels
        from hilbert_lib.attention.triton.hopper import tiles

    columns = columns_of(q)
    config = HOPPER_DQ[columns]
    rates = [call.pattern.dilation_rates[i] for i in one.branches]
    descriptors = [tiles.descriptor(x, r, config.block_n, columns) for r in rates for x in (k, v)]
    descriptors += [None] * (2 * division.BRANCHES - len(descriptors))
    grid, shared = launch_arguments(q, k, v, call, one, config, rows="queries", first=first, last=True, places=places)
    named = _named(kernels.dq_kernel, shared, config, len(rates)) | {"BLOCK_D": columns}
    named |= dict(zip(("stride_db", "stride_dn", "stride_dh"), dout.stride()[:3], strict=True))
    return Start(kernels.dq_kernel, grid, (q, dout, lse, delta, dq, *descriptors), named)


def _dq_of_parts(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, call: Request,
    one: schedule.Pass, *, first: bool, places: Places,
) -> Start:  # fmt: skip
    with importing("the module of the warp-specialised dq of wide heads"):
        from hilbert_lib.attention.triton.hopper import wide_queries as kernels

    high = high_columns_of(q)
    config, v_stages = HOPPER_WIDE_DQ[high]
    rates = [call.pattern.dilation_rates[i] for i in one.branches]
    descriptors = _of_parts((k, v), rates, config.block_n, high)
    grid, shared = launch_arguments(q, k, v, call, one, config, rows="queries", first=first, last=True, places=places)
    named = _named(kernels.wide_dq_kernel, shared, config, len(rates))
    named |= dict(zip(("stride_db", "stride_dn", "stride_dh"), dout.stride()[:3], strict=True))
    named |= {"BLOCK_E": high, "V_STAGES": v_stages}
    return Start(kernels.wide_dq_kernel, grid, (q, dout, lse, delta, dq, *descriptors), named)


def _named(kernel, shared: dict, config: Config, branches: int) -> dict:
    # Those shared arguments that this kernel takes, and what both kernels take besides; four warps a group.
    names = set(kernel.arg_names)
    own = {"STAGES": config.num_stages, "N_BRANCHES": branches, "num_warps": 4}
    if not shared["PADDING"] and "padding" in names:
        own["padding"] = None
    if not shared["drop_below"]:  # the share may be too small to drop one of 2^32
        own |= {"seed": None, "drop_below": None, "branch_ids": None, "DROPOUT": False}
    return {name: value for name, value in shared.items() if name in names} | own
