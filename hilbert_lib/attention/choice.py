"""Which backend serves a call: by rule, with its reasons."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hilbert_lib.attention.backends import presence
from hilbert_lib.attention.backends.backend import Backend, is_exporting
from hilbert_lib.attention.backends.registry import WITHOUT_BUILD, backends_for
from hilbert_lib.attention.documents import LOOPED
from hilbert_lib.attention.failures import compiling, failure
from hilbert_lib.attention.measured_rules import MEASURED, remembered_rules
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.rules import CPU_RULE, FULL_RULE, HALF_RULES, Rule, grid_rule
from hilbert_lib.internals import compile_time_constant
from hilbert_lib.machine import get_gpu_info

# "auto" has k and v put in sequence order from so many rows of q on, and so many keys of a row on average, over all
# branches. On an H100 two copies cost less than a table from there on (reports/HISTORY.md, "An ordering's cost").
UNDONE_FROM, UNDONE_KEYS = 16_384, 1_024


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and why the others were passed over. `print` shows it as a table.

    Attributes:
        chosen: the backend's name; "" where none can serve.
        reasons: for every backend by name, "chosen" and its note, or why it was passed over; where it can serve, with
            its caveat.
        rule: where the order comes from in which "auto" tries them.
    """

    chosen: str
    reasons: dict[str, str]
    rule: str

    @property
    def is_measured(self) -> bool:
        """Whether the rule was measured on this machine, by `select_attention_backend` or `hilbert bench backends`."""
        return self.rule.startswith(MEASURED)

    def __str__(self) -> str:
        rows = {**self.reasons, "auto goes by": self.rule}
        width = max(map(len, rows))
        return "\n".join(f"{name.ljust(width)}  {reason}" for name, reason in rows.items())


def rule_for(q: Tensor, call: Request, *, gradient: bool) -> Rule:
    """The rule that "auto" goes by: one measured on this machine where there is one, otherwise the library's."""
    if not is_exporting():
        for shape, rule in remembered_rules(q.device, q.dtype):
            if shape.fits(q, call, gradient):
                return _of_documents_first(rule, call)
    if call.pattern.length is not None:
        order = "" if call.ordering is None else call.ordering.kind
        return _that_serves(grid_rule(q.device.type, q.element_size(), order), call)
    return _of_documents_first(_that_serves(_known_rule(q.device, q.dtype), call), call)


def _that_serves(rule: Rule, call: Request) -> Rule:
    # Of the names in a rule those that serve this kind of pattern at all.
    backends = backends_for(call.pattern)
    return Rule(tuple(name for name in rule.order if name in backends), rule.record)


def _of_documents_first(rule: Rule, call: Request) -> Rule:
    # Of packed documents, those that take all in one call stand before loops, for which the host waits.
    if call.cu_seqlens is None:
        return rule
    backends = backends_for(call.pattern)
    order = sorted(rule.order, key=lambda name: not backends[name].reads_documents)
    return Rule(tuple(order), rule.record)  # torch.compile cannot trace `_replace`


@compile_time_constant  # torch.compile cannot trace questions to the machine
def _known_rule(device: torch.device, dtype: torch.dtype) -> Rule:
    if device.type != "cuda":
        return CPU_RULE
    return HALF_RULES[get_gpu_info(device).architecture] if dtype.itemsize == 2 else FULL_RULE


def choose(q: Tensor, k: Tensor, call: Request, name: str, *, gradient: bool) -> str:
    """The backend that serves a validated call, or "" where none can. name: a backend's, or "auto" for the first."""
    asked = (name,)
    if name == "auto":
        asked = compiling(call.pattern.function, rule_for(q, call, gradient=gradient).order, q)
    return first_that_serves(q, k, call, asked)


def serving(q: Tensor, k: Tensor, call: Request, name: str, *, gradient: bool) -> str:
    """`choose`; ValueError, with the reasons, where no backend can serve."""
    chosen = choose(q, k, call, name, gradient=gradient)
    if not chosen:
        reasons = explain(q, k, call, name, gradient=gradient).reasons
        told = reasons.get(name) or ", ".join(f"{each} {reason}" for each, reason in reasons.items())
        raise ValueError(f"backend={name!r} {told}; see explain_backend")
    return chosen


def is_undone(asked: str, chosen: str, device: torch.device, call: Request, rows: int) -> bool:
    """Whether k and v are put in sequence order before a call, rather than found through a table in the kernels.

    asked: the backend asked for; chosen: the one that serves. A copy costs each row once, a table each read of a row.
    """
    if not backends_for(call.pattern)[chosen].reads_orderings:
        return True
    keys = sum(min(w, rows) / r**2 for w, r in call.pattern.branches)
    is_short = rows < UNDONE_FROM or keys < UNDONE_KEYS
    return asked == "auto" and device.type == "cuda" and call.query_start is None and not is_short


def first_that_serves(q: Tensor, k: Tensor, call: Request, names: Sequence[str]) -> str:
    """The first of some backends that serves a call, or ""."""
    backends = backends_for(call.pattern)
    return next((name for name in names if not backends[name].refusal(q, call, k)), "")


def explain(
    q: Tensor, k: Tensor, call: Request, name: str, *, gradient: bool, has_ordering: bool = False
) -> Explanation:
    """What `choose` takes, and why not the others.

    has_ordering: whether k and v of a sequence are stored in another order.
    """
    chosen, rule = choose(q, k, call, name, gradient=gradient), rule_for(q, call, gradient=gradient)
    reasons = {}
    for candidate, backend in backends_for(call.pattern).items():
        reasons[candidate] = _reason(backend, q, k, call, name, chosen, rule)
    if call.pattern.length is None:
        reasons |= WITHOUT_BUILD
    if has_ordering and chosen and is_undone(name, chosen, q.device, call, q.shape[1]):
        reasons[chosen] += "; k and v are copied in sequence order first"
    return Explanation(chosen, reasons, rule.record)


def _reason(backend: Backend, q: Tensor, k: Tensor, call: Request, asked: str, chosen: str, rule: Rule) -> str:
    # Say why a backend was chosen, or why it was not.
    refusal = backend.refusal(q, call, k)
    looped = LOOPED if call.cu_seqlens is not None and not backend.reads_documents else ""
    failed = failure(call.pattern.function, backend.name, q)
    more = "".join(f"; {caveat}" for caveat in (failed, backend.caveat, looped) if caveat)
    if backend.package and not refusal:
        more += f" ({presence.state(backend.package)})"
    if backend.name == chosen:
        return f"chosen: {backend.note}{more}"
    if refusal:
        return refusal if refusal.startswith(presence.ABSENT) else f"cannot serve: {refusal}"
    if asked != "auto":
        return f"not asked for: {asked!r} was"
    if failed:
        return f"passed over: {failed}"
    passed_over = f"after {chosen!r}" if backend.name in rule.order else "when asked for by name"
    return f"can serve, {passed_over}{more}"
