"""What each rank sends to whom, as data: pure functions of the pattern and the shards' lengths.

rows       rows that travel, as arithmetic progressions, and the messages that hold them
segments   which segments straddle ranks, and what must cross for them
balance    how many query-key pairs fall to a shard, and shard lengths that balance them
cost       a plan, and its cost: bytes on the wire, bytes of memory and FLOP of a rank
plan       how it is found: transports, and why
"""

from hilbert_lib.ring.plan.plan import plan_ring

__all__ = ["plan_ring"]
