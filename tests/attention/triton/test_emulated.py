"""The source of the warp-specialised kernels, run on a CPU (`emulator`), equals the oracle.

The library's own launches find branches, grids and arguments, as on a Hopper GPU.
"""

from functools import cache, partial
from itertools import product
from random import Random
from typing import NamedTuple

import oracle
import pytest
import torch
from cases import (
    HIDDEN,
    LAYOUTS,
    NORM_TOLERANCE,
    determinism,
    differentiated,
    documents_alone,
    drawn_dlse,
    ends_of,
    hidden_keys,
    stored,
)
from cases import drawn as tokens

from hilbert_lib import DilatedPattern
from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.documents import documents
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton.hopper import division, segments

emulator = pytest.importorskip("emulator", reason="triton has no build for this platform", exc_type=ImportError)

CASES = 32
SEVERAL = (45, 51, 128)  # seeds of calls that are no short ones: of several launches, with tiles that are whole
# A seed, and whether torch asks for determinism: then the copy engine sums no dq.
CALLS = [(seed, seed % 7 in (0, 2)) for seed in (*range(CASES), *SEVERAL)]
# A seed, which keys a mask hides, the share that dropout drops, and whether torch asks for determinism.
DROPPED = [
    (seed, HIDDEN[seed % 4] if seed // 5 % 2 else "none", (0.1, 0.7)[seed % 2], seed >= 10)
    for seed in range(20)
    if seed % 10 not in (2, 7)  # the others take every way
]
# A seed, and which keys a mask hides.
PADDED = [(seed, HIDDEN[seed % 4]) for seed in (*range(CASES), *SEVERAL)]
HEAD_DIMS = (40, 48, 64, 80, 128)
# A seed, the head_dim, the share dropped, which keys a mask hides, and whether torch asks for determinism.
WIDE = (
    (4, 256, 0.0, "none", False),
    (3, 192, 0.3, "none", False),
    (9, 136, 0.0, "none", True),
    (0, 200, 0.1, "none", True),
    (1, 160, 0.0, HIDDEN[0], False),
    (18, 192, 0.0, HIDDEN[3], False),
    (19, 256, 0.0, HIDDEN[2], False),
    (22, 256, 0.0, HIDDEN[1], True),
    (21, 152, 0.2, HIDDEN[0], False),
    (31, 248, 0.1, HIDDEN[1], False),
    (26, 192, 0.7, HIDDEN[2], True),
    (10, 208, 0.1, HIDDEN[3], False),
    (6, 192, 0.1, "none", False),
    (13, 256, 0.7, "none", True),
    (14, 192, 0.0, "none", False),
    (5, 160, 0.0, "none", False),
    (23, 256, 0.0, "none", False),
    *((seed, (192, 256)[seed % 2], 0.0, "none", False) for seed in SEVERAL),
)
# The same for narrow heads.
NARROW = (
    (45, 32, 0.0, "none", False),
    (1, 16, 0.0, "none", False),
    (2, 24, 0.0, "none", True),
    (7, 32, 0.0, HIDDEN[1], True),
    (10, 8, 0.0, HIDDEN[2], False),
    (5, 32, 0.1, "none", False),
    (2, 32, 0.7, "none", True),
    (19, 16, 0.1, HIDDEN[3], True),
    (22, 32, 0.1, HIDDEN[0], False),
)
HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (3, 3))  # of q, and of k and v


class Case(NamedTuple):
    pattern: DilatedPattern
    length: int  # of k and v
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool
    scale: float
    batch: int
    layout: str
    dtype: torch.dtype
    query_start: int | None = None
    mask: str = "none"
    dropout_p: float = 0.0
    documents: tuple[int, ...] | None = None  # lengths of packed documents
    is_bounded: bool = False  # whether the longest one is told


