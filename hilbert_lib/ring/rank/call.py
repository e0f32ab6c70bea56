"""One rank's part of a call: of one pattern, or of the patterns of a union one after the other, merged by lse."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hilbert_lib.attention.backends.parts import add_patterns, given_to_patterns, merge_patterns
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.patterns.union import Union
from hilbert_lib.ring.rank.blocks import Job
from hilbert_lib.ring.rank.exchange import Kept
from hilbert_lib.ring.rank.halo import HaloJob


class Passes(Protocol):
    """What computes a job: `passes` along a sequence, `halo` on a grid."""

    @staticmethod
    def forward(given: Tensors, job: object, confirm: Callable[[], None]) -> tuple[Tensor, Tensor, Kept]: ...

    @staticmethod
    def backward(dout: Tensor, given: Tensors, out: Tensor, lse: Tensor, job: object, kept: Kept) -> Tensors: ...


def by_pattern(given: Tensors, request: Request) -> Iterator[tuple[Tensors, Request]]:
    """Each pattern of a call, and what it is given: of a union several."""
    if isinstance(request.pattern, Union):
        yield from given_to_patterns(given, request)
    else:
        yield given, request


@dataclass(frozen=True, eq=False)
class RankCall:
    """What a rank computes, but for its tensors."""

    function: str  # which users call, as errors name it
    request: Request  # of the whole, but with the shard's padding mask
    passes: Passes
    jobs: tuple[Job | HaloJob, ...]  # one for each pattern

    def forward(self, given: Tensors, confirm: Callable[[], None]) -> tuple[Tensor, Tensor, list[Kept]]:
        """Output, lse, and what the backward of each pattern needs of other ranks.

        `confirm` is called before anything is sent.
        """
        if len(self.jobs) == 1:
            out, lse, kept = self.passes.forward(given, self.jobs[0], confirm)
            return out, lse, [kept]
        kept_of_each: list[Kept] = []

        def results() -> Iterator[tuple[Tensor, Tensor]]:
            before_sending = confirm
            for (own, _), job in zip(by_pattern(given, self.request), self.jobs, strict=True):
                out, lse, kept = self.passes.forward(own, job, before_sending)
                before_sending = agreed_already
                kept_of_each.append(kept)
                yield out, lse

        out, lse = merge_patterns(results(), given.q.dtype)
        return out, lse, kept_of_each

    def backward(self, dout: Tensor, given: Tensors, out: Tensor, lse: Tensor, kept_of_each: list[Kept]) -> Tensors:
        """Gradients of a rank's tensors, from the gradient of its out, and what `forward` returned."""
        if len(self.jobs) == 1:
            return self.passes.backward(dout, given, out, lse, self.jobs[0], *kept_of_each)

        def gradients() -> Iterator[Tensors]:
            each = by_pattern(given, self.request)
            for (own, _), job, kept in zip(each, self.jobs, kept_of_each, strict=True):
                yield self.passes.backward(dout, own, out, lse, job, kept)

        return add_patterns(gradients(), given)


def agreed_already() -> None:
    """The `confirm` of what is sent when all ranks agree."""
