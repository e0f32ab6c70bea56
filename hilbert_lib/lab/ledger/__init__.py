"""What the documents claim, and what was found: `reports/claims.yml` holds the questions, records hold the answers.

claim       the ledger's entries, and the verdict that a claim's cases give
kernels     cases from the records of times on one GPU: layouts, backends, graphs, pools
models      cases that are computed anywhere: cache lines, memory, kernels on reordered keys
ring        cases of several ranks, planned and measured
claims      measuring a claim again, some by pairs of their own
numbers     the numbers that README and notebooks tell, by name, in sentences written by hand
"""
