"""Starts of kernels that are gathered and not started, or counted."""

from collections.abc import Callable

from hilbert_lib.attention.triton.start import Start


def gathering(starts: list[Start]) -> Callable:
    """A function in the place of `start`: it makes tensors, and adds the starts to a list."""

    def start(make, tensors, *_options, made=(), finish=list, keep=True):
        new = [each and each.creator(tensors[0].device)() for each in made]
        starts.extend(make(*new))
        return finish(new)

    return start


def counted_launches(monkeypatch, module) -> list[int]:
    """The numbers of launches of each start that a module asks for from now on."""
    counts, start = [], module.start

    def counting(make, *given, **named):
        def making(*made):
            counts.append(len(starts := make(*made)))
            return starts

        return start(making, *given, **named)

    monkeypatch.setattr(module, "start", counting)
    return counts
