"""What is free, what fits, and what a call took."""

import gc
import os
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hilbert_lib.lab.guarded.cases import Benchmark
from hilbert_lib.lab.guarded.runner import SafeBenchmarkRunner
from hilbert_lib.limits import memory
from hilbert_lib.limits.config import SafetyConfig
from hilbert_lib.limits.memory import GB, Memory, MemorySafetyChecker, gpu_memory, host_memory, measure_peak

CONFIG = SafetyConfig(max_memory_share=0.8, min_free_gpu_gb=2, min_free_host_gb=3)


@pytest.fixture
def machine(monkeypatch):
    """Sets what is available, in GB: (total, available) of the host and of the GPU."""

    def set_to(host=(100, 90), gpu=(80, 70)):
        monkeypatch.setattr(memory, "host_memory", lambda: Memory("host", host[0] * GB, host[1] * GB))
        monkeypatch.setattr(memory, "gpu_memory", lambda device, **_: Memory(str(device), gpu[0] * GB, gpu[1] * GB))

    return set_to


@pytest.mark.parametrize(
    ("host", "most", "limit"),
    [  # by the share, by the share of what others left, by the rest
        ((100, 90), 70, "80 % of the 100.0 GB of host"),
        ((100, 30), 10, "80 % of the 100.0 GB of host"),
        ((8, 8), 5, "3.0 GB of host must stay free"),
    ],
)
def test_what_fits_is_decided_by_the_limit_that_binds_and_the_reason_names_it(machine, host, most, limit):
    machine(host=host)
    checker = MemorySafetyChecker(CONFIG, "cpu")
    assert checker.check_memory_available(most - 0.01)[0]
    fits, reason = checker.check_memory_available(most + 0.01)
    assert not fits
    for words in (f"{most}.010 GB required", f"{host[1]}.0 GB of host available", limit):
        assert words in reason


