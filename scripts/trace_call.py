"""The files and functions of the library that a warm call crosses, forward: what a reader has to open.

    python scripts/trace_call.py

Each call runs twice before it is traced. The calls of Triton's kernels need TRITON_INTERPRET=1 or a GPU.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

import hilbert_lib
from hilbert_lib import DilatedPattern, Neighbourhood, dilated_attention, neighbourhood_attention
from hilbert_lib.machine import kernel_mode

ROOT = Path(hilbert_lib.__file__).parent


def crossed(call: Callable[[], object]) -> list[str]:
    """The functions of the library that a call enters, each once, in the order of their first entry: "file:name"."""
    found: dict[str, None] = {}

    def enter(frame, event: str, _argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT)):
            found[f"{Path(path).relative_to(ROOT)}:{frame.f_code.co_name}"] = None

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def main() -> None:
    """Print a line a call: files, functions, and the files by name."""
    device = "cuda" if kernel_mode() == "compiled" else "cpu"
    tensors = [torch.randn(1, 64, 2, 16, device=device, requires_grad=True) for _ in range(3)]
    pattern, near = DilatedPattern((16, 64), (1, 2)), Neighbourhood((8, 8), 3)
    kernels = ["triton"] if kernel_mode() != "absent" else []
    calls = {}
    for backend in ["auto", *kernels]:
        calls[f"sequence, {backend}"] = lambda name=backend: dilated_attention(*tensors, pattern, backend=name)
        calls[f"grid, {backend}"] = lambda name=backend: neighbourhood_attention(*tensors, near, backend=name)
    for name, call in calls.items():
        for _ in range(2):
            call().sum().backward()
        functions = crossed(lambda run=call: run())
        files = sorted({function.partition(":")[0] for function in functions})
        print(f"{name}: {len(files)} files, {len(functions)} functions: {', '.join(files)}")


if __name__ == "__main__":
    main()
