"""Attention in which every query sees every key, by the backends for sequences: one segment that holds all.

    keys, key_padding_mask             -> out, lse \\
    extra keys, extra_padding_mask     -> out, lse  > merge -> out, lse -> backward of each with the merged results

No tensor is joined to another. Extra keys are few. Where the backend does not serve their mask or their number,
"triton" computes this part on a GPU, and matrix products elsewhere; `explain_backend` says so.

A short call (`is_short`) takes its host longer than its device. "triton" then computes all keys in one launch, by the
kernels for grids: keys are the cells of a line whose window holds every cell, and queries stand on its first cells.

Few queries have few tiles, which are a kernel's programs for dq. By "hopper" and "triton" the backward then cuts the
keys into runs, which are sequences of their own (`_in_runs`). The forward does so in its kernels (`triton.decode`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.backends.backend import Backend, Backward, Forward
from hilbert_lib.attention.backends.parts import merge_patterns
from hilbert_lib.attention.merge import add_tensors, kernel_serves
from hilbert_lib.attention.request import WORKING_DTYPE, GridPart, Request, Tensors
from hilbert_lib.attention.triton.limits import MOST_SEQUENCES, query_tiles
from hilbert_lib.patterns.all_pairs import AllPairs, one_segment
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood

# Backends whose kernels find a query's segment among those that the keys fill, and which decode if q and k have
# different lengths.
_BY_POSITION = ("hopper", "triton")
# Of a call on a line: of more keys, or more pairs in all heads and sequences, the device takes longer than the host.
MOST_ON_A_LINE, MOST_PAIRS = 1024, 2**22
# Of a backward in runs of keys: the tiles of dq that fill a GPU, the programs aimed at, and the fewest keys of a run.
FILLING_TILES, PROGRAMS, LEAST_KEYS = 128, 256, 4096


class _Part(NamedTuple):
    """Some of the keys, and what computes the attention of all queries over them."""

    inputs: Tensors
    request: Request
    forward: Forward
    backward: Backward


def as_counted(queries: int, k: Tensor, v: Tensor, request: Request, name: str) -> tuple[Tensor, Tensor, Request]:
    """k, v and a request of `one_segment` as a backend takes them.

    Some kernels need a key at each query's position. Where keys are fewer, k and v are padded and a mask hides the
    padding.
    """
    batch, keys = k.shape[:2]
    if name not in _BY_POSITION or queries == keys:
        return k, v, request
    mask, missing = request.key_padding_mask, queries - keys
    if missing > 0:
        mask = torch.zeros(batch, keys, dtype=torch.bool, device=k.device) if mask is None else mask
        mask = pad(mask, (0, missing), value=True)
        k, v = (pad(x, (0, 0, 0, 0, 0, missing)) for x in (k, v))
    return k, v, replace(request, key_padding_mask=mask, query_start=0)


def by_one_segment(backend: Backend, plain: Backend) -> Backend:
    """The backend for `AllPairs` that runs a backend for sequences. It serves where that one serves the keys.

    plain: "triton" for sequences, whose kernels take masks.
    """

    def limits(q: Tensor, request: Request) -> str:
        return backend.refusal_whatever_the_keys(q, _request(q, q, request.key_padding_mask, request))

    def of_keys(q: Tensor, k: Tensor, request: Request) -> str:
        return backend.of_keys(q, k, _request(q, k, request.key_padding_mask, request))

    return Backend(
        serves=AllPairs,
        name=backend.name,
        note=f"the keys by {backend.name!r} as one segment of a sequence; extra keys also, by 'triton' or by products",
        colour=backend.colour,
        functions=partial(_functions, backend, plain),
        limits=limits,
        of_keys=of_keys,
        caveat=backend.caveat,
        workspace=partial(_workspace, backend),
        lse_columns=backend.lse_columns,
    )


def on_a_line_where_short(segments: Backend, grids: Backend) -> Backend:
    """The backend for `AllPairs` that takes one launch where `is_short`, and is another elsewhere.

    segments: that other one. grids: the plain kernels for grids.
    """

    def functions(device: torch.device) -> tuple[Forward, Backward]:
        of_grids, of_segments = grids.functions(device), segments.functions(device)
        return partial(_line_forward, of_grids[0], of_segments[0]), partial(_line_backward, of_grids[1], of_segments[1])

    def workspace(
        arguments: tuple, request: Request, direction: str, device: torch.device, returned: int
    ) -> dict[str, int] | None:
        inputs = Tensors(*(arguments[0] if direction == "forward" else arguments[1]))
        if not is_short(inputs.q, inputs.k):
            return segments.workspace(arguments, request, direction, device, returned)
        inputs, request = _on_a_line(inputs, request)
        arguments = (inputs,) if direction == "forward" else (arguments[0], inputs, *arguments[2:])
        return grids.workspace(arguments, request, direction, device, returned)

    note = f"{segments.note}; short calls as the cells of a line"
    return replace(segments, note=note, functions=functions, workspace=workspace)


def is_short(q: Tensor, k: Tensor) -> bool:
    """Whether an `AllPairs` call has few keys and pairs, and a line of its keys has a cell for each query."""
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    is_few = queries <= keys <= MOST_ON_A_LINE and batch * heads * queries * keys <= MOST_PAIRS
    return is_few and max(batch, heads) <= MOST_SEQUENCES


def _line_forward(of_grids: Forward, of_segments: Forward, inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    if is_short(inputs.q, inputs.k):
        return of_grids(*_on_a_line(inputs, request))
    return of_segments(inputs, request)


def _line_backward(
    of_grids: Backward, of_segments: Backward, dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor,
    request: Request, dlse: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if is_short(inputs.q, inputs.k):
        inputs, request = _on_a_line(inputs, request)
        return of_grids(dout, inputs, out, lse, request, dlse=dlse)
    return of_segments(dout, inputs, out, lse, request, dlse=dlse)


def _on_a_line(inputs: Tensors, request: Request) -> tuple[Tensors, Request]:
    # The same call on a grid of one axis.
    q, k, *_ = inputs
    if inputs.extra_k is None:
        inputs = inputs._replace(extra_k=k[:, :0], extra_v=k[:, :0])
    pattern, part = _line(q.shape[1], k.shape[1], k.shape[2])
    masks = {"key_padding_mask": request.key_padding_mask, "extra_padding_mask": request.extra_padding_mask}
    return inputs, Request(pattern, scale=request.scale, is_part=request.is_part, part=part, **masks)


@lru_cache(maxsize=256)
def _line(queries: int, keys: int, kv_heads: int) -> tuple[HeadNeighbourhoods, GridPart | None]:
    # A window as wide as the line holds every cell, wherever a query stands.
    pattern = Neighbourhood((keys,), keys).of_heads(kv_heads)
    first = (range(queries),)
    return pattern, None if queries == keys else GridPart(first, first, (range(keys),))


def _functions(backend: Backend, plain: Backend, device: torch.device) -> tuple[Forward, Backward]:
    forward, backward = backend.functions(device)
    if backend.name in _BY_POSITION:
        backward = partial(_in_runs, backward, backend.name)
    parts = partial(_parts, backend, plain, (forward, backward))
    return partial(_forward, parts), partial(_backward, parts)


def _request(q: Tensor, k: Tensor, mask: Tensor | None, request: Request, is_part: bool = False) -> Request:
    # The request of some keys along a sequence. torch.compile traces no functools' caches.
    segment = one_segment if torch.compiler.is_compiling() else _cached_segment
    pattern = segment(q.shape[1], k.shape[1])
    return Request(pattern, scale=request.scale, key_padding_mask=mask, is_part=is_part)


_cached_segment = lru_cache(maxsize=256)(one_segment)


def _parts(
    backend: Backend, plain: Backend, functions: tuple[Forward, Backward], inputs: Tensors, request: Request
) -> Iterator[_Part]:
    # functions: of the backend, on the device.
    q, k, v, extra_k, *_ = inputs
    has_extra = extra_k is not None and extra_k.shape[1] > 0
    is_part = request.is_part or has_extra
    k, v, key_request = as_counted(
        q.shape[1], k, v, _request(q, k, request.key_padding_mask, request, is_part), backend.name
    )
    yield _Part(Tensors(q, k, v), key_request, *functions)
    if not has_extra:
        return
    server = extra_keys_server(backend, plain, inputs, request)
    if server is None:
        functions = reference.forward_by_rows, reference.backward_by_rows
    elif server is not backend:
        functions = server.functions(q.device)
    yield _Part(*_extra_call(server or backend, inputs, request), *functions)


def _extra_call(server: Backend, inputs: Tensors, request: Request) -> tuple[Tensors, Request]:
    # The call of the extra keys along a sequence.
    q, extra_k = inputs.q, inputs.extra_k
    request = _request(q, extra_k, request.extra_padding_mask, request, is_part=True)
    k, v, request = as_counted(q.shape[1], extra_k, inputs.extra_v, request, server.name)
    return Tensors(q, k, v), request


def extra_keys_server(backend: Backend, plain: Backend, inputs: Tensors, request: Request) -> Backend | None:
    """The backend for sequences that computes the extra keys of an `AllPairs` call; None for matrix products.

    backend: that of the keys. plain: "triton", the next to be asked on a GPU.
    """
    extra_inputs, extra_request = _extra_call(backend, inputs, request)
    if not backend.refusal_of_sizes(extra_inputs.q, extra_inputs.k, extra_request):  # the machine is that of the keys
        return backend
    if not kernel_serves(inputs.q):
        return None
    extra_inputs, extra_request = _extra_call(plain, inputs, request)
    return None if plain.refusal(extra_inputs.q, extra_request, extra_inputs.k) else plain


def _forward(parts: Callable[..., Iterator[_Part]], inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    results = [part.forward(part.inputs, part.request) for part in parts(inputs, request)]
    return results[0] if len(results) == 1 else merge_patterns(results, inputs.q.dtype)


def _backward(
    parts: Callable[..., Iterator[_Part]], dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request,
    dlse: Tensor | None = None,
) -> Tensors:  # fmt: skip
    q_dtype = inputs.q.dtype
    dq, grads = None, []
    for part, keys in zip(parts(inputs, request), (inputs.k, inputs.extra_k), strict=False):
        part_dq, dk, dv, *_ = part.backward(dout, part.inputs, out, lse, part.request, dlse=dlse)
        dq = part_dq if dq is None else add_tensors([dq], [part_dq], [q_dtype])[0]
        grads += [x if x.shape == keys.shape else x[:, : keys.shape[1]] for x in (dk, dv)]
    extra = [] if inputs.extra_k is None else [torch.zeros_like(x) for x in inputs.extra[len(grads) - 2 :]]
    return Tensors(dq.to(q_dtype), *grads, *extra)


def runs_of(q: Tensor, k: Tensor) -> int:
    """The number of runs of keys in which a backward computes dq: 1 where tiles of queries fill a GPU, or keys are few.

    >>> runs_of(torch.empty(1, 77, 8, 64), torch.empty(1, 65_536, 8, 64))
    16
    """
    batch, queries, heads, _ = q.shape
    keys, tiles = k.shape[1], max(1, batch * heads * query_tiles(queries))
    most = min(PROGRAMS // tiles, keys // max(LEAST_KEYS, queries))
    if tiles >= FILLING_TILES or most < 2:
        return 1
    # A number that divides the keys leaves no rest.
    return next((runs for runs in range(most, most // 2, -1) if keys % runs == 0), most)


def _in_runs(
    backward: Backward, name: str, dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # A backward of a segment, by runs of its keys; the last keys, which no run holds, are a call of their own.
    k = inputs.k
    runs = runs_of(inputs.q, k)
    if runs == 1:
        return backward(dout, inputs, out, lse, request, dlse=dlse)
    held = k.shape[1] // runs * runs
    of_keys = partial(_gradients_of_keys, backward, name, dout, inputs, out, lse, request, dlse)
    dq, dk, dv = of_keys(runs, 0, held)
    if held < k.shape[1]:
        own_dq, own_dk, own_dv = of_keys(1, held, k.shape[1])
        dq, dk, dv = dq + own_dq, torch.cat((dk, own_dk), 1), torch.cat((dv, own_dv), 1)
    return dq, dk, dv


def _gradients_of_keys(
    backward: Backward, name: str, dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request,
    dlse: Tensor | None, runs: int, first: int, stop: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # Gradients of q, in float32, and of the keys from `first` to `stop` - 1, in runs of equal length.
    def run_by_run(x: Tensor) -> Tensor:
        return x[:, first:stop].unflatten(1, (runs, -1)).flatten(0, 1)

    def for_each_run(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.repeat_interleave(runs, 0)

    q, k, v = for_each_run(inputs.q), run_by_run(inputs.k), run_by_run(inputs.v)
    mask = None if request.key_padding_mask is None else run_by_run(request.key_padding_mask)
    k, v, request = as_counted(q.shape[1], k, v, _request(q, k, mask, request, is_part=True), name)
    results = *map(for_each_run, (out, lse)), request
    dq, dk, dv, *_ = backward(for_each_run(dout), Tensors(q, k, v), *results, dlse=for_each_run(dlse))
    dq = dq.unflatten(0, (-1, runs)).sum(1, dtype=WORKING_DTYPE[q.dtype])
    length = (stop - first) // runs
    return dq, *(x[:, :length].unflatten(0, (-1, runs)).flatten(1, 2) for x in (dk, dv))


def _workspace(
    backend: Backend, arguments: tuple, request: Request, direction: str, device: torch.device, returned: int
) -> dict[str, int] | None:
    # That of the keys, beside the results of both parts; the extra keys are few.
    if backend.workspace is None:
        return None
    inputs = arguments[0] if direction == "forward" else arguments[1]
    q, k, v, extra_k, *_ = inputs
    own_request = _request(q, k, request.key_padding_mask, request)
    own_inputs = Tensors(q, k, v)
    own_arguments = (own_inputs,) if direction == "forward" else (arguments[0], own_inputs, *arguments[2:])
    keys = backend.workspace(own_arguments, own_request, direction, device, returned)
    runs = runs_of(q, k) if direction == "backward" and backend.name in _BY_POSITION else 1
    if keys is not None and runs > 1:
        rows = q.shape[0] * q.shape[1] * q.shape[2]
        keys |= {"rows of the queries for each run of keys": runs * (4 * q.nbytes + 2 * 4 * rows)}
    if keys is None or extra_k is None or not extra_k.shape[1]:
        return keys
    results = 3 * WORKING_DTYPE[q.dtype].itemsize * q.numel()
    return keys | {"results of the parts": results}
