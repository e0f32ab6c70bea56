"""The cost of each option of a call, and the time of the best other way for it: notebook 06c.

A base work has options around it, one at a time. Each is held against float64 before it is timed; what is off, or
fails, is recorded with its reason. Ours is timed alone, and then in turn with each rival.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from math import isnan, nan
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from hilbert_lib.attention.backends.flex import compiled_flex_attention
from hilbert_lib.attention.backends.flex_masks import FLEX_BLOCK, dilated_mask, residue_order
from hilbert_lib.attention.explain import explain_backend
from hilbert_lib.attention.validation import validated
from hilbert_lib.files import one_line
from hilbert_lib.lab.baselines import BASELINES
from hilbert_lib.lab.calls import Call, Inputs, Way
from hilbert_lib.lab.pairs import sweep, time_cases
from hilbert_lib.lab.sweeps.grids import attend_by_flex
from hilbert_lib.lab.tables import of_sweep
from hilbert_lib.lab.timing import SEED, Case, interval_of, resampled_medians
from hilbert_lib.lab.workload import BOTH

if TYPE_CHECKING:
    import pandas as pd  # here it would be loaded by every process that measures

OPTION_SWEEP, BASE, OURS = "options", "base", "ours"
DIRECTIONS = ("forward", BOTH)
NOT_TRIED = "not tried"  # a kind of record: of a way that does not serve an option, with the reason
LARGEST_ERRORS = {"float16": 0.02, "bfloat16": 0.02, "float32": 1e-4}
LARGEST_TF32_ERROR = 5e-3
GRID_ORDERS = ("raster", "tile", "morton")  # in which FlexAttention is timed
SMALL_BLOCK = 64
GATHERED = "gathered keys, torch's attention"

Makers = Mapping[str, Callable[[], Way]]  # by name; ValueError or ImportError says why there is no such way
Named = Iterable[tuple[str, str, Call]]  # base, option, call


def grid_rivals(call: Call, *, small_blocks: bool = False) -> dict[str, Callable[[], Way]]:
    """Others' ways to a call on a grid: FlexAttention by order of storage, and NATTEN by its tiles.

    small_blocks: whether FlexAttention is also given blocks of 64, in the last order.

    Without a CUDA device there is none: NATTEN needs one, and FlexAttention would be traced anew for each shape.
    """
    if call.device.type != "cuda":
        return {}
    orders = GRID_ORDERS if call.order == "raster" else (call.order,)
    shapes = [(order, FLEX_BLOCK) for order in orders] + [(orders[-1], SMALL_BLOCK)] * small_blocks
    return {flex_name(*each): partial(by_flex, call, *each) for each in shapes} | natten_ways(call)


def flex_name(order: str, block: int) -> str:
    """FlexAttention's name in a record."""
    return f"FlexAttention, {order}, blocks of {block}"


def sequence_rivals(call: Call, *, names: Iterable[str]) -> dict[str, Callable[[], Way]]:
    """Others' ways to a call along a sequence, by names of `BACKENDS` and `BASELINES`.

    Where these take no padding, FlexAttention is given it by hand; a query of a cache has its keys gathered.
    """
    makers = {name: partial(by_name, call, name) for name in names}
    if call.padded and "flex" in makers:
        makers["flex"] = partial(by_padded_flex, call)
    if call.queries == 1:
        makers[GATHERED] = partial(by_gathered_keys, call)
    return makers


def by_name(call: Call, name: str) -> Way:
    """A backend or a baseline as a way to a call along a sequence."""
    if name not in BASELINES:
        return call.by(name, name)
    options = call.options()

    def run(x: Inputs) -> tuple[torch.Tensor, ...]:
        inputs, request = validated(x.q, x.k, x.v, call.pattern, **options)
        if refusal := BASELINES[name].refusal(inputs.q, request):
            raise ValueError(refusal)
        return (BASELINES[name].run(*inputs[:3], request),)

    return Way(name, run)


def by_padded_flex(call: Call) -> Way:
    """FlexAttention on tokens in residue order, with keys that have no weight."""
    order = residue_order(call.pattern, call.length).to(call.device)
    sizes = call.is_causal, call.length, call.heads, call.heads, FLEX_BLOCK, call.device
    blocks, add_log_count = dilated_mask(call.pattern, *sizes)
    is_padded = order.apply(call.options()["key_padding_mask"], dim=1).contiguous()

    def score_mod(score, b, h, query, key):
        return torch.where(is_padded[b, key], -torch.inf, add_log_count(score, b, h, query, key))

    def run(x: Inputs) -> tuple[torch.Tensor, ...]:
        rows = (order.apply(rows, dim=1).transpose(1, 2) for rows in (x.q, x.k, x.v))
        out = compiled_flex_attention(*rows, score_mod=score_mod, block_mask=blocks)
        return (order.undo(out.transpose(1, 2), dim=1),)

    return Way("flex", run)


