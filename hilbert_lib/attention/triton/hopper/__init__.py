"""The warp-specialised kernels of Hopper.

launch     which calls they serve, and their launches
division   which branches a launch takes, and what of them comes through descriptors
tiles      tiles of dilated rows, and their descriptors
steps      the steps that both consumer groups share
forward    the forward's kernel
backward   the backward's kernel
"""
