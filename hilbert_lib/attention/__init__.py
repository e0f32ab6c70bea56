"""Exact dilated attention.

api        checks the arguments, chooses a backend, runs it
operators  forward and backward as torch operators, one node each to torch.compile
backends   the implementations, whether each can serve a call, how one is chosen
reference  the oracle: dense masks, any dtype
strided    dense kernels over zero-copy views, and their merge
triton     the fused kernels: all branches in one pass
dense      the dense kernels that torch has, under one signature
merge      the one associative merge of partial results
dropout    dropout bits keyed by position
call       one validated request
"""
