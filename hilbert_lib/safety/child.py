"""The process of one point: takes one line of JSON that says what to run, and writes a line for each record.

It is run as a script by `isolated`, and imports nothing but Python's own library: what imports torch, and waits for it,
is the target.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path


def main() -> None:
    # The pipe belongs to the records alone: whatever else is printed goes to standard error.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.enable(all_threads=False)  # a crash shows where
    faulthandler.dump_traceback_later(order["seconds"])  # and so does a hang, shortly before it is ended
    _be_the_first_to_go()
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        module, function = order["target"].split(":")
        target = getattr(importlib.import_module(module), function)
        _limit_memory(order["host_bytes"], order["gpu_share"], order["device"])
        for record in target(*order["arguments"]) or ():
            print(json.dumps({"record": record}), file=results, flush=True)
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_AS, before)  # reporting takes memory too
        traceback.print_exc()
        told = {"type": type(error).__name__, "message": str(error), "errno": getattr(error, "errno", None)}
        print(json.dumps({"error": told}), file=results, flush=True)
        sys.exit(1)


def _end_with_parent() -> None:
    # The parent keeps this pipe open for as long as it lives; if it is killed, nothing stays behind.
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


def _be_the_first_to_go() -> None:
    # Where the kernel runs out of memory it shall end this process and not its parent; and no core dump fills the disk.
    with contextlib.suppress(OSError):  # not Linux, or /proc is read-only: then the kernel chooses
        Path("/proc/self/oom_score_adj").write_text("1000")
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_memory(host_bytes: int | None, gpu_share: float | None, device: str) -> None:
    """Address space for so many bytes beyond what is in use, and a share of the GPU's memory; None is no limit."""
    import resource

    if host_bytes is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits = [pages * resource.getpagesize() + host_bytes, *resource.getrlimit(resource.RLIMIT_AS)]
        soft = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (soft, limits[2]))
    if gpu_share is not None:
        import torch

        # torch takes a device with an index alone here; one without is the child's first.
        torch.cuda.set_per_process_memory_fraction(gpu_share, torch.device(device).index or 0)


if __name__ == "__main__":
    main()
