"""Parameters under which a notebook measures one of its sweeps alone."""

LAYOUTS = {"counters": False}
CHOICES = {"ordering_length": 65536, "pool_lengths": []}
TABLES = {"lengths": [4096], "head_dims": [64], "ordering_length": 65536, "pool_lengths": []}
GRAPHS = TABLES
POOLS = {"lengths": [4096], "head_dims": [64], "ordering_length": 65536}
ORDERS = {"order_width": 32, "order_layers": 2, "order_batch": 4, "order_steps_seeds": [250, 3]}
