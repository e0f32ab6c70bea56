"""A union of patterns part by part: the forward of each, merged by lse; the backward of each with the merged results.

      pattern 1 -> out, lse \
      pattern 2 -> out, lse  > merge -> out, lse -> backward of each pattern -> sums of gradients
      extra keys are given to pattern 1 alone: every query sees them once
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hilbert_lib.attention.backends.backend import Backend
from hilbert_lib.attention.dropout import Branch, is_named, name_table, named, of_branches
from hilbert_lib.attention.merge import add_tensors, merge_results
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.attention.starts import STARTS
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.union import Union

BackendsFor = Callable[[Pattern], dict[str, Backend]]


def part_by_part(name: str, backends_for: BackendsFor, caveat: str, lse_columns: int) -> Backend:
    """The backend of that name for unions: it serves where it serves every part.

    backends_for: the backends that serve a pattern, by name. caveat: what they lack under this name. lse_columns: the
        most that one of them adds.
    """

    def refusal(q: Tensor, request: Request) -> str:
        for pattern in request.pattern.patterns:
            backend = backends_for(pattern).get(name)
            if backend is None:
                return f"serves no {pattern.noun}, which is a part of the union"
            if refused := backend.refusal_whatever_the_keys(q, replace(request, pattern=pattern)):
                return refused
        return ""

    def of_keys(q: Tensor, k: Tensor, request: Request) -> str:
        for pattern in request.pattern.patterns:
            if refused := backends_for(pattern)[name].of_keys(q, k, replace(request, pattern=pattern)):
                return refused
        return ""

    return Backend(
        serves=Union,
        name=name,
        note=f"the parts of the union one by one, merged by lse; each by {name!r}",
        colour="#009E73",
        functions=lambda device: (
            partial(_forward, name, backends_for),
            partial(_backward, name, backends_for),
        ),
        limits=refusal,
        of_keys=of_keys,
        caveat=caveat,
        workspace=partial(_workspace, name, backends_for),
        options=("part", *STARTS),
        lse_columns=lse_columns,
    )


def given_to_patterns(inputs: Tensors, request: Request) -> Iterator[tuple[Tensors, Request]]:
    """The inputs and the request of each pattern of a union. Extra keys go to the first; the seed is the union's."""
    for number, pattern in enumerate(request.pattern.patterns):
        pattern_request = replace(request, pattern=pattern, is_part=True)
        if "extra_k" in pattern.options and (number or inputs.extra_k is None):
            no_keys = inputs.k[:, :0]
            yield Tensors(*inputs[:3], no_keys, no_keys), replace(pattern_request, extra_padding_mask=None)
        else:
            yield inputs, pattern_request


