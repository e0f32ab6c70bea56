"""Subprocesses: the ranks of a group, and single calls.

workers     ranks as processes, started and watched
worker_main one rank: the module that torchrun starts
isolated    one call in a subprocess, stopped at a limit
child       the script of that call: a supervisor and a worker
progressive lengths that grow until the next one would pass a limit
"""

from hilbert_lib.lazy import lazily

REFUSED = "refused its arguments with"  # in the error of a rank whose peer refused: `workers` blames that peer

__getattr__, __dir__ = lazily(
    __name__,
    {
        "hilbert_lib.launch.workers": ("run_ranks",),
        "hilbert_lib.launch.isolated": ("run_isolated",),
        "hilbert_lib.launch.progressive": ("ProgressiveTester",),
    },
)
