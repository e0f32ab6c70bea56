"""What computes a call: the list of backends, and each one's refusal and functions.

registry   the backends by name, and whether each can serve a call
reference  the oracle: dense masks, any dtype
strided    dense kernels over zero-copy views, and their merge
dense      the dense kernels that torch has, under one signature
packages   those of other packages, likewise
flex       compiled FlexAttention on residue-major tokens; flex_compiled compiles it
"""
