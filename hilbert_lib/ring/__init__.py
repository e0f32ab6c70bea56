"""Exact dilated attention over several ranks, each of which holds a contiguous shard of the sequence.

rows       rows that travel, as arithmetic progressions, and the messages that hold them
segments   which segments straddle ranks, and what must cross for them
balance    how many query-key pairs fall to a shard, and shard lengths that balance them
cost       bytes on the wire, bytes of memory and FLOP of a rank
plan       what each rank sends to whom, by which transport and why
tables     plans by ranks and tokens
header     what ranks must agree on, compared before anything is sent
shards     a sequence split over ranks, and put together
layout     one rank's part of a plan as index tensors
exchange   rows on their way between ranks, and the answers to them
blocks     the dense attentions of shared segments
local      the attention of the segments inside a shard
passes     forward and backward of one rank
attention  the function
module     the module
workers    ranks as processes, started and watched
worker_main one rank: the module that torchrun starts
benchmarks what ranks measure of themselves
exactness  what a rank runs to be held against one process
"""
