"""Packed documents are attended to as if each were alone: output, lse, gradients, dropout; and what is refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import assert_close, attended, documents_alone, drawn, ends_of, refusals
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hilbert_lib import (
    DilatedAttention,
    DilatedPattern,
    MultiheadDilatedAttention,
    Ordering,
    dilated_attention,
    explain_backend,
)
from hilbert_lib.attention import choice, operators
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.rules import FULL_RULE

LENGTHS = [0, 7, 1, 0, 12, 1, 5, 0]
TOTAL = sum(LENGTHS)
PATTERN = DilatedPattern((4, 10), (1, 3), padding="zeros")
GROUPS = DilatedPattern((4, 10), (2, 3), "head_block", "head_groups")


CU = ends_of(LENGTHS)


@pytest.mark.parametrize("backend", ["reference", "eager", "sdpa", "auto"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", [PATTERN, GROUPS], ids=["zeros", "groups"])
def test_every_document_is_as_the_oracle_has_it_alone(pattern, is_causal, backend):
    tensors = drawn(TOTAL, 4, 2, 6, dtype=torch.float64)
    found = attended(tensors, pattern, backend, is_causal=is_causal, cu_seqlens=CU, max_seqlen=12)
    assert_close(found, documents_alone(tensors, LENGTHS, pattern, is_causal=is_causal), 1e-12)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_dropout_is_that_of_a_batch_of_documents(backend):
    tensors = drawn(6, 4, 2, 6, batch=3, dtype=torch.float64)
    packed = [x.flatten(0, 1)[None] for x in tensors]
    torch.manual_seed(0)
    wanted = attended(tensors, PATTERN, backend, dropout_p=0.4)
    torch.manual_seed(0)
    found = attended(packed, PATTERN, backend, dropout_p=0.4, cu_seqlens=ends_of([6, 6, 6]))
    assert_close([x.unflatten(1, (3, 6))[0] for x in (found[0], *found[2:])], (wanted[0], *wanted[2:]), 1e-12)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_document_has_tokens(lengths):
    tensors = drawn(0, 2, 2, 4)
    out, lse, *grads = attended(tensors, PATTERN, "auto", cu_seqlens=ends_of(lengths))
    assert out.shape == (1, 0, 2, 4) == grads[0].shape
    assert lse.shape == (1, 2, 0)


def test_it_is_one_operator_that_compiles_checkpoints_and_counts_flop():
    tensors = [x.requires_grad_() for x in drawn(TOTAL, 2, 1, 4)[:3]]
    request = Request(PATTERN, True, 0.5, cu_seqlens=CU, max_seqlen=12)
    given = *tensors, None, None, None, *operators._arguments(request), "eager"
    torch.library.opcheck(torch.ops.hilbert_lib.attention.default, given)
    attend = partial(dilated_attention, pattern=PATTERN, is_causal=True)  # "auto", which is sdpa
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for lengths in (LENGTHS, [TOTAL], [3, TOTAL - 3]):
        cu = ends_of(lengths)
        with FlopCounterMode(display=False) as counter:
            out = attend(*tensors, cu_seqlens=cu)
        pairs = [PATTERN.pairs(n, heads=2, kv_heads=1, is_causal=True) for n in lengths]
        assert counter.get_total_flops() == 4 * 4 * sum(pairs)
        assert torch.equal(compiled(*tensors, cu_seqlens=cu), out)
        again = checkpoint(attend, *tensors, cu_seqlens=cu, use_reentrant=False)
        grads = [torch.autograd.grad(each.square().sum(), tensors) for each in (out, again)]
        assert all(map(torch.equal, *grads))
    torch.compiler.reset()


def test_an_exported_module_takes_other_documents():
    module, options = DilatedAttention(PATTERN), {"is_causal": True, "cu_seqlens": CU}
    q = torch.randn(1, TOTAL, 2, 4)
    rows, ends = ({n: torch.export.Dim(name, min=2)} for n, name in ((1, "rows"), (0, "ends")))
    shapes = {"q": rows, "k": rows, "v": rows, "is_causal": None, "cu_seqlens": ends}
    exported = torch.export.export(module, (q, q, q), options, dynamic_shapes=shapes).module()
    q, options = torch.randn(1, 9, 2, 4), options | {"cu_seqlens": ends_of([1, 2, 3, 3])}
    assert torch.equal(exported(q, q, q, **options), module(q, q, q, **options))


def test_modules_take_documents():
    torch.manual_seed(0)
    q = torch.randn(1, TOTAL, 2, 4)
    wanted = dilated_attention(q, q, q, PATTERN, is_causal=True, cu_seqlens=CU)
    assert torch.equal(DilatedAttention(PATTERN)(q, q, q, is_causal=True, cu_seqlens=CU), wanted)
    layer = MultiheadDilatedAttention(8, 2, PATTERN)
    x = torch.randn(TOTAL, 8)
    alone = torch.cat([layer(each, is_causal=True)[0] for each in x.split(LENGTHS) if len(each)])
    torch.testing.assert_close(layer(x, is_causal=True, cu_seqlens=CU, max_seqlen=12)[0], alone)
    torch.testing.assert_close(layer(x[:, None], is_causal=True, cu_seqlens=CU)[0], alone[:, None])


def test_which_backends_serve_and_what_it_costs_is_told():
    q = torch.ones(1, TOTAL, 2, 4)
    told = explain_backend(q, q, q, PATTERN, cu_seqlens=CU)
    assert told.chosen == "sdpa"
    for name in ("sdpa", "eager", "reference"):
        assert "one document after the other; the host waits" in told.reasons[name]
    assert "documents" not in explain_backend(q, q, q, PATTERN).reasons["sdpa"]
    call = Request(PATTERN, cu_seqlens=CU)
    half = torch.ones(1, TOTAL, 2, 64, dtype=torch.float16)
    assert BACKENDS["flex"].limits(half, call).startswith("no cu_seqlens")
    assert BACKENDS["hopper"].limits(half, call) == ""
    for name in ("cudnn", "triton"):
        assert not BACKENDS[name].limits(half, call)


def test_what_takes_all_documents_in_one_call_stands_before_loops(monkeypatch):
    monkeypatch.setattr(choice, "_known_rule", lambda *_: FULL_RULE)
    q, one = torch.ones(1, TOTAL, 2, 4), Request(PATTERN)
    assert choice.rule_for(q, one, gradient=False) == FULL_RULE
    of_documents = choice.rule_for(q, replace(one, cu_seqlens=CU), gradient=False)
    assert of_documents.order == ("triton", "sdpa", "eager")
    if not BACKENDS["triton"].here(q, one):
        told = explain_backend(q, q, q, PATTERN, cu_seqlens=CU)
        assert told.chosen == "triton"
        assert "one document after the other" not in told.reasons["triton"]
        assert "one document after the other" in told.reasons["sdpa"]


def packed(cu=CU, *, batch=1, keys=TOTAL, **options):
    q, k = torch.ones(batch, TOTAL, 2, 4), torch.ones(batch, keys, 2, 4)
    return dilated_attention(q, k, k, PATTERN, cu_seqlens=cu, **options)


def nested():
    layer = MultiheadDilatedAttention(8, 2, PATTERN, batch_first=True).eval()
    return layer(torch.nested.nested_tensor([torch.ones(3, 8)], layout=torch.strided), cu_seqlens=CU)


WRONG = {
    TypeError: [
        (lambda: packed([0, TOTAL]), "cu_seqlens must be an int32 tensor or None, got list"),
        (lambda: packed(CU.long()), "cu_seqlens must be an int32 tensor or None, got torch.int64"),
        (lambda: packed(max_seqlen=2.0), "max_seqlen must be an integer of at least 1, got 2.0"),
        (nested, "query must be a dense .* tensor, got a nested one"),
    ],
    ValueError: [
        (lambda: packed(CU[:0]), r"cu_seqlens must be \(documents \+ 1,\), got shape \(0,\)"),
        (lambda: packed(CU[None]), r"cu_seqlens must be \(documents \+ 1,\), got shape \(1, 9\)"),
        (lambda: packed(CU.to("meta")), r"cu_seqlens must be on the device of q \(cpu\), got meta"),
        (lambda: packed(batch=2), "q must have a batch of 1 with cu_seqlens, got 2"),
        (lambda: packed(keys=9), "k must have the length of q"),
        (lambda: packed(max_seqlen=0), "max_seqlen must be an integer of at least 1, got 0"),
        (lambda: packed(max_seqlen=11), "max_seqlen must be at least the length of every document, 12, got 11"),
        (lambda: packed(None, max_seqlen=11), "max_seqlen must be None without cu_seqlens, got 11"),
        (lambda: packed(query_start=0), "query_start must be None with cu_seqlens, got 0"),
        (lambda: packed(query_start=CU[:1]), "query_start must be None with cu_seqlens, got Tensor"),
        (lambda: packed(key_start=CU[:1]), "key_start must be None with cu_seqlens, got Tensor"),
        (lambda: packed(kv_ordering=Ordering.linear(TOTAL)), "kv_ordering must be None with cu_seqlens, got Ordering"),
        (lambda: packed(key_padding_mask=CU[None] > 0), "key_padding_mask must be None with cu_seqlens, got Tensor"),
        (lambda: packed(backend="flex"), "backend='flex' .*(no cu_seqlens|needs a CUDA device)"),
        (lambda: packed(CU[2:]), r"must begin with 0, .* got \[7, 8, 8, 20, 21, 26, 26\]"),
        (lambda: packed(CU[:-3]), r"must begin with 0, .* end with q's length 26, got \[0, 0, 7, 8, 8, 20\]"),
        (lambda: packed(CU[[0, 4, 2, 8]]), r"never fall .* got \[0, 8, 7, 26\]"),
        (lambda: packed(ends_of([1] * 8 + [TOTAL - 9])), r"got \[0, 1, 2, 3, \.\.\., 6, 7, 8, 25\]"),
    ],
}
test_what_is_no_row_of_documents_is_refused_by_name_and_value = refusals(WRONG)
