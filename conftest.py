"""The garbage of a collection, and what the notebooks' cells are held to under nbval, also by pytest on one alone."""

import gc
from pathlib import Path

import pytest

# What the modules and the tests make lives to the end: neither the many imports nor the collections of garbage with
# which measurements of memory begin need to go through it.
gc.disable()

EVIDENCE = Path(__file__).parent / "reports"


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
