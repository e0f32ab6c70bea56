"""The memory that a call of attention will need, predicted, along a sequence and on a grid.

Backends written in torch's operators run on meta tensors, which take no memory, and the tensors alive are counted.
Backends that call kernels say their own (`Backend.workspace`).
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.attention.aligned import aligned_backward, aligned_forward
from hilbert_lib.attention.api import QueryBox
from hilbert_lib.attention.backends.backend import Backend
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.choice import choose, is_undone
from hilbert_lib.attention.explain import explain_backend
from hilbert_lib.attention.grid_parts import part_of_box
from hilbert_lib.attention.joint import beside, joint_call, joint_refusal
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.attention.validation import LARGEST_HEAD_DIM, as_pattern, check_dtype
from hilbert_lib.attention.zero_keys import has_zero_keys
from hilbert_lib.internals import dense_operators, dispatch_mode, multiplies_by_amx
from hilbert_lib.limits.memory import GB, device_or_default
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.all_pairs import AllPairs
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.patterns.points import ListedPairs, PointNeighbourhood

_aten = torch.ops.aten

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the highest point of a call. `print` shows them as a table."""

    items: dict[str, int]  # bytes by name; `inputs`, `outputs` and `workspace` sum them up
    inputs: int  # there before: q, k and v; in the backward also dout, out and lse
    outputs: int  # there after
    workspace: int  # held in addition at the highest point

    @property
    def peak(self) -> int:
        """Beyond the inputs."""
        return self.outputs + self.workspace

    @property
    def total(self) -> int:
        """Peak bytes with the inputs."""
        return self.inputs + self.peak

    @property
    def total_gb(self) -> float:
        """`total` in units of 2^30 bytes, as `MemorySafetyChecker` takes it."""
        return self.total / GB

    def __str__(self) -> str:
        rows = {**self.items, "total": self.total}
        width = max(map(len, rows))
        return "\n".join(f"{name.ljust(width)}  {size / 2**20:12.1f} MiB" for name, size in rows.items())