@cache
def drawn(seed: int) -> Case:
    """A random case that the kernels serve: all tiles whole but for causality, branches that share a launch, or any."""
    random = Random(seed)
    heads, kv_heads = random.choice(HEADS[:3] if seed % 3 == 0 else HEADS)
    query_start = None
    pattern, length = None, 0
    while pattern is None or not any(division.is_reached(*branch, length) for branch in pattern.branches):
        lengths = random.choices((101, 200, 250, 512, 900), k=random.randint(1, 3))
        rates = random.choices((1, 1, 1, 2, 3, 4, 6), k=len(lengths))
        # Last tiles of one row, of half the rows and one more, and others.
        length = 128 * random.randint(1, 4) + random.choice((1, 1, 65, 65, 0, 64, -1, 50))
        if seed % 3 == 0:
            lengths, length = random.sample((256, 384, 768), k=random.randint(2, 3)), 768
            rates = [random.choice((1, 2) if w == 256 else (1, 3)) for w in lengths]
        if seed % 3 == 1:
            lengths, rates = random.choice((((256, 512), (1, 1)), ((512, 512), (1, 2)), ((400, 400), (1, 3))))
            length += 256
        offsets = random.choice(("head", "head_block", "branch", "zero"))
        mixing = "head_groups" if kv_heads >= len(lengths) and random.random() < 0.2 else "softmax"
        pattern = DilatedPattern(lengths, rates, offsets, mixing)
    if seed % 7 == 6:  # all but the first positions have a query, more than are decoded
        query_start = random.randint(1, length - 66)
    return Case(
        pattern, length, heads, kv_heads, HEAD_DIMS[seed % 5], seed % 2 == 1,
        random.choice((1, 4)) * HEAD_DIMS[seed % 5] ** -0.5, random.choice((1, 2)) if length < 400 else 1,
        random.choice(LAYOUTS), random.choice((torch.bfloat16, torch.float16)), query_start,
    )  # fmt: skip


def mask_of(case: Case) -> torch.Tensor | None:
    return None if case.mask == "none" else hidden_keys(case.mask, case.batch, case.length)


def request_of(case: Case) -> Request:
    seed = torch.tensor([-(2**62) + 12345678901]) if case.dropout_p else None
    return Request(
        case.pattern, is_causal=case.is_causal, scale=case.scale, query_start=case.query_start,
        key_padding_mask=mask_of(case), dropout_p=case.dropout_p, seed=seed,
        cu_seqlens=None if case.documents is None else ends_of(case.documents),
        max_seqlen=max(case.documents) if case.is_bounded else None,
    )  # fmt: skip


@cache
def expected(case: Case) -> tuple:
    """Inputs, and what is right: out, lse and the gradients of q, k and v."""
    start = case.query_start or 0
    sizes = case.length - start, case.heads, case.kv_heads, case.head_dim
    tensors = tokens(*sizes, keys=case.length, batch=case.batch, dtype=case.dtype)
    if case.dropout_p:  # the oracle has no dropout: the reference says which pairs are kept
        call = request_of(case)
        parts = [(slice(None), call)] if case.documents is None else documents(call, tensors[0], case.kv_heads)
        found = zip(*(_with_dropout([x[:, rows].double() for x in tensors], part) for rows, part in parts), strict=True)
        return tensors, [torch.cat(each, dim) for each, dim in zip(found, (1, 2, 1, 1, 1), strict=True)]
    options = {"is_causal": case.is_causal, "scale": case.scale}
    if case.documents is not None:
        return tensors, documents_alone(tensors, case.documents, case.pattern, **options)
    options |= {"query_start": start, "key_padding_mask": mask_of(case)}
    attend = partial(oracle.attention, pattern=case.pattern, **options)
    return tensors, differentiated(attend, [x.double() for x in tensors])


def _with_dropout(tensors: list[torch.Tensor], call: Request) -> tuple[torch.Tensor, ...]:
    q, k, v, dout = tensors
    given = Tensors(q, k, v)
    out, lse = reference.forward(given, call)
    return out, lse, *reference.backward(dout, given, out, lse, call)[:3]


def results_of(sources, case: Case, is_deterministic: bool = False) -> dict[str, torch.Tensor]:
    q, k, v, dout = (stored(x, case.layout) for x in expected(case)[0])
    return results_for(sources, case, (q, k, v, dout), is_deterministic)


def results_for(sources, case: Case, tensors: tuple, is_deterministic: bool = False) -> dict[str, torch.Tensor]:
    sources.starts.clear()
    forward = forward_of(sources, case, tensors, is_deterministic)
    return forward | backward_of(sources, case, tensors, forward, is_deterministic)