def by_gathered_keys(call: Call) -> Way:
    """One query of a cache: the keys that each head sees are copied side by side, then attended to by torch."""
    head_keys = [
        call.pattern.keys(call.length - 1, kv_head=head, kv_heads=call.heads, length=call.length)
        for head in range(call.heads)
    ]
    most = max(map(len, head_keys))
    index = torch.stack([torch.nn.functional.pad(keys, (0, most - len(keys)), value=-1) for keys in head_keys])
    index, heads = index.to(call.device), torch.arange(call.heads, device=call.device)[:, None]
    attends = (index >= 0)[None, :, None]  # [1, heads, 1, keys]

    def run(x: Inputs) -> tuple[torch.Tensor, ...]:
        k, v = (rows[:, index.clamp(min=0), heads] for rows in (x.k, x.v))  # [batch, heads, keys, head_dim]
        out = scaled_dot_product_attention(x.q.transpose(1, 2), k, v, attn_mask=attends)
        return (out.transpose(1, 2),)

    return Way(GATHERED, run)


def by_flex(call: Call, order: str, block: int) -> Way:
    """FlexAttention on a grid that is stored in an order. Extra queries are a dense call over all keys beside it."""
    ordering = call.ordering(order)
    options = call.options(ordering)
    options.pop("ordering", None)

    def run(x: Inputs) -> tuple[torch.Tensor, ...]:
        extra = {name: getattr(x, name) for name in ("extra_k", "extra_v", "bias") if getattr(x, name) is not None}
        out = attend_by_flex(x.q, x.k, x.v, call.pattern, ordering, block_size=block, **extra, **options)
        if x.extra_q is None:
            return (out,)
        pairs = ((x.k, x.extra_k), (x.v, x.extra_v))
        k, v = (torch.cat([cells, more], 1) if more is not None else cells for cells, more in pairs)
        rows = (rows.transpose(1, 2) for rows in (x.extra_q, k, v))
        return out, scaled_dot_product_attention(*rows).transpose(1, 2)

    return Way(flex_name(order, block), run, ordering)


def natten_ways(call: Call) -> dict[str, Callable[[], Way]]:
    """NATTEN by each of its tiles for this shape, where it is installed and tells them; else its default tiles."""
    default = {"NATTEN": partial(by_natten, call, "NATTEN", {})}
    try:
        natten = import_module("natten")
        x = call.inputs.mapped(lambda x: x[:, :1])  # the first row alone: only shapes of a head are looked at
        grid = [rows[..., :1, :, :].unflatten(1, (1,) * len(call.pattern.shape)) for rows in (x.q, x.k, x.v)]
        tiles = natten.get_configs_for_hopper_fna(*grid)
    except (ImportError, AttributeError, ValueError, RuntimeError):
        return default
    ways = {}
    for (queries, keys), schedule in tiles:
        name = f"NATTEN, tiles {'x'.join(map(str, queries))} {'x'.join(map(str, keys))} {schedule}"
        own = {"q_tile_shape": queries, "kv_tile_shape": keys, "kernel_schedule": schedule, "backend": "hopper-fna"}
        ways[name] = partial(by_natten, call, name, own)
    return ways or default


def by_natten(call: Call, name: str, tiles: dict) -> Way:
    """NATTEN on a grid, its permutes included."""
    try:
        natten = import_module("natten")
    except ImportError:
        raise ImportError("natten is not installed") from None
    lacks = {"bias": call.has_bias, "mask": call.padded, "extra queries": call.extra_queries}
    lacks |= {"order of storage": call.order != "raster"}
    if missing := ", ".join(option for option, is_asked in lacks.items() if is_asked):
        raise ValueError(f"NATTEN takes no {missing}")
    near = call.pattern
    steps = {"kernel_size": near.window, "stride": near.stride, "dilation": near.dilation, **tiles}
    attend = getattr(natten, f"na{len(near.shape)}d")

    def run(x: Inputs) -> tuple[torch.Tensor, ...]:
        rows = (rows.unflatten(1, near.shape) for rows in (x.q, x.k, x.v))
        extra = {} if x.extra_k is None else {"additional_keys": x.extra_k, "additional_values": x.extra_v}
        return (attend(*rows, **steps, **extra).flatten(1, len(near.shape)),)

    return Way(name, run)


