"""Predicted memory: as much as is measured, before anything is allocated."""

from functools import partial
from itertools import product
from math import prod
from types import SimpleNamespace

import pytest
import torch
from cases import refusals

from hilbert_lib import (
    DilatedPattern,
    Neighbourhood,
    Ordering,
    PointNeighbourhood,
    dilated_attention,
    neighbourhood_attention,
)
from hilbert_lib.attention.backends import listed, presence, strided, tiles
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.internals import WITHOUT_INTERNALS
from hilbert_lib.lab.guarded import cases as benchmarks
from hilbert_lib.lab.records import REPORTS, read_records
from hilbert_lib.limits import estimate, memory
from hilbert_lib.limits.estimate import estimate_memory
from hilbert_lib.limits.memory import measure_peak
from hilbert_lib.machine import kernel_mode

pytestmark = pytest.mark.usefixtures("older_objects_apart")
MB = 2**20
ALIGNED = DilatedPattern((256, 512, 1024), (1, 2, 4))
UNEVEN = DilatedPattern((300, 1000), (1, 3))
GROUPS = DilatedPattern((256, 1024), (1, 2), mixing="head_groups")
REFERENCE = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
LONG = DilatedPattern((2048, 65536, 524288), (1, 64, 512))
SIZES = {"length": 1024, "heads": 4, "head_dim": 64, "dtype": torch.float32}
CASES = {  # pattern, sizes and options
    "plain": (ALIGNED, {}),
    "half": (ALIGNED, {"dtype": torch.bfloat16}),
    "half, short segments": (DilatedPattern((64, 1024), (1, 16)), {"dtype": torch.bfloat16, "length": 4096}),
    "double": (ALIGNED, {"dtype": torch.float64}),
    "several, grouped, causal": (ALIGNED, {"batch": 2, "kv_heads": 2, "is_causal": True}),
    "uneven": (UNEVEN, {"batch": 2, "length": 1100}),
    "groups of heads": (GROUPS, {"length": 2048}),
    "ordering, grouped": (ALIGNED, {"kv_heads": 2, "has_kv_ordering": True}),
    "ordering, few keys": (DilatedPattern((4096,), (16,)), {"length": 4096, "has_kv_ordering": True}),
}
SEEN_IN_OTHERS = ("half", "double", "ordering, grouped")  # of the reference, whose scores are whole and take long
MASKED = {
    "dropout": (ALIGNED, {"dropout_p": 0.1, "length": 320}),
    "padding": (ALIGNED, {"has_key_padding": True}),
    "decoding": (UNEVEN, {"queries": 16, "length": 4096}),
    "padded on the left": (UNEVEN, {"has_key_start": True, "batch": 2}),
    "padded on the left, decoding": (UNEVEN, {"has_key_start": True, "queries": 16, "length": 4096}),
}


PLANE, OTHER = (Neighbourhood((20, 24), window, stride=(1, 3)) for window in (9, (5, 9)))
SMALL_GRID = (Neighbourhood((6, 8), 3), {"heads": 2, "kv_heads": 1, "head_dim": 16, "extra": 3})  # for an interpreter
POINTS = PointNeighbourhood(
    torch.cartesian_prod(*[torch.arange(13)] * 3)[::3], (4, 3, 5), keys=torch.cartesian_prod(*[torch.arange(9)] * 3)
)
IS_INTERPRETED = kernel_mode() == "interpreted"
GRIDS = {
    "line": (Neighbourhood((600,), 65, edge="wrap"), {}),
    "line, padded on the left": (Neighbourhood((600,), 65), {"has_key_start": True, "batch": 2}),
    "plane, half, grouped": (PLANE, {"batch": 2, "kv_heads": 2, "dtype": torch.bfloat16}),
    "plane, some of the queries": (PLANE, {"query_box": ((2, 20), (3, 20)), "extra": 3}),
    "windows, extra keys": ((PLANE, OTHER), {"kv_heads": 2, "extra": 40}),
    "volume, double, padded, extra keys": (
        Neighbourhood((6, 8, 10), (3, 5, 5), edge="clip"),
        {"dtype": torch.float64, "has_key_padding": True, "extra": 5, "batch": 2},
    ),
    "bias, windows": ((PLANE, OTHER), {"kv_heads": 2, "has_bias": True, "batch": 2}),
    "points": (POINTS, {"kv_heads": 2, "batch": 2}),
    "points, half, padded, extra keys": (
        POINTS,
        {"dtype": torch.bfloat16, "has_key_padding": True, "extra": 5, "kv_heads": 2},
    ),
    "points, extra queries": (POINTS, {"extra": 40, "extra_queries": 1500}),
    "extra queries": (PLANE, {"extra": 40, "extra_queries": 1500}),
    "padded, extra queries alone": (OTHER, {"has_key_padding": True, "extra_queries": 30, "kv_heads": 2}),
}