def test_on_a_gpu_its_own_memory_counts_and_the_hosts_has_to_stay_free(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    checker = MemorySafetyChecker(CONFIG, "cuda:0")
    machine(gpu=(80, 70))
    assert checker.check_memory_available(50)[0]
    for gb, host, words in ((60, (100, 90), "cuda:0"), (1, (100, 2), "of host")):
        machine(host=host)
        fits, reason = checker.check_memory_available(gb)
        assert not fits
        assert words in reason


def test_what_must_stay_free_of_a_gpu_is_another_limit_than_of_the_host(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = SafetyConfig(max_memory_share=1, min_free_gpu_gb=2, min_free_host_gb=3)
    machine(gpu=(80, 10), host=(100, 9))
    assert MemorySafetyChecker(config, "cuda:0").room() == 8 * GB
    assert MemorySafetyChecker(config, "cpu").room() == 6 * GB
    for host, words in (((100, 9), "2.0 GB of cuda:0 must stay free"), ((100, 2), "3.0 GB of host must stay free")):
        machine(gpu=(80, 10), host=host)
        fits, reason = MemorySafetyChecker(config, "cuda:0").check_memory_available(8 if "host" in words else 8.5)
        assert not fits
        assert words in reason


def test_what_torch_caches_is_there_for_this_process_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GB)
    config = SafetyConfig(max_memory_share=1, min_free_gpu_gb=0, min_free_host_gb=0)
    own, child = (MemorySafetyChecker(config, "cuda:0", for_child=value) for value in (False, True))
    assert (own.room(), child.room()) == (60 * GB, 20 * GB)
    assert not child.check_memory_available(21)[0]
    benchmark = Benchmark("builtins:list", inputs=lambda _: 21 * GB)
    runner = SafeBenchmarkRunner(benchmark=benchmark, config=config, device="cuda:0")
    assert runner.why_not({"sides": ["any"]})["any"]["status"] == "not tried"


def in_container(monkeypatch, folder, own, files=()):
    """A machine of 64 GB, 60 of them free, whose /proc/self/cgroup says `own`; files of cgroups below the folder."""
    (folder / "own").write_bytes(own)
    for name, content in dict(files).items():
        path = folder / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if content is None else path.write_bytes(content)
    monkeypatch.setattr(memory, "CGROUPS", folder)
    monkeypatch.setattr(memory, "OWN_CGROUPS", folder / "own")
    machine = SimpleNamespace(total=64 * GB, available=60 * GB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)


USED, GB_8 = b"%d\n" % (5 * GB), b"%d\n" % (8 * GB)
ONE = {b"memory.current": USED}
# Pages of files are given back at need; as version 2 of cgroups says it, and version 1.
FREED = {b"memory.max": GB_8, **ONE, b"memory.stat": b"anon 1\ninactive_file %d\n" % GB}
FREED_1 = {b"memory.limit_in_bytes": GB_8, b"memory.usage_in_bytes": USED}
FREED_1[b"memory.stat"] = b"anon 1\ntotal_inactive_file %d\n" % GB
NO_LIMIT = (b"", b"max", b"-1\n", b"8G\n", b"1e9", b"9" * 5000, b"\xff", None)  # None is a folder
NO_GROUP = (b"", b"\n", b"nothing", b"0:", b"1:cpu", b"4:memory:/", b"\xff\x00")
OTHERS = [  # what /proc/self/cgroup says, files, and GB in all and available
    *((b"0::/\n", {b"memory.max": x, **ONE}, 64, 60) for x in NO_LIMIT),
    (b"2:cpu:/\n0::/a/b\n", {b"a/b/memory.max": b"max\n", **{b"a/" + name: x for name, x in FREED.items()}}, 8, 4),
    (b"0::/of/the/host\n", FREED, 8, 4),  # a container that sees its own group at the root
    (b"4:memory:/a\n", {b"memory/a/" + name: x for name, x in FREED_1.items()}, 8, 4),
    (b"0::/\n", {b"memory.max": b"%d" % (2**70), **ONE}, 64, 60),
    (b"0::/\n", {b"memory.max": b"%d" % (99 * GB), **ONE}, 64, 60),  # above the machine's
    (b"4:memory:/\n", {b"memory/memory.limit_in_bytes": b"9223372036854771712\n"}, 64, 60),
    (b"4:cpu,memory:/a\n", {b"memory/a/memory.limit_in_bytes": b"-1", b"memory/memory.limit_in_bytes": GB_8}, 8, 8),
    (b"0::/\n", {b"memory.max": GB_8, b"memory.high": b"%d" % (6 * GB), **ONE}, 6, 1),
    (b"0::/\n", {b"memory.max": b"max", b"memory.high": GB_8, **ONE}, 8, 3),
    (b"0::/\n", {b"memory.max": GB_8}, 8, 8),  # nobody says how much is in use
    (b"0::/\n", {b"memory.max": GB_8, b"memory.current": b"?", b"memory.stat": None}, 8, 8),
    (b"0::/\n", {b"memory.max": GB_8, **ONE, b"memory.stat": b"\nanon\ninactive_file x\na b c\n\xff 1\n"}, 8, 3),
    (b"0::/\n", {b"memory.max": GB_8, **ONE, b"memory.stat": b"inactive_file %d" % (7 * GB)}, 8, 8),  # never above
    (b"0::/\n", {b"memory.max": GB_8, b"memory.current": b"%d" % (9 * GB)}, 8, 0),
    (b"0::/\n", {b"memory.max": b"0", **ONE}, 0, 0),
    (b"0::/a/b/c\n", {b"a/memory.max": GB_8, b"a/b/memory.max": b"%d" % (9 * GB), b"a/b/c/memory.max": b"max"}, 8, 8),
    (b"0::/../../of/the/host\n", {b"memory.max": GB_8, **ONE}, 8, 3),
    (b"0::/gone (deleted)\n", {b"memory.max": GB_8, **ONE}, 8, 3),
    (b"0::/\xff:\x0b\n", {b"\xff:\x0b/memory.max": GB_8}, 8, 8),
    *((own, {b"memory.max": GB_8}, 64, 60) for own in NO_GROUP),
]


@pytest.mark.parametrize(("own", "files", "total", "available"), OTHERS, ids=range(len(OTHERS)))
def test_every_way_to_write_a_containers_limit_gives_a_sane_number(tmp_path, monkeypatch, own, files, total, available):
    in_container(monkeypatch, tmp_path, own, files)
    found = host_memory()
    assert (found.total / GB, found.available / GB) == (total, available)
    assert found.bounds[0] == (64 * GB, 60 * GB)
    assert all(0 <= free <= most for most, free in found.bounds)


def test_a_containers_file_that_cannot_be_read_is_no_limit(tmp_path, monkeypatch):
    in_container(monkeypatch, tmp_path, b"0::/\n", {b"memory.max": GB_8, **ONE})
    read = memory.Path.read_bytes

    def refused(path):
        if path.name == "memory.max":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(memory.Path, "read_bytes", refused)
    monkeypatch.setattr(memory.Path, "read_text", refused)
    monkeypatch.setattr(memory.Path, "exists", refused)
    assert host_memory().total == 64 * GB
    (tmp_path / "own").unlink()
    assert host_memory().total == 64 * GB


def test_a_container_and_its_machine_bind_each_by_itself():
    both = Memory("host", 8 * GB, 5 * GB, bounds=((64 * GB, 5 * GB), (8 * GB, 7 * GB)))
    assert both.room(share=0.5, min_free_gb=1) == (-27 * GB, "50 % of the 64.0 GB of host may be in use")


def test_the_peak_counts_what_is_freed_on_the_way_and_inside_of_operators():
    x = torch.ones(1000, 1000)

    assert measure_peak(lambda: ((x + 1).sum(0), x.logsumexp(0)), "cpu") == pytest.approx(x.nbytes, rel=0.02)
    assert measure_peak(lambda: x.add_(1), "cpu") < 1000
    held = [torch.ones(1000)]
    assert measure_peak(held.clear, "cpu") == 0, "only what was there is freed"


def test_what_earlier_calls_left_in_cycles_is_gone_when_a_call_is_measured():
    # Freed during the call it would lower the peak: on a GPU alone, as the CPU's profiler leaves older memory out.
    cycle = [torch.zeros(1000, device="cpu")]
    cycle.append(cycle)
    left, found = weakref.ref(cycle[0]), []
    gc.disable()  # the profiler alone makes enough objects for a collection
    try:
        del cycle
        measure_peak(lambda: found.append(left()), "cpu")
    finally:
        gc.enable()
    assert found == [None]


@pytest.mark.gpu
@pytest.mark.alone
def test_what_the_allocator_keeps_counts_as_available():
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    before = gpu_memory(device).available
    x = torch.empty(GB, dtype=torch.uint8, device=device)
    assert gpu_memory(device).available <= before - GB
    del x  # kept by the allocator, which can give it back
    assert gpu_memory(device).available == pytest.approx(before, abs=GB // 16)


@pytest.mark.gpu
def test_the_peak_on_a_gpu_is_that_of_the_call_alone():
    torch.cuda.empty_cache()  # a block that an earlier test left would go whole, if it is a little larger
    kept = torch.ones(2**20, device="cuda")
    assert measure_peak(lambda: (kept * 2) * 3, "cuda") == 2 * kept.nbytes


def test_an_interrupt_while_torchs_profiler_starts_leaves_none_running(monkeypatch):
    closed = []

    @contextmanager
    def silent():
        yield
        closed.append(1)
        if len(closed) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(memory, "_silent_stderr", silent)
    with pytest.raises(KeyboardInterrupt):
        measure_peak(lambda: torch.zeros(1), "cpu")
    assert not torch.autograd._profiler_enabled()
