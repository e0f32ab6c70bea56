"""Joint attention: queries beside a grid, which see every cell and every extra key."""

from typing import NamedTuple

from torch import Tensor

from hilbert_lib.attention import operators
from hilbert_lib.attention.autograd import needs_gradient
from hilbert_lib.attention.backends.all_pairs import extra_keys_server
from hilbert_lib.attention.backends.registry import BACKENDS, backends_for
from hilbert_lib.attention.choice import choose
from hilbert_lib.attention.failures import first_that_compiles
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.starts import padding_with_starts
from hilbert_lib.patterns.all_pairs import AllPairs

# Of a backend that serves grids alone: the one for sequences that serves the queries beside them.
_ALONG_SEQUENCES = {"lists": "triton"}


def beside(name: str) -> str:
    """The backend that computes extra queries where the one of this name computes the cells."""
    return _ALONG_SEQUENCES.get(name, name)


class Joint(NamedTuple):
    """The results of extra queries, and the call that they are of."""

    out: Tensor  # (batch, extra, heads, head_dim)
    lse: Tensor  # (batch, heads, extra)
    backend: str
    inputs: Tensors
    request: Request


def extra_attention(
    extra_q: Tensor, inputs: Tensors, request: Request, backend: str, return_lse: bool, level: int
) -> Joint:
    """Attention of extra queries over all cells and extra keys.

    extra_q: as autocast casts it. inputs, request: those of the cells. backend, return_lse: as the user gave them.
    level: as in `first_that_compiles`.
    """
    inputs, request = joint_call(extra_q, inputs, request)
    gradient = needs_gradient(*inputs)

    def chosen() -> str:
        how = {"gradient": gradient, "lse_gradient": gradient and return_lse}
        name = choose(inputs.q, inputs.k, request, beside(backend), **how)
        if not name:
            raise ValueError(f"backend={backend!r} {joint_refusal(inputs, request, backend)}; see explain_backend")
        return name

    def run(name: str) -> Joint:
        return Joint(*operators.attention(inputs, request, name), name, inputs, request)

    return first_that_compiles(chosen, run, backend, level)


def joint_call(extra_q: Tensor, inputs: Tensors, request: Request) -> tuple[Tensors, Request]:
    """The inputs and the request of extra queries, from those of the cells, which may be stored in any order."""
    padding, extra_padding = padding_with_starts(request, inputs.k), request.extra_padding_mask
    inputs = inputs._replace(q=extra_q, bias=None)
    if not inputs.k.shape[1]:  # points without keys: the extra keys are all there are
        inputs = inputs._replace(k=inputs.extra_k, v=inputs.extra_v, extra_k=inputs.k, extra_v=inputs.v)
        padding, extra_padding = extra_padding, None
    masks = {"key_padding_mask": padding, "extra_padding_mask": extra_padding}
    return inputs, Request(AllPairs(), scale=request.scale, **masks)


def joint_refusal(inputs: Tensors, request: Request, name: str) -> str:
    """The reason why a backend does not serve extra queries, or ""."""
    backend = backends_for(AllPairs).get(beside(name))
    refusal = backend.refusal(inputs.q, request, inputs.k) if backend else "there is none of this name"
    return refusal and f"cannot serve extra_q: {refusal}"


def servers(inputs: Tensors, request: Request, name: str) -> str:
    """The backends that compute extra queries where this one is named, in words."""
    name = beside(name)
    extra_k = inputs.extra_k
    has_parts = backends_for(AllPairs)[name].serves is AllPairs  # "reference" and "eager" serve any pattern
    if not has_parts or extra_k is None or not extra_k.shape[1]:
        return f"extra queries by {name!r}"
    server = extra_keys_server(BACKENDS[name], BACKENDS["triton"], inputs, request)
    if server is BACKENDS[name]:
        return f"extra queries by {name!r}"
    others = "matrix products" if server is None else repr(server.name)
    return f"extra queries over the cells by {name!r}, over the extra keys by {others}"
