"""A command that is stopped by a signal ends in order: what runs is told, and the next call goes on from there."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM. asyncio lets a KeyboardInterrupt through, and swallows other exceptions in a handler."""

    def __init__(self, signal_number: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_status = 128 + signal_number


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `Interrupted`; later ones would break the writing of a manifest."""

    def stop(signal_number: int, _frame) -> None:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted(signal_number)

    def swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
        # Raised in a finalizer or a callback of the garbage collector, where Python drops it: sent again, out of there.
        if not isinstance(unraisable.exc_value, Interrupted):
            hook(unraisable)
            return
        for number in handlers:
            signal.signal(number, stop)
        again = unraisable.exc_value.exit_status - 128
        threading.Timer(0.01, os.kill, (os.getpid(), again)).start()

    hook, sys.unraisablehook = sys.unraisablehook, swallowed
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in handlers.items():
            signal.signal(number, handler)
