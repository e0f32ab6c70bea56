"""Points: packed lists, and the pattern that they are made of."""

import pytest
import torch

from hilbert_lib.patterns.packed_lists import PackedLists


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (63, 65), (129, 200), (5, 0), (0, 5)])
def test_packed_lists_hold_the_pairs_of_a_mask_in_any_order(queries, keys):
    generator = torch.Generator().manual_seed(queries)
    mask = torch.rand(queries, keys, generator=generator) < 0.3
    orders = [torch.randperm(n, generator=generator) for n in (queries, keys)]
    lists = PackedLists.from_mask(mask, *orders)
    assert lists.mask.equal(mask)
    assert lists.pairs == mask.sum()
    assert [x.dtype for x in lists.tensors] == [torch.int32, torch.int32, torch.int32, torch.int64]
    rows = lists.query_rows
    assert rows[:queries].equal(orders[0].int())
    assert rows[queries:].eq(-1).all()
    assert len(rows) == 64 * (len(lists.starts) - 1)
    for first, last in zip(lists.starts, lists.starts[1:], strict=False):
        own = lists.key_rows[first:last].flatten()
        own = own[own >= 0]
        assert len(own.unique()) == len(own) > 64 * (last - first - 1)