def forward_of(sources, case: Case, tensors: tuple, is_deterministic: bool) -> dict[str, torch.Tensor]:
    with determinism(is_deterministic):
        results = sources.launch.forward_on_hopper(Tensors(*tensors[:3]), request_of(case))
    return dict(zip(("out", "lse"), results, strict=True))


def backward_of(sources, case: Case, tensors: tuple, forward: dict, is_deterministic: bool) -> dict[str, torch.Tensor]:
    *inputs, dout = tensors
    with determinism(is_deterministic):
        grads = sources.launch.backward_on_hopper(dout, Tensors(*inputs), *forward.values(), request_of(case))
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


def fault_of(sources, case: Case, is_deterministic: bool = False, is_forward_given: bool = False) -> str | None:
    """What is wrong; of the forward first, after which no backward runs.

    is_forward_given: the backward goes on from what is right, and no forward runs.
    """
    tensors, right = expected(case)
    tensors = [stored(x, case.layout) for x in tensors]
    sources.starts.clear()
    try:
        if is_forward_given:
            results = {"out": right[0].to(case.dtype).contiguous(), "lse": right[1].float()}
        else:
            results = forward_of(sources, case, tensors, is_deterministic)
            if wrong := fault_in(sources, case, results):
                return wrong
        results = backward_of(sources, case, tensors, results, is_deterministic)
    except emulator.Fault as fault:
        return str(fault)
    if has_run_again(sources):
        return "the plain kernel ran once more, as for a NaN"
    return fault_in(sources, case, results)


def has_run_again(sources) -> bool:
    repeated = (each for each in sources.starts if each.named.get("IF_FLAG"))
    return any(each.named.get("flag", each.arguments[-1]).item() for each in repeated)


def fault_in(sources, case: Case, results: dict[str, torch.Tensor]) -> str | None:
    launches = len({each.named["branches"] for each in sources.starts if "branches" in each.named})
    # Each launch rounds what it adds to.
    bound = (NORM_TOLERANCE[case.dtype] ** 2 + launches * (torch.finfo(case.dtype).eps / 4) ** 2) ** 0.5
    right = dict(zip(("out", "lse", "dq", "dk", "dv"), expected(case)[1], strict=True))
    return emulator.wrong(results, [right[name] for name in results], bound)


@pytest.fixture(scope="module")
def sources():
    return emulator.Sources()


@pytest.mark.parametrize(("seed", "is_deterministic"), CALLS)
def test_output_and_gradients_of_the_kernels_source_equal_the_oracle(sources, seed, is_deterministic):
    assert fault_of(sources, drawn(seed), is_deterministic) is None
    assert f"{emulator.PACKAGE}.hopper.forward" in [each.kernel.__module__ for each in sources.starts]


@pytest.mark.parametrize(("seed", "mask"), PADDED)
def test_they_equal_it_beside_a_mask_of_keys(sources, seed, mask):
    case = drawn(seed)._replace(mask=mask)
    assert fault_of(sources, case, seed % 7 in (0, 2)) is None
    assert f"{emulator.PACKAGE}.hopper.forward" in [each.kernel.__module__ for each in sources.starts]


FIXED = {
    # Tiles of 128 queries at every eighth position: the second group alone sees several blocks of the branch of rate 1.
    "far": Case(
        DilatedPattern((1024, 1024), (8, 1)), 1024, 1, 1, 128, True, 128**-0.5, 1, "bshd", torch.bfloat16, None
    ),
    # Queries that begin in the second half of a tile: the first group has none of them.
    "late": Case(
        DilatedPattern((1024, 1024), (8, 1)), 1024, 1, 1, 128, True, 128**-0.5, 1, "bshd", torch.bfloat16, 700
    ),
    "late, of 256": Case(DilatedPattern((1024,), (1,)), 640, 1, 1, 256, True, 0.06, 1, "bshd", torch.bfloat16, 511),
    # One causal branch, whose tiles are taken from the last one on.
    "one branch": Case(DilatedPattern((400,), (1,)), 530, 2, 1, 128, True, 128**-0.5, 1, "bshd", torch.bfloat16, None),
}  # fmt: skip


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("case", FIXED)
def test_tiles_whose_groups_see_other_blocks_equal_the_oracle(sources, case, is_deterministic):
    assert fault_of(sources, FIXED[case], is_deterministic) is None