def estimate_memory(
    pattern: DilatedPattern | Neighbourhood | PointNeighbourhood | tuple[Neighbourhood, ...],
    *,
    heads: int,
    head_dim: int,
    length: int | None = None,
    batch: int = 1,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    direction: str = "forward",
    is_causal: bool = False,
    dropout_p: float = 0.0,
    has_key_padding: bool = False,
    has_kv_ordering: bool = False,
    has_key_start: bool = False,
    has_bias: bool = False,
    queries: int | None = None,
    query_box: QueryBox | None = None,
    extra: int = 0,
    extra_queries: int = 0,
    device: object = None,
) -> MemoryEstimate:
    """Peak bytes of one call of attention. Packed documents and a gradient of lse are not covered.

    Args:
        pattern: which keys a query sees; for a call on a grid a `Neighbourhood`, or a tuple of one for each KV head.
            The lists of a `PointNeighbourhood` are counted as inputs.
        heads, head_dim, batch: heads of q, size of one head, sequences.
        length: keys. On a grid it is left out, as are is_causal, dropout_p and has_kv_ordering. On a grid of more than
            one axis has_key_start and queries are left out, too. Over points all of these, has_bias and query_box
            are left out.
        kv_heads: heads of k and v; by default as many as of q.
        dtype: of q, k and v.
        direction: "forward", or "backward" with what the forward left; training needs the larger of the two.
        backend, is_causal, dropout_p: as the functions take them.
        has_key_padding, has_kv_ordering, has_key_start: whether the call has a key_padding_mask, a kv_ordering, a
            key_start or a tensor of query_start. Where k and v are put in sequence order first, copies of both are kept
            for the backward. Tables that later calls share are not counted, but the lists of "lists" are.
        has_bias: on a grid, whether there is a bias. It counts in float32 (float64 for float64), with its gradient.
        queries: rows of q, the last positions (decoding); by default all.
        query_box: on a grid, the cells of q, as the function takes it; not with queries or has_key_start.
        extra: keys beside those of a grid, which every query sees.
        extra_queries: queries beside a grid, which see every cell and every extra key.
        device: where the tensors would be; by default as for `MemorySafetyChecker`.

    Raises:
        TypeError, ValueError: naming the argument and what is allowed; also where the backend cannot serve the call.

    >>> pattern = DilatedPattern((64, 128), (1, 2))
    >>> print(estimate_memory(pattern, length=2**14, heads=4, head_dim=64, backend="eager", device="cpu"))
    q, k, v                       24.0 MiB
    out                            8.0 MiB
    lse                            0.2 MiB
    workspace: temporary          88.2 MiB
    total                        120.5 MiB
    >>> estimate_memory(Neighbourhood((64, 64), 7), heads=4, head_dim=64, backend="triton", device="cuda").workspace
    0
    """
    checks.one_of("direction", direction, DIRECTIONS)
    dtype = check_dtype(dtype)
    checks.boolean("has_key_padding", has_key_padding)
    checks.boolean("has_kv_ordering", has_kv_ordering)
    checks.boolean("has_key_start", has_key_start)
    checks.boolean("has_bias", has_bias)
    device = device_or_default(device)
    heads, kv_heads = checks.grouped(heads, kv_heads)
    extra = checks.integer("extra", extra, least=0)
    extra_queries = checks.integer("extra_queries", extra_queries, least=0)
    pattern, part = as_pattern(pattern), None
    if isinstance(pattern, PointNeighbourhood):
        left_out = {"length": length, "is_causal": is_causal, "dropout_p": dropout_p, "query_box": query_box}
        left_out |= {"has_kv_ordering": has_kv_ordering, "has_key_start": has_key_start, "queries": queries}
        for name, value in (left_out | {"has_bias": has_bias}).items():
            if value:
                raise ValueError(f"{name} must be left out for a call over points, got {value!r}")
        batch = checks.integer("batch", batch, least=1)
        head_dim = checks.integer("head_dim", head_dim, least=1, most=LARGEST_HEAD_DIM)
        q, k, extra_keys = (
            torch.empty(batch, *rows, head_dim, dtype=dtype, device="meta")
            for rows in ((pattern.lists.queries, heads), (pattern.lists.keys, kv_heads), (extra, kv_heads))
        )
        padding = torch.empty(k.shape[:2], dtype=torch.bool, device="meta") if has_key_padding else None
        leaves = Tensors(q, k, k, extra_keys, extra_keys)
        return _of_points(pattern, leaves, padding, extra_queries, backend, direction, device)
    if on_grid := pattern.length is not None:
        near = pattern.of_heads(kv_heads)
        left_out = {"length": length, "is_causal": is_causal, "dropout_p": dropout_p}
        left_out |= {"has_kv_ordering": has_kv_ordering}
        if len(near.shape) > 1:
            left_out |= {"queries": queries, "has_key_start": has_key_start}
        for name, value in left_out.items():
            if value:
                raise ValueError(f"{name} must be left out for a call on a grid, got {value!r}")
        length, backends, part = near.length, backends_for(near), part_of_box(query_box, near.shape)
        if query_box is not None and (queries is not None or has_key_start):
            raise ValueError(f"query_box must be left out with queries or has_key_start, got {query_box!r}")
    else:
        length, backends = checks.integer("length", length, least=1), backends_for(pattern)
        for name, count in (("extra", extra), ("extra_queries", extra_queries)):
            if count:
                raise ValueError(f"{name} must be 0 unless the call is on a grid, got {count}")
        if query_box is not None:
            raise ValueError(f"query_box must be left out unless the call is on a grid, got {query_box!r}")
        if has_bias:
            raise ValueError("has_bias must be left out unless the call is on a grid, got True")
    rows = length if queries is None else checks.integer("queries", queries, least=1, most=length)
    start = None if queries is None else length - queries or None  # all of them are no decoding
    if part is not None:
        rows = prod(map(len, part.rows))
    batch = checks.integer("batch", batch, least=1)
    head_dim = checks.integer("head_dim", head_dim, least=1, most=LARGEST_HEAD_DIM)
    if batch * (length + extra + extra_queries) * heads * head_dim > checks.LARGEST_SIZE * LARGEST_HEAD_DIM:
        sizes = f"batch {batch}, length {length}, heads {heads}, head_dim {head_dim}"
        raise ValueError(f"length must be one whose bytes can be counted in 64 bits, got {sizes}")
    q = torch.empty(batch, rows, heads, head_dim, dtype=dtype, device="meta")
    k = torch.empty(batch, length, kv_heads, head_dim, dtype=dtype, device="meta")
    extra_keys = k.new_empty(batch, extra, kv_heads, head_dim)
    bias = q.new_empty(heads, *near.bias_sides, dtype=WORKING_DTYPE[dtype]) if has_bias else None
    padding = torch.empty(batch, length, dtype=torch.bool, device="meta") if has_key_padding else None
    options = {"query_start": start, "query_box": query_box}
    if not on_grid:
        options |= {"is_causal": is_causal, "dropout_p": dropout_p}
    if has_kv_ordering:  # any one: the choice asks whether there is one
        options["kv_ordering"] = Ordering.linear(length)
    starts = torch.empty(batch, dtype=torch.int64, device="meta") if has_key_start else None
    if has_bias:
        options["bias"] = bias
    options, named = options | {"pattern": pattern}, backend
    backend = _serving(q, k, padding, starts, device, named, direction == "backward", backends, options)
    is_gathered = has_kv_ordering and is_undone(
        named, backend, device, Request(pattern, query_start=start, key_start=starts), rows
    )
    if on_grid:
        of_bias = {"has_bias": has_bias, "bias_gradient": has_bias and direction == "backward"}
        call = Request(near, scale=head_dim**-0.5, key_padding_mask=padding, key_start=starts, part=part, **of_bias)
        if starts is not None:
            call = replace(call, query_start=start)
        elif start is not None:
            call = replace(call, part=part_of_box([(start, start + rows)], near.shape))
        leaves = Tensors(q, k, k, extra_keys, extra_keys, bias)
    else:
        seed = torch.empty(1, dtype=torch.int64, device="meta") if dropout_p else None
        slots = torch.empty(length, dtype=torch.int32, device="meta") if has_kv_ordering and not is_gathered else None
        call = Request(pattern, is_causal, head_dim**-0.5, dropout_p, seed, padding, start, slots, key_start=starts)
        leaves = Tensors(q, k, k)
    serving_backend = backends[backend]
    if (
        device.type == "cuda"
        and not torch.cuda.is_available()
        and (reason := serving_backend.refusal_of_sizes(q, k, call))
    ):
        raise ValueError(f"backend={backend!r} cannot serve: {reason}")

    lse = torch.empty(batch, heads, rows, dtype=WORKING_DTYPE[dtype], device="meta")
    inputs, outputs = {"q, k, v": q.nbytes + 2 * k.nbytes}, {"out": q.nbytes, "lse": lse.nbytes}
    inputs |= {"extra k, v": 2 * extra_keys.nbytes} if extra else {}
    inputs |= {"bias": bias.nbytes} if has_bias else {}
    if direction == "backward":
        grads = {f"d{name.replace(', ', ', d')}": size for name, size in inputs.items()}
        inputs, outputs = inputs | {"dout": q.nbytes, **outputs}, grads
    arguments, returned = (leaves,) if direction == "forward" else (q, leaves, q, lse), sum(outputs.values())
    workspace = None
    if serving_backend.workspace:
        workspace = serving_backend.workspace(arguments, serving_backend.as_run(call), direction, device, returned)
        if workspace is not None and serving_backend.aligns(call):
            # q, k and v at row 0, and the results of these; in the backward dout, out and lse too. Rows are put back
            # when the workspace is free again.
            moved = sum(x.nbytes for x in (q, k, k)) + (2 * q.nbytes + lse.nbytes if direction == "backward" else 0)
            held = max(0, sum(workspace.values()) - returned)
            workspace = {"of sequences at row 0": held, "sequences at row 0": moved + returned}
    if workspace is None:
        workspace = {"temporary": _traced(arguments, call, serving_backend, direction, device) - returned}
    if direction == "forward" and not on_grid and has_zero_keys(call, length):
        # Their table; and their weights, which are computed when the rest is free again.
        table = kv_heads * rows * lse.element_size()
        workspace["zero keys"] = table + max(0, lse.nbytes + lse.numel() - sum(workspace.values()))
    if is_gathered and direction == "forward":
        workspace["k, v in sequence order"] = 2 * k.nbytes
    elif is_gathered:
        inputs["k, v in sequence order"] = 2 * k.nbytes
        # dk is put back when the rest of the workspace is free again, and dv when the first dk is.
        workspace["dk or dv put back"] = max(0, k.nbytes - sum(workspace.values()))
    if extra_queries:
        extra_q = q.new_empty(batch, extra_queries, heads, head_dim)
        extra_call = _ExtraCall(*joint_call(extra_q, leaves, call), beside(named), direction, device)
        return extra_call.added(inputs, outputs, sum(workspace.values()))
    return _estimate(inputs, outputs, workspace)


