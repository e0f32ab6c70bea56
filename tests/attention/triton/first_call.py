"""A first and a second call of the fused kernels on a driver that starts nothing: what is compiled, and when.

The arguments are head_dim and "causal" or "whole". A process of its own, and without a GPU, as `compile_kernels.py`:
tensors are on the CPU, and the driver says that there is an H100.
"""

import gc
import json
import sys
import tempfile
import time
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from hilbert_lib import DilatedPattern
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton import launch

PATTERN = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))  # of the reference work
compiled, begun, devices, collecting, loading, loaded_at_once = [], [], [], [], [], []


class Launcher:
    """Notes that a kernel is started, and how many launchers are loaded at one time."""

    launch_cooperative_grid = False

    def __init__(self, src, metadata):
        self.name = src.fn.__name__
        loading.append(self.name)
        loaded_at_once.append(len(loading))
        time.sleep(0.1)  # in which another thread would begin
        loading.remove(self.name)

    def __call__(self, *_):
        begun.append((self.name, time.perf_counter()))


class Driver:
    """What Triton asks of a driver before it starts a kernel."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda _device: {"max_shared_mem": 227 * 1024, "warpSize": 32},
        load_binary=lambda *_: (None, 0, 0, 0, 1024),
    )

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def noted(compile_kernel):
    """Notes when each kernel is compiled."""

    def run(src, *args, **options):
        collecting.append(gc.isenabled())
        start = time.perf_counter()
        kernel = compile_kernel(src, *args, **options)
        compiled.append((src.fn.__name__, start, time.perf_counter()))
        return kernel

    return run


def told(run) -> dict:
    """What a run compiles and starts; and how many kernels are compiled at one time, at most."""
    compiled.clear()
    begun.clear()
    run()
    return {
        "compiled": sorted(name for name, *_ in compiled),
        "at once": max((sum(a <= begin < b for _, a, b in compiled) for _, begin, _ in compiled), default=0),
        "before any starts": all(end < begun[0][1] for *_, end in compiled),
        "started": [name for name, _ in begun],
    }


if __name__ == "__main__":
    head_dim, causal = int(sys.argv[1]), sys.argv[2] == "causal"
    triton.knobs.cache.dir = tempfile.mkdtemp()
    triton.runtime.driver.set_active(Driver())
    triton.compiler.compile = noted(triton.compiler.compile)
    torch.cuda.set_device = lambda device: devices.append(str(device))
    q, k, v, dout = torch.zeros(4, 1, 65536, 16, head_dim, dtype=torch.bfloat16)
    call = Request(PATTERN, is_causal=causal, scale=1.0)
    out, lse = torch.empty_like(q), torch.empty(1, 16, 65536)
    runs = {
        "forward": lambda: launch.forward_on_hopper(Tensors(q, k, v), call),
        "backward": lambda: launch.backward_on_hopper(dout, Tensors(q, k, v), out, lse, call),
    }
    found = {f"{number} {name}": told(run) for number in ("first", "second") for name, run in runs.items()}
    found["devices"] = sorted(set(devices))
    found["collected"] = {"inside": any(collecting), "after": gc.isenabled()}
    found["loaded at once"] = max(loaded_at_once)
    print(json.dumps(found))
