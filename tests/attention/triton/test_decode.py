"""A few queries against many keys: the keys split over programs, equal to the oracle wherever the queries stand."""

from dataclasses import replace

import oracle
import pytest
import torch
from allpairspy import AllPairs
from cases import (
    BRANCHES,
    LAYOUTS,
    ORDERINGS,
    TOLERANCE,
    assert_close,
    attended,
    determinism,
    differentiated,
    drawn,
    in_pairs,
    out_and_lse,
    stored,
)

from hilbert_lib import DilatedPattern, Neighbourhood
from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.patterns.dilated import MIXING_RULES, OFFSET_RULES

decode_line = pytest.importorskip("hilbert_lib.attention.triton.decode_line", reason="triton has no build")
decode = pytest.importorskip("hilbert_lib.attention.triton.decode", reason="triton has no build for this platform")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = 71
WINDOWS = ((0, 1), (0, 5), (21, 1), (21, 40), (29, 4), (46, 3), (KEYS - 1, 1), (KEYS - 5, 5))  # first query, queries


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """`torch.empty` then gives NaN, so that a part that is read and was not written shows."""
    with determinism(warn_only=True):
        yield


def tokens(queries: int, heads: int, kv_heads: int, *, keys: int = KEYS, head_dim: int = 5, batch: int = 2, **options):
    return drawn(queries, heads, kv_heads, head_dim, keys=keys, batch=batch, **options)[:3]


def decoded(q, k, v, call: Request):
    """`decode.attend_in_parts` on the device of the tests; out and lse on the CPU."""
    call = replace(call, **{f: x.to(DEVICE) for f, x in vars(call).items() if isinstance(x, torch.Tensor)})
    out, lse = decode.attend_in_parts(*(x.to(DEVICE) for x in (q, k, v)), call)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    return out.cpu(), lse.cpu()


HEADS = ((3, 3), (6, 3), (4, 1))  # five queries of four heads are more than a tile of the interpreter
STORED = ("none", "random", "hilbert")
DTYPES = (torch.float32, torch.bfloat16)
AXES = (BRANCHES, OFFSET_RULES, MIXING_RULES, HEADS, WINDOWS, STORED, LAYOUTS, DTYPES, [False, True])
AXES += (["causal", "not causal"],)


@in_pairs(AXES, 3, kv_heads=lambda heads: heads[1])
def test_output_and_lse_equal_the_oracle_wherever_the_queries_stand(case):
    branches, offsets, mixing, heads, (first, queries), ordering, layout, dtype, padded, causality = case
    pattern = DilatedPattern(*BRANCHES[branches], offsets=offsets, mixing=mixing)
    q, k, v = tokens(queries, *heads, dtype=dtype)
    padding = torch.rand(2, KEYS, generator=torch.Generator().manual_seed(1)) < 0.4 if padded else None
    options = {"is_causal": causality == "causal", "key_padding_mask": padding, "query_start": first}
    expected, expected_lse = oracle.attention(q, k, v, pattern, scale=0.7, **options)
    order = ORDERINGS[ordering](KEYS)
    inverse = None if order is None else order.inverse.int()
    kept = (k, v) if order is None else (order.apply(k, dim=1), order.apply(v, dim=1))
    call = Request(pattern, scale=0.7, inverse=inverse, **options)
    out, lse = decoded(*(stored(x, layout) for x in (q, *kept)), call)
    assert_close((out, lse), (expected, expected_lse), TOLERANCE[dtype][:2])


# query_start, key_start, queries of four sequences. Some begin before or after the rows of k, or hold no row of q.
STARTS = {
    "caches": ((0, 9, KEYS - 3, KEYS), None, 3),
    "padded caches": ((-2, 40, KEYS - 1, 17), (0, 5, KEYS, 18), 4),
    "one query": ((5, 40, KEYS - 1, 23), (-3, 37, 60, 24), 1),
    "padded alike": (33, (0, 32, 35, KEYS + 4), 5),
}
START_AXES = (BRANCHES, OFFSET_RULES, MIXING_RULES, HEADS, STARTS, LAYOUTS, DTYPES, [False, True])
START_AXES += (["causal", "not causal"],)


