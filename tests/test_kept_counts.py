"""What the processes of a run of the tests count once."""

import sys

import pandas as pd
import pytest
from kept_counts import FOLDER, MODULE, NAMES, kept, share_counts

from hilbert_lib.lab.ledger import order_map


def test_the_first_that_asks_counts_and_the_others_read(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    grids, points = pd.DataFrame({"counted": [0.1 + 0.2]}), pd.DataFrame({"counted": [float("nan")], "kernel": "a"})
    for name, counts in (("grids", grids), ("points", points)):
        first = kept(name, lambda counts=counts: counts)
        other = kept(name, lambda: pytest.fail("it was counted again"))
        for each in (first, other, other):
            pd.testing.assert_frame_equal(each(), counts, check_exact=True)


def test_the_counts_that_are_shared_are_the_maps(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    for name in NAMES:
        monkeypatch.setattr(order_map, name, lambda name=name: pd.DataFrame({"counted": [name]}))
    share_counts()
    assert sys.modules[MODULE] is order_map
    for name in NAMES:
        assert getattr(order_map, name)().counted.tolist() == [name]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
