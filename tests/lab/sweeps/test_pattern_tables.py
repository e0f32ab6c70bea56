"""The tables of notebook 02 say what attention does."""

import pandas as pd
import pytest
import torch

from hilbert_lib import DilatedPattern, Ordering
from hilbert_lib.lab.patterns import errors, mixing, multiplicities
from hilbert_lib.lab.samples import text_qkv

PATTERN = DilatedPattern((4, 8, 16), (1, 2, 4))


@pytest.mark.parametrize("is_causal", [False, True])
def test_multiplicities_count_what_the_pattern_says(is_causal):
    table = multiplicities(PATTERN, 16, kv_heads=2, is_causal=is_causal)
    for (head, query), own in table.groupby(["head", "query"]):
        keys = PATTERN.keys(query, kv_head=head, kv_heads=2, length=16, is_causal=is_causal)
        assert own.key.repeat(own["count"]).tolist() == keys.tolist()
    assert table["count"].sum() == PATTERN.pairs(16, heads=2, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_mixing_by_denominators_is_one_softmax_over_the_keys_that_the_query_sees(is_causal):
    q, k, _ = text_qkv(16, heads=4, head_dim=4, kv_heads=2)
    table = mixing(q.clone().requires_grad_(), k, PATTERN, query=5, head=3, is_causal=is_causal)
    keys = PATTERN.keys(5, kv_head=1, kv_heads=2, length=16, is_causal=is_causal)
    assert sorted(table.key) == keys.tolist()
    assert (table.mixed - table.one_softmax).abs().max() < 1e-12
    assert table.groupby("branch").in_branch.sum().sub(1).abs().max() < 1e-12
    scores = (k[0, keys, 1] @ q[0, 5, 3]).double() / 2
    torch.testing.assert_close(
        torch.tensor(table.sort_values("key").one_softmax.to_numpy()).sort().values, scores.softmax(0).sort().values
    )


@pytest.mark.parametrize(("name", "value"), [("query", 16), ("query", -1), ("head", 4)])
def test_mixing_refuses_what_is_not_there(name, value):
    q, k, _ = text_qkv(16, heads=4, head_dim=4)
    with pytest.raises(ValueError, match=f"{name} must be from 0 to .*, got {value}"):
        mixing(q, k, PATTERN, **{"query": 0, name: value})


def test_errors_are_small_the_same_in_every_ordering_and_refusals_are_explained():
    orderings = [None, Ordering.random(16, seed=0)]
    table = errors(*text_qkv(16, heads=2, head_dim=4), PATTERN, orderings=orderings, dtypes=[torch.float32])
    served = table[table.reason == ""]
    assert set(served.backend) >= {"reference", "eager", "sdpa"}
    assert served[["out", "lse", "dq", "dk", "dv"]].max().max() < 2e-4
    assert served.same.all()
    assert "CUDA" in table.set_index("backend").reason["cudnn"].iloc[0] or torch.cuda.is_available()


def test_errors_show_an_ordering_that_changes_the_result(monkeypatch):
    monkeypatch.setattr(Ordering, "undo", lambda self, x, dim: x)
    table = errors(
        *text_qkv(16, heads=2, head_dim=4), PATTERN, orderings=[None, Ordering.random(16, seed=0)], backends=["eager"]
    )
    assert not table[table.ordering == "random"].same.any()
    assert table[table.ordering == "random"].out.min() > 1e-2


def test_tables_do_not_depend_on_the_default_device():
    q, k, v = text_qkv(16, heads=2, head_dim=4)
    tables = [
        lambda: multiplicities(PATTERN, 16, kv_heads=2),
        lambda: mixing(q, k, PATTERN, query=5),
        lambda: errors(q, k, v, PATTERN, backends=["eager"], dtypes=[torch.float32]),
    ]
    for table in tables:
        expected = table()
        with torch.device("meta"):
            pd.testing.assert_frame_equal(table(), expected)