@in_pairs(START_AXES, 3, kv_heads=lambda heads: heads[1])
def test_sequences_that_begin_at_unequal_rows_are_each_attended_to_alone(case):
    branches, offsets, mixing, heads, starts, layout, dtype, padded, causality = case
    pattern = DilatedPattern(*BRANCHES[branches], offsets=offsets, mixing=mixing)
    query_start, key_start, queries = STARTS[starts]
    q, k, v = tokens(queries, *heads, batch=4, dtype=dtype)
    padding = torch.rand(4, KEYS, generator=torch.Generator().manual_seed(1)) < 0.4 if padded else None
    options = {"is_causal": causality == "causal", "key_padding_mask": padding}
    begins = None if key_start is None else torch.tensor(key_start, dtype=torch.int32 if padded else torch.int64)
    firsts = query_start if isinstance(query_start, int) else torch.tensor(query_start)
    expected = oracle.attention(q, k, v, pattern, scale=0.7, query_start=firsts, key_start=begins, **options)
    name = "query_start" if isinstance(firsts, int) else "query_starts"
    call = Request(pattern, scale=0.7, key_start=begins, **{name: firsts}, **options)
    found = decoded(*(stored(x, layout) for x in (q, k, v)), call)
    assert_close(found, expected, TOLERANCE[dtype][:2])


BEGINS = torch.tensor([7, 20])


# edge, is_causal, dilation, stride, windows of the KV heads.
LINES = {
    "sliding": ("clip", True, 1, 1, (5, 5)),
    "dilated": ("shift", False, 3, 2, (7, 4)),
    "in groups": ("shift", True, 2, 3, (9, KEYS + 3)),
    "clipped": ("clip", False, 2, 4, (KEYS + 8, 6)),
    "round": ("wrap", False, 1, 1, (20, 33)),
}
LINE_AXES = (LINES, STARTS, DTYPES, (1, 3), ("plain", "masks", "bias"), (0, 3), (1, 10**6))


@pytest.mark.parametrize(
    "case",
    list(
        AllPairs(
            list(map(list, LINE_AXES)), filter_func=lambda case: case[0] != "round" or case[1:2] in ([], ["caches"])
        )
    ),
    ids=str,
)
def test_lines_that_begin_at_unequal_rows_are_each_attended_to_alone(case, monkeypatch):
    line, starts, dtype, group, more, extra, programs = case
    edge, is_causal, dilation, stride, windows = LINES[line]
    rules = {"dilation": dilation, "stride": stride, "is_causal": is_causal, "edge": edge}
    pattern = tuple(Neighbourhood((KEYS,), window, **rules) for window in windows)
    query_start, key_start, queries = STARTS[starts]
    options = {"query_start": query_start if isinstance(query_start, int) else torch.tensor(query_start)}
    if key_start is not None:
        options["key_start"] = torch.tensor(key_start)
    given = list(tokens(queries, 2 * group, 2, batch=4, dtype=dtype))
    if extra:
        given += tokens(queries, 2, 2, batch=4, keys=extra, dtype=dtype)[1:]
    generator = torch.Generator().manual_seed(1)
    if more == "masks":
        options["key_padding_mask"] = torch.rand(4, KEYS, generator=generator) < 0.4
        if extra:
            options["extra_padding_mask"] = torch.rand(4, extra, generator=generator) < 0.4
    if more == "bias":
        given.append(torch.randn(2 * group, 2 * max(windows) - 1, generator=generator).to(dtype))
    expected = oracle.attending(pattern, **options)(*(x.double() for x in given))
    monkeypatch.setattr(decode_line, "PROGRAMS", programs)
    monkeypatch.setattr(decode_line, "KEYS_PER_ROW", 1)
    on_device = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    found = out_and_lse([*(x.to(DEVICE) for x in given), None], pattern, "triton", **on_device)
    assert_close(found, expected, TOLERANCE[dtype][:2])


def test_keys_after_a_sequence_and_before_it_are_not_read():
    q, k, v = tokens(2, 2, 1)
    call = Request(
        DilatedPattern((16, 64), (1, 2)), is_causal=True, query_starts=torch.tensor([40, 50]), key_start=BEGINS
    )
    expected = decoded(q, k, v, call)
    for b, (begin, end) in enumerate(((7, 42), (20, 52))):
        for x in (k, v):
            x[b, :begin] = x[b, end:] = torch.nan
    assert all(map(torch.equal, decoded(q, k, v, call), expected))


@pytest.mark.parametrize(
    "pattern", [DilatedPattern((16, 64), (1, 2)), Neighbourhood((KEYS,), 20, edge="clip")], ids=str
)
def test_it_is_the_backend_of_few_queries_with_tensors_of_starts_and_refuses_many(pattern):
    tensors = [x.to(DEVICE) for x in drawn(3, 4, 2, 8, keys=KEYS, batch=2)]
    starts = {"query_start": torch.tensor([40, 50]), "key_start": BEGINS}
    options = {name: x.to(DEVICE) for name, x in starts.items()}
    right = differentiated(oracle.attending(pattern, **options), [x.double() for x in tensors])
    assert_close(attended(tensors, pattern, "triton", **options), right, TOLERANCE[torch.float32][2])
    many = [x.to(DEVICE) for x in drawn(33, 4, 2, 8, keys=KEYS, batch=2)]
    with pytest.raises(ValueError, match=r"'triton' cannot serve: reads starts on the device for up to 64 .*, got 66"):
        attended(many, pattern, "triton", **options)


