"""What all tests share."""

import os
import tempfile

import pytest
import torch

from hilbert_lib.environment import prepare_kernels

prepare_kernels()  # before anything imports triton: without a GPU its kernels are interpreted
os.environ["HILBERT_CACHE"] = tempfile.mkdtemp()  # what this machine remembers of backends changes no test
torch.set_num_threads(1)  # small tensors gain nothing from more, and lose much where the cores are busy


def pytest_make_parametrize_id(val):
    # The same in every process that collects the tests.
    return " ".join(sorted(map(str, val))) if isinstance(val, set | frozenset) else None


def pytest_collection_modifyitems(items):
    for item in items:
        for marker, gpus in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker) and torch.cuda.device_count() < gpus:
                item.add_marker(pytest.mark.skip(reason=f"needs {gpus} CUDA device(s)"))
