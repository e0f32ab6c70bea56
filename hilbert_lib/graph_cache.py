"""Tables that calls share: in memory of no graph and no pool, and kept for the CUDA graphs that captured them."""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial, update_wrapper
from threading import Lock, Thread
from typing import NamedTuple, TypeVar
from weakref import WeakSet

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


class CacheInfo(NamedTuple):
    """Look-ups answered and not, results held (captured ones too), their size and the bound of what is not captured."""

    hits: int
    misses: int
    held: int
    size: int
    maxsize: int


class GraphCache:
    """A function that keeps its last results up to a total size; the newest stays even if it alone is larger.

    Results asked for while a CUDA graph is captured stay too, beyond that size: the graph holds addresses alone. The
    function makes tensors on the device that is its last argument.
    """

    def __init__(self, build: Callable, maxsize: int, size: Callable[..., int]):
        update_wrapper(self, build)
        self._build, self._maxsize, self._size_of = build, maxsize, size
        self._lock = Lock()  # autograd runs backward passes in threads of its own
        self.cache_clear()
        _caches.add(self)

    def cache_clear(self) -> None:
        self._hits = self._misses = self._size = 0
        self._held: OrderedDict[Hashable, object] = OrderedDict()
        self._captured: dict[Hashable, object] = {}

    def renew_after_fork(self) -> None:
        """In a forked child, free the lock that a thread held which is not there, and begin anew.

        That thread may have been half-way through a change. What it left is not freed: CUDA serves no forked child.
        """
        if self._lock.locked():
            self._lock, self._left = Lock(), (self._held, self._captured)
            self.cache_clear()

    def cache_info(self) -> CacheInfo:
        with self._lock:
            size = self._size + sum(self._size_of(*key) for key in self._captured)
            return CacheInfo(self._hits, self._misses, len(self._held) + len(self._captured), size, self._maxsize)

    def __call__(self, *key: Hashable) -> object:
        device = key[-1]
        # Asked of CUDA's tables alone: a build of torch without CUDA cannot answer.
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            found = self._held.get(key)
            if found is None:
                found = self._captured.get(key)
            elif capturing:
                self._captured[key] = self._held.pop(key)
                self._size -= self._size_of(*key)
            else:
                self._held.move_to_end(key)
            self._hits, self._misses = self._hits + (found is not None), self._misses + (found is None)
        if found is not None:
            return found
        # Not under the lock: it waits for the stream, on which there may be work that waits for another thread.
        made = made_to_share(partial(self._build, *key), device)
        let_go = []
        with self._lock:
            if (found := self._captured.get(key, self._held.get(key))) is not None:  # another thread was faster
                return found
            self._held[key] = made
            self._size += self._size_of(*key)
            while self._size > self._maxsize and len(self._held) > 1:
                let_go.append(self._held.popitem(last=False))
                self._size -= self._size_of(*let_go[-1][0])
        # Not under the lock, as above. No kernel may read what is freed: the allocator knows the stream that made it.
        for device in {key[-1] for key, _ in let_go}:
            if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(device)
        return made


_caches: "WeakSet[GraphCache]" = WeakSet()  # every one there is: these are all locks of the library


def _renew_all() -> None:
    for cache in _caches:
        cache.renew_after_fork()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_renew_all)


def cached_for_graphs(maxsize: int = 1024, size: Callable[..., int] = lambda *key: 1) -> Callable[..., GraphCache]:
    """A decorator that makes a function a `GraphCache`: of so many results, or of the size of their arguments."""
    return partial(GraphCache, maxsize=maxsize, size=size)
