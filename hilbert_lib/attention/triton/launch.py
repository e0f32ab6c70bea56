"""Launches: the `forward` and `backward` of a backend, by the plain kernels, and by the warp-specialised ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hilbert_lib.attention.documents import check_rows
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton import decode, schedule
from hilbert_lib.attention.triton.arguments import as_asked, as_computed, config_of, launch_arguments, result
from hilbert_lib.attention.triton.backward import (
    backward_kernel,
    delta_kernel,
    dkv_kernel,
    dq_kernel,
    scale_kernel,
)
from hilbert_lib.attention.triton.forward import forward_kernel
from hilbert_lib.attention.triton.geometry import block_d
from hilbert_lib.attention.triton.hopper import division, grid_launch, segments
from hilbert_lib.attention.triton.hopper import launch as hopper
from hilbert_lib.attention.triton.limits import POSITIONS
from hilbert_lib.attention.triton.packed import Documents, Launch, Places, scheduled_length
from hilbert_lib.attention.triton.start import FLAG, Made, Start, start

ELEMENTS = 2048  # of a program that scales sums: 16 a thread
PLAIN = {"forward": forward_kernel, "dq": dq_kernel, "dkv": dkv_kernel}


def forward(inputs: Tensors, call: Request) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention; shapes as in `reference.forward`.

    Raises ValueError for more keys than the kernels can count.
    """
    q, k, v, *_ = inputs
    _check_keys(k, call, "triton")
    if decode.serves(q, k, call):
        return decode.attend_in_parts(q, k, v, call)
    dtype = q.dtype
    q, k, v = as_computed(q, k, v)
    todo = passes_of("forward", q, k, call)
    out = result(q, todo, call)
    made = out, _lse_beside(out, q)
    if len(todo) > 1:
        made += Made(q.shape, torch.float32), _no_lse(q)

    def starts(places: Places, out: Tensor, lse: Tensor, *partial_results: Tensor) -> list[Start]:
        tensors = (q, k, v, out, lse, *(partial_results or (out, lse)), q)
        return [_plain("forward", tensors, call, places, *one, IF_FLAG=False) for one in _in_order(todo)]

    finish = itemgetter(0, 1) if q.dtype == dtype else partial(_out_and_lse, dtype)
    launches = partial(_launches, "forward", q, todo)
    return _start(starts, (q, k, v), made, call, "forward", finish, launches)


def is_short(q: Tensor, k: Tensor, call: Request) -> bool:
    """Whether a call is one launch forward and one backward, since more would take its host longer than its device."""
    is_whole = q.shape[1] == k.shape[1] and call.query_start is None and call.cu_seqlens is None
    is_few = is_whole and q.shape[1] <= schedule.SHORT_ROWS
    return is_few and schedule.is_short(call.pattern, q.shape[1], q.shape[0] * q.shape[2])


def passes_of(kernel: str, q: Tensor, k: Tensor, call: Request) -> tuple[schedule.Pass, ...]:
    """The passes of a plain kernel, in its tiles."""
    if is_short(q, k, call):
        return (schedule.whole_pass(call.pattern, k.shape[1]),)
    config = config_of(kernel, q)
    block = config.block_n if kernel == "dkv" else config.block_m
    return schedule.passes(call.pattern, scheduled_length(call, k.shape[1]), block)


def _out_and_lse(dtype: torch.dtype, made: list[Tensor]) -> tuple[Tensor, Tensor]:
    return *as_asked(dtype, made[0]), made[1]


def _check_keys(k: Tensor, call: Request, backend: str) -> None:
    if k.shape[1] > POSITIONS:
        raise ValueError(f"k must have up to {POSITIONS:,} rows with backend={backend!r}, got {k.shape[1]:,}")
    if call.cu_seqlens is not None:
        check_rows(call.cu_seqlens, k.shape[1], call.max_seqlen)


