"""What notebook 07 measures: kept as it is found, not measured twice, and told in tables."""

import json

import oracle
import pytest
import torch
import torch.distributed as dist
from cases import refusals
from copied_calls import copy_calls
from forked_ranks import fork_ranks

from hilbert_lib import dilated_attention
from hilbert_lib.lab.sustained import WINDOWS
from hilbert_lib.lab.sweeps import ring, sequences
from hilbert_lib.lab.sweeps.clouds import SHARED, CloudWork
from hilbert_lib.lab.sweeps.halos import RECTANGLES, RUNS, SHARDINGS, STRIPS
from hilbert_lib.lab.sweeps.over_ranks import OverRanks
from hilbert_lib.lab.sweeps.ring import run_works
from hilbert_lib.lab.sweeps.sequences import DENSE_RING, GATHERED, ORDERS, TRANSPORTS
from hilbert_lib.lab.sweeps.spread import ALONE
from hilbert_lib.lab.workload import Workload
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.patterns.union import Union

SIZES = {"heads": 2, "head_dim": 8, "first_segment": 16}
EVERY = (*TRANSPORTS, GATHERED, *ORDERS, DENSE_RING)


def whole_grid(shape, window, heads=1):
    near = Neighbourhood(shape, window)
    return Workload(near, near.length, heads, 8, torch.device("cpu"), dtype="float32")


