"""Memory and time: limits, predictions, and a watch while something runs.

config        the limits, from arguments, the environment, a file
device_memory how a call's peak is counted
memory        what is free, whether a need fits, and what a call took
estimate      what a call of attention will need, before it is made
watch         memory and temperature while a run goes on, which ends at a limit
"""
