"""What ranks run in the tests of the workers: one of them breaks, in every way a rank can."""

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from hilbert_lib.launch.worker_main import TELL_SECONDS

HANG_SECONDS = 600


def sum_of_ranks(arguments: dict) -> dict:
    """What a rank of a sound group knows: the sum of all ranks and of a number that it was given; and whether what it
    prints is seen while it runs: whoever sees it makes a file."""
    print(f"rank {dist.get_rank()} has begun")
    print("half a line", end="")
    total = torch.tensor([dist.get_rank() + arguments.get("start", 0)], device=device())
    dist.all_reduce(total)
    facts = {"rank": dist.get_rank(), "threads": torch.get_num_threads(), "backend": dist.get_backend()}
    return {**facts, "total": total.item(), "device": total.device.index, "is_heard": _is_heard(arguments.get("file"))}


def aborting_at_its_end(arguments: dict) -> int:
    """Its rank; Python's own end then aborts, as where a library's thread still wants the interpreter.

    Rank 0 has no result yet when torchrun learns how the last rank ended.
    """
    atexit.register(os.abort)
    pids = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    while dist.get_rank() == 0 and psutil.pid_exists(pids[-1].item()):
        time.sleep(0.05)
    time.sleep(dist.get_rank() == 0)  # in which torchrun would end this rank
    return dist.get_rank()


def _is_heard(file: str | None) -> bool:
    deadline = time.monotonic() + 300 * (file is not None and dist.get_rank() == 0)
    while time.monotonic() < deadline:
        if Path(file).exists():
            return True
        time.sleep(0.05)
    return False


def last_rank_breaks(arguments: dict) -> object:
    """The last rank does what its fault says, while the others wait for it in a collective."""
    begun()
    sys.modules["__main__"].TELL_SECONDS = arguments.get("tell_seconds", TELL_SECONDS)
    if dist.get_rank() == dist.get_world_size() - 1:
        print(f"this rank {arguments['fault']}", file=sys.stderr, flush=True)
        return FAULTS[arguments["fault"]]()
    if arguments.get("on_grid"):
        from hilbert_lib import Neighbourhood, ring_neighbourhood_attention

        x = torch.ones(1, 8, 1, 4)
        ring_neighbourhood_attention(x, x, x, Neighbourhood((8 * dist.get_world_size(),), 3))
    dist.barrier()


def all_hang(arguments: dict) -> None:
    """Every rank starts a process and hangs, each in a place of its own."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HANG_SECONDS})"], start_new_session=True)
    begun()
    time.sleep(HANG_SECONDS)


def begun() -> None:
    """Tell the test that this rank is there, by a file, and wait until all are: none is late for what follows."""
    folder = Path(os.environ["HILBERT_TEST_BEGAN"])
    (folder / str(dist.get_rank())).touch()
    while len(list(folder.iterdir())) < dist.get_world_size():
        time.sleep(0.01)


def device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def stall() -> None:
    time.sleep(HANG_SECONDS)


def raise_alone() -> None:
    raise ValueError("pattern must be the same on every rank")


FAULTS = {
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "fills the memory": lambda: torch.empty(2**52, device=device()),
    "raises": raise_alone,
    "stalls": stall,
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "ends early": lambda: os._exit(0),
    "exits": lambda: sys.exit(3),
    "returns early": lambda: "what it found",
    "returns no JSON": lambda: {1, 2},
}