def _no_lse(q: Tensor) -> Made:
    # That of rows which no kernel visits.
    return Made((q.shape[0], q.shape[2], q.shape[1]), torch.float32, -torch.inf)


def _lse_beside(out: Made, q: Tensor) -> Made:
    # lse is written where out is.
    return _no_lse(q) if out.value is not None else _no_lse(q)._replace(value=None)


def forward_on_hopper(inputs: Tensors, call: Request) -> tuple[Tensor, Tensor]:
    """The same by the warp-specialised kernels; a tensor that they cannot read is copied once.

    The plain kernels compute branches whose rows the copy engine does not reach, and again, where a tile is cut off,
    tiles with a NaN. Of queries that have few tiles they share the keys out (`decode`). In an exported program, which
    serves all lengths, they also compute the lengths that the warp-specialised kernels do not serve: elsewhere
    `hopper.launch.refusal_of_keys` refuses these. Short segments are windows of the kernels for grids (`segments`).
    """
    q, k, v, *_ = inputs
    _check_keys(k, call, "hopper")
    if hopper.refusal_of_keys(q, k, call) or (q.shape[1] != k.shape[1] and decode.serves(q, k, call)):
        return forward(inputs, call)
    if (line := segments.on_a_line(inputs, call)) is not None:
        return grid_launch.forward(*line)
    if (beside := segments.beside_another(inputs, call)) is not None:
        return _forward_beside(beside, inputs, call)
    q, k, v = hopper.as_read(q, k, v)
    ours, theirs = hopper.launches_of(k, call)
    out = result(q, ours[:1], call)
    masked = hopper.masked(q, k, call, ours)
    made = out, _lse_beside(out, q), FLAG if any(masked) else None

    def again() -> list[schedule.Pass]:
        # Of tiles that are cut off, the plain kernel tells a NaN that was attended to from one that was not. Of several
        # launches the first then begins every row anew.
        return [replace(ours[0], covers_all=len(ours) > 1 and not schedule.covers_all(call.pattern)), *ours[1:]]

    def starts(places: Places, out: Tensor, lse: Tensor, flag: Tensor | None) -> list[Start]:
        tensors = (q, k, v, out, lse, out, lse)
        first = [
            hopper.forward_start(
                q, k, v, call, one, out, lse, flag if is_masked else None, first=number == 0, places=places
            )
            for number, (one, is_masked) in enumerate(zip(ours, masked, strict=True))
        ]
        # These go on from the results and replace them, rounded once more each time.
        last = [_plain("forward", (*tensors, q), call, places, one, False, True, IF_FLAG=False) for one in theirs]
        if flag is None:
            return first + last
        repeated = [
            _plain("forward", (*tensors, flag), call, places, one, number == 0, True, IF_FLAG=True)
            for number, one in enumerate(again())
        ]
        return first + repeated + last

    def launches() -> list[Launch]:
        return [(one, division.BLOCK) for one in ours] + _launches("forward", q, (*again(), *theirs))

    return _start(starts, (q, k, v), made, call, "forward on hopper", itemgetter(0, 1), launches)


def backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, call: Request, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    q, k, v, *_ = inputs
    dtype = q.dtype
    q, k, v, dout, out = as_computed(q, k, v, dout, out)
    if is_short(q, k, call):
        one = schedule.whole_pass(call.pattern, k.shape[1])

        def start_at_once(places: Places, dq: Tensor, dk: Tensor, dv: Tensor) -> list[Start]:
            return [_all_gradients((q, k, v, out, lse, dout, dlse, dq, dk, dv), call, one)]

        made = tuple(result(x, (one,), call) for x in (q, k, v))
        finish = partial(_gradients, dtype, 0)
        return _start(start_at_once, (q, k, v, dout, lse, out, dlse), made, call, "backward at once", finish)
    of_keys, of_queries = _Passes.of("dkv", q, k, (k, v), call), _Passes.of("dq", q, k, (q,), call)

    def starts(places: Places, delta: Tensor, *grads: Tensor) -> list[Start]:
        given, count = (q, k, v, dout, lse, delta), len(of_keys.made)
        both = *of_keys.starts(given, grads[:count], places), *of_queries.starts(given, grads[count:], places)
        return [_delta(out, dout, dlse, delta), *both]

    made = Made(lse.shape, lse.dtype), *of_keys.made, *of_queries.made

    def launches() -> list[Launch]:
        return of_keys.launches(q) + of_queries.launches(q)

    finish = partial(_gradients, dtype, 1 + len(of_keys.made))
    return _start(starts, (q, k, v, dout, lse, out, dlse), made, call, "backward", finish, launches)