def on_a_grid(near, options, device):
    """As `given`, of `neighbourhood_attention`. It has run once: the tables that calls share are not estimated."""
    o = {"batch": 1, "kv_heads": 4, "extra": 0, "heads": 4, "head_dim": 64, "dtype": torch.float32, **options}
    if isinstance(near, PointNeighbourhood):
        queries, seq = near.lists.queries, near.lists.keys
    else:
        queries = seq = (near if isinstance(near, Neighbourhood) else near[0]).length
    box = o.get("query_box")
    queries = queries if box is None else prod(stop - start for start, stop in box)
    rows = [(queries, o["heads"]), *[(seq, o["kv_heads"])] * 2, *[(o["extra"], o["kv_heads"])] * 2 * bool(o["extra"])]
    leaves = [
        torch.randn(o["batch"], *each, o["head_dim"], dtype=o["dtype"], device=device).requires_grad_() for each in rows
    ]
    keywords = dict(zip(("extra_k", "extra_v"), leaves[3:], strict=False)) | {"backend": o["backend"]}
    if o.get("extra_queries"):
        extra_q = leaves[0].new_empty(o["batch"], o["extra_queries"], o["heads"], o["head_dim"]).normal_()
        keywords["extra_q"] = extra_q.requires_grad_()
        leaves.append(keywords["extra_q"])
    if o.get("has_bias"):
        windows = [near.window] if isinstance(near, Neighbourhood) else [each.window for each in near]
        sides = [2 * max(n) - 1 for n in zip(*windows, strict=True)]
        keywords["bias"] = torch.randn(o["heads"], *sides, device=device).requires_grad_()
        leaves.append(keywords["bias"])
    if o.get("has_key_padding"):
        keywords["key_padding_mask"] = torch.zeros(o["batch"], seq, dtype=torch.bool, device=device)
    if o.get("has_key_start"):
        keywords["key_start"] = torch.full((o["batch"],), 7, device=device)
    elif box is not None:
        keywords["query_box"] = box
    elif not isinstance(near, PointNeighbourhood):
        keywords["ordering"] = Ordering.random(seq, 0)

    def attend():
        return neighbourhood_attention(*leaves[:3], near, **keywords)

    if o["backend"] != "flex":  # whose first call makes a mask, which is estimated
        attend()
    return leaves, attend


