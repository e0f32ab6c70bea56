"""The warp-specialised kernels of Hopper.

launch     their launches, and the calls that they serve
division   branches of each launch
tiles      tiles of dilated rows, and their descriptors
steps      the forward's work on a block of keys
forward    the forward's kernel
backward   the backward's kernel
queries    the kernel of dq alone
segments   short segments as windows on a line, by the kernels for grids

wide_keys     the kernel of dk and dv at a head_dim above 128
wide_queries  the kernel of dq alone at a head_dim of 129 to 192

On grids:

grid_launch      their launches, and the calls that they serve
places           numbers and places of tiles
boxes            tiles and the boxes that they walk over
box_descriptors  descriptors of boxes for the copy engine
bias             tiles of a bias by relative position, and the sums of its gradient
bias_tables      kernels around those by boxes: padded tables of a bias, bounds of its gradient, and the gradient
masks            the cells of a box that a group sees
grid_forward     the forward's kernel
grid_backward    the backward's kernel
grid_whole       the forward's kernel where windows are whole boxes of 128 keys

At a head_dim above 128 (`wide` along sequences, too):

wide                rows of two parts, and the steps of two groups of warps that share a tile
grid_wide           the forward's kernel
grid_wide_backward  the backward's kernel
"""
