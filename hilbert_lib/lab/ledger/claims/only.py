"""Parameters under which a notebook measures one of its sweeps alone."""

LAYOUTS = {"counters": False}
CHOICES = {"ordering_length": 65536, "pool_lengths": []}
TABLES = {"lengths": [4096], "head_dims": [64], "ordering_length": 65536, "pool_lengths": []}
GRAPHS = TABLES
POOLS = {"lengths": [4096], "head_dims": [64], "ordering_length": 65536}