def given(pattern, options, device="cpu"):
    """The inputs that an estimate is of, as leaves, and a function that runs the call."""
    if not isinstance(pattern, DilatedPattern):
        return on_a_grid(pattern, options, device)
    o = {"batch": 1, "queries": None, "kv_heads": None, **SIZES, **options}
    rows = o["queries"] or o["length"]
    like = {"device": device, "dtype": o["dtype"]}
    q = torch.randn(o["batch"], rows, o["heads"], o["head_dim"], **like)
    k, v = (torch.randn(o["batch"], o["length"], o["kv_heads"] or o["heads"], o["head_dim"], **like) for _ in "kv")
    padding = torch.zeros(o["batch"], o["length"], dtype=torch.bool, device=device)
    keywords = {name: o[name] for name in ("is_causal", "dropout_p", "backend") if name in o}
    keywords["key_padding_mask"] = padding if o.get("has_key_padding") else None
    keywords["kv_ordering"] = Ordering.random(o["length"], 0) if o.get("has_kv_ordering") else None
    keywords["query_start"] = None if o["queries"] is None else o["length"] - o["queries"]
    if o.get("has_key_start"):
        keywords["key_start"] = torch.full((o["batch"],), 7, device=device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return leaves, lambda: dilated_attention(*leaves, pattern, **keywords)


def predicted_and_measured(pattern, options, direction, device="cpu") -> tuple[int, int]:
    leaves, attend = given(pattern, options, device)
    sizes = SIZES if isinstance(pattern, DilatedPattern) else SIZES | {"length": None}
    estimated = estimate_memory(pattern, **{**sizes, **options}, direction=direction, device=device)

    def forward():
        with torch.no_grad():
            return attend()

    if direction == "forward":
        return estimated.peak, measure_peak(forward, device)

    def backward_of_a_forward():
        out = attend()
        outs = out if isinstance(out, tuple) else (out,)
        douts = [torch.ones_like(x) for x in outs]
        return lambda: torch.autograd.grad(outs, leaves, douts)

    if options.get("has_bias"):
        backward_of_a_forward()()  # which has tables of its own
    return estimated.peak, measure_peak(backward_of_a_forward(), device)


COPIED = pytest.mark.skipif(WITHOUT_INTERNALS, reason="results are then copied, which no estimate counts")


@COPIED
@pytest.mark.parametrize("direction", estimate.DIRECTIONS)
@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, backend) for case in CASES for backend in ("eager", "sdpa")]
    + [pytest.param(case, "reference", marks=[pytest.mark.full] * (case in SEEN_IN_OTHERS)) for case in CASES]
    + [(case, backend) for case in MASKED for backend in ("eager", "reference")],
)
def test_on_the_cpu_the_estimate_is_what_the_profiler_measures(case, backend, direction):
    pattern, options = {**CASES, **MASKED}[case]
    options, slack = {**SIZES, **options, "backend": backend}, 0.05 * MB
    if backend == "reference":
        options["length"] = min(options["length"], 512)  # its scores are whole
    if backend == "sdpa":
        options["length"] *= 4
        slack = 2.1 * MB  # its blocks of scores are counted in whole MB
    predicted, measured = predicted_and_measured(pattern, options, direction)
    assert predicted == pytest.approx(measured, rel=0.01, abs=slack)


@COPIED
@pytest.mark.parametrize("direction", estimate.DIRECTIONS)
@pytest.mark.parametrize(
    ("case", "backend"), [*product(GRIDS, ("eager", "reference"))] + [("small", "triton")] * IS_INTERPRETED
)
def test_on_a_grid_the_estimate_is_what_the_profiler_measures(monkeypatch, case, backend, direction):
    for room, bound in ((tiles, "CHUNK"), (tiles, "PAIRS_OF_STEP"), (listed, "CHUNK")):
        monkeypatch.setattr(room, bound, 2**17)  # many chunks
    near, options = {**GRIDS, "small": SMALL_GRID}[case]
    predicted, measured = predicted_and_measured(near, options | {"backend": backend}, direction)
    assert predicted == pytest.approx(measured, rel=0 if backend == "triton" else 0.01)


def test_an_estimate_on_a_grid_counts_extra_keys_and_walks_over_few_tiles():
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64, "device": "cpu", "backend": "eager", "direction": "backward"}
    found = estimate_memory(Neighbourhood((2**12, 2**12), 33), **sizes, extra=512)
    q, k, extra = 2**24 * 8 * 128, 2**24 * 2 * 128, 512 * 2 * 128
    assert found.inputs == 3 * q + 2 * k + 2 * extra + 2**24 * 8 * 4
    assert found.outputs == q + 2 * k + 2 * extra
    assert found.items["dextra k, dv"] == found.items["extra k, v"] == 2 * extra
    assert found.workspace > 2 * found.outputs  # sums in float32


def test_the_gradient_of_a_bias_has_sums_of_pairs():
    """Windows of 17, moved inside: 5 shifts of 8 ranks along each axis. 200 programs are too few: 6 runs of tiles."""
    sizes = {"heads": 8, "head_dim": 64, "device": "cuda", "backend": "triton", "has_bias": True}
    near = Neighbourhood((64, 64), 17)
    found = estimate_memory(near, **sizes, direction="backward")
    assert found.items["bias"] == found.items["dbias"] == 8 * 33 * 33 * 4
    assert found.items["workspace: sums of the gradient of bias"] == 6 * (8 * 5 * 5) * (64 * 64) * 4
    forward = estimate_memory(near, **sizes)
    assert (forward.items["bias"], forward.workspace) == (8 * 33 * 33 * 4, 0)