@pytest.mark.parametrize("starts", [{}, {"query_starts": torch.tensor([29, 4]), "key_start": torch.tensor([11, 2])}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_has_the_bits_of_the_reference_and_lse_is_undropped(is_causal, starts):
    q, k, v = tokens(4, 4, 2)
    seed = torch.tensor([2**40 + 5])
    pattern = DilatedPattern((16, 64), (2, 3))
    first = {} if starts else {"query_start": 29}
    call = Request(pattern, scale=0.5, is_causal=is_causal, dropout_p=0.3, seed=seed, **first, **starts)
    torch.testing.assert_close(decoded(q, k, v, call), reference.forward(Tensors(q, k, v), call), atol=2e-5, rtol=0)


@pytest.mark.parametrize("programs", [1, 20, 10**6])
def test_the_result_does_not_depend_on_how_the_keys_are_split(programs, monkeypatch):
    q, k, v = tokens(2, 2, 1, keys=250, head_dim=16, batch=1)
    call = Request(DilatedPattern((50, 250), (1, 2)), scale=0.3, is_causal=True, query_start=240)
    monkeypatch.setattr(decode, "PROGRAMS", programs)
    monkeypatch.setattr(decode, "KEYS_PER_ROW", 1)
    monkeypatch.setattr(decode, "MERGED_ELEMENTS", 64)  # the merge takes several steps too
    torch.testing.assert_close(decoded(q, k, v, call), reference.forward(Tensors(q, k, v), call), atol=2e-5, rtol=0)


def test_every_part_of_the_keys_has_one_program_and_no_other_is_started():
    pattern = DilatedPattern((2048, 4096, 30000), (1, 4, 3))
    chunk, units, parts = decode.split(pattern, 20000, 9001, 1, batch=1, kv_heads=4, least=16, block=16)
    heads = [sum(9001 % w % r == g % r for g in range(4)) for w, r in pattern.branches]
    keys = [2048, 1024, 6667]
    assert chunk == -(-sum(n * h for n, h in zip(keys, heads, strict=True)) // decode.PROGRAMS // 16) * 16
    assert parts == sum(-(-n // chunk) for n in keys)
    assert units == sum(-(-n // chunk) * h for n, h in zip(keys, heads, strict=True))


# NaN in what is masked makes numpy warn where the interpreter multiplies it.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_key_that_is_not_finite_stays_in_its_rows(bad, which):
    q, k, v = tokens(5, 2, 1, batch=1)
    call = Request(DilatedPattern((8, 32), (1, 2)), is_causal=True, query_start=30)
    clean, _ = decoded(q, k, v, call)
    for position in (3, 29, 32, 33, 60):
        spoilt = {"k": k.clone(), "v": v.clone()}
        spoilt[which][:, position] = bad
        out, _ = decoded(q, spoilt["k"], spoilt["v"], call)
        for t in range(5):
            if position not in call.pattern.keys(30 + t, kv_head=0, kv_heads=1, length=KEYS, is_causal=True):
                assert torch.equal(out[:, t], clean[:, t])
            elif which == "v":
                assert not out[:, t].isfinite().any()


@pytest.mark.gpu
def test_two_runs_give_the_same_bits():
    tensors = tokens(3, 4, 2)
    call = Request(DilatedPattern((16, 64), (1, 2)), is_causal=True, query_start=46)
    assert all(map(torch.equal, decoded(*tensors, call), decoded(*tensors, call)))


def test_it_serves_few_rows_or_tiles_against_many_keys():
    pattern = DilatedPattern((64, 4096), (1, 2))

    def serves(
        queries: int, heads: int, pattern: DilatedPattern = pattern, dtype: torch.dtype = torch.bfloat16, batch: int = 1
    ) -> bool:
        k = torch.empty(batch, 8192, 2, 64, dtype=dtype)
        return decode.serves(torch.empty(batch, queries, heads, 64, dtype=dtype), k, Request(pattern, query_start=0))

    assert serves(1, 2)
    assert serves(16, 8)
    assert not serves(16, 8, DilatedPattern((64,), (1,)))
    assert serves(16, 8, dtype=torch.float32)
    assert serves(16, 8, batch=64)  # of few rows the number of tiles does not matter
    # 16 tiles of `forward` at most, and only in half precision.
    assert serves(17, 8)
    assert serves(64, 8, batch=2)
    assert not serves(64, 8, batch=3)
    assert not serves(17, 8, dtype=torch.float32)
    # More rows have to leave partial results small beside the keys.
    assert serves(128, 2, DilatedPattern((1024,), (1,)))
    assert not serves(129, 2, DilatedPattern((1024,), (1,)))
