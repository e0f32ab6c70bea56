"""Garbage that holds memory, and when it is freed."""

import gc
import weakref

import pytest

from hilbert_lib.lab.timers import old_objects_apart


class Holder:
    """In a cycle with itself."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_apart():
    gc.unfreeze()
    yield
    gc.freeze()  # as conftest.py left it


def test_garbage_made_inside_is_freed_inside_and_older_objects_after_it():
    old = Holder()
    seen_old = weakref.ref(old)
    with old_objects_apart():
        new = Holder()
        seen_new = weakref.ref(new)
        del old, new
        gc.collect()
        assert (seen_new() is None, seen_old() is None) == (True, False)
    gc.collect()
    assert seen_old() is None
    assert gc.get_freeze_count() == 0


def test_what_others_set_apart_stays_so():
    gc.freeze()
    apart = gc.get_freeze_count()
    with old_objects_apart(), old_objects_apart():
        assert gc.get_freeze_count() <= apart
    assert gc.get_freeze_count() > apart // 2


def test_the_few_objects_that_python_itself_sets_apart_count_for_nothing(monkeypatch):
    # Python 3.12 does with immortal objects, some hundred of them, at the first collection.
    counted = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted() + 400)
    here = len(gc.get_objects())
    with old_objects_apart():
        assert len(gc.get_objects()) < here // 2
    assert len(gc.get_objects()) >= here // 2
