"""The laboratory: measures, draws and reports. Nothing that a user calls imports it.

What is measured:

workload      one call of any pattern: inputs, useful work, exact rows
exact_rows    a few rows of attention and of its gradients in float64
baselines     other people's ways to dilated attention
seeds         what the documents under examination published
seed_kernel   their kernel pair
samples       real input for notebooks

How it is measured:

timers        the clocks of the host and of a CUDA device
timing        samples of one call, and of two in turn
sustained     calls back to back
pairs         calls checked, compared, timed and recorded
selection     a backend chosen by measurement
guarded       points in processes of their own, within limits of memory and time
cache         what caches and memory see, modelled
sweeps        what each notebook measures

What becomes of it:

environment   the machine, the software and the code
records       files of what was measured
tables        records as tables
figures       every plot
ledger        what the documents claim, and what was found
parameters    parameters of a notebook, checked
suite         runs of notebooks, and their reports
"""
