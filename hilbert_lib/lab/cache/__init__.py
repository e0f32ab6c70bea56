"""Models of what caches and memory see when rows are read in some order.

cache          sectors, lines and pages that a branch touches
sweeps         tables of these, over row sizes, dilations, layouts and orders
l2             what a cache of a given size can reuse
predicted      what the hardware should count in one launch
grid           how compact blocks of slots are on a grid
neighbourhood  blocks touched, and rows exchanged, by a window on a grid
"""
