"""The messages between ranks, as data: pure functions of the pattern and the shards.

rows       rows that travel, as arithmetic progressions, and the messages that hold them
segments   which segments straddle ranks, and what must cross for them
balance    how many query-key pairs fall to a shard, and shard lengths that balance them
cost       a plan, and its cost: bytes on the wire, bytes of memory and FLOP of a rank
plan       how it is found: transports, and why
shards     how the cells of a grid are spread, and what the windows of a rank's queries reach
halo       which rows of a grid travel, and what that costs
points     what the rows of points cost that travel
"""

from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.halo import plan_halo
from hilbert_lib.ring.plan.plan import TRANSPORTS, plan_ring

__all__ = ["TRANSPORTS", "plan_halo", "plan_ring", "shard_lengths_for"]
