"""What memory a call of dilated attention will need, before it is made.

What is written in torch's own operators is run on meta tensors, which have shapes and no memory, and what is alive is
counted. What calls kernels is added up from the tensors that `attention.strided` and `attention.triton.launch` make.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hilbert_lib import checks
from hilbert_lib.attention.api import LARGEST_HEAD_DIM, check_dtype, explain_backend
from hilbert_lib.attention.backends import strided
from hilbert_lib.attention.backends.flex import FLEX_BLOCK
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.call import Call, working_dtype
from hilbert_lib.attention.triton import schedule
from hilbert_lib.limits.memory import GB, device_or_default
from hilbert_lib.pattern import DilatedPattern

_aten = torch.ops.aten

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the highest point of a call. `print` shows them as a table.

    Attributes:
        items: bytes by name: the tensors that the call is given, those it returns, and "workspace: ..." for what it
            holds beside these.
        inputs: of what is there before: q, k and v; in the backward also dout, out and lse.
        outputs: of what is there after.
        workspace: of what is held beside both at the highest point.
    """

    items: dict[str, int]
    inputs: int
    outputs: int
    workspace: int

    @property
    def peak(self) -> int:
        """Beyond the inputs."""
        return self.outputs + self.workspace

    @property
    def total(self) -> int:
        """With the inputs."""
        return self.inputs + self.peak

    @property
    def total_gb(self) -> float:
        """As `MemorySafetyChecker` takes it."""
        return self.total / GB

    def __str__(self) -> str:
        rows = {**self.items, "total": self.total}
        width = max(map(len, rows))
        return "\n".join(f"{name.ljust(width)}  {size / 2**20:12.1f} MiB" for name, size in rows.items())


