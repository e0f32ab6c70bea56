"""What ranks tell each other before they send rows, in the tests of the ring."""

import weakref
from contextlib import ExitStack
from functools import partial
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from cases import BRANCHES
from ring_ranks import NAMES, SPECS, inputs, noting, results, said_by

from hilbert_lib.attention import operators
from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.ring import agreement as header
from hilbert_lib.ring.attention import _agreed, ring_dilated_attention
from hilbert_lib.ring.plan.plan import plan_ring
from hilbert_lib.ring.rank import exchange, passes


def disagree(**differing) -> list[str]:
    """What ranks say when the last one calls with other arguments than the rest: in the first call of that length, and
    where they have agreed in one before, so that a rank expects no difference."""
    q, k, v, _ = inputs(8)
    pattern, is_last = DilatedPattern((16,), (2,)), dist.get_rank() == dist.get_world_size() - 1
    options, asked = {"pattern": pattern}, q
    if is_last:
        options |= {name: SPECS[value] if name == "kv_ordering" else value for name, value in differing.items()}
        options["pattern"] = DilatedPattern(*BRANCHES[options["pattern"]]) if "pattern" in differing else pattern
        asked = q.clone().requires_grad_() if options.pop("requires_grad", False) else q
    said = []
    _agreed.clear()
    for _ in range(2):
        said.append(said_by(ring_dilated_attention, asked, k, v, **options))
        ring_dilated_attention(q, k, v, pattern)
    return said


def one_fails_by_itself() -> list:
    """What is said where the last rank asks for more than it can compute, and the others have begun: they find out
    before they send. And whether all agree in the next call."""
    q, k, v, _ = inputs(8)
    call = partial(ring_dilated_attention, pattern=DilatedPattern((16,), (2,)), group=dist.new_group())
    first = call(q, k, v)

    too_large = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with ExitStack() as stack:
        larger = dist.get_rank() == dist.get_world_size() - 1
        if larger:
            stack.enter_context(patch.object(operators, "attention", too_large))
        said = said_by(call, *(x.repeat(1 + larger, 1, 1, 1) for x in (q, k, v)))
    return [said, torch.equal(call(q, k, v), first)]


def without_validation(lengths: list[int]) -> list:
    """How many headers are sent: of a validated call, and of one that is not, whose result is the same. And what is
    said of a third one, for which each rank has a row less."""
    q, k, v, _ = inputs(lengths[dist.get_rank()])
    call = partial(ring_dilated_attention, pattern=DilatedPattern(*BRANCHES["longer"]))
    with noting([(dist, "all_gather", "header")]) as headers:
        first, before = call(q, k, v), len(headers)
        assert torch.equal(call(q, k, v, validate=False), first)
        counts = [before, len(headers) - before]
    return [*counts, said_by(call, q[:, 1:], k[:, 1:], v[:, 1:], validate=False)]


def around_the_header() -> list[list[str]]:
    """The order in which a group's first call, and its second, compute, learn that all agree, send and wait."""
    group, found = dist.new_group(), []
    q, k, v, _ = inputs(16)
    places = [
        (operators, "attention", "compute"),
        (header.Agreement, "lengths", "agree"),
        (exchange, "exchange", "send"),
    ]
    places += [(exchange.Arriving, "wait", "wait")]
    with noting(places) as events:
        for _ in range(2):
            ring_dilated_attention(q, k, v, DilatedPattern((8, 32), (1, 2)), transport="all_gather", group=group)
            found.append(events[:])
            events.clear()
    return found


def others_are_not_as_before() -> list:
    """Of a group's later calls: the largest error of output and gradients where another rank has fewer rows than
    before, in the end under a limit of memory that the rows of before would pass. And what is said where the last rank
    asks for another transport and the others for what cannot be planned."""
    rank, pattern = dist.get_rank(), DilatedPattern(*BRANCHES["longer"])
    ring = partial(ring_dilated_attention, pattern=pattern, group=dist.new_group(), transport="ring")
    drawn, errors = inputs(16), []
    sizes = {"batch": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "dtype": torch.float32, "transport": "ring"}
    before, after = (
        max(cost.memory_forward for cost in plan_ring(pattern, lengths, **sizes).ranks) for lengths in ((8, 8), (8, 5))
    )
    assert after < before
    for lengths, limit in (([8, 8], None), ([5, 8], None), ([8, 8], None), ([8, 5], after)):
        *tensors, dout = (x[:, : sum(lengths)] for x in drawn)
        whole = results(partial(dilated_attention, pattern=pattern), tensors, dout)
        rows = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        mine = results(partial(ring, memory_limit=limit), [x[:, rows] for x in tensors], dout[:, rows])
        for name, own, one in zip(NAMES, mine, whole, strict=True):
            part = (slice(None), slice(None), rows) if name == "lse" else (slice(None), rows)
            errors.append((own - one[part]).abs().nan_to_num(0.0).max().item())
    asked = {"transport": "all_gather"} if rank else {"memory_limit": 1}
    return [max(errors), said_by(ring, *(x[:, rows] for x in tensors), **asked)]


def what_was_computed_in_vain() -> list[bool]:
    """Where another rank has fewer rows than before, and this one begins again: whether its first results are held."""
    group, computed, held = dist.new_group(), [], []
    q, k, v, _ = inputs(8)
    pattern, forward = DilatedPattern((8, 32), (1, 2)), passes._fused_forward
    ring_dilated_attention(q, k, v, pattern, group=group)

    def watched(*args):
        held.extend(out() is not None for out in computed)
        results = forward(*args)
        computed.append(weakref.ref(results[0]))
        return results

    rows = slice(0, 8 if dist.get_rank() == 0 else 5)
    with patch.object(passes, "_fused_forward", watched):
        ring_dilated_attention(q[:, rows], k[:, rows], v[:, rows], pattern, group=group)
    return held
