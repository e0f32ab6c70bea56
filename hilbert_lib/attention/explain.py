"""The backend that serves a call, and why the others do not."""

import torch

from hilbert_lib.attention import api
from hilbert_lib.attention.autograd import needs_gradient
from hilbert_lib.attention.choice import Explanation, choose, explain
from hilbert_lib.attention.joint import beside, joint_call, joint_refusal, servers
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.validation import as_cast, as_pattern, validated
from hilbert_lib.checks import known_by, unscripted
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.patterns.pattern import Pattern


@unscripted
def explain_backend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | tuple[Neighbourhood, ...],
    *,
    backend: str = "auto",
    **options,
) -> Explanation:
    """The backend that `attend` would run for the same arguments, and why it passes over the others.

    With extra_q, `chosen` is the backend of the cells. Its reason also names what computes the extra queries.

    >>> from hilbert_lib import DilatedPattern, Neighbourhood
    >>> q = k = v = torch.ones(1, 8, 2, 4)
    >>> explain_backend(q, k, v, DilatedPattern((4,), (1,))).chosen
    'sdpa'
    >>> explain_backend(q, k, v, Neighbourhood((2, 4), 2)).chosen
    'eager'
    """
    known_by(api.attend, options, called="explain_backend")
    inputs, request = validated(q, k, v, as_pattern(pattern), backend=backend, **options)
    gradient = needs_gradient(*inputs)
    lse_gradient = gradient and options.get("return_lse", False)
    has_ordering = options.get("kv_ordering") is not None
    how = {"gradient": gradient, "lse_gradient": lse_gradient}
    found = explain(inputs.q, inputs.k, request, backend, has_ordering=has_ordering, **how)
    if options.get("extra_q") is None:
        return found
    return _with_extra_queries(found, backend, how, *joint_call(as_cast(options["extra_q"]), inputs, request))


def _with_extra_queries(
    found: Explanation, backend: str, how: dict[str, bool], inputs: Tensors, request: Request
) -> Explanation:
    # inputs, request: of the extra queries. how: which gradients there are.
    chosen = choose(inputs.q, inputs.k, request, beside(backend), **how)
    reasons = dict(found.reasons)
    for name, reason in found.reasons.items():
        if name == backend == found.chosen or reason.startswith("can serve"):
            reasons[name] = joint_refusal(inputs, request, name) or reason
    if not (found.chosen and chosen):
        return Explanation("", reasons, found.rule)
    reasons[found.chosen] += f"; {servers(inputs, request, chosen)}"
    return Explanation(found.chosen, reasons, found.rule, found.off_fast_path)
