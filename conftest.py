"""What the notebooks' cells are held to under nbval, by `make test` and by pytest on a notebook alone."""

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    # nbval compares outputs where a notebook keeps them, and in no other would a warning be seen.
    result = yield
    streams = (output for output in getattr(item, "test_outputs", ()) if output.output_type == "stream")
    if told := "".join(stream.text for stream in streams if stream.name == "stderr"):
        item.raise_cell_error("the cell wrote to stderr", told)
    return result
