"""One rank's part of a call: of one pattern, or of the patterns of a union one after the other, merged by lse."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hilbert_lib.attention.backends.parts import add_patterns, given_to_patterns, merge_patterns
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.patterns.union import Union
from hilbert_lib.ring.rank.blocks import Job
from hilbert_lib.ring.rank.exchange import Saved
from hilbert_lib.ring.rank.halo import HaloJob


class Passes(Protocol):
    """The module that computes a job: `passes` along a sequence, `halo` on a grid and of points."""

    @staticmethod
    def results(tensors: Tensors, job: object, confirm: Callable[[], None]) -> tuple[Tensor, Tensor, Saved]: ...

    @staticmethod
    def gradients(
        dout: Tensor, tensors: Tensors, out: Tensor, lse: Tensor, job: object, saved: Saved, dlse: Tensor | None = None
    ) -> Tensors: ...


def by_pattern(tensors: Tensors, request: Request) -> Iterator[tuple[Tensors, Request]]:
    """Each pattern of a call, and the tensors that it is given: of a union several."""
    if isinstance(request.pattern, Union):
        yield from given_to_patterns(tensors, request)
    else:
        yield tensors, request


@dataclass(frozen=True, eq=False)
class RankCall:
    """The work of a rank, without its tensors."""

    function: str  # which users call, as errors name it
    request: Request  # of the whole, but with the shard's padding mask
    passes: Passes
    jobs: tuple[Job | HaloJob, ...]  # one for each pattern

    def results(self, tensors: Tensors, confirm: Callable[[], None]) -> tuple[Tensor, Tensor, list[Saved]]:
        """Output, lse, and what the backward of each pattern needs of other ranks.

        `confirm` is called before anything is sent.
        """
        if len(self.jobs) == 1:
            out, lse, saved = self.passes.results(tensors, self.jobs[0], confirm)
            return out, lse, [saved]
        saved_by_pattern: list[Saved] = []

        def results() -> Iterator[tuple[Tensor, Tensor]]:
            before_sending = confirm
            for (part_tensors, _), job in zip(by_pattern(tensors, self.request), self.jobs, strict=True):
                out, lse, saved = self.passes.results(part_tensors, job, before_sending)
                before_sending = agreed_already
                saved_by_pattern.append(saved)
                yield out, lse

        out, lse = merge_patterns(results(), tensors.q.dtype)
        return out, lse, saved_by_pattern

    def gradients(
        self, dout: Tensor, tensors: Tensors, out: Tensor, lse: Tensor, dlse: Tensor | None,
        saved_by_pattern: list[Saved],
    ) -> Tensors:  # fmt: skip
        """Gradients of a rank's tensors, from those of its out and lse, if any, and what `results` returned."""
        if len(self.jobs) == 1:
            return self.passes.gradients(dout, tensors, out, lse, self.jobs[0], *saved_by_pattern, dlse)

        def gradients() -> Iterator[Tensors]:
            parts = by_pattern(tensors, self.request)
            for (part_tensors, _), job, saved in zip(parts, self.jobs, saved_by_pattern, strict=True):
                yield self.passes.gradients(dout, part_tensors, out, lse, job, saved, dlse)

        return add_patterns(gradients(), tensors)


def agreed_already() -> None:
    """The `confirm` of what is sent when all ranks agree."""
