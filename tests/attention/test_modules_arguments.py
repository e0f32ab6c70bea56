"""What a module is built from and called with is refused by name, value and what is allowed, not where it is used."""

from functools import partial

import pytest
import torch
from cases import refusals

from hilbert_lib import DilatedAttention, DilatedPattern, MultiheadDilatedAttention, Ordering

DILATED = DilatedPattern((4, 12), (1, 3))
GROUPS = DilatedPattern((4, 8), (1, 2), mixing="head_groups")
HILBERT = partial(Ordering.from_curve, "hilbert")
ORDERED = partial(DilatedAttention, DILATED, kv_ordering=HILBERT)


def tokens(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, 16)


def nested(*rest: int) -> torch.Tensor:
    return torch.nested.nested_tensor([tokens(3, *rest), tokens(4, *rest)])


def multihead(pattern=DILATED, embed_dim=16, heads=4, **options) -> MultiheadDilatedAttention:
    return MultiheadDilatedAttention(embed_dim, heads, pattern, **{"batch_first": True, **options})


def called(*tensors, **options):
    return multihead()(*(tensors or (tokens(2, 9),)), **options)


WRONG = {
    TypeError: [
        (lambda: multihead(dropout="0.1"), "dropout must be a number, got '0.1'"),
        (lambda: multihead(kv_ordering="hilbert"), "kv_ordering must be None, an Ordering, .* got 'hilbert'"),
        (lambda: multihead(None), "pattern must be a DilatedPattern, got NoneType"),
        (lambda: DilatedAttention((4, 8)), "pattern must be a DilatedPattern, got tuple"),
        (lambda: multihead(batch_first="yes"), "batch_first must be True or False, got 'yes'"),
        (lambda: called(tokens(2, 9).half()), r"query must have the dtype of .* \(torch.float32\), got torch.float16"),
        (lambda: called(value=tokens(2, 9).half()), "value must have the dtype of"),
        (lambda: torch.autocast("cpu", torch.bfloat16)(called)(tokens(2, 9).double()), "query must have the dtype of"),
        (lambda: called([1.0]), "query must be a tensor, got list"),
        (lambda: called(tokens(2, 9), 3), "key must be a tensor, got int"),
        (lambda: multihead(batch_first=False)(nested()), r"query must be a dense \(strided\) tensor, got a nested one"),
        (lambda: called(tokens(2, 4), *[nested()] * 2), r"key must be a dense \(strided\) tensor, got a nested one"),
        (lambda: ORDERED()(*[nested(4)] * 3), r"q must be a dense \(strided\) tensor, got a nested one"),
        (lambda: called(attn_mask="causal", is_causal=True), "attn_mask must be .* got str"),
        (lambda: called(tokens(9), key_padding_mask=[True] * 9), "key_padding_mask must be a tensor or None, got list"),
        (lambda: called(key_padding_mask=tokens(2).long()), "key_padding_mask must be a bool .*, got torch.int64"),
        (lambda: ORDERED()(tokens(1, 9, 2), 3, 3), "k must be a tensor"),
        (lambda: DilatedAttention(DILATED, kv_ordering=str)(*tokens(3, 1, 9, 2)), "kv_ordering must be an Ordering"),
    ],
    ValueError: [
        (lambda: multihead(dropout=1), r"dropout must be in \[0, 1\), got 1"),
        (lambda: DilatedAttention(DILATED, scale=0), "scale must be finite and above 0, got 0"),
        (lambda: multihead(backend="fast"), "backend must be one of auto, .* got 'fast'"),
        (lambda: multihead(backend="flash")(tokens(1, 9)), "backend='flash' .*needs a CUDA device"),
        (lambda: multihead(embed_dim=0), "embed_dim must be an integer of at least 1, got 0"),
        (lambda: multihead(heads=3), "num_heads must divide embed_dim 16, got 3"),
        (lambda: multihead(embed_dim=514, heads=2), "embed_dim / num_heads must be at most 256, got 514 / 2 = 257"),
        (lambda: multihead(kv_heads=3), "kv_heads must divide num_heads 4, got 3"),
        (lambda: multihead(GROUPS, kv_heads=1), r"needs at least one KV head a branch \(2\), got 1"),
        (lambda: multihead(device="gpu"), "device must be a device that torch knows, .* got 'gpu'"),
        (lambda: multihead(dtype=torch.int8), "dtype must be one of torch.float16, .* got torch.int8"),
        (lambda: multihead(dtype="float32"), "dtype must be one of torch.float16, .* got 'float32'"),
        (lambda: called(tokens(2, 9).to("meta")), r"query must be on the device of the parameters \(cpu\), got meta"),
        (lambda: called(torch.ones(1, 9, 8)), "query must be tokens of size 16 in 2 or 3 dimensions"),
        (lambda: called(tokens(1, 12), *[tokens(1, 9)] * 2), r"key must be .* like query \(1, 12, 16\), got .*9, 16\)"),
        (lambda: called(need_weights=True), "need_weights must be False"),
        (lambda: called(attn_mask=torch.ones(9, 9)), r"attn_mask must be None unless is_causal=True: .* \(9, 9\)"),
        (lambda: called(key_padding_mask=-torch.ones(2, 9)), "key_padding_mask must be bool, or hold .*; got -1.0"),
        (lambda: ORDERED()(*tokens(2, 1, 9, 2), tokens(1, 3, 2)), r"v must have the shape of k \(1, 9, .*\(1, 3, "),
        (lambda: multihead(kv_ordering=HILBERT(12))(tokens(1, 9)), r"must have the length of k \(9\), got 12"),
    ],
}
of_nested_tensors = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
test_a_wrong_argument_is_refused_by_name_and_value = of_nested_tensors(refusals(WRONG))


def test_the_largest_head_dim_is_served():
    module = MultiheadDilatedAttention(256, 1, DILATED, batch_first=True)
    assert module(torch.ones(1, 9, 256))[0].shape == (1, 9, 256)
