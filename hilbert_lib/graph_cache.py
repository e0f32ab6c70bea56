"""Tables that calls share: in memory of no graph and no pool, and kept for the CUDA graphs that captured them."""

from collections.abc import Callable
from functools import lru_cache, wraps
from threading import Thread
from typing import TypeVar

import torch

Made = TypeVar("Made")


def made_to_share(build: Callable[[], Made], device: torch.device) -> Made:
    """What `build` returns, complete and for every later call to read, on any stream and in any graph.

    `torch.compile(mode="reduce-overhead")` and `torch.cuda.use_mem_pool` give what a thread allocates memory of a pool
    of theirs, and the first takes it back. So tables for a CUDA device are built in a thread that lives no longer.

    `build` makes tensors on the device and needs no mode or setting of the calling thread. Raises RuntimeError while a
    CUDA graph is captured: only its replays would fill the tables.
    """
    if device.type != "cuda":
        return build()
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a call must have run once before a CUDA graph captures it, and not too many others since: its tables "
                "are not there"
            )
        stream = torch.cuda.current_stream()
    made, errors = [], []

    def on_stream() -> None:
        try:
            with torch.cuda.stream(stream):
                made.append(build())
        except BaseException as error:  # raised in the thread that asked
            errors.append(error)

    # Not of an executor: those take nothing more once the main thread has ended, while others still serve.
    thread = Thread(target=on_stream)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    stream.synchronize()
    return made[0]


def wait_for_readers(device: torch.device) -> None:
    """Wait until no kernel reads what will be freed: the allocator knows only the stream that made it."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)


def cached_for_graphs(maxsize: int = 1024) -> Callable[[Callable], Callable]:
    """A decorator: the function keeps its last results, and for good those that it gave to a CUDA graph's capture.

    The function makes tensors on the device that is its last argument.
    """

    def decorated(build: Callable) -> Callable:
        devices, captured = set(), {}

        @lru_cache(maxsize)
        def found(*arguments):
            if found.cache_info().currsize == maxsize:  # one is let go of
                for device in devices:
                    wait_for_readers(device)
            devices.add(arguments[-1])
            return made_to_share(lambda: build(*arguments), arguments[-1])

        @wraps(build)
        def call(*arguments):
            result = found(*arguments)
            # Asked where there are CUDA's tables alone: a build of torch without CUDA cannot answer.
            if arguments[-1].type == "cuda" and torch.cuda.is_current_stream_capturing():
                captured.setdefault(id(result), result)
            return result

        call.cache_info, call.cache_clear = found.cache_info, found.cache_clear
        return call

    return decorated
