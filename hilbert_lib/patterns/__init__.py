"""Which keys a query sees. A pattern is one idea: whatever computes, counts or sends attention asks it.

pattern        what every pattern answers
dilated        LongNet's branches along a sequence
residues       how many positions a set of branches covers
neighbourhood  windows on a grid of 1 to 3 axes
blocks         neighbourhoods as kernels read them: rectangles, and blocks of a mask
union          several patterns in one softmax
"""
