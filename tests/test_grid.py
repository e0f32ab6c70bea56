"""What a grid's orders are worth is counted: blocks, pairs and bytes; FlexAttention computes the predicted blocks."""

from functools import partial

import pytest
import torch
from cases import assert_close, differentiated, drawn, norms, refusals
from oracle import attending, mask_of
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from hilbert_lib import NeighbourhoodAttention, neighbourhood_attention
from hilbert_lib.attention.backends import flex, flex_masks, tile_groups
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.lab.cache import neighbourhood as counting
from hilbert_lib.lab.exact_rows import exact_keys, exact_rows
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns import blocks as mask
from hilbert_lib.patterns.blocks import axis_tiles, mask_blocks
from hilbert_lib.patterns.neighbourhood import Neighbourhood

CASES = [((16, 16), 5), ((16, 16), 9), ((13, 10), 4), ((24, 20), 7), ((9, 9), 9), ((1, 30), 1)]
ORDERS = ("raster", "snake", "tile", "morton", "hilbert", "random")


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0][0]}x{case[0][1]}-{case[1]}")
def near(request):
    return Neighbourhood(*request.param)


def tensors(near, count=3):
    return drawn(near.length, 2, 2, 8, dtype=torch.float64)[:count]


def ordering(near, order):
    return counting.neighbourhood_orderings(near.shape)[order]


def attend(q, k, v, near, own, block_size):
    """FlexAttention's output and lse, of tokens that are stored in an order."""
    request = Request(near.of_heads(k.shape[2]), scale=q.shape[3] ** -0.5, ordering=own)
    return flex.attend(Tensors(q, k, v, k[:, :0], v[:, :0]), request, block_size)


def block_mask(near, own, block_size):
    return flex_masks.neighbourhood_mask((near,), own, None, 0, False, block_size, torch.device("cpu"))


# Each order on two grids, each grid in two orders; and other rules.
GRIDS = [(Neighbourhood(*CASES[(n + more) % 6]), order) for n, order in enumerate(ORDERS) for more in (0, 3)]
GRIDS += [
    (Neighbourhood((12, 14), (3, 4), dilation=(2, 1), edge="wrap"), "hilbert"),
    (Neighbourhood((9, 20), (4, 5), stride=(1, 2), is_causal=(True, False), edge="clip"), "tile"),
]
WINDOWS = [("raster", 1), ("hilbert", 1), ("snake", 6), ("hilbert", 6), ("tile", 23), ("morton", 23), ("random", 23)]


RULES = [{}, {"edge": "clip", "stride": (1, 3)}, {"edge": ("wrap", "clip"), "dilation": (2, 1)}]
RULES += [{"edge": "clip", "is_causal": (False, True), "dilation": (1, 2), "stride": (2, 3)}]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: " ".join(rules) or "plain")
@pytest.mark.parametrize(("order", "window"), WINDOWS)
def test_blocks_far_apart_on_a_grid_of_many_are_found(monkeypatch, window, order, rules):
    monkeypatch.setattr(mask, "CELLS_ON_CPU", 2**12)  # two words at a time where windows are large
    window = min(window, 20) if rules else window
    rules = {name: 1 if name == "stride" and window == 1 else value for name, value in rules.items()}
    near = Neighbourhood((40, 50), window, **rules)  # of 500 blocks of keys, 64 are looked at together
    sizes = {"q_block": 6, "kv_block": 4}
    blocks, pairs = (count(near, ordering(near, order), **sizes) for count in (mask_blocks, counting.block_pairs))
    assert (blocks.partial | blocks.full).equal(pairs > 0)


def listed(counts, indices):
    """Lists of blocks, as FlexAttention keeps them, as a table."""
    table = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, (count, columns) in enumerate(zip(counts[0, 0], indices[0, 0], strict=True)):
        table[row, columns[:count].long()] = True
    return table


def test_the_mask_of_the_kernel_holds_the_predicted_blocks(near):
    own = ordering(near, "hilbert")
    blocks = mask_blocks(near, own, q_block=16, kv_block=16)
    mask = block_mask(near, own, 16)
    assert listed(mask.kv_num_blocks, mask.kv_indices).equal(blocks.partial)
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices).equal(blocks.full)
    assert listed(mask.q_num_blocks, mask.q_indices).equal(blocks.partial.T)
    assert listed(mask.full_q_num_blocks, mask.full_q_indices).equal(blocks.full.T)
    assert blocks.full.any() or near != Neighbourhood((16, 16), 9)  # some case has full blocks


