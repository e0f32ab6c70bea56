"""Ranks that a notebook starts are copies of torchrun's process, as those of tests: see `forked_ranks`."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

# What ranks that measure load besides torch.
LOADED = ("hilbert_lib.lab.sweeps.ring", "torch.fx.experimental.symbolic_shapes")


class CopyingRanks:
    """A finder of the module that starts ranks, which is changed once it is loaded."""

    def find_spec(self, name: str, _path, _target=None) -> ModuleSpec | None:
        if name != "hilbert_lib.launch.workers":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            sys.path.append(str(Path(__file__).parents[1]))
            import pytest
            from forked_ranks import fork_ranks

            fork_ranks(pytest.MonkeyPatch(), LOADED)

        spec.loader.exec_module = load_and_change
        return spec