def _estimate(inputs: dict[str, int], outputs: dict[str, int], workspace: dict[str, int]) -> MemoryEstimate:
    items = inputs | outputs | {f"workspace: {name}": size for name, size in workspace.items()}
    return MemoryEstimate(items, *(sum(sizes.values()) for sizes in (inputs, outputs, workspace)))


def _of_points(
    points: PointNeighbourhood, leaves: Tensors, padding: Tensor | None, extra_queries: int, named: str,
    direction: str, device: torch.device,
) -> MemoryEstimate:  # fmt: skip
    # Of one call over points. leaves, padding: on the meta device.
    q, k, _, extra_keys, _ = leaves.with_rows
    is_absent = device.type == "cuda" and not torch.cuda.is_available()
    backends, options = backends_for(ListedPairs), {"pattern": points.to("cpu" if is_absent else device)}
    backend = backends[_serving(q, k, padding, None, device, named, direction == "backward", backends, options)]
    call = Request(ListedPairs(), scale=1.0, key_padding_mask=padding, lists=points.list_tensors)
    if is_absent and (reason := backend.refusal_of_sizes(q, k, call)):
        raise ValueError(f"backend={named!r} cannot serve: {reason}")
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=WORKING_DTYPE[q.dtype], device="meta")
    inputs, outputs = {"q, k, v": q.nbytes + 2 * k.nbytes}, {"out": q.nbytes, "lse": lse.nbytes}
    inputs |= {"extra k, v": 2 * extra_keys.nbytes} if extra_keys.numel() else {}
    arguments = (leaves,)
    if direction == "backward":
        grads = {f"d{name.replace(', ', ', d')}": size for name, size in inputs.items()}
        inputs, outputs, arguments = inputs | {"dout": q.nbytes, **outputs}, grads, (q, leaves, q, lse)
    returned = sum(outputs.values())
    workspace = backend.workspace and backend.workspace(arguments, call, direction, device, returned)
    if workspace is None:
        workspace = {"temporary": _traced(arguments, call, backend, direction, device) - returned}
    inputs |= {"lists": sum(x.nbytes for x in points.list_tensors)}
    if extra_queries:
        extra_q = q.new_empty(q.shape[0], extra_queries, *q.shape[2:])
        extra_call = _ExtraCall(*joint_call(extra_q, leaves, call), beside(named), direction, device)
        return extra_call.added(inputs, outputs, sum(workspace.values()))
    return _estimate(inputs, outputs, workspace)


