"""Approximations of full attention see the keys that they name, as many each, and their errors are kept."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hilbert_lib import two_resolution_attention
from hilbert_lib.attention.grid_module import NeighbourhoodAttention
from hilbert_lib.lab import resolutions
from hilbert_lib.lab.models import PictureModel, rotary
from hilbert_lib.lab.sweeps.learning import noisy_crops

SHAPE, CELL = (8, 8), 2


def drawn(heads=2, batch=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, batch, 64, heads, 4, generator=generator, dtype=torch.float64)


def near_cells(near):
    row, column = torch.arange(16) // 4, torch.arange(16) % 4
    starts = [(line - near // 2).clamp(0, 4 - near) for line in (row, column)]
    inside = [
        (line >= start[:, None]) & (line < start[:, None] + near)
        for line, start in zip((row, column), starts, strict=True)
    ]
    return inside[0] & inside[1]


@pytest.mark.parametrize("near", [1, 3])
def test_chosen_cells_that_are_near_give_two_resolutions(near):
    q, k, v = drawn()
    cells = resolutions.cell_of_tokens(SHAPE, CELL)
    chosen = near_cells(near).expand(2, 2, 16, 16)
    out = resolutions.over_chosen(q, k, v, cells, chosen, means=True)
    torch.testing.assert_close(out, two_resolution_attention(q, k, v, SHAPE, cell=CELL, near=near))
    assert not torch.allclose(out, resolutions.over_chosen(q, k, v, cells, chosen, means=False))


def test_all_cells_chosen_are_full_attention():
    q, k, v = drawn()
    cells = resolutions.cell_of_tokens(SHAPE, CELL)
    chosen = resolutions.chosen_by_means(q, k, cells, 16)
    assert chosen.all()
    full = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    for means in (False, True):
        torch.testing.assert_close(resolutions.over_chosen(q, k, v, cells, chosen, means=means), full)


def test_the_cells_with_the_largest_mean_scores_are_chosen():
    q, k, _ = drawn()
    cells = resolutions.cell_of_tokens(SHAPE, CELL)
    chosen = resolutions.chosen_by_means(q, k, cells, 3)
    for batch, head, cell in ((0, 0, 0), (1, 1, 9)):
        mean = q[batch, cells == cell, head].mean(0)
        scores = torch.stack([mean @ k[batch, cells == other, head].mean(0) for other in range(16)])
        assert set(chosen[batch, head, cell].nonzero()[:, 0].tolist()) == set(scores.topk(3).indices.tolist())


def test_errors_are_kept_and_ways_have_as_many_keys(tmp_path):
    torch.manual_seed(0)
    model = PictureModel(8, [NeighbourhoodAttention(8, 2, 3, prepare=rotary)])
    pictures = [torch.rand(12, 12)]
    _, noisy = noisy_crops(pictures, 2, 8, generator=torch.Generator().manual_seed(0))
    how = {"cell": 2, "nears": [1, 3], "output_dir": str(tmp_path)}
    records = resolutions.run_approximations(model, noisy, **how)
    assert resolutions.run_approximations(model, noisy, **how) == records
    table = resolutions.error_table([*records, {"kind": "training"}])
    assert set(table.way) == set(resolutions.WAYS)
    assert table.groupby("near")["keys"].unique().map(list).to_dict() == {1: [4 + 15], 3: [36 + 7]}
    assert (table.low <= table.error).all()
    assert (table.error <= table.high).all()
    assert len(records[0]["errors"]) == 2
    with pytest.raises(ValueError, match="records must hold one of kind 'approximation'"):
        resolutions.error_table([])