def dropping(seed: int, mask: str, dropout_p: float, is_deterministic: bool) -> tuple[Case, bool]:
    """A case of DROPPED, and whether torch asks for determinism."""
    return drawn(seed)._replace(mask=mask, dropout_p=dropout_p, query_start=None), is_deterministic


@pytest.mark.parametrize("dropped", DROPPED)
def test_they_drop_what_the_reference_drops(sources, dropped):
    assert fault_of(sources, *dropping(*dropped)) is None
    kernels = {each.kernel.__module__ for each in sources.starts if each.named.get("DROPOUT")}
    assert {f"{emulator.PACKAGE}.hopper.forward", f"{emulator.PACKAGE}.hopper.backward"} <= kernels


def of_head_dim(seed: int, head_dim: int, dropout_p: float, mask: str, is_deterministic: bool) -> tuple[Case, bool]:
    """A case of WIDE or of NARROW, and whether torch asks for determinism."""
    case = drawn(seed)._replace(head_dim=head_dim, scale=head_dim**-0.5, query_start=None)
    return case._replace(dropout_p=dropout_p, mask=mask), is_deterministic


@pytest.mark.parametrize("wide", WIDE)
def test_heads_above_128_equal_the_oracle(sources, wide):
    case, is_deterministic = of_head_dim(*wide)
    assert fault_of(sources, case, is_deterministic) is None
    modules = {each.kernel.__module__.removeprefix(f"{emulator.PACKAGE}.") for each in sources.starts}
    assert {"hopper.forward", "hopper.wide_keys"} <= modules
    assert "hopper.backward" not in modules
    dq = "hopper.queries" if case.head_dim > 192 else "hopper.wide_queries"
    assert case.mask != "none" or dq in modules


def test_the_cases_of_heads_above_128_take_every_way(monkeypatch, sources):
    monkeypatch.setattr(sources, "run", lambda each: None)
    ways = set()
    for wide in WIDE:
        results_of(sources, *of_head_dim(*wide))
        for each in sources.starts:
            if each.kernel.__module__ == f"{emulator.PACKAGE}.hopper.wide_keys":
                columns, *flags = (each.named[name] for name in ("BLOCK_E", "CAUSAL", "PADDING", "DROPOUT"))
                ways |= {(columns, *flags), (columns, each.named["READ_PARTIAL"])}
    both = (False, True)
    assert ways == {*product((64, 128), both, both, both), *product((64, 128), both)}


@pytest.mark.parametrize("narrow", NARROW)
def test_heads_up_to_32_equal_the_oracle_in_tiles_of_as_many_columns(sources, narrow):
    assert fault_of(sources, *of_head_dim(*narrow)) is None
    columns = {each.named.get("BLOCK_D") for each in sources.starts if ".hopper." in each.kernel.__module__}
    assert columns == {32}


def test_the_cases_of_narrow_heads_take_every_way(monkeypatch, sources):
    monkeypatch.setattr(sources, "run", lambda each: None)
    ways = set()
    for narrow in NARROW:
        results_of(sources, *of_head_dim(*narrow))
        for each in sources.starts:
            kernel = each.kernel.__module__.removeprefix(f"{emulator.PACKAGE}.hopper.")
            options = [(name, each.named.get(name)) for name in ("PADDING", "DROPOUT", "WITH_DQ")]
            ways |= {(kernel, each.named.get("CAUSAL"), *option) for option in options if option[1] is not None}
    both = (False, True)
    asked = product(("forward", "backward"), both, ("PADDING", "DROPOUT"), both)
    assert ways >= {*asked, *product(("backward",), both, ("WITH_DQ",), both)}


# Lengths of documents: of less than a tile, of whole tiles, of a tile and one row, none, and of several segments.
DOCUMENTS = ((1, 63, 130, 0, 257, 64), (384, 129, 255), (20, 700, 5), (128, 128, 256, 65), (0, 0, 401))
PACKED = [(seed, DOCUMENTS[seed % 5], seed % 3 == 0, 0.3 if seed % 4 == 1 else 0.0) for seed in range(22)]