def merge_patterns(results: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output, in a dtype, and lse over the keys of all patterns, from those over each. Rounded once."""
    merged = None
    for result, is_last in _until_last(results):
        own_dtype = dtype if is_last else WORKING_DTYPE[dtype]
        merged = result if merged is None else merge_results(*merged, *result, own_dtype)
    out, lse = merged
    return out.to(dtype).contiguous(), lse


def add_patterns(gradients: Iterable[Tensors], inputs: Tensors, in_float: tuple[int, ...] = ()) -> Tensors:
    """Sums of the gradients of all patterns: in float32 (float64 for float64), and rounded once but for some tensors.

    in_float: numbers of the tensors that are not rounded.
    """
    sums: list[Tensor | None] = [None] * len(inputs)
    for grads, is_last in _until_last(gradients):
        both = {}  # gradients that an earlier pattern has, too, by number: the dtypes of their sums
        for n, grad in enumerate(grads):
            # Only the first pattern has extra keys, and none where not all patterns take them.
            if grad is None or inputs[n] is None or grad.shape != inputs[n].shape:
                continue
            if sums[n] is None:
                sums[n] = grad
            else:
                is_rounded = is_last and n not in in_float
                both[n] = inputs[n].dtype if is_rounded else WORKING_DTYPE[inputs[n].dtype]
        if both:
            added = add_tensors([sums[n] for n in both], [grads[n] for n in both], [*both.values()])
            for n, total in zip(both, added, strict=True):
                sums[n] = total
    dtypes = (x if x is None else WORKING_DTYPE[x.dtype] if n in in_float else x.dtype for n, x in enumerate(inputs))
    return Tensors(*(x if x is None else x.to(dtype) for x, dtype in zip(sums, dtypes, strict=True)))


def _until_last(items: Iterable) -> Iterator[tuple]:
    # Each item, and whether it is the last.
    items = iter(items)
    item = next(items)
    for following in items:
        yield item, False
        item = following
    yield item, True


def _parts(inputs: Tensors, request: Request) -> Iterator[tuple[Tensors, Request]]:
    # `given_to_patterns`, each with a seed of its own.
    for number, (part_inputs, part) in enumerate(given_to_patterns(inputs, request)):
        if request.seed is not None:
            part = replace(part, seed=_seed(request.seed, request.pattern, number, inputs.q, inputs.k.shape[2]))
        yield part_inputs, part


def _seed(seed: Tensor, union: Union, number: int, q: Tensor, kv_heads: int) -> Tensor:
    # A seed with which a pattern's own parts drop what they drop as parts of the union.
    count, parts = len(union.patterns), union.patterns[number].part_count(kv_heads)
    branches = tuple(part * count + number for part in range(parts))
    if is_named(seed):  # of a document
        return of_branches(seed, union.part_count(kv_heads), branches)
    names = torch.tensor([0, 0, 1, 0, 0, 0, 0], device=q.device).repeat(q.shape[0], q.shape[2], 1)
    names[..., 0] = torch.arange(q.shape[0], device=q.device)[:, None]
    names[..., 1] = torch.arange(q.shape[2], device=q.device)
    of_union = [Branch(branch, *union.branch_of(branch)) for branch in branches]
    return named(seed, name_table(names, of_union))


def _forward(name: str, backends_for: BackendsFor, inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    def results() -> Iterator[tuple[Tensor, Tensor]]:
        for part_inputs, part in _parts(inputs, request):
            run, _ = backends_for(part.pattern)[name].functions(inputs.q.device)
            yield run(part_inputs, part)

    return merge_patterns(results(), inputs.q.dtype)


def _backward(
    name: str, backends_for: BackendsFor, dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request,
    dlse: Tensor | None = None,
) -> Tensors:  # fmt: skip
    def gradients() -> Iterator[Tensors]:
        for part_inputs, part in _parts(inputs, request):
            _, run = backends_for(part.pattern)[name].functions(dout.device)
            yield run(dout, part_inputs, out, lse, part, dlse=dlse)

    in_float = (1, 2) if request.part and request.part.in_float else ()
    return add_patterns(gradients(), inputs, in_float)


def _workspace(
    name: str, backends_for: BackendsFor, arguments: tuple, request: Request, direction: str, device: torch.device,
    returned: int,
) -> dict[str, int] | None:  # fmt: skip
    # The workspace of the largest part, beside the lists of all parts, which are kept, and results or sums in float32.
    largest, lists = 0, 0
    for pattern in request.pattern.patterns:
        workspace = backends_for(pattern)[name].workspace
        part_bytes = workspace and workspace(arguments, replace(request, pattern=pattern), direction, device, returned)
        if part_bytes is None:
            return None
        part_lists = part_bytes.get("lists", 0)
        lists += part_lists
        largest = max(largest, sum(part_bytes.values()) - part_lists)
    tensors = arguments[0] if direction == "forward" else arguments[1]
    wide = WORKING_DTYPE[tensors.q.dtype].itemsize
    count = tensors.q.numel() if direction == "forward" else sum(x.numel() for x in tensors if x is not None)
    merged = {"of a part": largest, "merged, float32": 3 * wide * count}
    return {"lists": lists} | merged if lists else merged
