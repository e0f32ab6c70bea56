"""Processes: ranks, and one call apart.

workers     ranks as processes, started and watched
worker_main one rank: the module that torchrun starts
isolated    one call in a subprocess, stopped at a limit
child       the process of that call
progressive lengths that grow until the next one would pass a limit
"""

REFUSED = "refused its arguments with"  # what a rank says where another one did: `workers` blames the other
