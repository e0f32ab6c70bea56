"""A command that is stopped by a signal ends in order: what runs is told, and the next call goes on from there."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM. asyncio lets a KeyboardInterrupt through, and swallows other exceptions in a handler."""

    def __init__(self, signal_number: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_status = 128 + signal_number


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `Interrupted`; later ones would break the writing of a manifest."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        if any(caller.f_code is swallowed.__code__ for caller, _ in traceback.walk_stack(frame)):
            return  # raised there it would be dropped once more; it is sent until it is not
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        is_told.set()
        raise Interrupted(signal_number)

    def send(signal_number: int) -> None:
        while not is_told.wait(0.01):
            os.kill(os.getpid(), signal_number)

    def swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
        # Raised in a finalizer or a callback of the garbage collector, where Python drops it: sent again, out of there.
        if not isinstance(unraisable.exc_value, Interrupted):
            hook(unraisable)
            return
        for number in handlers:
            signal.signal(number, stop)
        is_told.clear()
        threading.Thread(target=send, args=(unraisable.exc_value.exit_status - 128,), daemon=True).start()

    is_told = threading.Event()
    hook, sys.unraisablehook = sys.unraisablehook, swallowed
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        is_told.set()
        sys.unraisablehook = hook
        for number, handler in handlers.items():
            signal.signal(number, handler)