def cloud(points):
    return CloudWork("room", points, 5, heads=2, head_dim=8, dtype="float32")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Works of one and two ranks over gloo, the folder that keeps them, and their records."""
    folder, timed = tmp_path_factory.mktemp("ring"), {"repetitions": 3, **SIZES}
    every_cut = {"sides": (*SHARDINGS, ALONE), "repetitions": 3}
    works = [
        OverRanks.spanning("weak", 1, 32, sustained_seconds=0.01, **timed),
        OverRanks("cloud", 1, cloud(200), repetitions=3),
        OverRanks.spanning("weak", 2, 64, sides=("auto", ALONE), sustained_seconds=0.01, **timed),
        OverRanks.spanning("strong", 2, 64, sides=EVERY, dtype="float32", **timed),
        OverRanks.spanning("lengths", 2, 256, growth=4, backward=False, **timed),
        OverRanks("grid", 2, whole_grid((8, 12), (3, 5), heads=2), sustained_seconds=0.01, **every_cut),
        OverRanks("grid", 2, whole_grid((4, 6, 6), (2, 3, 3), heads=2), backward=False, **every_cut),
        OverRanks("cloud", 2, cloud(400), sides=(SHARED, ALONE), repetitions=3, sustained_seconds=0.01),
    ]
    with pytest.MonkeyPatch.context() as patch:
        copy_calls(patch)
        fork_ranks(patch)
        return works, folder, run_works(works, output_dir=str(folder), backend="gloo")


def test_records_hold_samples_and_small_errors_of_every_side(measured):
    works, _, records = measured
    works = [work for work in works if work.kind is sequences]
    records = [record for record in records if "tokens" in record]
    assert [record["side"] for record in records] == [side for work in works for side in work.sides]
    for record, work in zip(records, [each for each in works for _ in each.sides], strict=True):
        assert len(record["forward_samples_ms"]) == 3
        assert len(record["backward_samples_ms"]) == 3 * work.backward
        assert (record["out_error"] is None) == (record["side"] == DENSE_RING)
        assert (record["dq_error"] is None) == (record["side"] == DENSE_RING or not work.backward)
        most = 1e-6 if record["dtype"] == "float32" else 1e-2
        assert max(record["out_error"] or 0.0, record["dq_error"] or 0.0) < most
        assert len(record["forward_by_rank_ms"]) == work.ranks
        assert record["forward_ms"] * (1 + 1e-6) >= max(record["forward_by_rank_ms"]), "a sample is the slowest rank's"
        assert len(record["sustained_samples_ms"]) == WINDOWS * (record["sweep"] == "weak")
    assert [record["sent_forward"] for record in records if record["side"] == ALONE] == [0]
    sent = {record["side"]: record["sent_forward"] for record in records if record["sweep"] == "strong"}
    row = 2 * 2 * 8 * 4  # bytes of k and v of one position
    planned = {side: (32 if side in (GATHERED, DENSE_RING) else 32 // 4) * row for side in EVERY}
    assert sent == planned | {"all_to_all": 8 * (4 * 8 + 1) * 4}  # q, k, v, out and lse of one head


def test_of_a_grid_bytes_are_the_plans_and_rows_of_every_gradient_exact(measured):
    records = [record for record in measured[2] if "shape" in record]
    assert [record["side"] for record in records] == [*SHARDINGS, ALONE] * 2
    for record in records:
        is_alone = record["side"] == ALONE
        for name in ("forward", "backward"):
            travels = record[f"received_{name}"] * (name == "forward" or record["backward"])
            assert record[f"counted_{name}"] == travels
            assert (travels == 0) == (is_alone or (name == "backward" and not record["backward"]))
        assert record["flop_forward"] > 0
        errors = [record["out_error"], *([record["dq_error"]] if record["backward"] else [])]
        assert errors == [None] * len(errors) if is_alone else max(errors) < 1e-6
        assert len(record["sustained_samples_ms"]) == WINDOWS * record["backward"]
    plane = {record["side"]: record for record in records[:4]}
    assert plane[RECTANGLES]["border"] == 2 / 6
    assert plane[RUNS]["border"] == 1
    assert plane[RECTANGLES]["received_forward"] == 2 * 8 * 2 * 2 * 8 * 4  # columns of 8 cells; k, v, heads, bytes
    assert plane[STRIPS]["received_forward"] == 12 * 2 * 2 * 8 * 4


def test_of_a_cloud_bytes_are_the_plans_and_rows_of_every_gradient_exact(measured):
    one, shared, alone = (record for record in measured[2] if "cloud" in record)
    assert [record["side"] for record in (one, shared, alone)] == [SHARED, SHARED, ALONE]
    for record in (one, shared, alone):
        for name in ("forward", "backward"):
            assert record[f"counted_{name}"] == record[f"received_{name}"]
            assert (record[f"counted_{name}"] > 0) == (record is shared)
        assert len(record["forward_samples_ms"]) == 3
        assert (record["border"] > 0) == (record is shared)
    assert max(one["out_error"], one["dq_error"], shared["out_error"], shared["dq_error"]) < 1e-6
    assert alone["out_error"] is None
    assert alone["flop_forward"] < shared["flop_forward"], "a rank sees other ranks' points"
    assert len(shared["sustained_samples_ms"]) == WINDOWS
    row = 2 * 2 * 8  # elements of k and v
    assert shared["received_backward"] % (row * 4) == 0 == shared["received_forward"] % (row * 4)


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_a_wrong_row_of_a_gradient_is_found(broken):
    work = OverRanks("grid", 1, whole_grid((6, 8), (3, 3)))
    inputs = [x.detach().double() for x in torch.randn(4, 1, 48, 1, 8, generator=torch.Generator().manual_seed(0))]
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out, _ = oracle.attention(*leaves, work.workload.pattern)
    found = [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        errors = [work.errors(RECTANGLES, inputs, found[0], found[1:])]
        found[broken][0, 3 * 8 + 4] += 0.1
        errors.append(work.errors(RECTANGLES, inputs, found[0], found[1:]))
    finally:
        dist.destroy_process_group()
    assert max(errors[0].values()) < 1e-12
    assert errors[1]["dq"] > 1e-3


@pytest.mark.parametrize("head", range(4))
def test_a_wrong_row_of_any_head_of_a_sequence_is_found(head):
    cpu = torch.device("cpu")
    workload = Workload(DilatedPattern((8,), (1,)), 32, 4, 8, cpu, is_causal=True, dtype="float64", kv_heads=2)
    work, (q, k, v, dout) = OverRanks("weak", 1, workload), workload.tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = dilated_attention(*leaves, workload.pattern, is_causal=True, backend="reference")
    grads = torch.autograd.grad(out, leaves, dout)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        errors = [work.errors("auto", (q, k, v, dout), out.detach(), grads)]
        wrong = [x.detach().clone() for x in (out, grads[0])]
        for x in wrong:
            x[:, :, head] *= 1.1
        errors.append(work.errors("auto", (q, k, v, dout), wrong[0], [wrong[1], *grads[1:]]))
    finally:
        dist.destroy_process_group()
    assert max(errors[0].values()) < 1e-12
    assert min(errors[1].values()) > 1e-2


def test_what_the_folder_holds_is_not_measured_again(measured, monkeypatch):
    works, folder, records = measured
    assert [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()] == records
    monkeypatch.setattr(ring, "run_ranks", lambda *_, **__: pytest.fail("measured again"))
    assert run_works(works, output_dir=str(folder), backend="gloo") == records


def work(**changed):
    return OverRanks.spanning("weak", 2, **{"tokens": 64, **SIZES, **changed})


def grid(**changed):
    shape = changed.pop("shape", (4, 4))
    return OverRanks("grid", 2, whole_grid(shape, (3, 3)), **changed)


def shared(**changed):
    return OverRanks("cloud", 2, cloud(changed.pop("points", 400)), **changed)


@pytest.mark.parametrize("made", [work(), grid(), shared()], ids=["sequence", "grid", "cloud"])
def test_a_record_is_known_by_all_that_its_side_was_asked_for(made):
    asked = made.identity("auto")
    assert asked.keys() >= {"ranks", "heads", "head_dim", "backward", "dtype", "side"}
    others = [ring._key(asked | {name: "another"}) for name in asked]
    assert len({ring._key(asked), *others}) == 1 + len(asked)
    assert ring._key(asked | {"out_error": 1.0}) == ring._key(asked)


def both_windows():
    union = Union((Neighbourhood((4, 4), 3), Neighbourhood((4, 4), 1)))
    return Workload(union, 16, 1, 8, torch.device("cpu"))


@pytest.mark.parametrize(
    "made",
    [work(is_causal=True, growth=3), grid(sides=SHARDINGS), shared(sides=(SHARED, ALONE))],
    ids=["sequence", "grid", "cloud"],
)
def test_ranks_are_told_the_work_as_json_and_a_record_tells_it_again(made):
    assert OverRanks.of(json.loads(json.dumps(made.fields))) == made
    again = OverRanks.of(made.identity(made.sides[-1]))
    assert again.identity("auto") == made.identity("auto")


WRONG = [
    (lambda: work(sides=("fast",)), "sides must be of auto"),
    (lambda: work(tokens=65), "tokens must be a multiple of the ranks, 2"),
    (lambda: work(first_segment=0), "first_segment must be an integer"),
    (lambda: work(growth=1), "growth must be an integer"),
    (lambda: grid(sides=("ring",)), "sides must be of rectangles"),
    (lambda: grid(shape=(5, 5)), "2 equal parts"),
    (lambda: shared(sides=("rectangles",)), "sides must be of runs of points"),
    (lambda: shared(points=401), "points must be a multiple of the ranks, 2, got 401"),
    (lambda: OverRanks.on_points("weak", 2, "room 400 4 2x8"), "window must be odd, got 4"),
    (lambda: OverRanks("union", 2, both_windows()), "pattern must be a DilatedPattern or a Neighbourhood, got Union"),
]
test_works_that_cannot_be_are_refused = refusals({ValueError: WRONG})
