"""Benchmarks within limits of memory and time, each point in a process of its own.

cases        the points of a benchmark, and what their sides run
runner       points measured one after another, resumable
interrupted  a runner that is interrupted on purpose, and what is left of it
"""
