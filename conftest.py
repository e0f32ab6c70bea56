"""How every process collects its garbage, and what the notebooks' cells are held to, also by pytest on one alone."""

import gc
import importlib
import os
import runpy
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

EVIDENCE = Path(__file__).parent / "reports"
STARTUP = Path(__file__).parent / "tests/startup"

# In this process, in what it starts with its own `sys.path`, and in all else that is started.
runpy.run_path(str(STARTUP / "sitecustomize.py"))
sys.path.append(str(STARTUP))
names = ("copied_calls", "copied_kernels", "kept_counts")
copied_calls, copied_kernels, kept_counts = map(importlib.import_module, names)
os.environ.setdefault(kept_counts.FOLDER, tempfile.mkdtemp())  # workers have the first process's
# Small tensors gain nothing from more threads, and a thread that waits for work keeps its core busy: notebook 03 by
# itself took 14 times the processor time where others worked beside it.
os.environ["OMP_NUM_THREADS"] = "1"
# Freed memory stays with a process: the operating system would clear its pages again. Processes that start from here on
# read this.
os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**28), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
# What the modules and the tests made lives to the end: neither the many imports nor the collections of garbage with
# which measurements of memory begin need to go through it.
gc.disable()


def pytest_addoption(parser):
    text = "with --nbval-lax: a notebook whose outputs are compared as with --nbval, in the same process as the others"
    parser.addoption("--compared", action="append", default=[], metavar="NOTEBOOK", help=text)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    collected = yield
    if file_path in [parent.config.invocation_params.dir / name for name in parent.config.option.compared]:
        for notebook in collected:
            notebook.compare_outputs = True
    return collected


def pytest_collection_finish(session):
    nbval = sys.modules.get("nbval.kernel")
    if len({item.path for item in session.items if item.path.suffix == ".ipynb"}) > 1:
        nbval.start_new_kernel = partial(start_kernel, nbval.start_new_kernel)


def start_kernel(start, *arguments, **options):
    """A kernel for nbval, in the place of its own function."""
    kernels = copied_kernels.shared()
    if kernels.door is None:
        return start(*arguments, **options)
    with patch("jupyter_client.provisioning.local_provisioner.launch_kernel", kernels.launch):
        return start(*arguments, **options)


@pytest.fixture(autouse=True)
def examples_are_copied(request, monkeypatch):
    """Docstrings' isolated calls are spared the second or two that loading torch takes."""
    if isinstance(request.node, pytest.DoctestItem):
        copied_calls.copy_calls(monkeypatch)


def pytest_sessionfinish():
    if copied_kernels.shared.cache_info().currsize:
        copied_kernels.shared().end()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_collection_modifyitems(items):
    # A fork without the committed records has nothing for those notebooks to draw.
    if any(EVIDENCE.glob("h[12]00*")):
        return
    skip = pytest.mark.skip(reason="draws the committed records in reports/")
    for item in (each for each in items if each.path.suffix == ".ipynb" and "committed" in each.path.read_text()):
        item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    # nbval compares outputs where a notebook keeps them, and in no other would a warning be seen.
    result = yield
    streams = (output for output in getattr(item, "test_outputs", ()) if output.output_type == "stream")
    if told := "".join(stream.text for stream in streams if stream.name == "stderr"):
        item.raise_cell_error("the cell wrote to stderr", told)
    return result
