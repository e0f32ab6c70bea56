"""`python -m hilbert_lib.cli`: the command where the package is not installed."""

from hilbert_lib.cli import run

run()
