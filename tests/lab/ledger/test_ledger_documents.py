"""Claims that are timed by themselves: the restated kernels select what the documents say, dense beside dilated."""

import pytest
import torch

from hilbert_lib.lab.ledger.documents import backend_pairs, claim_table, dense_pairs, documents_pairs
from hilbert_lib.lab.ledger.rerun import claim_pairs
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.seeds import seed_key_sets
from hilbert_lib.ordering import Ordering

seed_kernel = pytest.importorskip("hilbert_lib.lab.seed_kernel", reason="triton has no build for this platform")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = {"segment_length": 12, "heads": 1, "head_dim": 8, "device": DEVICE}


@pytest.mark.parametrize(("segment", "rate"), [(12, 1), (9, 3), (36, 2)])
def test_the_restated_kernels_read_the_keys_of_the_documents(segment, rate):
    q, k, v = (torch.randn(1, 36, 1, 16, device=DEVICE) for _ in range(3))
    snake = Ordering.from_curve("snake", 36).perm.int().to(DEVICE)
    for order, mask in zip((None, snake), seed_key_sets(36, segment, rate), strict=True):
        out = seed_kernel.seed_attention(q, k, v, segment_length=segment, dilation_rate=rate, order=order)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2).double() for x in (q, k, v)), mask.to(DEVICE)
        )
        torch.testing.assert_close(out.double(), expected.transpose(1, 2), atol=1e-5, rtol=0)


def test_two_functions_differ_two_layouts_do_not_and_each_side_is_held_against_its_own():
    # At a size that the interpreter can run.
    pairs = list(documents_pairs({(36, 3): 2.0, (36, 1): None}, **{**SMALL, "head_dim": 16}))
    records = run_sides(pairs, device=DEVICE, repetitions=5)
    table = claim_table(records).set_index("dilation")
    assert table.claimed[3] == 2.0
    assert table.claimed.isna()[1]
    assert table.functions_apart[3] > 0.5
    assert (table.layouts_apart == 0).all()
    assert 0 < max(record[side]["error"] for record in records for side in "ab") < 0.01
    (standard, hilbert), *_ = pairs
    assert standard.error(hilbert.run()) > 0.5


def test_claims_are_timed_at_the_sizes_of_the_documents_and_what_cannot_be_is_refused():
    standards = [standard.parameters for standard, _ in claim_pairs(["K3"], device="cpu")]
    assert {(of["length"], of["dilation"]) for of in standards} == {(4096, 64), (2048, 2), (1024, 1), (4096, 1)}
    assert {of["heads"] * of["head_dim"] for of in standards} == {768}
    dense = [dense.parameters["branches"] for dense, _ in claim_pairs(["K10"], device="cpu")]
    assert dense == ["8192:1", "32768:1", "131072:1"]
    with pytest.raises(ValueError, match="claims must be of K3, K4, K10, K11, B4; got 'K99'"):
        next(claim_pairs(["K99"], device="cpu"))
    with pytest.raises(ValueError, match="segment_length must divide 4096 and be at least 64, got 1000"):
        list(claim_pairs(["K3"], device="cpu", segment_length=1000))


def test_dense_attention_stands_beside_dilated_of_as_many_tokens():
    shorter, longer = dense_pairs([2048, 4096], **SMALL)
    (record,) = run_sides([shorter], device=DEVICE)
    assert max(record["a"]["error"], record["b"]["error"]) < 0.01
    assert longer[0].useful_flop > longer[1].useful_flop


def test_two_backends_compute_one_function():
    ((base, other),) = backend_pairs(("sdpa",), "eager", (2048,), **SMALL)
    assert (base.name, other.name) == ("sdpa", "eager")
    (record,) = run_sides([(base, other)], device=DEVICE)
    assert record["output_difference"] < 0.01


@pytest.mark.gpu
def test_a_claim_is_timed():
    table = claim_table(run_sides(claim_pairs(["K3"], device="cuda"), device="cuda"))
    assert table.functions_apart[0] > 0.5
    assert table[["functions", "layouts"]].notna().all(axis=None)