def test_flex_on_a_grid_has_a_list_of_blocks_for_each_head_where_windows_differ():
    sizes = {"heads": 8, "head_dim": 64, "backend": "flex", "device": "cuda"}
    windows = [Neighbourhood((512, 512), n) for n in (7, 9)]
    one, several = (estimate_memory(near, **sizes) for near in (windows[0], tuple(windows * 4)))
    assert several.workspace > 4 * one.workspace > 0
    assert estimate_memory(windows[0], **sizes, direction="backward").total > one.inputs


class Kernel:
    """Results of the right sizes, and in the backward eight float32 for each element of q beside them."""

    @staticmethod
    def forward(q, k, v, problem):
        return q.new_empty(q.shape), q.new_empty(q.shape[:3])

    @staticmethod
    def backward(dout, q, k, v, out, lse, problem):
        _scratch = q.new_empty(8, q.numel())
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@pytest.mark.parametrize("direction", estimate.DIRECTIONS)
@pytest.mark.parametrize(("pattern", "batch", "kv_heads"), [(ALIGNED, 1, 4), (UNEVEN, 2, 2), (GROUPS, 1, 4)])
def test_results_kept_for_one_merge_are_counted(monkeypatch, pattern, batch, kv_heads, direction):
    merge = pytest.importorskip("hilbert_lib.attention.triton.merge")
    monkeypatch.setattr(strided, "_merges_at_once", lambda q, kernel: True)
    monkeypatch.setattr(merge, "merge_parts", lambda parts, q: (q.clone(), q[..., 0].transpose(1, 2).clone()))
    monkeypatch.setattr(merge, "sum_parts", lambda parts, x: x.clone())
    counted = strided.over_views(Kernel, {4: (32, 32, 0)})["workspace"]
    q, k, lse = torch.randn(batch, 4096, 4, 16), torch.randn(batch, 4096, kv_heads, 16), torch.randn(batch, 4, 4096)
    tensors, on_meta = Tensors(q, k, k), Tensors(*(x.to("meta") for x in (q, k, k)))
    run, given, meta, returned = strided.forward, (tensors,), (on_meta,), q.nbytes + lse.nbytes
    if direction == "backward":
        run, given, returned = strided.backward, (q, tensors, q, lse), q.nbytes + 2 * k.nbytes
        meta = on_meta.q, on_meta, on_meta.q, lse.to("meta")
    predicted = counted(meta, Request(pattern), direction, torch.device("cuda"), returned)["temporary"] + returned
    measured = measure_peak(lambda: run(*given, Request(pattern), Kernel), "cpu")
    assert predicted == pytest.approx(measured, rel=1e-3)


FUSED = {"length": 2**19, "heads": 16, "head_dim": 64, "device": "cuda"}
ON_HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


@pytest.mark.parametrize(
    ("backend", "ordered"), [pytest.param("hopper", False, marks=ON_HOPPER), ("triton", False), ("triton", True)]
)
def test_fused_kernels_hold_partial_results_of_several_passes(backend, ordered):
    """And gather nothing of an ordering, which the plain ones serve."""
    sizes = {**FUSED, "backend": backend, "has_kv_ordering": ordered}
    out, lse = 2**19 * 16 * 64 * 2, 2**19 * 16 * 4
    forward = estimate_memory(REFERENCE, **sizes)
    assert (forward.inputs, forward.outputs, forward.workspace) == (3 * out, out + lse, 0)
    several = estimate_memory(LONG, **sizes)
    assert several.workspace == (0 if backend == "hopper" else 2 * out + lse)  # float32
    backward = estimate_memory(LONG, **sizes, direction="backward")
    assert (backward.inputs, backward.outputs) == (5 * out + lse, 3 * out)
    assert backward.workspace == (1 if backend == "hopper" else 3) * 2 * out + lse


@ON_HOPPER
def test_the_warp_specialised_kernels_read_no_ordering_and_a_backward_with_a_query_start_is_plain():
    sizes = {**FUSED, "backend": "hopper"}
    plain, stored = (estimate_memory(REFERENCE, **sizes, has_kv_ordering=has) for has in (False, True))
    assert stored.total - plain.total == 2 * 2**19 * 16 * 64 * 2
    some = {**FUSED, "queries": 2**18, "direction": "backward"}
    assert estimate_memory(LONG, **some, backend="hopper") == estimate_memory(LONG, **some, backend="triton")
    with pytest.raises(ValueError, match=r"backend='hopper' cannot serve: decodes nothing.*'triton' serves it"):
        estimate_memory(REFERENCE, **sizes, queries=1)


