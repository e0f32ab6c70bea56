"""Host times of known calls on a driver that starts nothing, beside autograd's for a function that computes nothing.

    python tests/attention/triton/host_times.py [CALL ...]

Microseconds of the thread, the least of many rounds: without a gradient, forward, forward and backward. Calls are
those of `known_launches`. A GPU's driver comes on top, and torch's dense kernels, for which stand-ins only make
results. What autograd adds up takes a CPU's time here. A process of its own, as `known_launches.py`.
"""

import gc
import sys
import time
from types import SimpleNamespace

import kept_starts
import known_launches
import torch
from known_launches import CALLS, EVERY, STEPS, arguments_of

ROUNDS, REPEATED, WARM = 30, 30, 6


class ComputesNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, dout):
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def runs_of(name: str) -> list:
    """The three calls of a kind, each warm: its launches are those of a recording."""
    given = arguments_of(name) if name else arguments_of("sequence")
    function = EVERY[name][0] if name else lambda q, k, v, **_: ComputesNothing.apply(q, k, v)
    plain = {key: x.detach() if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]

    if not leaves:  # of a step of decoding
        for _ in range(WARM):
            function(**given)
        return [lambda: function(**given)]
    first = function(**given)
    douts = [torch.zeros_like(x) for x in (first if isinstance(first, tuple) else (first,))]

    def both():
        results = function(**given)
        return torch.autograd.grad(results if isinstance(results, tuple) else (results,), leaves, douts)

    runs = [lambda: function(**plain), lambda: function(**given), both]
    for run in runs:
        for _ in range(WARM):
            run()
    return runs


def least_us(run) -> float:
    """The least time of a call among rounds."""
    times = []
    for _ in range(ROUNDS):
        begun = time.thread_time_ns()
        for _ in range(REPEATED):
            run()
        times.append((time.thread_time_ns() - begun) / REPEATED / 1000)
    return min(times)


if __name__ == "__main__":
    # Nothing is noted.
    kept_starts.started = lambda *_: None
    known_launches.known = lambda x: None
    known_launches.alive = known_launches.begun = SimpleNamespace(append=lambda _: None, extend=lambda _: None)
    known_launches.on_a_driver_that_starts_nothing()
    torch.set_num_threads(1)
    gc.disable()
    print("| us | no gradient | forward | forward and backward |\n| --- | --- | --- | --- |")
    for name in ("", *(sys.argv[1:] or (*CALLS, *STEPS))):
        cells = [f"{least_us(run):.1f}" for run in runs_of(name)]
        print(f"| {name or 'a function that computes nothing'} | {' | '.join(cells)} |")
