"""What Python runs first in each process that the tests start: the garbage collector seldom looks, and not at the end.

Hardly an object that an import makes is garbage. A process's end would look for garbage among all of them, thrice.
"""

import atexit
import gc
import sys

gc.set_threshold(50_000, 50, 50)
atexit.register(gc.freeze)
if "ipykernel_launcher" in sys.orig_argv:
    from copied_ranks import CopyingRanks

    sys.meta_path.insert(0, CopyingRanks())
