"""Whatever a measured side does on a GPU, it is recorded with its cause, and the GPU has its memory back."""

import pytest
import torch
from own_processes import PATIENCE, let_time_pass_when, wait_for

from hilbert_lib.lab.guarded.cases import Benchmark
from hilbert_lib.lab.guarded.runner import SafeBenchmarkRunner
from hilbert_lib.limits.config import SafetyConfig
from hilbert_lib.limits.estimate import MemoryEstimate
from hilbert_lib.limits.memory import GB
from hilbert_lib.limits.watch import _Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

BREAKING = Benchmark("gpu_sides:measure")
NEAR_BYTES = 64 * 2**20


@pytest.fixture
def gpu(nothing_is_left):
    """What NVML tells of the GPU. In the end the memory is free that was free before."""
    torch.ones(1, device="cuda")  # this process's own context is there before and after
    torch.cuda.empty_cache()
    gpu = _Gpu(torch.device("cuda", 0))
    before = gpu.look()[0].available
    yield gpu
    # Once a process is gone, the driver takes its memory in.
    wait_for(lambda: gpu.look()[0].available >= before - NEAR_BYTES)


def run(side, **limits):
    """The outcome of a side that is alone in its point, and how its process ended."""
    (line,) = SafeBenchmarkRunner(benchmark=BREAKING, config=SafetyConfig(**limits), device="cuda:0").run(
        [{"sides": [side]}]
    )
    (attempt,) = line["attempts"]
    assert attempt["left"] == ()
    return line["outcomes"][side], attempt


@pytest.mark.parametrize(
    ("side", "status", "words"),
    [
        ("accesses illegally", "CUDA error", "an illegal memory access was encountered"),
        ("takes more than there is", "out of memory", "OutOfMemoryError: CUDA out of memory. Tried to allocate"),
        ("holds and is killed", "killed", "by SIGKILL"),
        ("hangs in a kernel", "timed out", f"longer than {PATIENCE:g} s"),
    ],
)
def test_a_fault_is_recorded_with_its_cause_and_gives_its_memory_back(gpu, monkeypatch, side, status, words):
    is_hanging, look, looks = status == "timed out", _Gpu.look, []
    available = gpu.look()[0].available  # this process may hold some of the GPU's memory

    def noted(own):
        memory, temperature = look(own)
        looks.append(available - memory.available > 10 * GB)
        return memory, temperature

    if is_hanging:  # the limit is passed once the watch has seen what the side holds
        monkeypatch.setattr(_Gpu, "look", noted)
        let_time_pass_when(lambda: sum(looks) > 1, monkeypatch)
    outcome, attempt = run(side, max_seconds=PATIENCE)
    assert (outcome["status"], outcome["paired"]) == (status, False)
    assert words in outcome["cause"]
    assert any(text.endswith("bytes held") for text in attempt["output"])
    assert ("the kernel was started" in attempt["output"]) == is_hanging
    if is_hanging:
        assert attempt["peaks"]["gpu_bytes"] > 10 * GB


def test_more_than_its_share_of_the_gpu_is_refused(gpu):
    memory, _ = gpu.look()
    assert memory.available > memory.total // 2
    outcome, _ = run("takes a quarter", max_memory_share=0.2)
    assert outcome["status"] == "out of memory", outcome["cause"]
    outcome, _ = run("takes a quarter", max_memory_share=0.9)
    assert outcome["status"] == "ok", outcome["cause"]


def test_what_this_process_keeps_for_later_is_given_to_a_points_process(gpu):
    kept = torch.cuda.memory_reserved()  # other tests' tables may hold blocks, which cannot be given back
    torch.empty(kept + 4 * GB, dtype=torch.uint8, device="cuda")  # more than any of them: a block of its own
    assert torch.cuda.memory_reserved() >= 2 * kept + 4 * GB
    free, total = torch.cuda.mem_get_info()
    too_much_now = int(free - 0.1 * total) + kept + 3 * GB
    point = Benchmark(BREAKING.target, estimate=lambda *_: MemoryEstimate({}, too_much_now, 0, 0))
    config = SafetyConfig(max_memory_share=0.9)
    assert not SafeBenchmarkRunner(benchmark=point, config=config, device="cuda:0").why_not({"sides": ["good"]})
    assert torch.cuda.memory_reserved() <= kept
