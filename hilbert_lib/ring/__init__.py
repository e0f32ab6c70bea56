"""Exact dilated attention over several ranks, each of which holds a contiguous shard of the sequence.

attention  the function
module     the module
shards     a sequence split over ranks, and put together
agreement  what ranks must agree on, compared before anything is sent
plan       what each rank sends to whom, by which transport and why
rank       one rank's work
"""