def packed(seed: int, lengths: tuple[int, ...], is_bounded: bool, dropout_p: float) -> tuple[Case, bool]:
    """A case of PACKED, and whether torch asks for determinism."""
    case = drawn(seed)._replace(length=sum(lengths), batch=1, query_start=None, documents=lengths)
    return case._replace(is_bounded=is_bounded, dropout_p=dropout_p), seed % 7 in (0, 2)


@pytest.mark.parametrize("of_documents", PACKED)
def test_each_of_several_packed_documents_is_as_the_oracle_has_it_alone(sources, of_documents):
    assert fault_of(sources, *packed(*of_documents)) is None
    modules = {each.kernel.__module__.removeprefix(f"{emulator.PACKAGE}.") for each in sources.starts}
    assert {"hopper.forward", "hopper.backward"} <= modules


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_is_not_finite_stays_in_its_document(sources, seed):
    """Of the output: here the plain kernel runs once more."""
    case, _ = packed(*PACKED[seed])
    case = case._replace(dropout_p=0.0, layout="bshd")
    q, k, v, _ = (x.clone() for x in expected(case)[0])
    begin = sum(case.documents[:1])
    end = begin + case.documents[1]
    k[:, begin:end], v[:, begin:end] = torch.nan, torch.inf
    out, _ = sources.launch.forward_on_hopper(Tensors(q, k, v), request_of(case))
    right = expected(case)[1][0]
    for rows in (slice(0, begin), slice(end, None)):
        assert (out[:, rows] - right[:, rows]).norm() <= 4e-3 * right[:, rows].norm()
    assert not out[:, begin:end].isfinite().all()


@pytest.mark.parametrize("head_dim", [160, 256])
def test_the_backward_of_packed_documents_of_wide_heads_is_the_plain_kernels(sources, head_dim):
    case, is_deterministic = packed(*PACKED[0])
    assert fault_of(sources, case._replace(head_dim=head_dim), is_deterministic) is None
    modules = {each.kernel.__module__.removeprefix(f"{emulator.PACKAGE}.") for each in sources.starts}
    assert "hopper.forward" in modules
    assert not modules & {"hopper.backward", "hopper.wide_keys"}


