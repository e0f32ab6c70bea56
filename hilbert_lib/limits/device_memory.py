"""Where the count of a peak of a GPU's memory begins."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def old_objects_apart() -> Iterator[None]:
    """Inside, `begin_peak` does not go through what was there before.

    In a process that has loaded torch's compiler or a package of kernels that takes longer than timing a short call.
    What becomes garbage of the old objects inside, in cycles, is freed by a collection after it. Where somebody has set
    most objects apart before (`gc.freeze`), that stands, and nothing is added to it.

    >>> with old_objects_apart():
    ...     gc.get_freeze_count() > 0
    True
    """
    # Not any at all: from Python 3.12 on each collection sets the immortal objects apart that it meets.
    if gc.get_freeze_count() > len(gc.get_objects()):
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def begin_peak(device: torch.device) -> int:
    """Bytes that are allocated on a CUDA device, once nothing holds what earlier calls left; its peak counts from here.

    What torch.compile leaves in cycles holds a call's inputs. The thread that runs a device's backward passes holds the
    results of the last one until it is scheduled again, which a busy host delays; a backward of an empty tensor ends
    that.

    Args:
        device: a CUDA device.
    """
    gc.collect()
    with torch.inference_mode(False), torch.enable_grad():
        nothing = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(nothing * 1, nothing, nothing.detach())
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
