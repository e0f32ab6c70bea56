"""Every architecture by name, with the dtypes that it computes with; no GPU and no driver are answers, not errors."""

from types import SimpleNamespace

import pytest
import torch

from hilbert_lib import get_gpu_info
from hilbert_lib import machine as hardware
from hilbert_lib.machine import NO_GPU, gpu_info

HALF, BFLOAT = torch.float16, torch.bfloat16
FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
CASES = [  # model, capability, name of the architecture, dtypes beside float32 and float64, recommended dtype
    ("GTX 980", (5, 2), "older", set(), torch.float32),
    ("Tesla P100", (6, 0), "Pascal", {HALF}, torch.float32),
    ("GTX 1080", (6, 1), "Pascal", {HALF}, torch.float32),
    ("V100", (7, 0), "Volta", {HALF}, HALF),
    ("Xavier", (7, 2), "Volta", {HALF}, HALF),
    ("T4", (7, 5), "Turing", {HALF}, HALF),
    ("A100", (8, 0), "Ampere", {HALF, BFLOAT}, BFLOAT),
    ("RTX 3090", (8, 6), "Ampere", {HALF, BFLOAT}, BFLOAT),
    ("Orin", (8, 7), "Ampere", {HALF, BFLOAT}, BFLOAT),
    ("L4", (8, 9), "Ada", {HALF, BFLOAT, *FP8}, BFLOAT),
    ("H200", (9, 0), "Hopper", {HALF, BFLOAT, *FP8}, BFLOAT),
    ("B200", (10, 0), "Blackwell", {HALF, BFLOAT, *FP8}, BFLOAT),
    ("B300", (10, 3), "Blackwell", {HALF, BFLOAT, *FP8}, BFLOAT),
    ("Thor", (11, 0), "Blackwell", {HALF, BFLOAT, *FP8}, BFLOAT),
    ("RTX 5090", (12, 0), "Blackwell", {HALF, BFLOAT, *FP8}, BFLOAT),
    ("of the future", (13, 0), "newer", {HALF, BFLOAT, *FP8}, BFLOAT),
]


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """A torch for CUDA that sees GPUs of these capabilities; without one it has no driver."""
    hardware._seen.cache_clear()

    def see(*capabilities):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index or 0])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties(f"GPU {device.index or 0}"))

    yield see
    hardware._seen.cache_clear()


def properties(name="H200", **more):
    sizes = {"total_memory": 2**37, "multi_processor_count": 132, "L2_cache_size": 50 * 2**20}
    return SimpleNamespace(name=name, **sizes, shared_memory_per_block_optin=232448, **more)


@pytest.mark.parametrize(("model", "capability", "architecture", "dtypes", "recommended"), CASES)
def test_every_architecture_has_its_name_and_dtypes(model, capability, architecture, dtypes, recommended):
    info = gpu_info(capability, properties(model))
    assert (info.name, info.capability, info.architecture) == (model, capability, architecture)
    assert set(info.dtypes) == dtypes | {torch.float32, torch.float64}
    assert info.recommended_dtype == recommended
    assert info.recommended_dtype in info.dtypes


def test_the_table_shows_what_is_known_and_bandwidth_is_where_clock_and_width_are():
    # An H100 PCIe: HBM2e at 1593 MHz, 5120 bits, for which NVIDIA prints 2039 GB/s.
    known = gpu_info((9, 0), properties(memory_clock_rate=1593000, memory_bus_width=5120))
    assert known.bandwidth_bytes_per_s == pytest.approx(2.039e12, rel=1e-3)
    for more in ({}, {"memory_clock_rate": 0, "memory_bus_width": 5120}):
        assert gpu_info((9, 0), properties(**more)).bandwidth_bytes_per_s is None
    text = str(gpu_info((9, 0), properties(memory_clock_rate=3201000, memory_bus_width=6144)))
    for part in ("H200, Hopper 9.0", "128 GiB", "4.9 TB/s", "132 SMs", "227 KiB", "50 MiB", "recommended bfloat16"):
        assert part in text
    assert "peak" not in str(gpu_info((9, 0), properties()))
    assert "no NVIDIA GPU" in str(NO_GPU)


@pytest.mark.parametrize("build", ["CPU", "CUDA without a driver"])
def test_without_a_gpu_or_a_driver_there_is_none(monkeypatch, gpus, build):
    gpus()
    if build == "CPU":
        monkeypatch.setattr(torch.version, "cuda", None)
    assert get_gpu_info() == get_gpu_info("cuda") == get_gpu_info("cpu") == NO_GPU
    for device in ("cuda:3", 3):
        with pytest.raises(ValueError, match=r"device must be a GPU that this process sees, .* got cuda:3"):
            get_gpu_info(device)


def test_each_gpu_of_several_is_told_apart_and_one_that_is_not_there_is_refused_by_name(gpus):
    gpus((8, 0), (9, 0))
    assert [get_gpu_info(f"cuda:{index}").architecture for index in (0, 1)] == ["Ampere", "Hopper"]
    assert get_gpu_info("cuda:1").name == get_gpu_info(1).name == "GPU 1"
    assert get_gpu_info() == get_gpu_info("cuda:0")
    for device in ("cuda:2", 2):
        with pytest.raises(ValueError, match="device must be below cuda:2, got cuda:2"):
            get_gpu_info(device)
    for device in (-1, 300, True):
        with pytest.raises((ValueError, TypeError), match=f"device must be an integer from 0 to 127, got {device}"):
            get_gpu_info(device)
    with pytest.raises(ValueError, match="device must be a device that torch knows"):
        get_gpu_info("gpu")


@pytest.mark.gpu
def test_this_gpu_is_known():
    info = get_gpu_info()
    assert info.capability == torch.cuda.get_device_capability()
    assert info.architecture not in ("none", "newer")
    assert info == get_gpu_info(torch.device("cuda", torch.cuda.current_device()))
    assert info.memory_bytes > 2**30
    assert info.l2_bytes > 2**18


def test_a_gpu_is_asked_once_and_a_refusal_is_not_kept(gpus):
    gpus()
    with pytest.raises(ValueError, match="of which there is none"):
        get_gpu_info("cuda:0")
    gpus((9, 0))
    assert get_gpu_info("cuda:0") is get_gpu_info(torch.device("cuda", 0))
