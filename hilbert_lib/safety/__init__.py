"""Measuring without taking the machine down: limits, predictions, and a watch while something runs.

config      the limits, from arguments, the environment, a file
memory      what is free, whether a need fits, and what a call took
estimate    what a call of attention will need, before it is made
watch       memory and temperature while a run goes on, which ends at a limit
progressive lengths that grow until the next one would pass a limit
child       the process of one point
isolated    one call in a process of its own, which no fault of it outlives
benchmarks  what the points of a benchmark are, and what their sides run
runner      points measured one after another, resumable
interrupted a runner that is interrupted on purpose, and what is left of it
"""