def run_options(
    calls: Named,
    rivals: Callable[[str, str, Call], Makers] | None = None,
    *,
    device: torch.device,
    output_dir: str = "",
    repetitions: int = 12,
    seconds: float = 0.2,
    sweep_name: str = OPTION_SWEEP,
    directions: Sequence[str] = DIRECTIONS,
) -> list[dict]:
    """Check and, on a CUDA device, time ours on every call alone, or in turn with every rival. Records one by one.

    What a folder holds from this code on this hardware is not measured again. A call with few queries has no backward.

    Args:
        calls: base, option and call; of each base one option is `BASE`.
        rivals: the ways of others to a call of a base and an option; by default ours is alone.
        output_dir: folder of results.jsonl, or "". repetitions, seconds: as of `run_sides`.
        sweep_name: of the records. directions: of `DIRECTIONS`.
    """
    how = {"device": device, "repetitions": repetitions, "seconds": seconds}

    def points() -> Iterator[tuple[tuple[Case, ...], Callable[[], dict]]]:
        earlier_base = ""
        for base, option, call in calls:
            if rivals and base != earlier_base and device.type == "cuda":
                torch.compiler.reset()  # FlexAttention compiles a function for so many shapes, and no more
                earlier_base = base
            makers = rivals(base, option, call) if rivals else {OURS: call.by}
            for direction in directions[:1] if call.queries else directions:
                about = {"sweep": sweep_name, "base": base, "option": option, "direction": direction}
                about |= call.parameters
                own = Case(OURS, partial(_compute, call, call.by, direction), about, 0.0)
                checked_own = cache(partial(_checked, call, call.by, own))  # once for all rivals
                for name, make in makers.items():
                    case = Case(name, partial(_compute, call, make, direction), about, 0.0)
                    cases = (case, own) if rivals else (own,)
                    makes = (partial(_checked, call, make, case), checked_own) if rivals else (checked_own,)
                    yield cases, partial(_measured, call, cases, makes, **how)
            for drawn in ("inputs", "douts", "_exact"):  # only one call's tensors are in memory
                vars(call).pop(drawn, None)

    return sweep(points(), output_dir, write=device.type == "cuda")


def _measured(
    call: Call,
    cases: Sequence[Case],
    makes: Sequence[Callable[[], Case]],
    *,
    device: torch.device,
    repetitions: int,
    seconds: float,
) -> dict:
    # The record of ours alone, or of a rival in turn with ours; what goes wrong with either is the reason.
    is_timed = device.type == "cuda"
    if is_timed:
        torch.cuda.synchronize()  # after an error that no later call survives, this ends the sweep
    with tf32(call.allows_tf32):
        try:
            checked = [make() for make in makes]
        except Exception as error:  # what a way raises is its own affair
            reason = "no room" if isinstance(error, torch.OutOfMemoryError) else one_line(error)
            return _told(_pair(cases) | {"kind": NOT_TRIED if is_timed else "check", "reason": reason})
        record = _pair(checked) | {"kind": "check"}
        if is_timed:
            took = sum(map(_seconds_of, checked))
            record = time_cases(*checked, device=device, took=took, repetitions=repetitions, seconds=seconds).record()
    return _told(record | ({} if "b" in record else _explained(call, cases[0].parameters["direction"])))


def _checked(call: Call, make: Callable[[], Way], case: Case) -> Case:
    # The case with its error, which must be small, and the call that is timed.
    way, direction = make(), case.parameters["direction"]
    error = call.error(way, gradient=direction == BOTH)
    most = LARGEST_TF32_ERROR if call.allows_tf32 else LARGEST_ERRORS[call.dtype]
    if not error <= most:
        raise ValueError(f"off by {error:.1e} from float64, more than {most:.0e}")
    return Case(case.name, _timed_call(call, way, direction), case.parameters, error, call.flop(direction))


def _compute(call: Call, make: Callable[[], Way], direction: str) -> None:
    # The call that is timed, once, for what it compiles.
    with tf32(call.allows_tf32):
        _timed_call(call, make(), direction)()


def _timed_call(call: Call, way: Way, direction: str) -> Callable[[], object]:
    tokens, douts = call.inputs.stored(way.ordering), list(call.douts)
    if direction == "forward":

        @torch.no_grad()
        def run() -> object:
            return way.attend(tokens)

    else:
        if way.ordering is not None:
            douts[0] = way.ordering.apply(douts[0], dim=1)
        leaves = tokens.mapped(lambda x: x.detach().requires_grad_())

        def run() -> object:
            return torch.autograd.grad(way.attend(leaves), leaves.present, douts)

    return run


def _explained(call: Call, direction: str) -> dict:
    # What `explain_backend` says of ours.
    q, k, v, *rest = call.inputs.mapped(lambda x: x.detach().requires_grad_(direction == BOTH))
    more = {name: x for name, x in zip(Inputs._fields[3:], rest, strict=True) if x is not None}
    found = explain_backend(
        q, k, v, call.pattern, backend=call.backend, **more, **call.options(call.ordering(call.order))
    )
    return {"chosen": found.chosen, "off_fast_path": found.off_fast_path}


