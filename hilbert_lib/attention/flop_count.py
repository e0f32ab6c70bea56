"""The useful FLOP of a call, for torch's FlopCounterMode, padded keys included."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from hilbert_lib.patterns.dilated import FLOP_BACKWARD, FLOP_FORWARD

COUNTER = "torch.utils.flop_counter"
_FORMULAS: list[Callable[[ModuleType], None]] = []  # of each pair of operators


def count_flop(forward: Callable, backward: Callable, inputs: int, elements: Callable[[tuple, tuple], int]) -> None:
    """Have torch's counter count two operators.

    inputs: how many tensors have gradients. elements: of their shapes and of the other arguments as they are, the pairs
    of a query and a key that attend, times head_dim.
    """

    def register(counter: ModuleType) -> None:
        def shapes(arguments: tuple) -> tuple:
            return tuple(None if x is None else x.shape for x in arguments[:inputs])

        @counter.register_flop_formula(forward, get_raw=True)
        def forward_flop(*arguments, out_val=None) -> int:
            return FLOP_FORWARD * elements(shapes(arguments), arguments[inputs:])

        @counter.register_flop_formula(backward, get_raw=True)
        def backward_flop(_dout, *arguments, out_val=None) -> int:
            return FLOP_BACKWARD * elements(shapes(arguments), arguments[inputs + 3 :])  # without out, lse and dlse

    _FORMULAS.append(register)
    if COUNTER in sys.modules:
        register(sys.modules[COUNTER])
    elif not any(isinstance(finder, _OnceLoaded) for finder in sys.meta_path):  # to import it would import triton
        sys.meta_path.insert(0, _OnceLoaded())


class _OnceLoaded(MetaPathFinder):
    """Registers all formulas with torch's counter whenever its module is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == COUNTER else None
        if spec is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), [tell(module) for tell in _FORMULAS])
        return spec