# segment_length, length, heads, kv_heads, head_dim, batch.
SEGMENTS = {
    "boxes of 128 keys": (128, 384, 2, 1, 128, 1),
    "boxes of 64 keys": (64, 192, 2, 2, 64, 2),
    "boxes of 64 keys, heads of 80": (256, 512, 4, 2, 80, 2),
    "one segment": (4096, 256, 2, 1, 40, 1),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_short_segments_run_as_windows_and_equal_the_oracle(sources, name):
    segment_length, length, heads, kv_heads, head_dim, batch = SEGMENTS[name]
    pattern, dtype = DilatedPattern((segment_length,), (1,)), torch.bfloat16
    case = Case(pattern, length, heads, kv_heads, head_dim, False, 0.2, batch, "bhsd", dtype)
    assert fault_of(sources, case, is_deterministic=True) is None
    modules = [each.kernel.__module__.removeprefix(f"{emulator.PACKAGE}.hopper.") for each in sources.starts]
    forward = "grid_whole" if segment_length % 128 == 0 and head_dim > 64 else "grid_forward"
    assert forward in modules
    assert modules.count("grid_backward") == 2
    assert not {"forward", "backward"} & {*modules}
    # The gradient of lse.
    *inputs, dout = expected(case)[0]
    attend = partial(oracle.attention, pattern=pattern, scale=case.scale)
    dlse = drawn_dlse(attend(*inputs)[1])
    right = differentiated(attend, [x.double() for x in (*inputs, dout)], dlse)[2:]
    out, lse = sources.launch.forward_on_hopper(Tensors(*inputs), request_of(case))
    grads = sources.launch.backward_on_hopper(dout, Tensors(*inputs), out, lse, request_of(case), dlse.float())
    found = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    assert emulator.wrong(found, right, NORM_TOLERANCE[dtype]) is None


@pytest.mark.parametrize(("segment_length", "head_dim"), [(64, 64), (64, 128), (128, 128), (256, 64)])
def test_what_is_not_finite_stays_in_its_short_segment(sources, segment_length, head_dim):
    length, row = 640 if segment_length < 256 else 768, 300
    *tensors, dout = tokens(length, 2, 1, head_dim, batch=1, dtype=torch.bfloat16)
    call = Request(DilatedPattern((segment_length,), (1,)), scale=0.125)
    there = slice(row // segment_length * segment_length, (row // segment_length + 1) * segment_length)
    for spoilt in range(4):
        q, k, v, slope = (x.clone() for x in (*tensors, dout))
        (q, k, v, slope)[spoilt][0, row] = torch.nan
        out, lse = sources.launch.forward_on_hopper(Tensors(q, k, v), call)
        for x in (out, *sources.launch.backward_on_hopper(slope, Tensors(q, k, v), out, lse, call)):
            x[0, there] = 0.0
            assert x.isfinite().all()


def test_keys_expanded_over_heads_run_as_windows(sources, monkeypatch):
    monkeypatch.setattr(sources.launch.segments, "FEWEST_TILES", 0)
    q, k, v = tokens(256, 3, 3, 64, batch=2, dtype=torch.bfloat16)[:3]
    k = k[:, :, :1].expand(k.shape)
    for pattern in (DilatedPattern((64,), (1,)), DilatedPattern((64, 256), (1, 2))):
        out, _ = sources.launch.forward_on_hopper(Tensors(q, k, v), Request(pattern, scale=0.125))
        right = oracle.attention(*(x.double() for x in (q, k, v)), pattern=pattern, scale=0.125)[0]
        assert emulator.wrong({"out": out}, [right], NORM_TOLERANCE[torch.bfloat16]) is None


# Segment lengths, rates, length, heads, kv_heads, head_dim, offsets.
TWO_BRANCHES = {
    "coarser": ((64, 256), (1, 2), 256, 2, 1, 64, "head"),
    "coarser, the first": ((512, 128), (4, 1), 512, 4, 2, 80, "head_block"),
    "both of rate 1": ((256, 64), (1, 1), 512, 2, 2, 128, "zero"),
}


@pytest.mark.parametrize("name", TWO_BRANCHES)
def test_the_other_of_two_branches_goes_on_from_windows(sources, monkeypatch, name):
    monkeypatch.setattr(sources.launch.segments, "FEWEST_TILES", 0)
    lengths, rates, length, heads, kv_heads, head_dim, offsets = TWO_BRANCHES[name]
    pattern = DilatedPattern(lengths, rates, offsets)
    case = Case(pattern, length, heads, kv_heads, head_dim, False, 0.2, 1, "bshd", torch.float16)
    assert fault_of(sources, case) is None
    modules = [each.kernel.__module__.removeprefix(f"{emulator.PACKAGE}.hopper.") for each in sources.starts]
    for module, count in (("grid_backward", 2), ("forward", 1), ("backward", 1), ("queries", 1)):
        assert modules.count(module) == count
    assert [each.kernel.__name__ for each in sources.starts].count("delta_kernel") == 1  # both branches have the same


def test_two_branches_are_divided_where_both_have_few_keys_and_nothing_is_cut():
    def is_divided(
        lengths=(256, 1024), rates=(1, 4), length=4096, head_dim=64, mixing="softmax", batch=8, **options
    ) -> bool:
        q = torch.empty(batch, length, 4, head_dim, device="meta")
        call = Request(DilatedPattern(lengths, rates, mixing=mixing), **options)
        return segments.beside_another(Tensors(q, q, q), call) is not None

    assert is_divided()
    assert not is_divided(batch=7)  # 896 tiles
    assert is_divided((1024, 256), (4, 1))
    assert is_divided((512, 2048), (1, 4))
    assert not is_divided((1024, 4096), (1, 4))  # 1,024 keys of 64 columns
    assert is_divided(head_dim=32)
    assert not is_divided((512, 2048), (1, 4), head_dim=32)
    assert is_divided((1024, 4096), (1, 4), head_dim=128)
    assert not is_divided((256, 4096), (1, 2), head_dim=128)  # 2,048 keys of the other
    assert not is_divided((256, 1024, 4096), (1, 4, 16))
    assert not is_divided((256, 1024), (2, 4))
    assert not is_divided((256, 1024), (1, 3))  # its last block of keys is cut
    assert not is_divided((96, 1024), (1, 4))
    assert not is_divided(mixing="head_groups")
    assert not is_divided(is_causal=True)


def test_what_boxes_do_not_serve_faster_runs_by_the_kernels_for_sequences():
    def are_windows(segment_length=256, length=1024, head_dim=64, rates=(1,), queries=None, heads=2, **options) -> bool:
        q, k = (torch.empty(1, n, heads, head_dim, device="meta") for n in (queries or length, length))
        lengths = (segment_length,) * len(rates)
        return segments.is_made_of_boxes(Tensors(q, k, k), Request(DilatedPattern(lengths, rates), **options))

    assert are_windows()
    assert are_windows(64)
    assert are_windows(1024)
    assert are_windows(2**20)  # all rows
    assert are_windows(2048, 4096, head_dim=65)
    assert are_windows(head_dim=16)
    assert not are_windows(512, head_dim=32)
    assert not are_windows(2048, 4096)  # longer than the longest
    assert not are_windows(4096, 8192, head_dim=128)
    assert not are_windows(head_dim=136)
    assert not are_windows(head_dim=8)
    assert not are_windows(32)  # a box would hold keys of two segments
    assert not are_windows(96, 960)
    assert not are_windows(192, 960)  # a tile would hold rows of two
    assert are_windows(384, 1152)
    assert not are_windows(length=1025)  # the last segment is cut
    assert not are_windows(rates=(2,))
    assert not are_windows(rates=(1, 2))
    assert not are_windows(heads=2**16)
    assert not are_windows(queries=256, query_start=0)
    assert not are_windows(is_causal=True)
    assert not are_windows(dropout_p=0.1, seed=torch.zeros(1, dtype=torch.int64))
    assert not are_windows(key_padding_mask=torch.zeros(1, 1024, dtype=torch.bool))


@pytest.mark.parametrize("length", [769, 641])
def test_tiles_of_an_uneven_length_are_whole_or_cut(sources, length):
    case = Case(DilatedPattern((256, 512), (1, 2)), length, 2, 1, 256, False, 0.1, 1, "bshd", torch.bfloat16)
    assert fault_of(sources, case) is None


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 10, 19])  # whole and causal, of 64 columns and of 128
def test_nothing_that_masked_keys_hold_reaches_a_result(sources, seed, is_deterministic):
    case = drawn(seed)._replace(mask="some", layout="bshd")
    q, k, v, dout = (x.clone() for x in expected(case)[0])
    hidden = mask_of(case)
    k[hidden], v[hidden] = torch.nan, -100.0
    assert fault_in(sources, case, results_for(sources, case, (q, k, v, dout), is_deterministic)) is None
    assert not has_run_again(sources)
    v[hidden] = torch.inf  # 0 * inf: the plain kernel runs once more
    assert fault_in(sources, case, results_for(sources, case, (q, k, v, dout), is_deterministic)) is None
    assert has_run_again(sources)


