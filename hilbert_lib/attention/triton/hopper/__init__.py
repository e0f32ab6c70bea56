"""The warp-specialised kernels of Hopper.

launch     which calls they serve, and their launches
division   which branches a launch takes, and what of them comes through descriptors
tiles      tiles of dilated rows, and their descriptors
steps      the steps that both consumer groups share
forward    the forward's kernel
backward   the backward's kernel

On grids:

grid_launch      which calls they serve, and their launches
boxes            tiles and the boxes that they walk over
box_descriptors  what the copy engine reads boxes with
masks            what a group sees of a box
grid_forward     the forward's kernel
grid_backward    the backward's kernel
"""
