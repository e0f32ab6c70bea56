"""Index tables shared by calls. They live outside CUDA-graph pools, and as long as a captured graph reads them."""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial, update_wrapper
from threading import Lock, Thread
from typing import NamedTuple, TypeVar
from weakref import WeakSet, ref

import torch

Made = TypeVar("Made")


def made_to_share(build: Callable[[], Made], device: torch.device) -> Made:
    """The result of `build`, complete, for every later call to read on any stream and in any graph.

    `torch.compile(mode="reduce-overhead")` and `torch.cuda.use_mem_pool` allocate a thread's tensors in pools of their
    own, and the first takes that memory back. So a thread of its own builds the tables for a CUDA device, and ends.

    `build` makes tensors on the device and needs no mode or setting of the calling thread. Raises RuntimeError while a
    CUDA graph is captured: only its replays would fill the tables.
    """
    if device.type != "cuda":
        return build()
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the index tables of this call are not cached: run it once, just before the CUDA graph is captured"
            )
        stream = torch.cuda.current_stream()
    results, errors = [], []

    def on_stream() -> None:
        try:
            with torch.cuda.stream(stream):
                results.append(build())
        except BaseException as error:  # raised in the thread that asked
            errors.append(error)

    # Not of an executor: those take nothing more once the main thread has ended, while others still serve.
    thread = Thread(target=on_stream)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    stream.synchronize()
    return results[0]


class CacheInfo(NamedTuple):
    """Look-ups answered and not; results kept (captured ones too), their size, and the bound on the others' size."""

    hits: int
    misses: int
    results: int
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
        self._recent: OrderedDict[Hashable, object] = OrderedDict()
        self._captured: dict[Hashable, object] = {}

    def renew_after_fork(self) -> None:
        """Free the lock in a forked child, where the thread that held it is not there, and begin anew.

        That thread may have been half-way through a change. What it left is not freed: CUDA serves no forked child.
        """
        if self._lock.locked():
            self._lock, self._left = Lock(), (self._recent, self._captured)
            self.cache_clear()

    def cache_info(self) -> CacheInfo:
        with self._lock:
            size = self._size + sum(self._size_of(*key) for key in self._captured)
            return CacheInfo(self._hits, self._misses, len(self._recent) + len(self._captured), size, self._maxsize)

    def __call__(self, *key: Hashable) -> object:
        device = key[-1]
        # Asked of CUDA's tables alone: a build of torch without CUDA cannot answer.
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            cached = self._recent.get(key)
            if cached is None:
                cached = self._captured.get(key)
            elif capturing:
                self._captured[key] = self._recent.pop(key)
                self._size -= self._size_of(*key)
            else:
                self._recent.move_to_end(key)
            self._hits, self._misses = self._hits + (cached is not None), self._misses + (cached is None)
        if cached is not None:
            return cached
        # Not under the lock: it waits for the stream, on which there may be work that waits for another thread.
        built = made_to_share(partial(self._build, *key), device)
        _note_shared(built)
        let_go = []
        with self._lock:
            if (cached := self._captured.get(key, self._recent.get(key))) is not None:  # another thread was faster
                return cached
            self._recent[key] = built
            self._size += self._size_of(*key)
            while self._size > self._maxsize and len(self._recent) > 1:
                let_go.append(self._recent.popitem(last=False))
                self._size -= self._size_of(*let_go[-1][0])
        # Not under the lock, as above. No kernel may read what is freed: the allocator knows the stream that made it.
        for device in {key[-1] for key, _ in let_go}:
            if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(device)
        return built


_shared: dict[int, ref] = {}  # the tensors of all results, by id


def is_shared(x: torch.Tensor) -> bool:
    """Whether a tensor is a result of a `GraphCache`, or a part of one: its values never change."""
    found = _shared.get(id(x))
    return found is not None and found() is x


def _note_shared(result: object) -> None:
    if isinstance(result, torch.Tensor):
        _shared[id(result)] = ref(result, partial(_forget_shared, id(result)))
    elif isinstance(result, tuple | list):
        for each in result:
            _note_shared(each)


def _forget_shared(key: int, gone: ref) -> None:
    if _shared.get(key) is gone:  # another tensor may have the number by now
        del _shared[key]


_caches: "WeakSet[GraphCache]" = WeakSet()  # every one there is


def _renew_all() -> None:
    for cache in _caches:
        cache.renew_after_fork()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_renew_all)


def cached_for_graphs(maxsize: int = 1024, size: Callable[..., int] = lambda *key: 1) -> Callable[..., GraphCache]:
    """A decorator that makes a function a `GraphCache`: of so many results, or of the size of their arguments."""
    return partial(GraphCache, maxsize=maxsize, size=size)
