"""The small models of notebook 10, what they learn from, and how they are trained."""

import pytest
import torch

from hilbert_lib import DilatedPattern, attention_weights
from hilbert_lib.lab import samples
from hilbert_lib.lab import training as trainer
from hilbert_lib.lab.models import AlongSequence, ByteModel, PictureModel, SlideModel, rollout, rotary
from hilbert_lib.lab.records import RESULTS, read_records
from hilbert_lib.lab.sweeps import learning
from hilbert_lib.lab.training import Training, curve_table, fit, learning_table, run_trainings

PATTERN = DilatedPattern((4, 12), (1, 3))


def test_no_text_or_picture_is_both_learnt_and_held_out():
    learnt, held_out = samples.text_parts()
    whole = torch.cat([learnt, held_out])
    assert torch.equal(whole, samples.text_tokens(len(whole)))
    assert 0.09 < len(held_out) / len(whole) < 0.11
    pictures, held_out_pictures = samples.picture_parts()
    assert not set(samples.LEARNT_PICTURES) & set(samples.HELD_OUT_PICTURES)
    assert (len(pictures), len(held_out_pictures)) == (6, 2)
    for picture in pictures + held_out_pictures:
        assert picture.dim() == 2
        assert 0 <= picture.min() < 0.3 < 0.7 < picture.max() <= 1


def test_a_lesion_is_moved_by_its_kind_and_the_rest_is_noise():
    slides = samples.made_slides(64, 16, 4, generator=torch.Generator().manual_seed(0), shift=6.0)
    sign = (2 * slides.kinds - 1)[:, None]
    assert (slides.tiles.mean(2) * sign)[slides.is_lesion].mean().item() == pytest.approx(3.0, abs=0.1)  # 6 / sqrt(4)
    assert slides.tiles[~slides.is_lesion].mean().item() == pytest.approx(0.0, abs=0.02)
    assert 0 < slides.kinds.sum() < 64


@pytest.mark.parametrize("places", [torch.arange(12)[None], (3, 4)], ids=["sequence", "grid"])
def test_scores_after_turning_depend_on_the_distance_alone_and_do_depend_on_it(places):
    q, k = (torch.randn(1, 1, 2, 10).expand(1, 12, 2, 10) for _ in range(2))
    q, k = rotary(q, k, places)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)[0, 0]
    step = 1 if isinstance(places, torch.Tensor) else 4  # a cell below
    torch.testing.assert_close(scores[:-step, :-step], scores[step:, step:])
    assert not torch.allclose(scores[0, 0], scores[0, step], atol=1e-3)


@pytest.mark.parametrize("name", learning.TEXT_ATTENTIONS)
def test_a_model_of_text_sees_earlier_bytes_and_its_twin_sees_none(name):
    torch.manual_seed(0)
    model = ByteModel(16, [learning.attention_of(name, 16, 2, length=12, pattern=PATTERN, window=4)])
    tokens = torch.randint(256, (1, 12))
    other = tokens.clone()
    other[0, 4] = (other[0, 4] + 1) % 256
    changed = (model(tokens) != model(other)).any(dim=2)[0].nonzero()[:, 0].tolist()
    seen = {
        learning.DILATED: [4, 5, 6, 7, 10],  # the segment of 4; and of head 1, whose offset is 1, 4 + 3 and 4 + 6
        learning.DENSE: [*range(4, 12)],
        learning.WINDOWS: [4, 5, 6, 7],
        learning.TWIN: [4],
    }
    assert changed == seen[name]


def test_the_twin_of_a_text_model_is_attention_to_itself_alone():
    torch.manual_seed(0)
    twin = learning.attention_of(learning.TWIN, 16, 2, length=12, pattern=PATTERN, window=4)
    attention = AlongSequence(16, 2, DilatedPattern((1,), (1,)))
    attention.load_state_dict(twin.state_dict())
    x = torch.randn(2, 12, 16)
    found, expected = twin(x), attention(x)
    torch.testing.assert_close(found, expected)
    dout = torch.randn_like(found)
    gradients = (
        torch.autograd.grad(out, [*each.parameters()], dout) for each, out in ((twin, found), (attention, expected))
    )
    for grad, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(grad, exact)


def test_a_name_of_no_attention_is_refused():
    with pytest.raises(ValueError, match=r"name must be one of dilated, .*, got 'linear'"):
        learning.attention_of("linear", 16, 2, length=12, pattern=PATTERN, window=4)


def test_the_twin_of_a_picture_model_sees_one_pixel():
    sizes = {"width": 8, "heads": 2, "layers": 1, "side": 9, "batch": 1, "steps": 1}
    for training in learning.picture_trainings((0,), window=3, device="cpu", **sizes):
        torch.manual_seed(0)
        model, pixels = training.make(), torch.rand(1, 9, 9)
        assert isinstance(model, PictureModel)
        other = pixels.clone()
        other[0, 4, 4] += 1
        changed = (model(pixels) != model(other)).sum().item()
        assert changed == (1 if training.name == learning.TWIN else 9)


