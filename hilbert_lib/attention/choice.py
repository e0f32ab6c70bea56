"""Which backend serves a call: by rule, with its reasons."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hilbert_lib.attention.backends import presence
from hilbert_lib.attention.backends.registry import BACKENDS, WITHOUT_BUILD
from hilbert_lib.attention.call import Call
from hilbert_lib.attention.measured_rules import MEASURED, device_name, pattern_key, remembered_rules
from hilbert_lib.attention.rules import CPU_RULES, FULL_RULES, HALF_RULES, Rule
from hilbert_lib.machine import get_gpu_info


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


def rule_for(q: Tensor, call: Call, *, gradient: bool) -> Rule:
    """The rule that "auto" goes by: one measured on this machine where there is one, otherwise the library's.

    Args:
        q: queries, (batch, queries, heads, head_dim).
        call: the rest of the request.
        gradient: whether the backward will run.
    """
    batch, length, heads, head_dim = q.shape
    pattern = pattern_key(call.pattern)
    for rule in _rules(q.device, q.dtype):
        if rule.asks_for_length and _is_exporting():
            continue  # an exported program serves all lengths, so that none may decide
        if rule.fits(head_dim, length, batch * heads, call.is_causal, gradient, pattern):
            return rule
    raise AssertionError("the last rule of every table fits all calls")


def _is_exporting() -> bool:
    # torch 2.11 says "exporting" to every program that torch.compile traces.
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def choose(q: Tensor, call: Call, name: str, *, gradient: bool) -> str:
    """The name of the backend that serves a validated call, or "" where none can; arguments as for `explain`."""
    asked = rule_for(q, call, gradient=gradient).order if name == "auto" else (name,)
    return next((candidate for candidate in asked if not BACKENDS[candidate].refusal(q, call)), "")


def explain(q: Tensor, call: Call, name: str, *, gradient: bool) -> Explanation:
    """The backend for a validated call, and why not the others.

    Args:
        q: queries, (batch, queries, heads, head_dim).
        call: the rest of the request.
        name: a backend's name, or "auto" for the first that can serve.
        gradient: whether the backward will run.
    """
    chosen, rule = choose(q, call, name, gradient=gradient), rule_for(q, call, gradient=gradient)
    reasons = {}
    for candidate, backend in BACKENDS.items():
        refusal = backend.refusal(q, call)
        more = f"; {backend.caveat}" if backend.caveat else ""
        more += f" ({presence.state(backend.package)})" if backend.package and not refusal else ""
        if candidate == chosen:
            reasons[candidate] = f"chosen: {backend.note}{more}"
        elif refusal:
            absent = refusal.startswith(presence.ABSENT)
            reasons[candidate] = refusal if absent else f"cannot serve: {refusal}"
        elif name != "auto":
            reasons[candidate] = f"not asked for: {name!r} was"
        else:
            passed_over = f"after {chosen!r}" if candidate in rule.order else "when asked for by name"
            reasons[candidate] = f"can serve, {passed_over}{more}"
    return Explanation(chosen, {**reasons, **WITHOUT_BUILD}, rule.record)


def _rules(device: torch.device, dtype: torch.dtype) -> tuple[Rule, ...]:
    if device.type != "cuda":
        known = CPU_RULES
    else:
        known = HALF_RULES[get_gpu_info(device).architecture] if dtype.itemsize == 2 else FULL_RULES
    return (*remembered_rules(device_name(device), dtype), *known)


_rules._dynamo_marked_constant = True  # torch.compile cannot trace questions to the machine (said as in ordering.py)
