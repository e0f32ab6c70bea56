"""Benchmarks within limits of memory and time, each point in a process of its own.

cases     the benchmark of attention: its points, and what their sides run
programs  points whose sides are programs that break
runner    points measured one after another, resumable
"""
