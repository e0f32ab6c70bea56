"""One program of the emulator: its groups of warps, engines and barriers, and who goes on when.

Each group is a greenlet, of which one runs at a time. At every operation on a barrier, a copy or a product the program
goes on with the first that can, of the groups, the copy engine and the tensor cores; their order is drawn for each
program. So in some programs copies come as early and products as late as can be, in others the reverse: a missing wait
reads what is not there yet, or not there any more. Where nothing can go on the program is stuck: that takes no time.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from types import SimpleNamespace

import numpy as np
from emulated_tiles import Fault
from greenlet import GreenletExit, getcurrent, greenlet

WARP = 32
NAMED_BARRIERS = range(8, 16)  # those of the hardware that Triton does not take for itself


class Barriers:
    """The `mbarrier`s of an allocation."""

    def __init__(self, cells: list, shape: Sequence[int]):
        self.cells, self.shape = cells, shape

    def index(self, i):
        size = len(self.cells) // self.shape[0]
        if not 0 <= int(i) < self.shape[0]:
            raise Fault(f"barrier {int(i)} of {self.shape[0]}")
        return Barriers(self.cells[int(i) * size : (int(i) + 1) * size], self.shape[1:])

    @property
    def one(self) -> "Barrier":
        (cell,) = self.cells
        return cell


class Barrier:
    """An `mbarrier`: its phase ends when `count` have arrived and all bytes have come."""

    count = left = bytes = phase = 0

    def change(self, arrivals: int, more_bytes: int):
        """Fewer arrivals are left, and more bytes to come."""
        if arrivals > self.left:
            raise Fault(f"more arrivals at a barrier than its count, {self.count}")
        self.left -= arrivals
        self.bytes += more_bytes
        if not self.left and not self.bytes:
            self.left, self.phase = self.count, self.phase + 1


class Queue(deque):
    """What an engine has still to do."""

    ready = deque.__len__

    def go_on(self):
        self.popleft()()


class Group:
    """A group of warps: its threads run as one, a greenlet."""

    def __init__(self, warps: int, flow: greenlet):
        self.threads, self.flow = WARP * warps, flow
        self.products, self.sent = Queue(), Queue()  # of the tensor cores, and of the copy engine to global memory
        self.ready = lambda: True
        self.is_done = False


class Program:
    """One program of a launch."""

    def __init__(self, name: str, ids: tuple[int, ...], grid: tuple[int, ...], warps: int):
        self.ids, self.grid, self.warps, self.random = ids, grid, warps, Random(f"{name} {ids}")
        self.copies, self.named_barriers = Queue(), {}
        self.group = Group(warps, getcurrent())
        self.groups = [self.group]
        self._draw_order()

    def _draw_order(self):
        queues = [queue for group in self.groups for queue in (group.products, group.sent)]
        agents = [*self.groups, self.copies, *queues]
        self.agents = self.random.sample(agents, len(agents))

    def wait(self, ready: Callable = lambda: True):
        """Goes on once `ready`; others may go on before."""
        self.group.ready = ready
        group = self._next()
        if group is not self.group:
            self.group = group
            group.flow.switch()

    def meet(self, number: int, threads: int, is_waited_for: bool):
        """Arrives at one of the hardware's named barriers, as each group does once before all `threads` have."""
        if number not in NAMED_BARRIERS:
            raise Fault(f"barrier {number} is not one of {NAMED_BARRIERS}")
        here = self.named_barriers.setdefault(number, SimpleNamespace(come=[], threads=threads, turns=0))
        here.threads = here.threads if here.come else threads
        here.come.append(self.group)
        come = sum(group.threads for group in here.come)
        if threads != here.threads or come > threads or here.come.count(self.group) > 1:
            raise Fault(f"barrier {number} of {here.threads} threads: {come} came, the last for {threads}")
        turn = here.turns
        if come == threads:
            here.come, here.turns = [], turn + 1
        self.wait(lambda: here.turns != turn or not is_waited_for)

    def _next(self) -> Group:
        # The group that goes on.
        while True:
            for agent in self.agents:
                if agent.ready():
                    break
            else:
                raise Fault("every group waits for what nothing brings about")
            if type(agent) is Group:
                return agent
            agent.go_on()

    def split(self, parts: list[tuple[Callable, tuple]], warps: list[int]):
        """Runs a function in a group each, the first in place of the one that calls."""
        main = self.group
        parted = [
            Group(n, greenlet(partial(self._run, *part))) for n, part in zip((self.warps, *warps), parts, strict=True)
        ]
        self.groups += parted
        self._draw_order()
        try:
            self.wait(lambda: all(group.is_done for group in parted))
        finally:
            for group in parted:  # of a program in which one failed
                if not group.flow.dead:
                    group.flow.throw(GreenletExit)
        main.ready = lambda: True

    def _run(self, function: Callable, arguments: tuple, *_of_who_ended):
        with np.errstate(all="ignore"):
            function(*arguments)
        me = self.group
        me.ready, me.is_done = lambda: False, True
        self.group = self._next()
        me.flow.parent = self.group.flow  # where it goes on once this one ends