def _seconds_of(case: Case) -> float:
    case.run()
    torch.cuda.synchronize()
    start = perf_counter()
    case.run()
    torch.cuda.synchronize()
    return perf_counter() - start


def _pair(cases: Sequence[Case]) -> dict:
    facts = [case.facts for case in cases]
    return dict(zip("ab", facts, strict=True)) if len(facts) == 2 else facts[0]


def _told(record: dict) -> dict:
    # The record, after a line that says it where something is timed.
    way = record.get("a", record)
    label = ", ".join(way["parameters"][name] for name in ("base", "option", "direction")) + f", {way['name']}"
    if record["kind"] == NOT_TRIED:
        print(f"{label}: not tried: {record['reason']}", flush=True)
    elif "samples_ms" in way:
        beside = f", ours {record['ratio']:.2f} times as fast" if "ratio" in record else ""
        print(f"{label}: {_rate(way):.0f} TFLOP/s (error {way['error']:.1e}){beside}", flush=True)
    return record


@contextmanager
def tf32(is_allowed: bool) -> Iterator[None]:
    """Inside, torch's setting lets float32 products round to TF32, or not.

    >>> with tf32(True):
    ...     torch.get_float32_matmul_precision()
    'high'
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if is_allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def option_table(records: list[dict], sweep_name: str = OPTION_SWEEP) -> "pd.DataFrame":
    """Every option of every base and direction once.

    Columns: base, option, direction, dtype; of ours median_ms, tflop_per_s, error, chosen, off_fast_path, and failed,
    the reason where it is wrong or does not run; `share` of
    the base's rate with its 95 % interval share_low to share_high; of the fastest other way its name `other`,
    other_share (its rate, of our base's), other_error, ratio (its time over ours) with low and high; `not_tried`: the
    other ways that have no time, with their reasons. What was not timed is NaN.
    """
    import pandas as pd

    alone, beside = {}, {}
    for record in of_sweep(records, sweep_name):
        parameters = record.get("b", record)["parameters"]
        case = tuple(parameters[name] for name in ("base", "option", "direction"))
        if "b" in record:
            beside.setdefault(case, []).append(record)
        else:
            alone[case] = record
    rows = []
    for case, record in alone.items():
        base, option, direction = case
        row = {"base": base, "option": option, "direction": direction, "dtype": record["parameters"]["dtype"]}
        row |= {"error": nan if "reason" in record else record["error"], "failed": record.get("reason", "")}
        row |= {name: record.get(name, "") for name in ("chosen", "off_fast_path")}
        row |= {"median_ms": _median(record), "tflop_per_s": _rate(record)}
        reference = alone.get((base, BASE, direction))
        row |= dict(zip(("share", "share_low", "share_high"), _share(record, reference), strict=True))
        rows.append(row | _best_other(beside.get(case, []), reference))
    return pd.DataFrame(rows)


def _median(side: dict) -> float:
    return float(np.median(side["samples_ms"])) if "samples_ms" in side else nan


def _rate(side: dict) -> float:
    return side["useful_flop"] / _median(side) / 1e9 if "samples_ms" in side else nan


def _rate_over(side: dict, reference: dict | None) -> float:
    # The rate of a side over that of the base.
    if reference is None or "samples_ms" not in side or "samples_ms" not in reference:
        return nan
    return side["useful_flop"] / reference["useful_flop"] * _median(reference) / _median(side)


def _share(side: dict, reference: dict | None) -> tuple[float, float, float]:
    # The same with its interval.
    share = _rate_over(side, reference)
    if isnan(share):
        return nan, nan, nan
    factor, rng = side["useful_flop"] / reference["useful_flop"], np.random.default_rng(SEED)
    base_medians, medians = (resampled_medians(one["samples_ms"], rng) for one in (reference, side))
    low, high = interval_of(factor * base_medians / medians)
    return share, low, high


def _best_other(records: list[dict], reference: dict | None) -> dict:
    reasons = (f"{record['a']['name']}: {record['reason']}" for record in records if "reason" in record)
    row = {"other": "", "other_share": nan, "other_error": nan, "ratio": nan, "low": nan, "high": nan}
    row["not_tried"] = "; ".join(reasons)
    timed = [record for record in records if "ratio" in record]
    if timed:
        best = min(timed, key=lambda record: record["ratio"])
        low, high = best["interval"]
        row |= {"other": best["a"]["name"], "other_share": _rate_over(best["a"], reference)}
        row |= {"other_error": best["a"]["error"], "ratio": best["ratio"], "low": low, "high": high}
    return row