def estimate_memory(
    pattern: DilatedPattern,
    *,
    length: int,
    heads: int,
    head_dim: int,
    batch: int = 1,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    direction: str = "forward",
    is_causal: bool = False,
    dropout_p: float = 0.0,
    has_key_padding: bool = False,
    has_kv_ordering: bool = False,
    queries: int | None = None,
    device: object = None,
) -> MemoryEstimate:
    """Bytes that `dilated_attention` will hold at its highest point, for dense inputs.

    Args:
        pattern: which keys a query sees.
        length: keys. heads, kv_heads: of q, and of k and v (by default the same). head_dim: size of one head.
        batch: sequences.
        dtype: of q, k and v.
        backend: as `dilated_attention` takes it.
        direction: "forward"; or "backward", with what the forward left. A step of training needs the larger of the two.
        is_causal, dropout_p: as `dilated_attention` takes them.
        has_key_padding: whether there is a key_padding_mask.
        has_kv_ordering: whether k and v are stored in a kv_ordering. What cannot read through one gathers both, and
            keeps the copies for the backward.
        queries: rows of q, the last positions (decoding); by default all.
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
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}; got {direction!r}")
    dtype = check_dtype(dtype)
    checks.boolean("has_key_padding", has_key_padding)
    checks.boolean("has_kv_ordering", has_kv_ordering)
    device = device_or_default(device)
    length, heads = checks.integer("length", length, least=1), checks.integer("heads", heads, least=1)
    kv_heads = heads if kv_heads is None else checks.integer("kv_heads", kv_heads, least=1)
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads {heads}, got {kv_heads}")
    rows = length if queries is None else checks.integer("queries", queries, least=1, most=length)
    start = None if queries is None else length - queries
    batch = checks.integer("batch", batch, least=1)
    head_dim = checks.integer("head_dim", head_dim, least=1, most=LARGEST_HEAD_DIM)
    q = torch.empty(batch, rows, heads, head_dim, dtype=dtype, device="meta")
    k = torch.empty(batch, length, kv_heads, head_dim, dtype=dtype, device="meta")
    padding = torch.empty(batch, length, dtype=torch.bool, device="meta") if has_key_padding else None
    asked = {"is_causal": is_causal, "dropout_p": dropout_p, "query_start": start}
    backend = _serving(pattern, q, k, padding, device, backend, direction == "backward", asked)
    seed = torch.empty(1, dtype=torch.int64, device="meta") if dropout_p else None
    is_gathered = has_kv_ordering and not BACKENDS[backend].reads_orderings
    slots = torch.empty(length, dtype=torch.int32, device="meta") if has_kv_ordering and not is_gathered else None
    call = Call(pattern, is_causal, head_dim**-0.5, dropout_p, seed, padding, start, slots)
    if device.type == "cuda" and not torch.cuda.is_available() and (reason := BACKENDS[backend].limits(q, call)):
        raise ValueError(f"backend={backend!r} cannot serve: {reason}")

    lse = torch.empty(batch, heads, rows, dtype=working_dtype(dtype), device="meta")
    inputs, outputs = {"q, k, v": q.nbytes + 2 * k.nbytes}, {"out": q.nbytes, "lse": lse.nbytes}
    if direction == "backward":
        inputs |= {"dout": q.nbytes, **outputs}
        outputs = {"dq, dk, dv": q.nbytes + 2 * k.nbytes}
    given = (q, k, k) if direction == "forward" else (q, q, k, k, q, lse)
    workspace = _workspace(given, call, backend, direction, device, sum(outputs.values()))
    if is_gathered and direction == "forward":
        workspace["k, v in sequence order"] = 2 * k.nbytes
    elif is_gathered:
        inputs["k, v in sequence order"] = 2 * k.nbytes
        # dk is put back when the rest of the workspace is free again, and dv when the first dk is.
        workspace["dk or dv put back"] = max(0, k.nbytes - sum(workspace.values()))
    return MemoryEstimate(
        {**inputs, **outputs, **{f"workspace: {name}": size for name, size in workspace.items()}},
        sum(inputs.values()),
        sum(outputs.values()),
        sum(workspace.values()),
    )


def _serving(
    pattern: DilatedPattern,
    q: Tensor,
    k: Tensor,
    padding: Tensor | None,
    device: torch.device,
    backend: str,
    gradient: bool,
    asked: dict,
) -> str:
    # The backend that would run, asked with stand-ins of one element. A GPU that is not here cannot be asked.
    if device.type == "cuda" and not torch.cuda.is_available():
        if backend not in BACKENDS:
            raise ValueError(
                f"backend must be named where there is no GPU to ask, {', '.join(BACKENDS)}; got {backend!r}"
            )
        # Sizes, dtype and pattern are checked all the same.
        here = [torch.empty(1, dtype=x.dtype).expand(x.shape) for x in (q, k)]
        explain_backend(*here, here[1], pattern, backend="reference", **asked)
        return backend
    needs = {"dtype": q.dtype, "device": device, "requires_grad": gradient and q.dtype.is_floating_point}
    stand_ins = [torch.empty(1, **needs).expand(x.shape) for x in (q, k)]
    mask = None if padding is None else torch.zeros(1, dtype=torch.bool, device=device).expand(padding.shape)
    with torch.set_grad_enabled(gradient):
        explanation = explain_backend(
            *stand_ins, stand_ins[1], pattern, key_padding_mask=mask, backend=backend, **asked
        )
    if not explanation.chosen:
        raise ValueError(f"backend={backend!r} {explanation.reasons[backend]}")
    return explanation.chosen


def _workspace(
    given: tuple[Tensor, ...], call: Call, backend: str, direction: str, device: torch.device, returned: int
) -> dict[str, int]:
    if backend == "triton":
        return _of_fused(given, call, direction, device)
    if backend == "flex":
        return {"temporary": _of_flex(given, direction) - returned}
    if backend in DENSE_WORKSPACE and device.type == "cuda":
        return {"temporary": _of_views(given, call, backend, direction, returned) - returned}
    return {"temporary": _traced(given, call, backend, direction, device) - returned}


class _Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive, and their most, while operators run on meta tensors.

    Attributes:
        peak: bytes, beyond those of the tensors that were given.
    """

    def __init__(self, given: list[Tensor], device: torch.device):
        super().__init__()
        self._on_cpu = device.type == "cpu"
        self._sizes = {x.untyped_storage()._cdata: 0 for x in given}
        self._now = self.peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is _aten.nonzero.default:  # of values that are not there: none is assumed
            return torch.empty(0, args[0].dim(), dtype=torch.int64)
        results = operator(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage())
        self.peak = max(self.peak, self._now + (_inside(operator, args) if self._on_cpu else 0))
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._now += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


