"""Where the count of a peak of a GPU's memory begins."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def old_objects_apart() -> Iterator[None]:
    """Inside, garbage collections skip objects that were made before: with torch's compiler loaded, one collection of
    all takes longer than a short call. Cycles of older objects are freed by a later collection.

    Objects that somebody has frozen before (`gc.freeze`) stay so, and none are added.
    """
    # More than half of them: from Python 3.12 on each collection freezes the immortal objects that it meets.
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
    """Free what earlier calls left on a CUDA device, reset its peak, and return the bytes still allocated."""
    gc.collect()  # what torch.compile leaves in cycles holds a call's inputs
    # The thread that runs a device's backward passes holds the results of the last one until it is scheduled again,
    # which a busy host delays; a backward of an empty tensor ends that.
    with torch.inference_mode(False), torch.enable_grad():
        nothing = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(nothing * 1, nothing, nothing.detach())
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
