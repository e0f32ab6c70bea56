"""Tables that a CUDA graph reads: it holds their addresses alone."""

from collections.abc import Callable
from functools import lru_cache, wraps

import torch


def cached_for_graphs(build: Callable) -> Callable:
    """A function that keeps its last 1,024 results, and those for good that it gave while a CUDA graph was captured.

    Args:
        build: makes tensors on the device that is its last argument.

    >>> cached = cached_for_graphs(lambda size, device: torch.zeros(size, device=device))
    >>> cached(2, torch.device("cpu")) is cached(2, torch.device("cpu"))
    True
    """
    found, captured = lru_cache(maxsize=1024)(build), {}

    @wraps(build)
    def call(*arguments):
        result = found(*arguments)
        # Asked where there are CUDA's tables alone: a build of torch without CUDA cannot answer.
        if arguments[-1].type == "cuda" and torch.cuda.is_current_stream_capturing():
            captured.setdefault(id(result), result)
        return result

    call.cache_info = found.cache_info
    return call