def _inside(operator: torch._ops.OpOverload, args: tuple) -> int:
    # What an operator takes on a CPU beside its results, as torch's profiler shows it; what others take is never the
    # most.
    if operator is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        return torch.get_num_threads() * 2**20  # blocks of scores
    if operator is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        copy = 0 if args[0].transpose(1, 2).is_contiguous() else args[0].nbytes  # of dout
        return copy + torch.get_num_threads() * 2 * 2**20
    if torch.Tag.pointwise in operator.tags:  # the narrower of two dtypes is copied into the wider
        terms = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        widest = max((x.element_size() for x in terms), default=0)
        return sum(x.numel() * widest for x in terms if x.element_size() < widest)
    return 0


def _traced(given: tuple[Tensor, ...], call: Call, backend: str, direction: str, device: torch.device) -> int:
    run = BACKENDS[backend].functions(device)[DIRECTIONS.index(direction)]
    others = [x for x in (call.seed, call.key_padding_mask) if x is not None]
    with torch.no_grad(), _Alive([*given, *others], device) as alive:
        results = run(*given, call)
        if direction == "forward":
            results[1].contiguous()
    return alive.peak


# What the backward of one dense kernel takes beside its results, in bytes: for each element of q where the rate is 1,
# for each element where it is above 1 (some copy what is strided), and for each row of q; by backend and size of an
# element. The forwards take nothing. tests/test_safety_estimate.py holds this against what a GPU allocates; packages
# are taken to be like the kernels of torch that they resemble.
DENSE_WORKSPACE = {
    "cudnn": {2: (4, 4, 4)},
    "flash": {2: (4, 8, 4)},
    "sdpa": {2: (4, 8, 8), 4: (4, 12, 12)},
    "flash_attn_2": {2: (4, 8, 4)},
    "flash_attn_3": {2: (4, 4, 8)},
    "flash_attn_4": {2: (4, 4, 8)},
    "xformers": {2: (4, 8, 8), 4: (4, 12, 12)},
}


def _of_views(given: tuple[Tensor, ...], call: Call, backend: str, direction: str, returned: int) -> int:
    # Highest point of `strided` where it keeps the results of all kernels and merges them at once.
    if direction == "forward":
        (q, k, v), lse_size, held = given, 4, 0
        query_side, workspace = [q], (0, 0, 0)
    else:
        dout, q, k, v, out, lse = given
        lse_size, held = 0, lse.nbytes  # of a copy in another layout
        query_side = [q, dout, out, lse.transpose(1, 2).contiguous()[..., None]]
        workspace = DENSE_WORKSPACE[backend][q.element_size()]
    peak, (dense, thinned, per_row) = 0, workspace
    for step in strided.steps(call, query_side, [k, v]):
        per_element = dense if step.block.rate == 1 else thinned
        q, k = step.queries[0], step.keys[0]
        rows = q.numel() // q.shape[-1]
        held += q.nbytes + lse_size * rows + (2 * k.nbytes if direction == "backward" else 0)
        peak = max(peak, held + per_element * q.numel() + per_row * rows)
    return max(peak, held + returned)


