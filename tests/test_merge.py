"""The merge is one associative, commutative operation with a neutral element."""

import pytest
import torch

from hilbert_lib.attention.merge import merge


def partial(keys: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of three rows over some of eight keys; no keys give the neutral element."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 8, generator=generator, dtype=torch.float64)[:, keys]
    v = torch.randn(8, 2, generator=generator, dtype=torch.float64)[keys]
    if not keys:
        return torch.zeros(3, 2, dtype=torch.float64), torch.full((3,), -torch.inf, dtype=torch.float64)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_merge_of_two_halves_is_attention_over_the_whole():
    torch.testing.assert_close(merge(*partial([0, 1, 2]), *partial([3, 4, 5, 6, 7])), partial(list(range(8))))


def test_a_key_in_both_parts_counts_twice():
    torch.testing.assert_close(merge(*partial([0, 1]), *partial([1, 2])), partial([0, 1, 1, 2]))


def test_merge_is_associative_and_commutative():
    a, b, c = partial([0, 1]), partial([2]), partial([3, 4, 5])
    torch.testing.assert_close(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)))
    torch.testing.assert_close(merge(*a, *b), merge(*b, *a))


def test_rows_without_keys_are_neutral_and_give_no_nan():
    torch.testing.assert_close(merge(*partial([]), *partial([1, 2])), partial([1, 2]))
    out, lse = merge(*partial([]), *partial([]))
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_lse_neither_overflow_nor_vanish(shift):
    (out_a, lse_a), (out_b, lse_b) = partial([0, 1]), partial([2, 3])
    out, lse = merge(out_a, lse_a + shift, out_b, lse_b + shift)
    torch.testing.assert_close(out, partial([0, 1, 2, 3])[0])
    torch.testing.assert_close(lse, partial([0, 1, 2, 3])[1] + shift)