@pytest.mark.parametrize("rules", [{}, {"edge": "clip"}, {"edge": "clip", "is_causal": True}, {"dilation": 2}], ids=str)
@pytest.mark.parametrize("cells", range(8, 13))
def test_a_block_that_the_grid_does_not_fill_is_never_full(cells, rules):
    """Whatever the rest, and however far a clipped window reaches past the end."""
    near = Neighbourhood((cells,), min(7, cells // 2) if "dilation" in rules else 7, **rules)
    mask = mask_of(near)
    for q_block, kv_block in ((1, 5), (3, 4), (4, 3), (5, 1)):
        whole = [
            [bool(block.all()) and block.shape == (q_block, kv_block) for block in rows.split(kv_block, 1)]
            for rows in mask.split(q_block)
        ]
        blocks = mask_blocks(near, None, q_block=q_block, kv_block=kv_block)
        assert blocks.full.equal(torch.tensor(whole))
        assert not (blocks.partial & blocks.full).any()


@pytest.mark.parametrize("extra", [1, 2, 10, 18, 34])
@pytest.mark.parametrize(
    ("cells", "queries"), [(16, range(16)), (30, range(30)), (40, range(3, 35)), (40, range(39, 40))]
)
def test_blocks_of_the_kernel_with_keys_that_all_see_are_those_of_the_pairs(cells, queries, extra):
    """Blocks of 16. Cells, queries, or cells and extra keys fill the last block or do not."""
    near = Neighbourhood((cells,), 15)
    box = None if len(queries) == cells else (queries,)
    mask = flex_masks.neighbourhood_mask((near,), None, box, extra, False, 16, torch.device("cpu"))
    seen = torch.nn.functional.pad(mask_of(near)[queries.start : queries.stop], (0, extra), value=True)
    blocks = [list(rows.split(16, 1)) for rows in seen.split(16)]
    full = torch.tensor([[bool(block.all()) and block.shape == (16, 16) for block in row] for row in blocks])
    some = torch.tensor([[bool(block.any()) for block in row] for row in blocks])
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices).equal(full)
    assert listed(mask.kv_num_blocks, mask.kv_indices).equal(some & ~full)


@pytest.mark.parametrize(("near", "order"), GRIDS)
def test_pairs_of_a_block_are_counted(near, order):
    perm = ordering(near, order).perm
    stored = mask_of(near)[perm][:, perm]
    pairs = counting.block_pairs(near, ordering(near, order), q_block=20, kv_block=30)
    blocks = [[block.sum() for block in rows.split(30, dim=1)] for rows in stored.split(20)]
    assert pairs.equal(torch.tensor(blocks))


def test_bytes_exchanged_are_of_the_rows_that_windows_reach_on_other_ranks():
    near = Neighbourhood((16, 12), 5)
    table = counting.count_exchange(near, ranks=[4], row_bytes=10).set_index("order")
    mask = mask_of(near)
    for order in ORDERS:
        runs = ordering(near, order).perm.tensor_split(4)
        received = [20 * int(mask[mine].any(0).sum() - mask[mine][:, mine].any(0).sum()) for mine in runs]
        assert [table.total_bytes[order], table.most_bytes[order]] == [sum(received), max(received)]


def test_sampled_rows_equal_the_oracle_and_its_gradients(near):
    q, k, v, dout = given = tensors(near, 4)
    out, _, dq, dk, dv = differentiated(attending(near), given)
    close = {"atol": 1e-12, "rtol": 0}
    rows = torch.tensor([near.length - 1, 0, near.length // 2])
    found = exact_rows(q, k, v, dout, near, head=1, queries=rows)
    torch.testing.assert_close(found, (out[0, rows, 1], dq[0, rows, 1]), **close)
    found = exact_keys(q, k, v, dout, near, kv_head=1, keys=rows)
    torch.testing.assert_close(found, (dk[0, rows, 1], dv[0, rows, 1]), **close)


def test_compact_orders_touch_fewer_blocks_where_the_window_is_wide():
    counts = counting.count_blocks([(64, 64), (40, 48)], windows=[5, 13, 41], block_sizes=[64])
    assert set(counts.window[counts.grid == "40 x 48"]) == {5, 13}, "a window wider than the grid was not left out"
    touched = counts.pivot(index=["grid", "window"], columns="order", values="touched")
    wide = touched.xs(13, level="window")
    assert (wide.hilbert < wide.raster).all()
    assert touched.loc[("64 x 64", 5)].raster < touched.loc[("64 x 64", 5)].hilbert
    assert (touched.random == touched.max(axis=1)).all()
    # On sides of a power of two, blocks of 64 are the same squares of 8 x 8 cells.
    assert (touched.loc["64 x 64", ["hilbert", "morton", "tile"]].nunique(axis=1) == 1).all()


def test_the_least_window_that_gains_is_where_blocks_touched_cross():
    least = counting.least_window((64, 64))
    counts = counting.count_blocks([(64, 64)], windows=[least - 2, least, 33], block_sizes=[counting.BLOCK])
    touched = counts.pivot(index="window", columns="order", values="touched")
    assert (touched.hilbert < touched.raster).to_dict() == {least - 2: False, least: True, 33: True}


def test_used_is_the_share_of_pairs_that_attend():
    near = Neighbourhood((16, 16), 5)
    shares = counting.block_shares(near, block_size=32)
    means = shares[shares.share > 0].groupby("order").share.mean()
    counts = counting.count_blocks([(16, 16)], windows=[5], block_sizes=[32]).set_index("order")
    assert (means - counts.used[means.index]).abs().max() < 1e-12


NEAR = Neighbourhood((4, 4), 3)
WRONG = [
    (lambda: mask_blocks(NEAR, Ordering.linear(15), q_block=4, kv_block=4), "ordering"),
    (lambda: mask_blocks(NEAR, Ordering.linear(16), q_block=0, kv_block=4), "q_block"),
    (lambda: counting.count_exchange(NEAR, ranks=[3], row_bytes=1), "ranks must divide the 16 cells"),
    (lambda: counting.count_blocks([(4, 9)], windows=[5], block_sizes=[4]), r"windows .* at most 4, .* got \[5\]"),
    (lambda: counting.count_blocks([(4, 4)], windows=[3, 3], block_sizes=[4]), r"windows .* once, got \[3, 3\]"),
    (lambda: counting.count_blocks([(4, 4)], windows=[3], block_sizes=[]), r"block_sizes .* at least one"),
    (lambda: counting.count_blocks([], windows=[3], block_sizes=[4]), r"shapes .* at least one"),
    (lambda: counting.least_window((16, 16)), r"shape must have a window that gains by hilbert order, got \(16, 16\)"),
    (lambda: counting.count_exchange(NEAR, ranks=[2, 2], row_bytes=1), r"ranks .* once"),
    (lambda: Neighbourhood((3, 4), 2).keys(12), "position must be an integer from 0 to 11, got 12"),
    (lambda: Neighbourhood((3, 4), 2).queries(-1), "position must be an integer from 0 to 11, got -1"),
]
test_what_is_not_allowed_is_named = refusals({ValueError: WRONG})


def test_one_compilation_serves_every_order_and_window_of_a_grid():
    torch._dynamo.reset()
    run = torch.compile(flex_attention, dynamic=False, fullgraph=True, backend="eager")
    q = torch.ones(1, 2, 256, 8)
    before = counters["stats"]["unique_graphs"]
    for window, order in ((3, "raster"), (5, "hilbert"), (16, "random")):
        near = Neighbourhood((16, 16), window)
        run(q, q, q, block_mask=block_mask(near, ordering(near, order), 16))
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("order", ORDERS)
def test_on_the_gpu_output_and_gradients_equal_the_oracle(order, block_size):
    near = Neighbourhood((32, 24), 9)
    own = ordering(near, order).to("cuda")
    given = drawn(near.length, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    found = differentiated(partial(attend, near=near, own=own, block_size=block_size), [own.apply(x, 1) for x in given])
    expected = differentiated(attending(near), [x.double().cpu() for x in given])
    found, expected = (each[:1] + each[2:] for each in (found, expected))
    assert max(norms([own.undo(x, dim=1).cpu() for x in found], expected)) < 0.01


def test_a_mask_first_made_in_inference_mode_serves_a_backward_pass(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # no gradient on the CPU
    near, own = Neighbourhood((6, 7), 3), Ordering.linear(42)  # of no other test: masks are cached
    given = tensors(near, 4)
    with torch.inference_mode():
        attend(*given[:3], near, own, 128)
    got = differentiated(partial(attend, near=near, own=own, block_size=128), given)
    assert_close(got, differentiated(attending(near), given), 1e-12)


def test_nothing_depends_on_the_default_device():
    near = Neighbourhood((5, 8), 5)
    own = ordering(near, "hilbert")
    q, k, v, dout = tensors(near, 4)
    module = NeighbourhoodAttention(16, 2, 3, dtype=torch.float64)

    def clear():
        flex_masks.neighbourhood_mask.cache_clear()
        tile_groups.groups.cache_clear()

    results = [
        lambda: near.keys(9),
        lambda: near.queries(9),
        lambda: mask_blocks(near, own, q_block=4, kv_block=2),
        lambda: counting.block_pairs(near, own, q_block=4, kv_block=2),
        lambda: [x for axis in near.axes for x in axis_tiles(axis, 4)],
        lambda: attend(q, k, v, near, own, 128),
        lambda: neighbourhood_attention(q, k, v, near, ordering=own),
        lambda: neighbourhood_attention(q, k, v, near, extra_k=k[:, :3], extra_v=v[:, :3], backend="reference"),
        lambda: module(q.flatten(2).unflatten(1, near.shape)),
        lambda: exact_rows(q, k, v, dout, near, head=1, queries=torch.tensor([9], device="cpu")),
        lambda: exact_keys(q, k, v, dout, near, kv_head=1, keys=torch.tensor([9], device="cpu")),
    ]
    for result in results:
        clear()
        expected = result()
        clear()
        with torch.device("meta"):
            torch.testing.assert_close(result(), expected, atol=0, rtol=0)
