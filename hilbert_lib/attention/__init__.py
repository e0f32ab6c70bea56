"""Exact dilated attention: api validates and dispatches, reference is the oracle, strided runs dense kernels over views."""
