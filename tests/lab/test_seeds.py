"""The documents' claims restated, and the real input: what they say by the definition, and what they refuse."""

from pydoc_data.topics import topics

import numpy as np
import pytest
import torch

from hilbert_lib.curves.coordinates import curve_coordinates
from hilbert_lib.lab.samples import sample_image, text_qkv, text_tokens
from hilbert_lib.lab.seeds import key_set_table, seed_kernels_compared, seed_key_sets


def key_sets(length, w, r):
    """The two kernels row by row and key by key, as the documents write them."""
    cols = next(n for n in range(1, length + 1) if n * n >= length)
    cells = curve_coordinates("snake", (-(-length // cols), cols)).tolist()
    h = [row * cols + col for row, col in cells if row * cols + col < length]
    standard, hilbert = torch.zeros(2, length, length, dtype=torch.bool)
    for m in range(length):
        for i in range(w // r):
            standard[m, m // w * w + i * r] = True
            hilbert[h[m], h[h[m] // w * w + i * r]] = True
    return standard, hilbert


@pytest.mark.parametrize(
    ("length", "w", "r"), [(16, 8, 2), (36, 12, 1), (64, 16, 3), (36, 9, 2), (40, 10, 4), (8, 8, 8)]
)
def test_key_sets_are_those_of_a_plain_loop(length, w, r):
    for mine, expected in zip(seed_key_sets(length, w, r), key_sets(length, w, r), strict=True):
        assert torch.equal(mine, expected)


def test_the_comparison_is_that_of_the_two_outputs():
    rows = seed_kernels_compared(36, 9, [1, 2, 5], head_dim=8).set_index("dilation_rate")
    q, k, v = (x[0, :, 0] for x in text_qkv(36, heads=1, head_dim=8))
    for rate, row in rows.iterrows():
        outputs = []
        for mask in key_sets(36, 9, rate):
            scores = (q @ k.T / 8**0.5).masked_fill(~mask, -torch.inf)
            outputs.append(scores.softmax(-1) @ v)
        difference = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
        assert row.output_difference == pytest.approx(difference.item(), abs=1e-5)
        standard, hilbert = (mask.int() for mask in key_sets(36, 9, rate))
        assert row["keys"] == 9 // rate
        assert row.shared_keys == pytest.approx((standard * hilbert).sum().item() / 36)
        assert row.overlap == pytest.approx(row.shared_keys / (9 // rate))
        assert row.same_queries == pytest.approx((standard == hilbert).all(-1).sum().item() / 36)


def test_the_table_of_key_sets_holds_every_pair_of_either():
    table = key_set_table(16, 8, 2)
    standard, hilbert = key_sets(16, 8, 2)
    assert len(table) == (standard | hilbert).sum()
    assert table.standard.tolist() == standard[table["query"].tolist(), table["key"].tolist()].tolist()
    assert table.hilbert.tolist() == hilbert[table["query"].tolist(), table["key"].tolist()].tolist()


def test_the_text_repeats_where_it_ends():
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    assert bytes(text_tokens(len(text) + 7).tolist()) == text + text[:7]


def test_samples_do_not_depend_on_the_default_device():
    tokens, (q, k, v), sets = text_tokens(8), text_qkv(8, 2, 4, kv_heads=1), seed_key_sets(16, 8, 2)
    with torch.device("meta"):
        again = (text_tokens(8), *text_qkv(8, 2, 4, kv_heads=1), *seed_key_sets(16, 8, 2))
    for one, other in zip((tokens, q, k, v, *sets), again, strict=True):
        assert torch.equal(one, other)


def test_an_image_keeps_its_mean():
    assert sample_image(np.int64(2), 3).shape == (2, 3)
    assert sample_image(4, 4).mean() == pytest.approx(sample_image(1, 1).item(), abs=0.01)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: text_tokens(2.5), TypeError, "length must be an integer.*, got 2.5"),
        (lambda: text_tokens(0), ValueError, "length must be .* at least 1, got 0"),
        (lambda: text_qkv(4, 0, 4), ValueError, "heads must be .* at least 1, got 0"),
        (lambda: text_qkv(4, 0, 4, kv_heads=-1), ValueError, "heads must be .* at least 1, got 0"),
        (lambda: text_qkv(4, 1, 4, kv_heads=-1), ValueError, "kv_heads must be .* at least 1, got -1"),
        (lambda: text_qkv(4, 1, 4.0), TypeError, "head_dim must be an integer.*, got 4.0"),
        (lambda: text_qkv(4, 1, 4, seed=0.5), TypeError, "seed must be an integer.*, got 0.5"),
        (lambda: sample_image(0, 4), ValueError, "rows must be .* at least 1, got 0"),
        (lambda: sample_image(4, 1.5), TypeError, "cols must be an integer.*, got 1.5"),
        (lambda: seed_key_sets(16, 8, 1.5), TypeError, "dilation_rate must be an integer from 1 to 8, got 1.5"),
        (lambda: seed_key_sets(16, 8, 9), ValueError, "dilation_rate must be an integer from 1 to 8, got 9"),
        (lambda: seed_key_sets(16, 5, 1), ValueError, r"segment_length must divide length \(16\), got 5"),
        (lambda: seed_key_sets(0, 8, 1), ValueError, "length must be .* at least 1, got 0"),
        (
            lambda: seed_kernels_compared(16, 8, []),
            ValueError,
            "dilation_rates must hold at least one integer",
        ),
        (lambda: seed_kernels_compared(16, 8, 2), TypeError, "dilation_rates must be a sequence of integers, got 2"),
    ],
)
def test_bad_arguments_are_named(make, error, words):
    with pytest.raises(error, match=words):
        make()
