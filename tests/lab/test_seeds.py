"""The documents' claims restated, and the real input: what they say by the definition, and what they refuse."""

from pydoc_data.topics import topics

import numpy as np
import pytest
import torch

from hilbert_lib.curves.coordinates import curve_coordinates
from hilbert_lib.lab.samples import sample_image, text_qkv, text_tokens
from hilbert_lib.lab.seeds import seed_key_sets


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


@pytest.mark.parametrize(("length", "w", "r"), [(16, 8, 2), (36, 12, 1), (64, 16, 3), (40, 10, 4), (8, 8, 8)])
def test_key_sets_are_those_of_a_plain_loop(length, w, r):
    for mine, expected in zip(seed_key_sets(length, w, r), key_sets(length, w, r), strict=True):
        assert torch.equal(mine, expected)


def test_the_text_repeats_where_it_ends():
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    assert bytes(text_tokens(len(text) + 7).tolist()) == text + text[:7]
    with pytest.raises(ValueError, match=r"length must be .* at least 1, got 0"):
        text_tokens(0)


def test_samples_do_not_depend_on_the_default_device():
    tokens, (q, k, v), sets = text_tokens(8), text_qkv(8, 2, 4, kv_heads=1), seed_key_sets(16, 8, 2)
    with torch.device("meta"):
        again = (text_tokens(8), *text_qkv(8, 2, 4, kv_heads=1), *seed_key_sets(16, 8, 2))
    for one, other in zip((tokens, q, k, v, *sets), again, strict=True):
        assert torch.equal(one, other)


def test_an_image_keeps_its_mean():
    assert sample_image(np.int64(2), 3).shape == (2, 3)
    assert sample_image(4, 4).mean() == pytest.approx(sample_image(1, 1).item(), abs=0.01)