# FlexAttention's lists of blocks, in bytes for each head and pair of blocks: while they are sorted, and kept.
FLEX_SORTED, FLEX_KEPT = 59, 16
# What the first call of a shape takes on an H200 is 0 to 92 MiB; this is the middle. 60 are as large as L2: torch's
# compiler clears it between runs of a small kernel, of which it keeps the faster version, unless its cache on disk
# knows that. 32 are cuBLAS's, which multiplies for the lists, unless the process has multiplied before.
FLEX_FIRST = 46 * 2**20


def _of_flex(given: tuple[Tensor, ...], direction: str) -> int:
    # Highest point of `flex` on CUDA: of a forward that is the first of its pattern and length, and of a backward
    # after it, which runs the forward once more.
    q, k = (given[0], given[1]) if direction == "forward" else (given[1], given[2])
    batch, rows, heads, _ = q.shape
    lse = 4 * batch * rows * heads
    stored = q.nbytes + 2 * k.nbytes  # in residue order, and as much again for their gradients
    if direction == "backward":
        return 2 * stored + 3 * q.nbytes + 4 * lse  # out and dout in residue order, out in the sequence's
    pairs = heads * (-(-rows // FLEX_BLOCK)) ** 2
    return max(FLEX_SORTED * pairs, FLEX_KEPT * pairs + stored + q.nbytes + 2 * lse + FLEX_FIRST)


def _of_fused(given: tuple[Tensor, ...], call: Call, direction: str, device: torch.device) -> dict[str, int]:
    # As `triton/launch.py` and `triton.decode` make them; interpreted kernels are taken for compiled ones.
    from hilbert_lib.attention.triton import arguments, decode  # triton is imported only where a kernel is used

    q, k = (given[0], given[1]) if direction == "forward" else (given[1], given[2])
    batch, rows, heads, head_dim = q.shape
    lse, in_float = 4 * batch * rows * heads, 4 * q.numel()

    def passes(kernel: str) -> tuple[schedule.Pass, ...]:
        configs = arguments.CONFIGS[kernel].items()
        config = next(c for (size, largest), c in configs if size == q.element_size() and head_dim <= largest)
        return schedule.passes(call.pattern, k.shape[1], config.block_m if kernel != "dkv" else config.block_n)

    if direction == "forward":
        if decode.serves(q, k, call):
            return {"parts of the keys, float32": _parts(q, k, call) * (in_float + lse)}
        if len(passes("forward")) == 1 or _on_hopper(q, k, call, device):
            return {}
        return {"partial out, float32": in_float, "partial lse": lse}
    workspace = {"delta": lse}
    hopper = call.query_start is None and _on_hopper(q, k, call, device)
    if hopper and not torch.are_deterministic_algorithms_enabled():
        return workspace | {"sums of dq, float32": in_float}
    if len(passes("dq")) > 1:
        workspace["partial dq, float32"] = in_float
    if len(passes("dkv")) > 1 and not hopper:
        workspace["partial dk and dv, float32"] = 2 * 4 * k.numel()
    return workspace


def _parts(q: Tensor, k: Tensor, call: Call) -> int:
    from hilbert_lib.attention.triton import decode
    from hilbert_lib.attention.triton.geometry import block_d

    batch, rows, heads, head_dim = q.shape
    kv_heads, first = k.shape[2], call.first_query
    keys = min(k.shape[1], first + rows) if call.is_causal else k.shape[1]
    block = min(128, decode.TILE_BYTES // (block_d(head_dim) * k.element_size()))
    least = decode.KEYS_PER_ROW * rows * heads // kv_heads
    return decode.split(call.pattern, keys, first, rows, batch, kv_heads, least, block)[2]


def _on_hopper(q: Tensor, k: Tensor, call: Call, device: torch.device) -> bool:
    # Whether the warp-specialised kernels serve, as `launch` decides it for dense tensors.
    from hilbert_lib.attention.triton.hopper import launch

    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability(device) == (9, 0)
    return device.type == "cuda" and hopper and launch.serves(q, k.shape[1], call)