def test_what_reads_no_ordering_holds_copies_of_k_and_v():
    sizes = {"length": 2**16, "heads": 16, "kv_heads": 4, "head_dim": 64, "backend": "cudnn", "device": "cuda"}
    for direction in estimate.DIRECTIONS:
        plain, stored = (
            estimate_memory(REFERENCE, **sizes, direction=direction, has_kv_ordering=has) for has in (False, True)
        )
        assert stored.total - plain.total == 2 * 2**16 * 4 * 64 * 2
        assert (stored.peak == plain.peak) == (direction == "backward")  # whose workspace is more than dk
        assert sum(stored.items.values()) == stored.total


def test_sums_by_atomics_are_counted_unless_deterministic(monkeypatch):
    sizes = {"length": 2**16, "heads": 16, "head_dim": 64, "backend": "hopper", "device": "cuda"}
    sums = "workspace: sums of dq, float32"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs than Hopper sum dq otherwise")
    assert estimate_memory(REFERENCE, **sizes, direction="backward").items[sums] == 2**16 * 16 * 64 * 4
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert sums not in estimate_memory(REFERENCE, **sizes, direction="backward").items


def test_all_positions_as_queries_are_no_decoding():
    """Which dense kernels do not serve."""
    sizes = {"length": 256, "heads": 4, "head_dim": 64, "backend": "sdpa", "device": "cuda"}
    whole, named = (estimate_memory(DilatedPattern((64,), (1,)), **sizes, **more) for more in ({}, {"queries": 256}))
    assert named == whole


def test_decoding_holds_partial_results_of_chunks_of_keys():
    sizes = {"length": 2**20, "heads": 32, "kv_heads": 8, "head_dim": 128, "backend": "triton", "device": "cuda"}
    few = estimate_memory(REFERENCE, **sizes, queries=1)
    assert 0 < few.workspace < 2**20 * 8 * 128  # little beside k and v
    assert few.workspace > few.outputs


@pytest.mark.parametrize("pattern", [REFERENCE, LONG])
def test_a_backward_of_flex_needs_more_than_its_forward(pattern):  # the committed peaks are of all others
    sizes = {"length": 2**18, "heads": 16, "head_dim": 128, "backend": "flex", "device": "cuda"}
    forward, backward = (estimate_memory(pattern, **sizes, direction=x) for x in estimate.DIRECTIONS)
    assert forward.workspace >= 0
    assert backward.total > forward.total


def test_an_estimate_allocates_nothing_serves_a_billion_tokens_and_adds_up():
    sizes = {"length": 2**30, "heads": 16, "head_dim": 64, "device": "cpu", "backend": "eager"}
    found = []
    estimate = partial(estimate_memory, REFERENCE, **sizes, direction="backward")
    assert measure_peak(lambda: found.append(estimate()), "cpu") < MB
    (one,) = found
    assert one.total > 2**42
    assert sum(one.items.values()) == one.total == one.inputs + one.outputs + one.workspace
    assert one.total_gb == one.total / 2**30
    for name in ("q, k, v", "dout", "dq, dk, dv", "total"):
        assert name in str(one)


def test_the_time_of_a_first_sample_holds_no_collection(monkeypatch):
    events = []
    monkeypatch.setattr(memory, "gc", SimpleNamespace(collect=lambda: events.append("collection")))
    monkeypatch.setattr(benchmarks, "time", SimpleNamespace(perf_counter=lambda: events.append("clock") or 0.0))
    (point,) = benchmarks.attention_points(ALIGNED, lengths=[64], backends=["eager"], heads=1)
    next(benchmarks.attention_cases(point))
    assert events == ["collection", "clock", "clock"]


