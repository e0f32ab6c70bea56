"""The choice of a backend for a call: by rule, with its reasons."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hilbert_lib.attention.backends import listed_grid, presence
from hilbert_lib.attention.backends.all_pairs import is_short
from hilbert_lib.attention.backends.backend import Backend, is_exporting
from hilbert_lib.attention.backends.registry import WITHOUT_BUILD, backends_for
from hilbert_lib.attention.documents import LOOPED
from hilbert_lib.attention.failures import compiling, failure
from hilbert_lib.attention.measured_rules import MEASURED, remembered_rules
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.rules import (
    ALL_PAIRS_RULES,
    CPU_RULE,
    FLASH_RECORD,
    FLASH_TILES,
    FULL_RULE,
    GRID_ON_CPU,
    HALF_RULES,
    HOST_RECORD,
    POINTS,
    RESIDUES_RECORD,
    SHORT_RECORD,
    UNION_RECORD,
    Rule,
    first_of,
    grid_rule,
    on_architecture,
)
from hilbert_lib.attention.starts import has_starts
from hilbert_lib.attention.triton import schedule
from hilbert_lib.attention.triton.hopper.division import NARROW, is_reached
from hilbert_lib.internals import compile_time_constant
from hilbert_lib.machine import get_gpu_info
from hilbert_lib.patterns.all_pairs import AllPairs
from hilbert_lib.patterns.dilated import DilatedPattern

# "auto" has k and v put in sequence order from so many rows of q on, and so many keys of a row on average, over all
# branches. On an H100 two copies cost less than a table from there on (reports/HISTORY.md, "An ordering's cost").
UNDONE_FROM, UNDONE_KEYS = 16_384, 1_024
# Records by which others stand before "hopper".
_FASTER = (SHORT_RECORD, HOST_RECORD, UNION_RECORD, RESIDUES_RECORD, FLASH_RECORD)
FASTEST = ("hopper", "triton")  # the kernels of this library, by pattern, that a GPU runs fastest


@dataclass(frozen=True)
class Explanation:
    """The backend that serves a call, and why the others were passed over. `print` shows it as a table.

    Attributes:
        chosen: the backend's name; "" where none can serve.
        reasons: for every backend by name, "chosen" and its note, or why it was passed over; where it can serve, with
            its caveat.
        rule: where the order comes from in which "auto" tries them.
        off_fast_path: why the fastest kernels of this GPU do not compute the call: "hopper" on Hopper, "triton"
            elsewhere. "" where they do, and on a CPU.
    """

    chosen: str
    reasons: dict[str, str]
    rule: str
    off_fast_path: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether the rule was measured on this machine, by `select_attention_backend` or `hilbert bench backends`."""
        return self.rule.startswith(MEASURED)

    def __str__(self) -> str:
        rows = {**self.reasons, "auto goes by": self.rule}
        if self.off_fast_path:
            rows["off the fast path"] = self.off_fast_path
        width = max(map(len, rows))
        return "\n".join(f"{name.ljust(width)}  {reason}" for name, reason in rows.items())


def rule_for(q: Tensor, call: Request, *, gradient: bool, through_table: bool = False, k: Tensor | None = None) -> Rule:
    """The rule that "auto" goes by: one measured on this machine where there is one, otherwise the library's.

    through_table: whether k and v of a sequence are to be found through a table, where a backend reads one. k: may be
    left out where the rule does not hang on the number of keys: that of extra queries does.
    """
    rule = _rule_for(q, call, gradient=gradient)
    if k is not None and isinstance(call.pattern, AllPairs):
        if _is_bound_by_host(q, k):
            rule = _that_serves(first_of(rule, "triton", SHORT_RECORD), call)
        elif _has_few_tiles(q, gradient=gradient):
            rule = _flash_first(rule, call, q.device)
    return _of_tables(rule) if through_table else rule


def _of_tables(rule: Rule) -> Rule:
    # "hopper" reads no table: "triton" takes its place.
    order = dict.fromkeys("triton" if name == "hopper" else name for name in rule.order)
    return Rule(tuple(order), rule.record)