def test_no_block_of_keys_is_read_that_a_mask_hides(sources):
    """Their k and v may be anything then, and the plain kernel need not run once more."""
    pattern = DilatedPattern((512, 1024), (1, 2), "zero")
    case = Case(pattern, 1024, 1, 1, 128, False, 0.1, 1, "bshd", torch.bfloat16, mask="ends")
    q, k, v, dout = (x.clone() for x in expected(case)[0])
    assert mask_of(case)[0, 768:].all()  # whole blocks of either branch
    v[0, 768:] = torch.nan
    assert fault_in(sources, case, results_for(sources, case, (q, k, v, dout))) is None
    assert not has_run_again(sources)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_gradients_of_lse_equal_the_oracles(sources, is_deterministic):
    case = Case(DilatedPattern((64, 128), (1, 2)), 129, 2, 1, 64, True, 0.125, 1, "bshd", torch.bfloat16)
    *inputs, dout = tokens(case.length, case.heads, case.kv_heads, case.head_dim, dtype=case.dtype)
    attend = partial(oracle.attention, pattern=case.pattern, is_causal=True, scale=case.scale)
    dlse = drawn_dlse(attend(*inputs)[1])
    right = differentiated(attend, [x.double() for x in (*inputs, dout)], dlse)[2:]
    call = Request(case.pattern, is_causal=True, scale=case.scale)
    with determinism(is_deterministic):
        out, lse = sources.launch.forward_on_hopper(Tensors(*inputs), call)
        grads = sources.launch.backward_on_hopper(dout, Tensors(*inputs), out, lse, call, dlse.float().nan_to_num())
    assert f"{emulator.PACKAGE}.hopper.backward" in [each.kernel.__module__ for each in sources.starts]
    found = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    assert emulator.wrong(found, right, NORM_TOLERANCE[case.dtype]) is None


