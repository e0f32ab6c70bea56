"""FlexAttention, compiled, with a backward that may run again: `retain_graph` as for every operator."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import flex_attention

COMPILATIONS = 64  # one for each pattern and shape; torch's own limit of 8 ends a sweep with an error


def compiled_flex_attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor | tuple:
    """What `torch.nn.attention.flex_attention.flex_attention` returns, compiled for the shape and the options.

    Args:
        q, k, v: (batch, heads, seq, head_dim), on a CUDA device.
        **options: as flex_attention takes them.
    """
    with torch._dynamo.config.patch(recompile_limit=COMPILATIONS):
        return run_to_keep(_compiled(), q, k, v, **options)


def run_to_keep(run: Callable, *arguments, **options) -> Tensor | tuple:
    """What a compiled function returns, whose backward takes over none of the forward's buffers and so may run again.

    Args:
        run: of `torch.compile`; it returns a tensor, or a tuple that begins with one.
        *arguments, **options: its own.
    """
    with functorch_config.patch(donated_buffer=False):
        results = run(*arguments, **options)
    out = results if isinstance(results, Tensor) else results[0]
    node = out.grad_fn
    while node is not None and node.name() != "CompiledFunctionBackward":  # a view of what the compiled code returned
        node = node.next_functions[0][0] if node.next_functions else None
    if node is not None:
        # In torch 2.11 to 2.13 the indices of what a backward takes over are None where nobody looked for any, and a
        # backward that is to run again is refused unless they are the empty list.
        node._forward_cls.metadata.bw_donated_idxs = []
    return results


@cache
def _compiled() -> Callable:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
