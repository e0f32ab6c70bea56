"""Cases of dilated attention, and the check of one of them against the oracle: output, lse and gradients."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate

import oracle
import pytest
import torch
from allpairspy import AllPairs

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

# name: segment lengths, rates
BRANCHES = {
    "one": ((16,), (1,)),
    "aligned": ((8, 16, 32), (1, 2, 4)),
    "uneven": ((6, 12, 24), (1, 4, 5)),
    "sparse": ((8, 16), (2, 4)),
    "longer": ((16, 1000), (4, 3)),
}
ORDERINGS = {
    "none": lambda n: None,
    "linear": Ordering.linear,
    "residue": lambda n: Ordering.residue(n, 3),
    "random": lambda n: Ordering.random(n, seed=1),
    **{kind: lambda n, kind=kind: Ordering.from_curve(kind, n) for kind in ("hilbert", "morton", "snake", "tile")},
    "chunked": lambda n: Ordering.from_curve("hilbert", n, chunk=8),
}
# Of what the warp-specialised kernels run on.
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
# out, lse, gradient; float64 inputs are exact, and halves are rounded once on the way in and once on the way out. Their
# lse has an error of its own on the CPU: `lse_error`.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12, 1e-11),
    torch.float32: (2e-4, 2e-4, 2e-4),
    torch.float16: (4e-3, 2e-4, 2e-2),
    torch.bfloat16: (3e-2, 2e-4, 1.5e-1),
}
SHAPES = {  # batch, length, heads, kv_heads, head_dim
    "plain": (2, 32, 4, 4, 8),
    "ragged": (2, 37, 4, 4, 8),
    "grouped": (1, 45, 6, 3, 5),
    "one_kv_head": (2, 32, 4, 1, 16),
    "shorter": (2, 5, 3, 3, 3),
    "wide": (2, 70, 4, 2, 64),
    "small": (1, 21, 2, 2, 5),
    "small_grouped": (2, 18, 2, 1, 3),
}
LAYOUTS = ("bshd", "bhsd", "sliced")


def in_pairs(axes: tuple, at: int, kv_heads: Callable = lambda shape: SHAPES[shape][3]) -> pytest.MarkDecorator:
    """Cases in which every two values of the axes meet, without those that have fewer KV heads than head groups.

    axes: branches, offsets, mixing, and others; axis `at` says how many KV heads there are.
    """

    def is_possible(case: list) -> bool:
        return len(case) <= at or case[2] == "softmax" or kv_heads(case[at]) >= len(BRANCHES[case[0]][0])

    cases = list(AllPairs(list(map(list, axes)), filter_func=is_possible))
    return pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))


def stored(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides."""
    if layout == "bhsd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wide = x.new_full((x.shape[0], x.shape[1] + 3, x.shape[2], x.shape[3] + 8), torch.nan)
        wide[:, 1:-2, :, : x.shape[3]] = x
        return wide[:, 1:-2, :, : x.shape[3]]
    if layout == "odd stride":  # rows that begin at no multiple of 16 bytes
        return torch.nn.functional.pad(x, (0, 1))[..., : x.shape[-1]]
    if layout == "odd start":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


@cache
def expected(
    branches: str, offsets: str, mixing: str, dtype: torch.dtype, shape: str, is_causal: bool, padding: str = "none"
):
    """Inputs of the dtype, and what the oracle makes of them in float64."""
    batch, length, heads, kv_heads, head_dim = SHAPES[shape]
    tensors = drawn(length, heads, kv_heads, head_dim, batch=batch, dtype=dtype)
    pattern = DilatedPattern(*BRANCHES[branches], offsets=offsets, mixing=mixing, padding=padding)
    attend = partial(oracle.attention, pattern=pattern, is_causal=is_causal)
    out, lse, *grads = differentiated(attend, [x.double() for x in tensors])
    return pattern, tensors, out, lse, grads