def test_the_cases_take_every_way_through_the_kernels(monkeypatch, sources):
    monkeypatch.setattr(sources, "run", lambda each: None)
    forward, backward, adding = set(), set(), set()
    for seed, is_deterministic in CALLS:
        results_of(sources, drawn(seed), is_deterministic)
        for each in sources.starts:
            columns, causal, goes_on = (each.named.get(name) for name in ("BLOCK_D", "CAUSAL", "READ_PARTIAL"))
            if each.kernel.__module__ == f"{emulator.PACKAGE}.hopper.forward":
                forward.add((columns, causal, each.named["MASKED"], goes_on))
            if each.kernel.__module__ == f"{emulator.PACKAGE}.hopper.backward":
                backward.add((columns, causal, each.named["CUT"], each.named["WITH_DQ"]))
                adding.add((columns, causal, goes_on))
    both = (False, True)
    padded_forward, padded_backward = set(), set()
    for seed, mask in PADDED:
        results_of(sources, drawn(seed)._replace(mask=mask), seed % 7 in (0, 2))
        for each in sources.starts:
            columns, causal, goes_on = (each.named.get(name) for name in ("BLOCK_D", "CAUSAL", "READ_PARTIAL"))
            if each.kernel.__module__ == f"{emulator.PACKAGE}.hopper.forward":
                padded_forward.add((columns, causal, goes_on))
            if each.kernel.__module__ == f"{emulator.PACKAGE}.hopper.backward":
                padded_backward.add((columns, causal, each.named["CUT"], each.named["WITH_DQ"]))
    dropped_forward, dropped_backward = set(), set()
    for dropped in DROPPED:
        results_of(sources, *dropping(*dropped))
        for each in sources.starts:
            columns, causal, padding = (each.named.get(name) for name in ("BLOCK_D", "CAUSAL", "PADDING"))
            if each.kernel.__module__ == f"{emulator.PACKAGE}.hopper.forward":
                dropped_forward.add((columns, causal, padding))
            if each.kernel.__module__ == f"{emulator.PACKAGE}.hopper.backward":
                dropped_backward.add((columns, causal, padding, each.named["WITH_DQ"]))
    assert dropped_forward == set(product((64, 128), both, both))
    assert dropped_backward == set(product((64, 128), both, both, both))
    assert padded_forward == set(product((64, 128), both, both))
    assert padded_backward == set(product((64, 128), both, both, both))
    assert forward == {way for way in product((64, 128), both, both, both) if way[2] >= way[1]}  # causal: masked
    assert backward == set(product((64, 128), both, both, both))
    assert adding == set(product((64, 128), both, both))


ONE, TWO = drawn(19), Case(DilatedPattern((500, 768), (2, 3)), 1000, 1, 1, 64, True, 0.1, 1, "bshd", torch.float16)


# Of two launches neither visits all rows: the NaN is of the first alone, of the second, and of both.
@pytest.mark.parametrize(("case", "place"), [(ONE, 3), (ONE._replace(head_dim=128), 3), *((TWO, n) for n in (2, 3, 6))])
def test_a_nan_reaches_the_rows_that_attend_to_it(sources, case, place):
    """Here the plain kernel runs once more, as the warp-specialised one asks for."""
    case = case._replace(layout="bshd")
    q, k, v, _ = (x.clone() for x in expected(case)[0])
    v[0, place, 0] = torch.nan
    call = Request(case.pattern, is_causal=True, scale=case.scale)
    found, _ = sources.launch.forward_on_hopper(Tensors(q, k, v), call)
    sees = oracle.times_seen(case.pattern, range(case.length), case.length, 0, case.kv_heads, True)[:, place] > 0
    assert sees.any()
    assert torch.equal(found[0, :, 0].isnan().all(-1), sees)
    assert torch.equal(found[0, :, 0].isnan().any(-1), sees)
    right = expected(case)[1][0][0, :, 0]
    assert (found[0, :, 0] - right)[~sees].norm() <= 4e-3 * right.norm()
