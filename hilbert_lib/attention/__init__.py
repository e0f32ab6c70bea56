"""Exact dilated attention.

api        checks the arguments, chooses a backend, runs it
operators  forward and backward as torch operators, one node each to torch.compile
choice     which backend serves a call, and why
rules      what "auto" goes by, as data
remembered what was measured on this machine, in the user's cache folder
backends   the implementations, and whether each can serve a call
reference  the oracle: dense masks, any dtype
strided    dense kernels over zero-copy views, and their merge
triton     the fused kernels: all branches in one pass
dense      the dense kernels that torch has, under one signature
packages   those of other packages, likewise
flex       compiled FlexAttention on residue-major tokens
merge      the one associative merge of partial results
dropout    dropout bits keyed by position
call       one validated request
"""