def drawn(
    queries: int, heads: int, kv_heads: int, head_dim: int, *, batch=1, keys=None, dtype=torch.float32, device="cpu"
) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output; as many keys as queries unless told."""
    generator = torch.Generator(device).manual_seed(0)
    keys = queries if keys is None else keys
    rows = (queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)
    drawing = {"generator": generator, "device": device, "dtype": torch.promote_types(dtype, torch.float32)}
    return [torch.randn(batch, *each, head_dim, **drawing).to(dtype) for each in rows]


def differentiated(attend: Callable, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """out and lse of an attention, and the gradients of what it takes; tensors: this and the gradient of out."""
    *inputs, dout = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = attend(*leaves)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def attended(tensors: Sequence[torch.Tensor], pattern, backend: str, **options) -> tuple[torch.Tensor, ...]:
    """out, lse and the gradients of q, k and v; tensors: these and the gradient of out."""
    attend = partial(dilated_attention, pattern=pattern, backend=backend, return_lse=True, **options)
    return differentiated(attend, tensors)


def exactly(tensors: Sequence[torch.Tensor], pattern, **options) -> tuple[torch.Tensor, ...]:
    """The same of the reference in float64."""
    return attended([x.double() for x in tensors], pattern, "reference", **options)


@contextmanager
def determinism(wanted: bool = True, **options):
    """What torch is asked for inside."""
    torch.use_deterministic_algorithms(wanted, **options)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def ends_of(lengths: Sequence[int], device: object = "cpu") -> torch.Tensor:
    """`cu_seqlens` of documents."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def documents_alone(tensors: Sequence[torch.Tensor], lengths: Sequence[int], pattern, **options) -> tuple:
    """out, lse and gradients of packed documents, each by the oracle alone; tensors as `attended` takes them."""

    def attend(*leaves: torch.Tensor) -> list[torch.Tensor]:
        documents = [each for each in zip(*(x.split(lengths, 1) for x in leaves), strict=True) if each[0].numel()]
        found = zip(*(oracle.attention(*each, pattern, **options) for each in documents), strict=True)
        return [torch.cat(parts, dim) for parts, dim in zip(found, (1, 2), strict=True)]

    return differentiated(attend, [x.double() for x in tensors])


def norms(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> list[float]:
    """How far each tensor is off, relative to what is expected."""
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


def assert_close(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], tolerances) -> None:
    """Every tensor in float64 on the CPU, within its tolerance, or one of all."""
    pairs = list(zip(found, expected, strict=True))
    tolerances = [tolerances] * len(pairs) if isinstance(tolerances, float) else tolerances
    for (mine, theirs), tolerance in zip(pairs, tolerances, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs.cpu().double(), atol=tolerance, rtol=0)


def lse_error(backend: str, dtype: torch.dtype, device: str = "cpu") -> float:
    """How far lse may be off, as the docstring of `dilated_attention` says."""
    if dtype == torch.float64:
        return 4e-15
    # torch's flash kernel for the CPU has an exponential for half precision that is off by up to 1.1e-4 of itself, on
    # processors with AVX2 or AVX-512. Which keys meet it depends on how many a vector holds.
    is_fast = backend in ("sdpa", "auto") and device == "cpu" and dtype.itemsize == 2
    return 1.2e-4 if is_fast else 2e-6


def check(
    branches, offsets, mixing, ordering, backend, dtype, shape, layout, is_causal, device="cpu", padding="none"
) -> None:
    pattern, (q, k, v, dout), out, lse, grads = expected(branches, offsets, mixing, dtype, shape, is_causal, padding)
    order = ORDERINGS[ordering](k.shape[1])
    kept = [q, k, v] if order is None else [q, order.apply(k, dim=1), order.apply(v, dim=1)]
    tensors = [stored(x.to(device), layout) for x in (*kept, dout)]
    results = list(attended(tensors, pattern, backend, is_causal=is_causal, kv_ordering=order))
    if order is not None:
        results[3:] = [order.undo(x, dim=1) for x in results[3:]]
    assert results[0].dtype == dtype
    tolerances = TOLERANCE[dtype]
    assert_close(results, (out, lse, *grads), (*tolerances, *[tolerances[2]] * 2))


def refused(wrong: dict[type, list]) -> pytest.MarkDecorator:
    """Cases of (error, what raises it, words of the message), from lists of these by the error."""
    cases = [(error, *case) for error, listed in wrong.items() for case in listed]
    return pytest.mark.parametrize(("error", "call", "words"), cases, ids=range(len(cases)))


def refusals(wrong: dict[type, list]) -> Callable:
    """A test that each call of such a table raises its error with its words."""

    @refused(wrong)
    def test(error, call, words):
        with pytest.raises(error, match=words):
            call()

    return test


def only(some: set[tuple], every: Iterable[tuple]) -> list:
    """Cases of which every run has some, and the full one all."""
    return [pytest.param(*case, marks=[] if case in some else pytest.mark.full) for case in every]