class _ExtraCall(NamedTuple):
    """The call of extra queries, which runs after that of the cells, and backward before it."""

    inputs: Tensors  # on the meta device
    request: Request
    named: str  # the backend as the user named it
    direction: str
    device: torch.device

    def added(self, inputs: dict[str, int], outputs: dict[str, int], workspace: int) -> MemoryEstimate:
        """The estimate of both calls, from what that of the cells takes."""
        q = self.inputs.q
        batch, rows, heads, _ = q.shape
        lse = q.new_empty(batch, heads, rows, dtype=WORKING_DTYPE[q.dtype])
        results = {"extra out": q.nbytes, "extra lse": lse.nbytes}
        if self.direction == "forward":
            peak = self._workspace((self.inputs,), sum(results.values()))
            workspace = max(peak, workspace - sum(results.values()))
            return _estimate(inputs | {"extra q": q.nbytes}, outputs | results, {"temporary": workspace})
        grads = sum(x.nbytes for x in self.inputs.with_rows)  # all of them, while the backward of the cells runs
        peak = self._workspace((q, self.inputs, q, lse), grads)
        outputs = outputs | {"dextra q": q.nbytes}
        workspace = max(grads + peak - sum(outputs.values()), grads - q.nbytes + workspace)
        inputs = inputs | {"extra q": q.nbytes, "extra dout": q.nbytes, **results}
        return _estimate(inputs, outputs, {"temporary": workspace})

    def _workspace(self, arguments: tuple, returned: int) -> int:
        backend = backends_for(AllPairs)[self._backend()]
        workspace = backend.workspace and backend.workspace(
            arguments, self.request, self.direction, self.device, returned
        )
        if workspace is not None:
            return sum(workspace.values())
        return _traced(arguments, self.request, backend, self.direction, self.device) - returned

    def _backend(self) -> str:
        if self.device.type == "cuda" and not torch.cuda.is_available():
            return self.named
        q, k = (torch.empty(1, dtype=x.dtype, device=self.device).expand(x.shape) for x in self.inputs[:2])
        chosen = choose(q, k, self.request, self.named, gradient=self.direction == "backward")
        if not chosen:
            refusal = joint_refusal(Tensors(q, k, k), self.request, self.named)
            raise ValueError(f"backend={self.named!r} {refusal}")
        return chosen


