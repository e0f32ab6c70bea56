"""What the documents claim, and what was found: `reports/claims.yml` holds the questions, records hold the answers.

claim       the ledger's entries, and the verdict that a claim's cases give
kernels     cases from the records of times on one GPU: layouts, backends, graphs, pools
models      cases that are computed anywhere: cache lines, memory, kernels on reordered keys
ring        cases of several ranks, planned and measured
advice      what follows for a reader, each sentence with the numbers that it rests on
numbers     the numbers that a stranger reads first
"""
