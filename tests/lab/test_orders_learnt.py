"""The experiment on orders: models differ in who sees whom alone, and the interval is of pictures and of seeds."""

import numpy as np
import pytest
import torch

from hilbert_lib import DilatedPattern, Ordering
from hilbert_lib.lab.ledger.learning import orders_over_rows
from hilbert_lib.lab.models import AlongOrder, PatchModel
from hilbert_lib.lab.samples import HELD_OUT_PICTURES, LEARNT_PICTURES, MORE_HELD_OUT_PICTURES, picture_parts
from hilbert_lib.lab.sweeps.learning import LEARNT_ORDERS, hidden_patches, order_trainings
from hilbert_lib.lab.training import run_trainings

SIDE = 4
PATTERN = DilatedPattern((4, 8), (1, 2))


def along(name, pattern=PATTERN):
    torch.manual_seed(0)
    ordering = Ordering.from_curve(name, SIDE**2, grid=(SIDE, SIDE))
    return AlongOrder(16, 4, pattern, ordering, (SIDE, SIDE)), ordering


@pytest.mark.parametrize("name", ["raster", "morton", "hilbert"])
def test_a_token_sees_those_that_the_pattern_gives_along_the_order(name):
    layer, ordering = along(name)
    x = torch.randn(1, SIDE, SIDE, 16, requires_grad=True)
    out = layer(x).flatten(1, 2)
    slots = ordering.inverse
    for token in range(SIDE**2):
        (gradient,) = torch.autograd.grad(out[0, token].sum(), x, retain_graph=True)
        found = gradient.flatten(1, 2)[0].ne(0).any(-1)
        expected = torch.zeros(SIDE**2, dtype=torch.bool)
        for head in range(4):
            for part in PATTERN.head_parts(head, 4):
                expected |= PATTERN.mask(part, slots[token, None], slots, kv_head=head, kv_heads=4)[0]
        assert found.equal(expected), token


def test_an_order_in_which_all_see_all_changes_nothing():
    dense = DilatedPattern((SIDE**2,), (1,))
    x = torch.randn(2, SIDE, SIDE, 16)
    rows = along("raster", dense)[0](x)
    torch.testing.assert_close(along("hilbert", dense)[0](x), rows, rtol=0, atol=1e-5)  # float32, other sums
    assert not torch.allclose(along("hilbert")[0](x), along("raster")[0](x), atol=1e-3)


def test_patches_are_those_of_the_crop_and_hidden_ones_are_replaced():
    picture = torch.arange(64.0).view(8, 8) / 64
    patches, is_hidden = hidden_patches([picture], 3, SIDE, 2, generator=torch.Generator().manual_seed(0))
    assert patches.shape == (3, SIDE, SIDE, 4)
    assert patches[0, 1, 2].tolist() == (picture[2:4, 4:6].flatten() - 0.5).tolist()
    assert 0.2 < is_hidden.double().mean() < 0.8
    model = PatchModel(4, 16, [along("raster")[0]])
    changed = torch.where(is_hidden[..., None], patches + 1, patches)
    assert model(changed, is_hidden).equal(model(patches, is_hidden))
    assert not model(changed, ~is_hidden).equal(model(patches, ~is_hidden))


def test_no_picture_is_learnt_and_held_out():
    assert not set(LEARNT_PICTURES) & set(MORE_HELD_OUT_PICTURES)
    assert set(HELD_OUT_PICTURES) < set(MORE_HELD_OUT_PICTURES)
    _, held_out = picture_parts(MORE_HELD_OUT_PICTURES)
    assert len(held_out) == len(MORE_HELD_OUT_PICTURES) == 5
    assert all(picture.min() >= 0 and picture.max() <= 1 and min(picture.shape) >= 128 for picture in held_out)


def test_trainings_keep_a_loss_of_each_held_out_picture(tmp_path):
    sizes = {"width": 16, "heads": 4, "layers": 1, "side": 8, "patch": 2, "batch": 2, "steps": 12, "device": "cpu"}
    pattern = DilatedPattern((16, 32), (1, 2))  # 16 + 8 keys a query and head
    trainings = list(order_trainings(["raster", "windows"], [0, 1], pattern, **sizes))
    assert [each.name for each in trainings] == ["raster", "windows"] * 2
    assert {each.parameters["window"] for each in trainings} == {3}  # 5 x 5 are 25, more than 24 by 4 %
    records = run_trainings(trainings[:2], device="cpu", output_dir=str(tmp_path))
    for record in records:
        assert record["loss"] == pytest.approx(np.mean(record["losses"]))
        assert len(record["losses"]) == len(MORE_HELD_OUT_PICTURES)
    again = run_trainings(trainings[:2], device="cpu", output_dir=str(tmp_path))
    assert [each["seconds"] for each in again] == [each["seconds"] for each in records]  # not trained again
    assert [each["losses"] for each in again] == [each["losses"] for each in records]


def made_up(name, seed, losses):
    return {"kind": "training", "name": name, "parameters": {"sweep": LEARNT_ORDERS, "seed": seed}, "losses": losses}


def test_the_interval_is_of_pictures_and_seeds_drawn_anew():
    rows = [made_up("raster", seed, [1.0, 2.0, 4.0]) for seed in range(3)]
    even = [made_up("even", seed, [0.5, 1.0, 2.0]) for seed in range(3)]
    by_picture = [made_up("by picture", seed, [0.5, 2.0, 8.0]) for seed in range(3)]
    by_seed = [made_up("by seed", seed, [factor, 2 * factor, 4 * factor]) for seed, factor in enumerate((0.5, 1, 2))]
    others = [{"kind": "annealing", "name": "hilbert"}]
    table = orders_over_rows([*others, *by_seed, *rows, *even, *by_picture]).set_index("name")
    assert table.loc["raster", ["value", "low", "high"]].tolist() == [1, 1, 1]
    assert table.loc["even", ["value", "low", "high"]].tolist() == pytest.approx([0.5, 0.5, 0.5])
    for name in ("by picture", "by seed"):
        case = table.loc[name]
        assert case.value == pytest.approx(1.0)
        assert case.low == pytest.approx(0.5)
        assert case.high == pytest.approx(2.0)
    assert table.seeds.unique() == [3]
    assert table.pictures.unique() == [3]
