"""Sides that break on a GPU in every way a benchmark can, for tests of the runner."""

import os
import signal
from collections.abc import Iterator

import torch

HELD_BYTES = 10 * 2**30
HELD = []


def measure(point: dict) -> Iterator[dict]:
    """The only side of a point; its name is what it does."""
    (side,) = point["sides"]
    SIDES[side]()
    yield {"name": side}


def hold() -> None:
    HELD.append(torch.ones(HELD_BYTES, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    print(f"{HELD_BYTES} bytes held", flush=True)


def access_illegally() -> None:
    hold()
    nobodys = torch._C._construct_storage_from_data_pointer(16, HELD[0].device, 2**20)
    torch.empty(0, dtype=torch.uint8, device="cuda").set_(nobodys).fill_(1)
    torch.cuda.synchronize()


def take_more_than_there_is() -> None:
    hold()
    torch.cuda.set_per_process_memory_fraction(1.0)  # the driver itself refuses, and not torch before it is asked
    all_but_contexts = torch.cuda.mem_get_info()[1] - HELD_BYTES - 2**22
    torch.empty(all_but_contexts, dtype=torch.uint8, device="cuda")


def take_a_quarter() -> None:
    torch.empty(torch.cuda.mem_get_info()[1] // 4, dtype=torch.uint8, device="cuda")


def hang_in_a_kernel() -> None:
    hold()
    torch.cuda._sleep(2**50)  # cycles: days
    print("the kernel was started", flush=True)
    torch.cuda.synchronize()


def hold_and_be_killed() -> None:
    hold()
    os.kill(os.getpid(), signal.SIGKILL)


SIDES = {
    "good": lambda: None,
    "accesses illegally": access_illegally,
    "takes more than there is": take_more_than_there_is,
    "takes a quarter": take_a_quarter,
    "hangs in a kernel": hang_in_a_kernel,
    "holds and is killed": hold_and_be_killed,
}
