"""A machine whose time is known, for the tests of what is measured on it."""

from types import SimpleNamespace

from hilbert_lib.lab import timers
from hilbert_lib.lab.timing import Case


class FakeMachine:
    """A clock that only its own work moves on, in place of the timers'."""

    def __init__(self, monkeypatch):
        self.now_ns = 0
        self.log = []
        monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter_ns=lambda: self.now_ns))

    def case(self, name, milliseconds, **known):
        """A case whose call takes milliseconds(), or that constant, by this clock."""

        def run():
            self.log.append(name)
            self.now_ns += round(1e6 * (milliseconds() if callable(milliseconds) else milliseconds))

        return Case(name, run, parameters=known.pop("parameters", {}), error=known.pop("error", 0.0), **known)
