"""What all tests share."""

import gc
import importlib
import os
import sys
import tempfile
from types import ModuleType

import psutil
import pytest
import torch
from copied_calls import copy_calls
from hypothesis import settings
from interpreted import confine
from kept_counts import share_counts
from untimed_guards import leave_guards_untimed

from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.records import MACHINES, REPORTS
from hilbert_lib.machine import get_gpu_info, prepare_kernels

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
WORKER_BYTES = 8 * 2**30  # of a GPU, for each process of tests that are not alone on it
# Inductor takes from its cache what it compiled for another capability, whose vectors have another length (torch 2.13).
if "ATEN_CPU_CAPABILITY" in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
os.environ["HILBERT_CACHE"] = tempfile.mkdtemp()  # what this machine remembers of backends changes no test
settings.register_profile("suite", deadline=None)  # of the first call, which imports, and of busy cores
settings.load_profile("suite")
torch.set_num_threads(1)  # as in what the tests start, by the conftest.py above
# Inductor would start a process that imports torch once more to compile what this one can, and would compile a program
# for each width of vectors that the processor says it has.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
# Nor does torch.compile look for garbage after each compilation: what it left is seldom garbage.
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
# First the files that take longest: none of them is then the last, beside cores with nothing left to do. Before them
# one that collects garbage among all objects: there are fewest at the start.
LONG = ("test_timing", "test_triton", "test_ring_faults", "test_compiled_kernels", "test_ring_attention")
LONG += ("test_operators", "04_safe_benchmarking", "06_kernel_benchmarks", "06b_orders_and_counters")


def pytest_configure(config):
    # Each worker has one GPU, in turn; those of `make test-multigpu` have all of them.
    if WORKER and torch.cuda.device_count() > 1 and not config.option.markexpr.startswith("multigpu"):
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "") or ",".join(map(str, range(torch.cuda.device_count())))
        devices = given.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(WORKER.removeprefix("gw")) % len(devices)]
    # Before anything imports triton: without a GPU its kernels are interpreted, and checked in full by `make test-all`.
    marks = config.option.markexpr
    if prepare_kernels() == "interpreted":
        confine()
        if "full" in marks or not marks:
            from hastened import hasten

            hasten()


def pytest_collection_finish():
    leave_guards_untimed()
    share_counts()


@pytest.fixture
def rough_pictures(monkeypatch):
    """Pictures without layout and of few dots, in a third of the time, where a test is of what they are drawn from."""
    from hilbert_lib.lab.figures import record

    monkeypatch.setattr(record, "_laid_out", lambda figure: figure.set_layout_engine("none") or figure)
    monkeypatch.setattr(record, "_box", lambda figure: figure.bbox_inches)
    monkeypatch.setitem(record.STYLE, "savefig.dpi", 30)


def pytest_make_parametrize_id(val):
    # The same in every process that collects the tests.
    return " ".join(sorted(map(str, val))) if isinstance(val, set | frozenset) else None


def pytest_xdist_auto_num_workers():
    cores = environment()["cpu_cores"]
    gpus = [get_gpu_info(torch.device("cuda", n)) for n in range(torch.cuda.device_count())]
    fitting = sum(gpu.memory_bytes // WORKER_BYTES for gpu in gpus)
    # Without a GPU one for each core: one more would import and collect once more than the waits of deadlines save.
    return max(1, min(fitting, cores)) if gpus else cores


@pytest.hookimpl(tryfirst=True)  # marks are read after it
def pytest_collection_modifyitems(items):
    for item in items:
        # What is interpreted without a GPU is compiled where there is one: there `make test-gpu` runs it.
        if str(getattr(getattr(item, "module", None), "DEVICE", "")) == "cuda" and not item.get_closest_marker("full"):
            item.add_marker("gpu")
    # Notebooks follow each other: one process is copied for them.
    items.sort(key=lambda item: (item.path.suffix == ".ipynb", [*LONG, item.path.stem].index(item.path.stem)))
    lacking = [
        (marker, f"needs {gpus} CUDA device(s)")
        for marker, gpus in (("gpu", 1), ("multigpu", 2))
        if torch.cuda.device_count() < gpus
    ]
    if not any(REPORTS.glob(MACHINES)):
        lacking.append(("evidence", "needs the committed records in reports/"))
    for item in items:
        for marker, reason in lacking:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def older_files_apart():
    """No collection of garbage goes through what earlier files left. Not on a GPU, whose memory it may hold."""
    if not torch.cuda.is_available():
        gc.freeze()


@pytest.fixture(autouse=True)
def calls_are_not_known():
    """Tests replace backends and machines, which no form of a call can tell."""
    known_calls = sys.modules.get("hilbert_lib.attention.known_calls")
    if known_calls is not None:
        known_calls.forget()


@pytest.fixture
def compiled_code_is_forgotten():
    yield
    torch.compiler.reset()


@pytest.fixture
def calls_are_copied(monkeypatch):
    """Isolated calls are spared the second or two that loading torch takes. Not where their ends are tested."""
    copy_calls(monkeypatch)


@pytest.fixture
def kernels_are_copied(monkeypatch):
    """Kernels of notebooks are copies of a process that has loaded torch and the figures, and so are their calls.

    Not where a test is of how a kernel starts, of its death, or of who its parent is.
    """
    kernels = importlib.import_module("copied_kernels").shared()
    if kernels.door is not None:
        monkeypatch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", kernels.launch)


@pytest.fixture
def older_objects_apart():
    """For tests that collect garbage: what others left, torch's compiler too, is gone through once for all.

    Before each test, since the first one may load torch's compiler.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_is_left(monkeypatch):
    """In the end no process is left of those that the test started, or that an isolated one of it did."""
    from own_processes import PATIENCE, mark, marked_processes  # with all of `safety`, which few tests need

    from hilbert_lib.launch import isolated

    mark(monkeypatch)
    monkeypatch.setattr(isolated, "EXIT_SECONDS", PATIENCE)  # what was killed may be long in going on a busy machine
    before = set(psutil.Process().children(recursive=True))  # what other tests copy
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not marked_processes(having=isolated.MARK)


def softmax_attention(q, k, v, dropout, bias, softmax_scale, is_causal):
    """A softmax and its lse in the place of flash-attn, without which torchscale's code does not run."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.fixture
def torchscale(monkeypatch):
    """torchscale on a CPU. Of timm, which would bring torchvision, it takes one function, for training."""
    for name in ("timm", "timm.models", "timm.models.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["timm.models.layers"].drop_path = None  # no path is dropped here
    attention = importlib.import_module("torchscale.component.multihead_attention")
    monkeypatch.setattr(attention, "flash_attn_func", softmax_attention)
