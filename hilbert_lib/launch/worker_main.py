"""One rank: the module that torchrun starts, on one machine by `workers.run_ranks`, on several by hand.

torchrun --nnodes 2 ... -m hilbert_lib.launch.worker_main MODULE:FUNCTION --arguments FILE --results FOLDER
"""

import faulthandler
import importlib
import json
import os
import signal
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import click
import psutil
import torch
import torch.distributed as dist

from hilbert_lib.environment import prepare_kernels
from hilbert_lib.files import write_whole

AGENT = "HILBERT_AGENT"  # environment variable with the number of the process whose end ends the ranks
IMPORTING = "HILBERT_IMPORTING"  # environment variable that is set while a rank imports its target
BEAT_SECONDS = 0.25
TELL_SECONDS = 0.5  # in which others that fail too, by the same cause, can tell: torchrun ends all once one has gone
START_SECONDS = 300.0  # in which all ranks have to be there: machines start at different times
STALL_SECONDS = 20.0
BACKENDS = ("gloo", "nccl")
# Once a collective has taken too long, torch gives its flight recorder four times 15 s before it ends the rank.
NCCL_ENDING = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}
# A rank that is still connecting to the others fails where one of them has what it needs, and leaves.
TOGETHER = {"TORCH_DIST_INIT_BARRIER": "1"}
# NCCL connects ranks when they first need each other. The host waits in there, and no timeout counts: a rank that
# stalled before would keep the others for ever. So the group of all ranks does it while they are known to be there.
NCCL_CONNECTING = {"NCCL_RUNTIME_CONNECT": "0"}  # collectives, when the group is made; `_connect` does the messages
# NCCL's kernels come while attention is under way. With its priority they would begin once all of its blocks have, on
# one rank and not on another, whose kernels then wait for the first one's and hold multiprocessors.
NCCL_PRIORITY = {"TORCH_NCCL_HIGH_PRIORITY": "1"}


@click.command()
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option(
    "--arguments",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file with the dictionary that the function is called with; without it, an empty one.",
)
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder of rank-R.json, with what the function returned on rank R or how it failed.",
)
@click.option("--backend", type=click.Choice(BACKENDS), help="By default nccl where there is a GPU, otherwise gloo.")
@click.option(
    "--stall-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=STALL_SECONDS,
    show_default=True,
    help="Longest that a rank waits for another one in a collective.",
)
def main(target: str, arguments: Path | None, results: Path, backend: str | None, stall_seconds: float) -> None:
    """Call MODULE:FUNCTION on every rank of a process group; each rank with CUDA has the GPU of its local rank.

    To be started by torchrun.
    """
    rank = int(os.environ["RANK"])
    results.mkdir(parents=True, exist_ok=True)
    result_file(results, rank).unlink(missing_ok=True)  # of a former run
    threading.Thread(target=_live, args=(beat_file(results, rank),), daemon=True).start()
    faulthandler.enable()  # a crash shows where
    faulthandler.register(signal.SIGTERM, chain=True)  # and so does a rank that is ended because of another one
    try:
        _call(target, arguments, result_file(results, rank), backend, stall_seconds)
    except (Exception, SystemExit) as error:
        # Not in the file that torchrun reads: one that its signal cuts off would be a failure of its own.
        traceback.print_exc()
        told = {"type": type(error).__name__, "message": str(error), "errno": getattr(error, "errno", None)}
        write_whole(result_file(results, rank), json.dumps({"error": told, "time": time.time()}))
        time.sleep(TELL_SECONDS)
        os._exit(1)  # an orderly end would wait for the collectives that the others still owe


def result_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves {"result": value}, or {"error": {"type", "message", "errno"}, "time": seconds}.

    >>> result_file(Path("results"), 3).name
    'rank-3.json'
    """
    return folder / f"rank-{rank}.json"


def beat_file(folder: Path, rank: int) -> Path:
    """The file with a rank's process number, which its process touches for as long as it runs.

    >>> beat_file(Path("results"), 3).name
    'rank-3.pid'
    """
    return folder / f"rank-{rank}.pid"


def _call(target: str, arguments: Path | None, results: Path, backend: str | None, stall_seconds: float) -> None:
    prepare_kernels()
    module, function = target.split(":")
    os.environ[IMPORTING] = target
    function = getattr(importlib.import_module(module), function)
    del os.environ[IMPORTING]
    order = {} if arguments is None else json.loads(arguments.read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    on_gpu, options = {}, TOGETHER
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        on_gpu = {"device_id": device}
        options = TOGETHER | NCCL_ENDING | NCCL_CONNECTING | NCCL_PRIORITY
    for name, value in options.items():
        os.environ.setdefault(name, value)
    # All meet before the group is made: from there on none may keep another one waiting.
    store, _, _ = next(dist.rendezvous("env://", rank, ranks, timeout=timedelta(seconds=START_SECONDS)))
    store.set(f"hilbert/{rank}", "")
    store.wait([f"hilbert/{each}" for each in range(ranks)], timedelta(seconds=START_SECONDS))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=stall_seconds), **on_gpu
    )
    if on_gpu:
        _connect(ranks)
    result = json.dumps({"result": function(order)})
    if on_gpu:
        torch.cuda.synchronize()  # a kernel's error is this rank's error
    dist.destroy_process_group()
    write_whole(results, result)


def _connect(ranks: int) -> None:
    # A message from every rank to every other one.
    one_each = torch.zeros(ranks, device="cuda")
    dist.all_to_all_single(torch.empty_like(one_each), one_each)
    torch.cuda.synchronize()


def _live(path: Path) -> None:
    # torchrun's ranks are sessions of their own: no signal tells them that it is gone.
    write_whole(path, str(os.getpid()))
    agent = int(os.environ.pop(AGENT, os.getppid()))  # what this rank starts has another one
    while os.getppid() == agent:
        with suppress(OSError):  # the folder is gone, or its disk
            os.utime(path, (time.time(),) * 2)  # by this machine's clock, not by a file server's
        time.sleep(BEAT_SECONDS)
    process = psutil.Process()
    for each in [*process.children(recursive=True), process]:
        with suppress(psutil.NoSuchProcess):
            each.kill()


if __name__ == "__main__":
    main()
