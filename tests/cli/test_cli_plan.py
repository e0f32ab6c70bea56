"""`hilbert plan`, and the tables and figure of plans."""

import re
from itertools import product

import pytest
import torch
from command import call

from hilbert_lib import Neighbourhood, Rectangles
from hilbert_lib.cli import plan as cli_plan
from hilbert_lib.lab.sweeps.ring_tables import split_table
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.ring.plan.cost import amount
from hilbert_lib.ring.plan.halo import plan_halo
from hilbert_lib.ring.plan.plan import plan_ring


def plan(words, status=0):
    return call("plan", *words.split(), status=status)


def test_the_command_prints_the_plan_of_its_arguments():
    sizes = "--tokens 1G --ranks 8 --heads 2 --kv-heads 1 --head-dim 8"
    printed = plan(f"{sizes} --causal --segment-lengths 1k,1g --dilation-rates 1,4k --transport ring")
    pattern = DilatedPattern((2**10, 2**30), (1, 2**12))
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "dtype": torch.bfloat16}
    assert printed == f"{plan_ring(pattern, (2**27,) * 8, is_causal=True, transport='ring', **sizes)}\n"


def test_the_command_gives_unequal_ranks_shards_by_their_work():
    printed = plan("--tokens 64k --ranks 2 --weights 3,1 --heads 2 --segment-lengths 64k --dilation-rates 16 --causal")
    assert printed.count("100%") == 2, printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 1x", "'1x' is no whole number above 0"),
        ("--tokens 64k --weights 1,a", "'1,a' is no list of numbers such as 2,1,1"),
        ("--tokens 64k --weights 1,1,1", "weights must have one number a rank (2), got 3"),
        ("--tokens 64k --transport mail", "transport must be one of auto, ring, all_gather, all_to_all; got 'mail'"),
        ("--tokens 64k --memory-gb 0.001", "memory_limit must be at least 270532608 bytes (0.271 GB)"),
        ("--tokens 64k --memory-gb 0.26", "memory_limit must be at least 270532608 bytes"),  # of 10^9
        ("--tokens 64k --memory-gb inf", "inf is not in the range"),
        ("--tokens 64k --memory-gb nan", "Invalid value for --memory-gb: nan is not above 0"),
        ("--tokens 64k --kv-heads 3", "kv_heads must divide heads (16), got 3"),
        ("", "give --tokens, or --grid and --window; got none of them"),
        ("--grid 8x8", "give --tokens, or --grid and --window; got --grid"),
        ("--tokens 1m --window 5", "got --tokens, --window"),
        ("--grid 8,8 --window 3", "'8,8' is no number, or several with an x between them"),
        ("--grid 8x8 --window 3 --weights 1,2", "--weights: not of a grid, which takes --batch, --causal"),
        ("--grid 8x8 --window 0", "'0' is no number"),
    ],
)
def test_the_command_refuses_what_cannot_be_planned(words, message):
    assert message in " ".join(plan(f"--ranks 2 {words}", status=2).split())


def test_a_grid_says_where_it_is_causal_and_how_many_ranks_have_nothing():
    printed = plan("--grid 4x4 --window 3 --ranks 17 --causal")
    assert "causal along 0 and 1" in printed
    assert printed.count("(empty ranks: 13)") == 2  # strips and rectangles
    assert "Hilbert runs (empty ranks: 1)" in printed


def test_a_grids_lines_hold_the_most_of_any_rank():
    """Of three ranks the middle one receives from two, and has two borders."""
    printed = plan("--grid 12x4 --window 3 --ranks 3 --heads 4 --kv-heads 2 --head-dim 8")
    (line,) = (each for each in printed.splitlines() if each.lstrip().startswith("strips 3 x 1"))
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": torch.bfloat16}
    ranks = plan_halo(Neighbourhood((12, 4), 3), Rectangles((3, 1)), **sizes).ranks
    rows = 2 * 4 * 2  # two rows of four cells, each with two KV heads
    assert max(cost.received_forward for cost in ranks) == rows * 2 * 8 * 2
    most = {name: max(getattr(cost, name) for cost in ranks) for name in vars(ranks[0])}
    expected = [amount(most[f"received_{way}"] / 1e6) for way in ("forward", "backward")]
    expected += ["50%", *(amount(most[f"memory_{way}"] / 1e9) for way in ("forward", "backward"))]
    assert line.split()[4:9] == expected


@pytest.mark.parametrize("words", re.findall(r": +hilbert plan (.*)$", cli_plan.plan.help, re.M))
def test_the_examples_of_the_help_run(words):
    assert plan(words)


def test_rows_are_lacked_as_enumerated_wherever_the_sequence_is_ordered():
    pattern, kinds = DilatedPattern((12, 48), (2, 5)), ["linear", "hilbert", "morton"]
    table = split_table(pattern, 96, 3, kinds, kv_heads=2).set_index("kind")
    for kind in kinds:
        owner, lacked = Ordering(kind, 96).inverse // 32, [set() for _ in range(3)]
        for branch, head in product(range(2), range(2)):
            seen = pattern.mask(branch, torch.arange(96), torch.arange(96), kv_head=head, kv_heads=2)
            for query, key in (seen & (owner[:, None] != owner)).nonzero().tolist():
                lacked[owner[query]].add((branch, key, head))
        assert table.before[kind] == max(map(len, lacked))
    assert set(table.after) == {table.before["linear"]}
