"""Rules of "auto", as data: orders of backends, each with the record that it comes from."""

from typing import NamedTuple

CHOICE_RECORD = "notebook 05 on an H100, reports/h100"
NOT_MEASURED = "not measured: the order of general knowledge"


class Rule(NamedTuple):
    """An order of backends, the fastest first, and where it comes from. Names that are missing must be asked for."""

    order: tuple[str, ...]
    record: str


# On Hopper one pass over all branches is the fastest of what was timed in 47 of the 48 calls of 05's record. In the
# other one, of 262,144 tokens with a backward, FlashAttention-4's calls of each branch are ahead by 0.2 %; two records
# differ by more there. FlashAttention-3 and -2 are not in the record: each stands before what is older than it, and
# xFormers, which takes as long as torch's flash, behind both.
# "triton" stands right behind "hopper": what that refuses no other backend of the record serves faster.
_FLASH_ON_HOPPER = ("flash_attn_4", "flash_attn_3", "flash", "flash_attn_2")
_HOPPER = ("hopper", "triton", "cudnn", *_FLASH_ON_HOPPER, "xformers", "sdpa", "eager")
_AMPERE = ("triton", "cudnn", "flash_attn_2", "flash", "xformers", "sdpa", "eager")
_BLACKWELL = ("cudnn", "flash_attn_4", "triton", "flash", "flash_attn_2", "xformers", "sdpa", "eager")
_OLDER = ("sdpa", "xformers", "eager")
HALF_RULES = {
    "Hopper": Rule(_HOPPER, CHOICE_RECORD),
    **dict.fromkeys(("Ampere", "Ada"), Rule(_AMPERE, NOT_MEASURED)),
    **dict.fromkeys(("Blackwell", "newer"), Rule(_BLACKWELL, NOT_MEASURED)),
    **dict.fromkeys(("older", "Pascal", "Volta", "Turing"), Rule(_OLDER, NOT_MEASURED)),
}
# In float32 the fused kernels use no matrix instructions, and sdpa is ahead of them. Of what sdpa refuses (dropout,
# padding, a few queries) eager takes 0.2 to 44 times their time once they are compiled, and at 65,536 tokens 13 GiB
# where they take 0.1. float64 has eager alone on a GPU.
FULL_RULE = Rule(("sdpa", "triton", "eager"), "float32 on an H200, reports/HISTORY.md; float64 has eager alone")
# Of extra queries, which see all keys: dense kernels first.
_PLACES = {"hopper": 1, "triton": 1, "eager": 2}
ALL_PAIRS_RULES = {
    architecture: Rule(tuple(sorted(rule.order, key=lambda name: _PLACES.get(name, 0))), NOT_MEASURED)
    for architecture, rule in HALF_RULES.items()
}
# Of few extra queries torch's flash kernel splits the keys over programs, and cuDNN does not: 77 queries of 8 heads of
# 64 over 65,536 keys take 0.09 and 0.58 ms forward. From 16 queries on cuDNN's backward is faster. Up to so many tiles
# of 128 queries, over all heads and sequences, flash is first: with a gradient, and without.
FLASH_TILES = {True: 16, False: 48}
FLASH_RECORD = "few extra queries on an H200, reports/HISTORY.md"
# In a short call (`all_pairs.is_short`) "triton" has one launch for the cells and the extra keys. Two dense kernels
# and the sum of what they return take the host longer.
SHORT_RECORD = "not measured: one launch stands before several"
# In a short call on a grid (`listed_grid.is_short`) "lists" has one launch each way, and "hopper" two and three. Along
# a sequence (`schedule.is_short`) so do "triton" and "hopper".
HOST_RECORD = "host times on an H200, reports/HISTORY.md"
# Of a union that `listed_grid.leads_boxes`.
UNION_RECORD = "unions of narrow windows on an H200, reports/HISTORY.md"
# Of a dilated window that `listed_grid.leads_residues`.
RESIDUES_RECORD = "dilated windows on an H200, reports/HISTORY.md"
CPU_RULE = Rule(("sdpa", "eager"), "notebook 05, which measures it where it runs")

# On grids.
_GRIDS = "256 x 256 and 30 x 48 x 80 cells on an H100, reports/HISTORY.md"
# "lists" takes a half to a third of the time of "triton" on a plane, and in float32 six tenths to all of it: "triton"
# is for what lists lack, as a bias. There "flex" goes before it where tokens are stored compactly.
# What `select_attention_backend` or `hilbert bench grids` times on a machine goes before these rules.
_LISTS = f"lists on an H200, others {_GRIDS}"
GRID_BY_ROW = Rule(("hopper", "lists", "triton", "flex", "eager"), f"boxes on an H100 (notebook 08b); {_LISTS}")
GRID_ON_GPU = Rule(("lists", "triton", "flex", "eager"), _LISTS)
GRID_COMPACT = Rule(("lists", "flex", "triton", "eager"), _LISTS)
# Within "eager", `backends/tile_groups.py` chooses between tiles and all keys at once, from what was timed on a CPU.
GRID_ON_CPU = Rule(("eager",), "the only one for a CPU that is not interpreted")
POINTS = Rule(("triton", "eager"), "the only ones that read lists")
COMPACT_ORDERS = ("hilbert", "morton", "tile")  # whose blocks are compact


def first_of(rule: Rule, name: str, record: str) -> Rule:
    """A rule in which one backend, where the rule knows it, stands first."""
    if name not in rule.order:
        return rule
    return Rule(tuple(dict.fromkeys((name, *rule.order))), record)


def on_architecture(rule: Rule, architecture: str) -> Rule:
    """A rule for a GPU of an architecture. The record of a rule that was measured says where it was not.

    >>> on_architecture(FULL_RULE, "Ada").record
    'float32 on an H200, reports/HISTORY.md; float64 has eager alone; not measured on this kind of GPU (Ada)'
    """
    if architecture == "Hopper" or rule.record == NOT_MEASURED:  # all that was measured was so on Hopper
        return rule
    return Rule(rule.order, f"{rule.record}; not measured on this kind of GPU ({architecture})")


def grid_rule(device: str, element_size: int, order: str) -> Rule:
    """The rule for a call on a grid.

    device: its type. element_size: bytes of a number. order: the kind in which tokens are stored, "" row by row.
    """
    if device != "cuda":
        return GRID_ON_CPU
    if element_size != 2:
        return GRID_ON_GPU
    if not order:
        return GRID_BY_ROW
    return GRID_COMPACT if order in COMPACT_ORDERS else GRID_ON_GPU
