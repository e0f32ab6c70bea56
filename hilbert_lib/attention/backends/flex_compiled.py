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
    # The backward is compiled here, where these settings hold, and not by autograd's thread when it first runs. The
    # tag keeps it apart from one of the same code that does take buffers over: inductor's cache knows them as one.
    # Autograd's cache cannot keep code that holds tensors, like a mask's, and would warn of that; whoever keeps the
    # warning keeps a call's tensors with it.
    kept = functorch_config.patch(
        donated_buffer=False, force_non_lazy_backward_lowering=True, enable_autograd_cache=False
    )
    tag = torch.compiler.config.patch(cache_key_tag=f"{torch.compiler.config.cache_key_tag}, buffers kept")
    with kept, tag:
        results = run(*arguments, **options)
    given = [x.grad_fn for x in arguments if isinstance(x, Tensor)]
    node = (results if isinstance(results, Tensor) else results[0]).grad_fn
    while node is not None and node not in given:
        if node.name() == "CompiledFunctionBackward":
            # In torch 2.11 to 2.13 the indices of what a backward takes over are None where nobody looked for any, and
            # a backward that is to run again is refused unless they are the empty list.
            node._forward_cls.metadata.bw_donated_idxs = []
            break
        node = node.next_functions[0][0] if node.next_functions else None  # a view of what the code returned
    return results


@cache
def _compiled() -> Callable:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
