"""Processes: ranks, and one call apart.

workers     ranks as processes, started and watched
worker_main one rank: the module that torchrun starts
isolated    one call in a subprocess, stopped at a limit
child       the process of that call
"""