def _serving(
    q: Tensor, k: Tensor, padding: Tensor | None, starts: Tensor | None, device: torch.device, backend: str,
    gradient: bool, backends: dict[str, Backend], options: dict,
) -> str:  # fmt: skip
    """The backend that would run a call of tensors like these. Where the GPU is absent it must be named."""
    # Without the GPU, "reference" on the CPU checks sizes, dtype and pattern.
    is_absent = device.type == "cuda" and not torch.cuda.is_available()
    if is_absent and backend not in backends:
        raise ValueError(f"backend must be named where there is no GPU to ask, {', '.join(backends)}; got {backend!r}")
    place, name = ("cpu", "reference") if is_absent else (device, backend)
    needs = {"dtype": q.dtype, "device": place, "requires_grad": gradient and q.dtype.is_floating_point}
    q, k = (torch.empty(1, **needs).expand(x.shape) for x in (q, k))
    mask = None if padding is None else torch.zeros(1, dtype=torch.bool, device=place).expand(padding.shape)
    if "bias" in options:
        options = options | {
            "bias": torch.zeros(1, dtype=options["bias"].dtype, device=place).expand(options["bias"].shape)
        }
    with torch.set_grad_enabled(gradient):
        if starts is not None:
            options = options | {"key_start": torch.zeros_like(starts, device=place)}
        explanation = explain_backend(q, k, k, key_padding_mask=mask, backend=name, **options)
    if is_absent:
        return backend
    if not explanation.chosen:
        raise ValueError(f"backend={backend!r} {explanation.reasons[backend]}")
    return explanation.chosen