@pytest.mark.parametrize("direction", estimate.DIRECTIONS)
@pytest.mark.parametrize("backends", [["eager"], ["sdpa", "eager"]])
def test_a_point_is_predicted_with_all_that_its_process_holds(monkeypatch, backends, direction):
    monkeypatch.setattr(benchmarks, "measure_peak", lambda run, device: run() and 0)  # one profiler is enough
    sizes = {"heads": 4, "head_dim": 64, "directions": [direction]}
    (point,) = benchmarks.attention_points(ALIGNED, lengths=[2048], backends=backends, **sizes)

    def measure():
        cases = benchmarks.attention_cases(point)
        first, *_ = next(cases)
        return [first, *cases]

    predicted = benchmarks.attention_estimate(point, "eager").total
    assert predicted == pytest.approx(measure_peak(measure, "cpu"), rel=0.01)


def on_cuda(name, dtype=torch.bfloat16, **options):
    return estimate_memory(ALIGNED, **{**SIZES, "device": "cuda", "backend": name, "dtype": dtype, **options})


WRONG = [
    (lambda: on_cuda("auto"), "backend must be named"),
    (lambda: on_cuda("cudnn", torch.float32, direction="backward"), "'cudnn' cannot .* float16 and bfloat16, got"),
    (lambda: on_cuda("flash", head_dim=12), "'flash' cannot serve: head_dim must be a multiple of 8 up to 256, got 12"),
    (lambda: on_cuda("flash", dropout_p=0.5), "backend='flash' cannot serve: no dropout"),
    (lambda: on_cuda("flex", head_dim=8), "'flex' cannot serve: needs a head_dim of at least 16, got 8"),
    (lambda: on_cuda("triton", torch.float64), "serves float16, bfloat16 and float32, got float64"),
    (lambda: on_cuda("sdpa", torch.float64), "backend='sdpa' cannot serve: no float64 on cuda"),
]
is_here = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to ask")
test_what_a_gpu_that_is_not_here_cannot_serve_is_refused = is_here(refusals({ValueError: WRONG}))


ASKED = ("branches", "length", "heads", "head_dim", "dtype", "is_causal", "direction")
# Sweeps of the committed records whose sides are calls as a user makes them. FlexAttention's in 06 are not: its graph
# is kept from the forward, and nothing is first there.
CALLS = ("attention", "backends", "claims", "selection")


def committed_peaks() -> dict[tuple, int]:
    """What calls of 256 MB and more allocated on one GPU, by backend and what they were asked."""
    peaks = {}
    for path in sorted(REPORTS.glob("h[12]00/*/*/*.jsonl*")):
        for line in read_records(path):
            for record in line.get("records", [line]):  # of a point, or of a notebook
                if not record.get("peak_bytes"):
                    continue
                sides = record.get("sides") or [record[side] for side in "ab" if side in record] or [record]
                for side, peak in zip(sides, record["peak_bytes"], strict=True):
                    asked = side["parameters"]
                    if asked.get("sweep") in CALLS and side["name"] in BACKENDS and peak >= 256 * MB:
                        is_grouped = asked.get("pattern", "").endswith("groups")
                        key = side["name"], *(asked[name] for name in ASKED), is_grouped
                        peaks[key] = max(peak, peaks.get(key, 0))
    return peaks


@pytest.mark.evidence
def test_what_is_predicted_today_is_what_committed_calls_allocated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # as an H200 that is not here, and its packages
    peaks = {key: peak for key, peak in committed_peaks().items() if key[0] != "flex" and key[7] in estimate.DIRECTIONS}
    assert {key[0] for key in peaks} >= {"hopper", "cudnn", "flash", "flash_attn_4", "xformers", "sdpa", "eager"}
    assert len(peaks) > 150
    for (backend, branches, length, heads, head_dim, dtype, is_causal, direction, is_grouped), peak in peaks.items():
        w, r = zip(*(map(int, branch.split(":")) for branch in branches.split()), strict=True)
        pattern = DilatedPattern(w, r, mixing="head_groups" if is_grouped else "softmax")
        sizes = {"length": length, "heads": heads, "head_dim": head_dim, "dtype": getattr(torch, dtype)}
        asked = {"backend": backend, "is_causal": is_causal, "direction": direction, "device": "cuda"}
        predicted = estimate_memory(pattern, **sizes, **asked).peak
        # Far less than is promised, so that a change of what a kernel takes shows.
        assert predicted == pytest.approx(peak, rel=0.01), (branches, sizes, asked)


