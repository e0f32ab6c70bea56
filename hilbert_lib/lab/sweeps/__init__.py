"""What each notebook measures.

causes       04, 09: the documents' comparisons rebuilt, with one cause of a ratio at a time
memory       05: CUDA graphs, memory pools and caches of patterns
kernels      06: backends side by side, and what an order of k and v changes
counters     06: what the hardware counts
over_ranks   07: a workload over ranks, and the ways that compute it
sequences    07: those ways along a sequence
halos        07: those ways on a grid
spread       07: rows that lie on several ranks, held against float64
ring         07: what ranks measure
ring_tables  07: what is planned
ring_trace   07: the exchange in one call
grids        08: kernels on a grid, with the tokens in every order
"""
