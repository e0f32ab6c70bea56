"""The useful FLOP of a call, for torch's FlopCounterMode: as `DilatedPattern.work`, padded keys included."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from torch._ops import OpOverloadPacket

from hilbert_lib.attention.call import Call
from hilbert_lib.pattern import FLOP_BACKWARD, FLOP_FORWARD

COUNTER = "torch.utils.flop_counter"


def count_flop(forward: OpOverloadPacket, backward: OpOverloadPacket, call_of: Callable[..., Call]) -> None:
    """Have torch's counter count two operators, whose arguments but tensors and backend `call_of` reads."""

    def register(counter: ModuleType) -> None:
        @counter.register_flop_formula(forward)
        def forward_flop(q, k, v, *request, out_shape=None) -> int:
            return FLOP_FORWARD * _pair_elements(q, k, call_of(*request[:-1]))

        @counter.register_flop_formula(backward)
        def backward_flop(dout, q, k, v, out, lse, *request, out_shape=None) -> int:
            return FLOP_BACKWARD * _pair_elements(q, k, call_of(*request[:-1]))

    if COUNTER in sys.modules:
        register(sys.modules[COUNTER])
    else:  # to import it would import triton
        sys.meta_path.insert(0, _OnceLoaded(register))


def _pair_elements(q: Sequence[int], k: Sequence[int], call: Call) -> int:
    # Of the shapes of q and k.
    batch, queries, heads, head_dim = map(int, q)
    length, kv_heads = int(k[1]), int(k[2])
    if call.query_start is None and queries != length:  # a ring's block: all its queries see all its keys
        return batch * heads * queries * length * head_dim
    at = range(int(call.first_query), int(call.first_query) + queries)
    pairs = call.pattern.pairs(length, heads=heads, kv_heads=kv_heads, is_causal=call.is_causal, at=at)
    return batch * pairs * head_dim


class _OnceLoaded(MetaPathFinder):
    """Calls a function with torch's counter whenever that is loaded."""

    def __init__(self, register: Callable[[ModuleType], None]):
        self._register = register

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == COUNTER else None
        if spec is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), self._register(module))
        return spec