# Of at most 4 GB, so that sixteen tests fit on a GPU beside each other. With dropout, padding, float32 or an ordering
# the warp-specialised kernels do not serve, and LONG takes several passes, whose partial results are float32.
LARGE = {"length": 65536, "heads": 16, "head_dim": 128}
NARROW = {"length": 65536, "heads": 16, "head_dim": 64}
HALVES = ("hopper", "triton", "cudnn", "flash", "sdpa", "flex", *presence.MODULES)
ALL = (*HALVES, "eager")
WIDE, WINDOWS = Neighbourhood((512, 512), 17), tuple(Neighbourhood((256, 256), n) for n in (17, 33))
ON_A_GPU = {  # backends, pattern and options
    "plain": (ALL, REFERENCE, LARGE),
    "grouped, causal": (ALL, REFERENCE, {**NARROW, "is_causal": True, "kv_heads": 4}),
    "uneven, several sequences": (ALL, REFERENCE, {"length": 50000, "heads": 8, "batch": 2}),
    "several passes": (ALL, LONG, {"length": 131072, "heads": 16}),
    "dropout": (["triton"], LONG, {**NARROW, "dropout_p": 0.1}),
    "padding": (["triton"], REFERENCE, {**LARGE, "has_key_padding": True}),
    "float32": (["triton", "sdpa", "xformers"], REFERENCE, {**NARROW, "dtype": torch.float32}),
    "float32, several passes": (["triton"], LONG, {**NARROW, "dtype": torch.float32}),
    "float16": (HALVES, REFERENCE, {**LARGE, "dtype": torch.float16}),
    "ordering": (
        ["hopper", "triton", "cudnn", "sdpa", "flex"],
        REFERENCE,
        {**LARGE, "kv_heads": 8, "has_kv_ordering": True},
    ),
    "half of the queries": (["hopper", "triton"], REFERENCE, {**LARGE, "queries": 32768, "heads": 32, "kv_heads": 8}),
    # Its own peak is small: k and v have 512 MB, of which none may be copied.
    "one query": (["triton"], REFERENCE, {"length": 2**18, "queries": 1, "heads": 32, "kv_heads": 4, "head_dim": 128}),
    "eager, dropout": (["eager"], ALIGNED, {"length": 8192, "heads": 8, "dropout_p": 0.1}),
    "eager, padding": (["eager"], ALIGNED, {"length": 32768, "heads": 8, "has_key_padding": True}),
    "eager, half of the queries": (["eager"], ALIGNED, {"length": 65536, "queries": 32768, "heads": 8}),
    "grid": (["triton", "eager", "flex"], WIDE, {"heads": 8, "kv_heads": 4, "head_dim": 128, "extra": 256}),
    "grid, a quarter of the queries": (
        ["hopper", "triton", "eager", "flex"],
        WIDE,
        {"heads": 8, "kv_heads": 4, "head_dim": 128, "query_box": ((256, 384), (0, 512))},
    ),
    "grid, bias": (["triton"], WIDE, {"heads": 8, "kv_heads": 4, "head_dim": 128, "has_bias": True}),
    "grid, two windows": (["triton", "flex"], WINDOWS, {"batch": 2, "heads": 16, "kv_heads": 2, "head_dim": 128}),
}


GPU_CASES = [  # eager needs up to 70 GB there, which the others of a GPU's tests may not leave
    pytest.param(case, name, marks=[pytest.mark.alone] * (names is ALL and name == "eager"))
    for case, (names, *_) in ON_A_GPU.items()
    for name in names
]


@pytest.mark.gpu
@pytest.mark.parametrize("direction", estimate.DIRECTIONS)
@pytest.mark.parametrize(("case", "backend"), GPU_CASES)
def test_on_the_gpu_the_estimate_is_what_is_allocated(case, backend, direction):
    if backend in presence.MODULES and (reason := presence.breakage(backend)):
        pytest.skip(reason)
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    _, pattern, options = ON_A_GPU[case]
    options = {"dtype": torch.bfloat16, **options, "backend": backend}
    torch.cuda.empty_cache()
    predicted, measured = predicted_and_measured(pattern, options, direction, device="cuda")
    assert predicted == pytest.approx(measured, rel=0.1, abs=64 * MB)