def _rule_for(q: Tensor, call: Request, *, gradient: bool) -> Rule:
    if call.lists:
        return _that_serves(POINTS if q.device.type == "cuda" else GRID_ON_CPU, call)
    if isinstance(call.pattern, AllPairs):  # what was measured on this machine is of other patterns
        return _that_serves(_known_rule(q.device, q.dtype, all_pairs=True), call)
    if not is_exporting():
        for shape, rule in remembered_rules(q.device, q.dtype):
            if shape.fits(q, call, gradient):
                return _of_documents_first(rule, call)
    if call.pattern.length is not None:
        order = "" if call.ordering is None else call.ordering.kind
        rule = grid_rule(q.device.type, q.element_size(), order)
        # Tokens in another order are served by "lists" whatever their number.
        if rule.order[0] == "hopper" and _has_host(q):
            if listed_grid.is_short(q, call):
                rule = first_of(rule, "lists", HOST_RECORD)
            elif listed_grid.leads_boxes(q, call, gradient=gradient):
                rule = first_of(rule, "lists", UNION_RECORD)
            elif listed_grid.leads_residues(q, call):
                rule = first_of(rule, "lists", RESIDUES_RECORD)
        if q.device.type == "cuda":
            rule = on_architecture(rule, _architecture(q.device))
        return _that_serves(rule, call)
    rule = _known_rule(q.device, q.dtype)
    if rule.order[0] == "hopper" and _has_host(q) and _is_short_sequence(q, call):
        rule = first_of(rule, "triton", HOST_RECORD)
    return _of_documents_first(_that_serves(rule, call), call)


def _is_short_sequence(q: Tensor, call: Request) -> bool:
    # As `launch.is_short`. Without a start there are as many keys as queries.
    if not isinstance(call.pattern, DilatedPattern):  # a union, whose parts are calls of their own
        return False
    batch, rows, heads, _ = q.shape
    is_whole = call.query_start is None and call.cu_seqlens is None and not has_starts(call)
    return is_whole and rows <= schedule.SHORT_ROWS and schedule.is_short(call.pattern, rows, batch * heads)


def _is_bound_by_host(q: Tensor, k: Tensor) -> bool:
    # Of extra queries: whether their host takes longer than their device.
    return _has_host(q) and is_short(q, k)


def _flash_first(rule: Rule, call: Request, device: torch.device) -> Rule:
    if "flash" not in rule.order:
        return rule
    return _that_serves(on_architecture(first_of(rule, "flash", FLASH_RECORD), _architecture(device)), call)