def _gradients(dtype: torch.dtype, dq_number: int, made: list[Tensor]) -> tuple[Tensor, ...]:
    # dk and dv are the second and the third.
    return as_asked(dtype, made[dq_number], made[1], made[2])


def backward_on_hopper(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, call: Request, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by the warp-specialised kernels. dq is summed in an order that varies.

    Where torch asks for determinism, and at a head_dim above 128, another kernel computes dq (`hopper.launch.has_dq`).
    Short segments are windows, as in `forward_on_hopper`: their dq has the same bits every time.
    With a query_start the plain kernels compute all: the others count every row of q from position 0. They also compute
    all of packed documents at a head_dim above 128. Branches and lengths are as in `forward_on_hopper`.
    """
    q, k, v, *_ = inputs
    is_wide = q.shape[-1] > division.NARROW
    if call.query_start is not None or hopper.refusal_of_keys(q, k, call) or (call.cu_seqlens is not None and is_wide):
        return backward(dout, inputs, out, lse, call, dlse)
    if (line := segments.on_a_line(inputs, call)) is not None:
        line_inputs, line_call = line
        return grid_launch.backward(dout, line_inputs, out, lse, line_call, dlse)[:3]
    if (beside := segments.beside_another(inputs, call)) is not None:
        return _backward_beside(beside, dout, inputs, out, lse, call, dlse)
    q, k, v, dout = hopper.as_read(q, k, v, dout)
    # Each further pass adds its gradients to the results themselves. Sums are dense whatever q's strides.
    whole, theirs = hopper.launches_of(k, call)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    ours = whole
    if call.dropout_p > 0.0:  # four keys that are neighbours in a branch share their random bits
        ours = division.each_alone(call.pattern, whole, scheduled_length(call, k.shape[1]))
    # The plain kernel's passes for dq. None where dq is summed beside dk and dv, or a kernel of dq alone serves.
    of_queries = None
    if (is_wide or is_deterministic) and not hopper.has_dq(q, k, call):
        of_queries = _Passes.of("dq", q, k, (q,), call)
    has_sums = not is_wide and not is_deterministic
    of_dq = (result(q, whole[:1], call),) if of_queries is None else of_queries.made
    if has_sums:
        of_dq = Made(q.shape, q.dtype), Made(q.shape, torch.float32)
    of_dk = tuple(result(x, ours[:1], call) for x in (k, v))

    def starts(places: Places, delta: Tensor, dk: Tensor, dv: Tensor, *of_dq_now: Tensor) -> list[Start]:
        dq, given, sums = of_dq_now[0], (q, k, v, dout, lse, delta), of_dq_now[1] if has_sums else None
        launches = [_delta(out, dout, dlse, delta, sums)]
        of_keys = (dout, q, k, v, lse, delta, dk, dv, call)
        for number, one in enumerate(ours):
            if is_wide:
                launches.append(hopper.keys_start(*of_keys, one, first=number == 0, places=places))
            else:
                launches.append(hopper.backward_start(*of_keys, one, sums, first=number == 0, places=places))
        launches += [_plain("dkv", (*given, dk, dv, dk, dv), call, places, one, False, True) for one in theirs]
        if of_queries is not None:
            return launches + of_queries.starts(given, of_dq_now, places)
        if has_sums:
            launches += [_plain("dq", (*given, sums, sums), call, places, one, False, False) for one in theirs]
            return [*launches, _scaled(sums, dq, call.scale)]
        return launches + [
            hopper.dq_start(dout, q, k, v, lse, delta, dq, call, one, first=number == 0, places=places)
            for number, one in enumerate(whole)
        ]

    made = Made(lse.shape, lse.dtype), *of_dk, *of_dq
    name = "backward on hopper" if has_sums else "deterministic backward on hopper"

    def launches() -> list[Launch]:
        plain = of_queries.launches(q) if of_queries is not None else _launches("dq", q, theirs)
        return [(one, division.BLOCK) for one in (*ours, *whole)] + _launches("dkv", q, theirs) + plain

    finish = partial(_gradients, q.dtype, 3)
    return _start(starts, (q, k, v, dout, lse, out, dlse), made, call, name, finish, launches)


def _forward_beside(beside: segments.Beside, inputs: Tensors, call: Request) -> tuple[Tensor, Tensor]:
    # One branch by windows, and the other from its results on.
    out, lse = grid_launch.forward(beside.inputs, beside.call)
    q, k, v = hopper.as_read(*inputs[:3])

    def starts(places: Places) -> list[Start]:
        return [hopper.forward_start(q, k, v, call, beside.other, out, lse, None, first=False, places=places)]

    _start(starts, (q, k, v, out, lse), (), call, "forward beside windows", tuple)
    return out, lse


def _backward_beside(
    beside: segments.Beside, dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, call: Request, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    # The same of gradients, with the same bits every time. Both branches have the same delta.
    q, k, v, dout = hopper.as_read(*inputs[:3], dout)

    def start_of_delta(places: Places, delta: Tensor) -> list[Start]:
        return [_delta(out, dout, dlse, delta)]

    made = (Made(lse.shape, lse.dtype),)
    (delta,) = _start(start_of_delta, (q, k, dout, out, dlse), made, call, "delta beside windows", tuple)
    dq, dk, dv, *_ = grid_launch.backward(dout, beside.inputs, out, lse, beside.call, dlse, delta)

    def starts(places: Places) -> list[Start]:
        how = {"first": False, "places": places}
        return [
            hopper.backward_start(dout, q, k, v, lse, delta, dk, dv, call, beside.other, None, **how),
            hopper.dq_start(dout, q, k, v, lse, delta, dq, call, beside.other, **how),
        ]

    _start(starts, (q, k, v, dout, lse, delta, dq, dk, dv), (), call, "backward beside windows", tuple)
    return dq, dk, dv


def _scaled(sums: Tensor, dq: Tensor, scale: float) -> Start:
    # The gradient of q from its sums in float32, which are without the scale.
    grid = (triton.cdiv(sums.numel(), ELEMENTS),)
    return Start(scale_kernel, grid, (sums, dq, scale, sums.numel()), {"BLOCK": ELEMENTS})


class _Passes(NamedTuple):
    """All passes of a plain kernel of the backward. Several add gradients up in float32 first."""

    name: str
    call: Request
    todo: tuple[schedule.Pass, ...]
    made: tuple[Made, ...]  # its gradients, then their sums in float32 if there are several passes

    @classmethod
    def of(cls, name: str, q: Tensor, k: Tensor, like: tuple[Tensor, ...], call: Request) -> "_Passes":
        """like: the tensors whose gradients they are."""
        todo = passes_of(name, q, k, call)
        sums = [Made(x.shape, torch.float32, 0.0) for x in like] if len(todo) > 1 else []
        return cls(name, call, todo, (*(result(x, todo, call) for x in like), *sums))

    def starts(self, given: tuple[Tensor, ...], made: tuple[Tensor, ...], places: Places) -> list[Start]:
        """given: q, k, v, dout, lse and delta."""
        tensors = (*given, *made) if len(self.todo) > 1 else (*given, *made, *made)
        return [_plain(self.name, tensors, self.call, places, *one) for one in _in_order(self.todo)]

    def launches(self, q: Tensor) -> list[Launch]:
        """Each pass with the rows of its tiles."""
        return _launches(self.name, q, self.todo)


def _launches(kernel: str, q: Tensor, passes: Sequence[schedule.Pass]) -> list[Launch]:
    # Passes of a plain kernel, with the rows of its tiles.
    config = config_of(kernel, q)
    return [(one, config.block_n if kernel == "dkv" else config.block_m) for one in passes]


def _start(
    starts: Callable[..., list[Start]], given: tuple, made: tuple, call: Request, name: str, finish: Callable,
    launches: Callable[[], list[Launch]] = list,
) -> Sequence:  # fmt: skip
    # given: k is the second tensor. launches: those that need places where the rows are packed documents.
    tensors = *given, *call.tensors
    if call.cu_seqlens is None:
        return start(partial(starts, {}), tensors, name, *call.options, made=made, finish=finish)
    documents = Documents(call, given[1], launches())
    # All bounds of lengths for which the same tables are made are one kind of call.
    options = *replace(call, max_seqlen=None).options, scheduled_length(call, given[1].shape[1])

    def with_places(*all_made: Tensor) -> list[Start]:
        finding, places = documents.found(all_made[len(made) :])
        return finding + starts(places, *all_made[: len(made)])

    # The documents are checked by torch's operators besides.
    made_with_places = *made, *documents.made
    return start(with_places, tensors, name, *options, made=made_with_places, finish=finish, is_all=False)


def _delta(out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor, sums: Tensor | None = None) -> Start:
    batch, queries, heads, head_dim = out.shape
    rows = batch * queries * heads
    named = {"HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), "BLOCK_M": 32, "sums": sums}
    tensors = (out, dout, dlse, delta, *dout.stride()[:3], rows, queries, heads)
    return Start(delta_kernel, (triton.cdiv(rows, 32),), tensors, named)


def _plain(
    name: str, tensors: tuple, call: Request, places: Places, one: schedule.Pass, first: bool, last: bool, **named
) -> Start:
    # The start of a plain kernel for a pass; tensors begin with q, k and v.
    if name != "forward":  # dout is the fourth
        named |= dict(zip(("stride_db", "stride_dn", "stride_dh"), tensors[3].stride()[:3], strict=True))
    rows = "keys" if name == "dkv" else "queries"
    config = config_of(name, tensors[0])
    grid, shared = launch_arguments(*tensors[:3], call, one, config, rows=rows, first=first, last=last, places=places)
    return Start(PLAIN[name], grid, tensors, shared | named)


def _all_gradients(tensors: tuple, call: Request, one: schedule.Pass) -> Start:
    # The start of all gradients of a short call; tensors are those that `backward_kernel` begins with.
    q, k, v, *_ = tensors
    config, dout = config_of("backward", q), tensors[5]
    (programs,), shared = launch_arguments(q, k, v, call, one, config, rows="queries", first=True, last=True, places={})
    of_queries = shared.pop("heads")
    shared |= dict(zip(("stride_db", "stride_dn", "stride_dh"), dout.stride()[:3], strict=True))
    shared |= {"batch": q.shape[0], "kv_heads": k.shape[2]}
    for name in ("documents", "first_query", "keys", "READ_PARTIAL", "WRITE_PARTIAL"):
        del shared[name]
    grid = (programs + programs * k.shape[2] // of_queries,)
    return Start(backward_kernel, grid, tensors, shared)


def _in_order(todo: tuple[schedule.Pass, ...]) -> Iterator[tuple[schedule.Pass, bool, bool]]:
    # Each pass, whether it is the first, and whether it is the last.
    for number, one in enumerate(todo):
        yield one, number == 0, number == len(todo) - 1
