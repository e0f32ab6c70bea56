"""One rank: the module that torchrun starts, on one machine by `workers.run_ranks`, on several by hand.

torchrun --nnodes 2 ... -m hilbert_lib.launch.worker_main MODULE:FUNCTION --arguments FILE --results FOLDER
"""

import argparse
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hilbert_lib.files import write_whole
from hilbert_lib.launch.child import function_of, kill_all_below, leave, report_of
from hilbert_lib.limits.config import LONGEST_SECONDS
from hilbert_lib.machine import prepare_kernels

AGENT = "HILBERT_AGENT"  # environment variable with the number of the process whose end ends the ranks
IMPORTING = "HILBERT_IMPORTING"  # environment variable that is set while a rank imports its target
BEAT_SECONDS = 0.25
TELL_SECONDS = 0.5  # for others that fail by the same cause to report: torchrun ends all once one has gone
START_SECONDS = 300.0  # in which all ranks have to be there: machines start at different times
STALL_SECONDS = 20.0
BACKENDS = ("gloo", "nccl")
# After a collective's timeout torch would give its flight recorder four times 15 s before it ends the rank.
NCCL_ENDING = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}
# Without a barrier a rank that is done could leave while others still connect to it, and these would fail.
TOGETHER = {"TORCH_DIST_INIT_BARRIER": "1"}
# By default NCCL connects ranks when they first need each other. The host waits there without a timeout: a rank that
# stalled before would keep the others for ever. So all connect at once, while they are known to be there.
NCCL_CONNECTING = {"NCCL_RUNTIME_CONNECT": "0"}  # collectives, when the group is made; `_call` does the messages
# NCCL's kernels come while attention runs. At attention's priority they would begin after all of its blocks have begun,
# on one rank earlier than on another, whose kernels then wait for the first one's and hold multiprocessors.
NCCL_PRIORITY = {"TORCH_NCCL_HIGH_PRIORITY": "1"}


def main() -> None:
    """Call MODULE:FUNCTION on every rank of a process group; each rank with CUDA has the GPU of its local rank."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}" if __spec__ else None,
        description=main.__doc__,
        epilog="To be started by torchrun.",
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="MODULE:FUNCTION")
    text = "JSON file with the dictionary that the function is called with; without it, an empty one."
    parser.add_argument("--arguments", type=Path, help=text)
    text = "Folder of rank-R.json, with what the function returned on rank R or how it failed."
    parser.add_argument("--results", type=Path, required=True, help=text)
    text = "By default nccl where there is a GPU, otherwise gloo."
    parser.add_argument("--backend", choices=BACKENDS, help=text)
    text = "Longest that a rank waits for another one in a collective; by default %(default)s."
    parser.add_argument("--stall-seconds", type=float, default=STALL_SECONDS, help=text)
    parsed = parser.parse_args()
    if parsed.arguments is not None and not (os.path.isfile(parsed.arguments) and os.access(parsed.arguments, os.R_OK)):
        parser.error(f"--arguments must be a file that can be read, got {parsed.arguments}")
    if parsed.results.exists() and not parsed.results.is_dir():
        parser.error(f"--results must be a folder, got {parsed.results}")
    if not 0 < parsed.stall_seconds <= LONGEST_SECONDS:
        parser.error(f"--stall-seconds must be above 0 and at most {LONGEST_SECONDS:g}, got {parsed.stall_seconds:g}")
    results = parsed.results
    rank = int(os.environ["RANK"])
    results.mkdir(parents=True, exist_ok=True)
    result_file(results, rank).unlink(missing_ok=True)  # of a former run
    threading.Thread(target=_live, args=(beat_file(results, rank),), daemon=True).start()
    faulthandler.enable()  # a crash shows where
    faulthandler.register(signal.SIGTERM, chain=True)  # and so does a rank ended because of another one
    try:
        _call(parsed, result_file(results, rank))
    except (Exception, SystemExit) as error:
        # Not in torchrun's own error file: torchrun fails where its signal cuts one off.
        traceback.print_exc()
        write_whole(result_file(results, rank), json.dumps(report_of(error) | {"time": time.monotonic()}))
        time.sleep(TELL_SECONDS)
        os._exit(1)  # an orderly end would wait for the collectives that the others still owe


def result_file(folder: Path, rank: int) -> Path:
    """The file of a rank: {"result": value}, or {"error": {"type", "message", "errno"}, "time": seconds}."""
    return folder / f"rank-{rank}.json"


def beat_file(folder: Path, rank: int) -> Path:
    """The file with a rank's process number, which its process touches for as long as it runs."""
    return folder / f"rank-{rank}.pid"


def _call(parsed: argparse.Namespace, path: Path) -> None:
    prepare_kernels()
    os.environ[IMPORTING] = parsed.target
    function = function_of(parsed.target)
    del os.environ[IMPORTING]
    order = {} if parsed.arguments is None else json.loads(parsed.arguments.read_text(encoding="utf-8"))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = parsed.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    on_gpu, options = {}, TOGETHER
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        on_gpu = {"device_id": device}
        options = TOGETHER | NCCL_ENDING | NCCL_CONNECTING | NCCL_PRIORITY
    for name, value in options.items():
        os.environ.setdefault(name, value)
    # All meet before the group is made: its timeout, which may be shorter, is for ranks that are there.
    store, _, _ = next(dist.rendezvous("env://", rank, ranks, timeout=timedelta(seconds=START_SECONDS)))
    store.set(f"hilbert/{rank}", "")
    store.wait([f"hilbert/{peer}" for peer in range(ranks)], timedelta(seconds=START_SECONDS))
    timeout = timedelta(seconds=parsed.stall_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout, **on_gpu)
    if on_gpu:  # a message from every rank to every other one
        one_each = torch.zeros(ranks, device="cuda")
        dist.all_to_all_single(torch.empty_like(one_each), one_each)
        torch.cuda.synchronize()
    result = json.dumps({"result": function(order)})
    if on_gpu:
        torch.cuda.synchronize()  # a kernel's error is this rank's error
        gc.collect()  # NCCL ends once all CUDA graphs with its kernels are freed, those in a circle of references too
    dist.destroy_process_group()
    write_whole(path, result)


def _beat(path: Path) -> None:
    # By this machine's clock, not by a file server's, and by one that nobody sets.
    os.utime(path, (time.monotonic(),) * 2)


def _live(path: Path) -> None:
    # A rank has a session of its own: no signal comes when torchrun is gone.
    draft = path.with_suffix(".new")
    draft.write_text(str(os.getpid()), encoding="utf-8")
    _beat(draft)  # before the file has its name: the time of its making is the system's
    draft.replace(path)
    agent = int(os.environ.pop(AGENT, os.getppid()))  # what this rank starts has another one
    while os.getppid() == agent:
        with suppress(OSError):  # the folder is gone, or its disk
            _beat(path)
        time.sleep(BEAT_SECONDS)
    kill_all_below()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Aborted!")
    leave()