class _Alive(dispatch_mode()):
    """Counts the bytes of tensors alive while operators run on meta tensors; `peak` leaves `inputs` out."""

    def __init__(self, inputs: list[Tensor], device: torch.device):
        super().__init__()
        self._on_cpu = device.type == "cpu"
        self._sizes = {id(x.untyped_storage()): 0 for x in inputs}
        self._now = self.peak = 0
        self._layouts = {}  # of elementwise results, by operator and `_form` of its arguments

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        # Meta tensors have no values: none is taken as nonzero.
        if operator is _aten.nonzero.default and args[0].is_meta:
            return torch.empty(0, args[0].dim(), dtype=torch.int64)
        results = self._run(operator, args, kwargs or {})
        tensors = [x for x in args if isinstance(x, Tensor)]
        is_table = not all(x.is_meta for x in tensors)  # made on the host, for later calls too
        viewed = {id(x.untyped_storage()) for x in tensors}  # of tables too
        for x in leaves_of(results):
            if isinstance(x, Tensor) and x.is_meta and not is_table:
                storage = x.untyped_storage()
                if id(storage) not in self._sizes and id(storage) not in viewed:
                    self._sizes[id(storage)] = storage.nbytes()
                    self._now += storage.nbytes()
                    weakref.finalize(storage, self._forget, id(storage))
        self.peak = max(self.peak, self._now + (_inside(operator, args) if self._on_cpu else 0))
        return results

    def _run(self, operator: Callable, args: tuple, kwargs: dict) -> object:
        # Of many elementwise operators torch finds the result's layout in Python, which takes longer than all else.
        form = _form(args) if torch.Tag.pointwise in operator.tags and not kwargs else None
        if form is None:
            return operator(*args, **kwargs)
        key = operator, form
        if key in self._layouts:
            shape, stride, dtype = self._layouts[key]
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        result = operator(*args)
        storages = {id(x.untyped_storage()) for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and id(result.untyped_storage()) not in storages:
            self._layouts[key] = result.shape, result.stride(), result.dtype
        return result

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


def _form(args: tuple) -> tuple | None:
    """All that the layout of a result on the meta device hangs on; None of arguments of other kinds or devices."""
    form = []
    for x in args:
        if isinstance(x, Tensor) and x.is_meta:
            form.append((x.shape, x.stride(), x.dtype))
        elif isinstance(x, bool | int | float | str | None):
            form.append((type(x), x))
        else:
            return None
    return tuple(form)


def leaves_of(x: object) -> Iterator[object]:
    """The leaves of nested tuples and lists."""
    if isinstance(x, tuple | list):
        for item in x:
            yield from leaves_of(item)
    else:
        yield x


def _inside(operator: Callable, args: tuple) -> int:
    """Bytes that a CPU operator takes in addition to its results, by torch's profiler; others never decide the peak."""
    if operator.overloadpacket is dense_operators.flash_attention_for_cpu:
        q, k = args[:2]
        block = _rows_of_block(q) * (min(512, k.shape[2]) + 2 + q.shape[3])  # scores, their sums and largest, output
        copies = 2 * k.shape[2] * q.shape[3] * q.itemsize * q.shape[0] * q.shape[1] if _copies_keys(q, k) else 0
        return copies + torch.get_num_threads() * block * WORKING_DTYPE[q.dtype].itemsize
    if operator.overloadpacket is dense_operators.flash_attention_for_cpu_backward:
        copy = 0 if args[0].transpose(1, 2).is_contiguous() else args[0].nbytes  # of dout
        q, k = args[1:3]
        block = _rows_of_block(q) * (2 * min(512, k.shape[2]) + 1)  # scores, their gradients, sums of rows
        return copy + torch.get_num_threads() * block * WORKING_DTYPE[q.dtype].itemsize
    if torch.Tag.pointwise in operator.tags:  # the narrower of two dtypes is copied into the wider
        terms = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        widest = max((x.element_size() for x in terms), default=0)
        return sum(x.numel() * widest for x in terms if x.element_size() < widest)
    return 0


def _copies_keys(q: Tensor, k: Tensor) -> bool:
    """Whether torch's kernel for the CPU copies k and v, in the form in which AMX multiplies (seen in torch 2.13)."""
    if q.dtype != torch.bfloat16 or min(q.shape[2], k.shape[2]) < 64 or not multiplies_by_amx():
        return False
    sequences, rows = q.shape[0] * q.shape[1], _rows_of_block(q)
    blocks_of_a_thread = -(-sequences * -(-q.shape[2] // rows) // torch.get_num_threads())
    return blocks_of_a_thread * rows >= 4 * sequences


def _rows_of_block(q: Tensor) -> int:
    """Rows of q that torch's kernel for the CPU takes at a time (torch 2.13)."""
    rows = q.shape[2]
    return min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32)


def _traced(arguments: tuple, call: Request, backend: Backend, direction: str, device: torch.device) -> int:
    """Bytes alive at the highest point of a backend written in torch's operators, what it returns included."""
    run = backend.functions(device)[DIRECTIONS.index(direction)]
    if backend.aligns(call):
        run = partial(aligned_forward if direction == "forward" else aligned_backward, run)
    tensors = [x for x in (call.seed, call.key_padding_mask, call.key_start) if x is not None]
    with torch.no_grad(), _Alive([x for x in leaves_of(arguments) if x is not None] + tensors, device) as alive:
        results = run(*arguments, call)
        if direction == "forward":
            results[1].contiguous()
    return alive.peak