@pytest.mark.parametrize("is_dense", [True, False])
def test_rollout_is_the_product_of_the_blocks_matrices(is_dense):
    torch.manual_seed(0)
    slides = samples.made_slides(1, 8, 4, generator=torch.Generator().manual_seed(0))
    count = 1 + len(slides.places)
    of_torchscale = DilatedPattern((5, count), (1, 2), offsets="head_block", padding="zeros")
    model = SlideModel(4, 16, 2, 2, DilatedPattern((count,), (1,)) if is_dense else of_torchscale)
    with torch.no_grad():
        x, product = model.tokens(slides.tiles, slides.places), torch.eye(count)
        matrices = []
        for block in model.blocks:
            q, k, _ = block.attention.attention.project(block.attention_norm(x))
            keys, weights = attention_weights(q, k, model.pattern, range(count))
            matrix = torch.zeros(1, 2, count, count + 1).scatter_(3, keys % (count + 1), weights)  # -1 is the last
            matrices.append(matrix[..., :-1].mean(1)[0])
            product = (torch.eye(count) + matrices[-1]) / 2 @ product
            x = block(x)
    direct, through = rollout(model, slides.tiles, slides.places)
    torch.testing.assert_close(direct, matrices[0][0, 1:])
    torch.testing.assert_close(through, product[0, 1:])
    assert ((direct > 0) == (matrices[0][0, 1:] > 0)).all(), "an unseen tile has a weight"
    with torch.inference_mode():
        assert torch.equal(rollout(model, slides.tiles, slides.places)[1], through)


def line(seed, steps=60, name="a line"):
    target = 3.0

    def loss(model, generator):
        x = torch.rand(8, 1, generator=generator)
        return (model(x) - target * x).square().mean()

    return Training(
        name,
        {"sweep": "line", "seed": seed},
        lambda: torch.nn.Linear(1, 1),
        loss,
        lambda model: loss(model, torch.Generator().manual_seed(99)),
        steps=steps,
        tokens=8,
        rate=0.2,
    )


def test_a_model_learns_and_a_seed_gives_the_same_record():
    (first,), (again,) = (run_trainings([line(0)], device="cpu") for _ in range(2))
    assert first["loss"] < 0.1 * first["curve"][0][1]
    assert (first["loss"], first["curve"]) == (again["loss"], again["curve"])
    assert fit(line(1), device="cpu")[1]["loss"] != first["loss"]


def test_a_step_in_half_precision_reads_the_weights_that_it_has_learnt(monkeypatch):
    """As on a GPU: autocast keeps the first weights in half precision until it is left."""
    monkeypatch.setattr(trainer, "_precision", lambda device: torch.autocast("cpu", torch.bfloat16))
    _, record = fit(line(0), device="cpu")
    assert record["loss"] < 0.1 * record["curve"][0][1]


def test_what_is_in_the_folder_is_not_trained_again(tmp_path):
    run_trainings([line(0)], device="cpu", output_dir=str(tmp_path))
    trained = []

    def counted(seed):
        training = line(seed)
        return Training(**{**vars(training), "make": lambda: trained.append(seed) or training.make()})

    records = run_trainings([counted(0), counted(1)], device="cpu", output_dir=str(tmp_path))
    assert trained == [1]
    assert [record["parameters"]["seed"] for record in records] == [0, 1]
    assert len(read_records(tmp_path / RESULTS)) == 2


def test_tables_have_a_row_a_training_and_a_point_for_each_stretch_of_steps():
    records = run_trainings([line(0, steps=45), line(1, steps=45, name="b")], device="cpu")
    table, curves = learning_table(records, "line"), curve_table(records, "line")
    assert table[["name", "seed", "weights"]].to_numpy().tolist() == [["a line", 0, 2], ["b", 1, 2]]
    assert table.loss.tolist() == [record["loss"] for record in records]
    points = curves[curves.seed == 0].tokens.tolist()
    assert (points[0], points[-1], len(points)) == (3 * 8, 45 * 8, 15)
    with pytest.raises(ValueError, match="got 'text'"):
        learning_table(records, "text")


def test_slides_are_told_by_a_trained_encoder_better_than_by_chance():
    pattern = DilatedPattern.geometric(16, 53, branches=2, offsets="head_block", padding="zeros")
    sizes = {"side": 8, "heads": 4, "head_dim": 4, "layers": 1}
    training = learning.slide_training(pattern, **sizes, batch=8, steps=60, device="cpu")
    model, record = fit(training, device="cpu")
    assert isinstance(model, SlideModel)
    assert record["loss"] < 0.6 < record["curve"][0][1]  # ln 2 = 0.69 by chance
