"""Garbage that holds memory, and when it is freed."""

import gc
import weakref

from hilbert_lib.device_memory import old_objects_apart


class Holder:
    """In a cycle with itself."""

    def __init__(self):
        self.itself = self


def test_garbage_made_inside_is_freed_inside_and_older_objects_after_it():
    old = Holder()
    seen_old = weakref.ref(old)
    with old_objects_apart():
        new = Holder()
        seen_new = weakref.ref(new)
        del old, new
        gc.collect()
        assert seen_new() is None
        assert seen_old() is not None
    gc.collect()
    assert seen_old() is None
    assert gc.get_freeze_count() == 0