def _has_few_tiles(q: Tensor, *, gradient: bool) -> bool:
    # Of extra queries: whether they leave most multiprocessors without work, unless the keys are split.
    batch, rows, heads, _ = q.shape
    return not _has_symbols(q) and batch * heads * -(-rows // 128) <= FLASH_TILES[gradient]


def _has_host(q: Tensor) -> bool:
    # Whether a short call waits for its host. A compiled program does not, and must not hang on the number of keys, nor
    # must one that is traced with symbols as sizes.
    if q.device.type != "cuda" or q.dtype.itemsize != 2 or torch.compiler.is_compiling():
        return False
    return not _has_symbols(q)


def _has_symbols(q: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in q.shape)


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
def _known_rule(device: torch.device, dtype: torch.dtype, all_pairs: bool = False) -> Rule:
    if device.type != "cuda":
        return CPU_RULE
    rules = ALL_PAIRS_RULES if all_pairs else HALF_RULES
    architecture = get_gpu_info(device).architecture
    return on_architecture(rules[architecture] if dtype.itemsize == 2 else FULL_RULE, architecture)


@compile_time_constant
def _architecture(device: torch.device) -> str:
    return get_gpu_info(device).architecture


def choose(
    q: Tensor, k: Tensor, call: Request, name: str, *, gradient: bool, lse_gradient: bool = False,
    through_table: bool = False,
) -> str:  # fmt: skip
    """The backend that serves a validated call, or "" where none can. name: a backend's, or "auto" for the first.

    lse_gradient: whether the backward may be given the gradient of lse. through_table: as for `rule_for`.
    """
    asked = (name,)
    if name == "auto":
        rule = rule_for(q, call, gradient=gradient, through_table=through_table, k=k)
        asked = compiling(call.pattern.function, rule.order, q)
        if lse_gradient:
            backends = backends_for(call.pattern)
            asked = tuple(each for each in asked if not backends[each].lse_refusal(q, call))
    return first_that_serves(q, k, call, asked)


def serving(
    q: Tensor, k: Tensor, call: Request, name: str, *, gradient: bool, lse_gradient: bool = False,
    has_ordering: bool = False,
) -> str:  # fmt: skip
    """`choose`; ValueError, with the reasons, where no backend can serve.

    has_ordering: whether k and v of a sequence are stored in another order.
    """
    through_table = has_ordering and _is_through_table(name, q, call)
    gradients = {"gradient": gradient, "lse_gradient": lse_gradient}
    chosen = choose(q, k, call, name, **gradients, through_table=through_table)
    if not chosen:
        reasons = explain(q, k, call, name, **gradients, has_ordering=has_ordering).reasons
        told = reasons.get(name) or ", ".join(f"{each} {reason}" for each, reason in reasons.items())
        raise ValueError(f"backend={name!r} {told}; see explain_backend")
    return chosen


def is_undone(asked: str, chosen: str, device: torch.device, call: Request, rows: int) -> bool:
    """Whether k and v are put in sequence order before a call, rather than found through a table in the kernels.

    asked: the backend asked for; chosen: the one that serves. A copy costs each row once, a table each read of a row.
    """
    return not backends_for(call.pattern)[chosen].reads_orderings or _copies_cost_less(asked, device, call, rows)


def _is_through_table(asked: str, q: Tensor, call: Request) -> bool:
    # Of k and v in another order: whether a backend that reads a table is given one. Of other patterns none reads one.
    return isinstance(call.pattern, DilatedPattern) and not _copies_cost_less(asked, q.device, call, q.shape[1])


def _copies_cost_less(asked: str, device: torch.device, call: Request, rows: int) -> bool:
    if has_starts(call):  # backends that read a table do not read starts, or are given moved sequences
        return True
    # Whether "auto" has k and v copied in sequence order even for a backend that reads them through a table.
    keys = sum(min(w, rows) / r**2 for w, r in call.pattern.branches)
    is_short = rows < UNDONE_FROM or keys < UNDONE_KEYS
    return asked == "auto" and device.type == "cuda" and call.query_start is None and not is_short


def first_that_serves(q: Tensor, k: Tensor, call: Request, names: Sequence[str]) -> str:
    """The first of some backends that serves a call, or ""."""
    backends = backends_for(call.pattern)
    return next((name for name in names if not backends[name].refusal(q, call, k)), "")


def explain(
    q: Tensor, k: Tensor, call: Request, name: str, *, gradient: bool, lse_gradient: bool = False,
    has_ordering: bool = False,
) -> Explanation:  # fmt: skip
    """The backend that `choose` takes, and why not the others.

    has_ordering: whether k and v of a sequence are stored in another order.
    """
    through_table = has_ordering and _is_through_table(name, q, call)
    how = {"gradient": gradient, "through_table": through_table}
    chosen, rule = choose(q, k, call, name, lse_gradient=lse_gradient, **how), rule_for(q, call, k=k, **how)
    reasons = {}
    for candidate, backend in backends_for(call.pattern).items():
        lacking = backend.lse_refusal(q, call) if lse_gradient else ""
        reasons[candidate] = _reason(backend, q, k, call, name, chosen, rule, lacking)
    if call.pattern.length is None and not call.lists:
        reasons |= WITHOUT_BUILD
    if has_ordering and chosen and is_undone(name, chosen, q.device, call, q.shape[1]):
        reasons[chosen] += "; k and v are copied in sequence order first"
    is_faster = rule.record.startswith(_FASTER) and chosen == rule.order[0]
    off_fast_path = "" if is_faster and name == "auto" else _off_fast_path(chosen, q, k, call, reasons)
    return Explanation(chosen, reasons, rule.record, off_fast_path)


def _off_fast_path(chosen: str, q: Tensor, k: Tensor, call: Request, reasons: dict[str, str]) -> str:
    # The fastest kernels are those of this library that run on this GPU at all.
    if q.device.type != "cuda":
        return ""
    backends = backends_for(call.pattern)
    fastest = next((name for name in FASTEST if name in backends and not backends[name].here(q, call)), "")
    if fastest not in ("", chosen):
        return f"{fastest!r} {reasons[fastest]}"
    if fastest == "hopper" and isinstance(call.pattern, DilatedPattern):
        branches = [f"{w}:{r}" for w, r in call.pattern.branches if not is_reached(w, r, k.shape[1])]
        parts = [f"the branches {' '.join(branches)}"] if branches else []
        if q.shape[-1] > NARROW and call.cu_seqlens is not None:
            parts.append(f"the backward of packed documents at a head_dim above {NARROW}")
        elif q.shape[-1] > NARROW and (branches or call.key_padding_mask is not None):
            parts.append(f"dq at a head_dim above {NARROW}")
        return f"plain kernels compute {' and '.join(parts)}" if parts else ""
    return ""


def _reason(
    backend: Backend, q: Tensor, k: Tensor, call: Request, asked: str, chosen: str, rule: Rule, lacking: str
) -> str:
    # Say why a backend was chosen, or why it was not. lacking: why it has no gradient of lse.
    refusal = backend.refusal(q, call, k)
    looped = LOOPED if call.cu_seqlens is not None and not backend.reads_documents else ""
    failed = failure(call.pattern.function, backend.name, q)
    more = "".join(f"; {caveat}" for caveat in (failed, backend.caveat, looped, lacking) if caveat)
    if backend.package and not refusal:
        more += f" ({presence.state(backend.package)})"
    if backend.name == chosen:
        return f"chosen: {backend.note}{more}"
    if refusal:
        return refusal if refusal.startswith(presence.ABSENT) else f"cannot serve: {refusal}"
    if asked != "auto":
        return f"not asked for: {asked!r} was"
    if failed or lacking:
        return f"passed over: {failed or lacking}"
    passed_over = f"after {chosen!r}" if backend.name in rule.order else "when asked for by name"
    return f"can serve, {passed_over}{more}"
