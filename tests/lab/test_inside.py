"""The steps of notebook 11: exact on numpy tiles, counted rightly, and compiled to tensor cores and copies of boxes."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import oracle
import pytest
import torch

from hilbert_lib import Neighbourhood
from hilbert_lib.lab.inside import STEPS, computed_share, count_steps, key_rectangles, numpy_tiles, source_of
from hilbert_lib.lab.inside.steps import run_on_numpy, run_step
from hilbert_lib.lab.workload import Workload

SIDE = 64
CPU = torch.device("cpu")


def work_of(window: int, heads: int = 1, head_dim: int = 16) -> Workload:
    return Workload(Neighbourhood((SIDE, SIDE), window), SIDE**2, heads, head_dim, CPU, dtype="float32")


@cache
def exact_of(window: int, heads: int = 1) -> torch.Tensor:
    """The oracle's output for `work_of`."""
    work = work_of(window, heads)
    return oracle.attention(*work.tensors[:3], work.pattern)[0]


@pytest.mark.parametrize("window", [1, 6, 9, 25])
def test_every_step_equals_the_oracle_wherever_its_programs_are(window):
    work, exact = work_of(window, heads=2), exact_of(window, heads=2)
    for step in STEPS:
        queries = 64 if step.box else 1
        last = SIDE**2 // queries - 1
        programs = [0, last // 3, last // 2, last - 1, last]
        out, _ = run_on_numpy(step, work, [(n, head) for n in programs for head in range(2)])
        rows = out[0, :, 0].isfinite().all(-1)
        assert rows.sum() == queries * len(programs)
        torch.testing.assert_close(out[:, rows], exact[:, rows].float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("- window // 2, 0)", "- window // 2 + 1, 0)"),
        ("start = start // STEP * STEP", "start = start // STEP * STEP + STEP"),
        ("total * decay +", "total +"),
        ("acc * decay[:, None]", "acc"),
        ("(key_x < left + window)", "(key_x <= left + window)"),
        ("ahead = j + STAGES - 1", "ahead = j + STAGES"),
        ("(cell_y * side + cell_x) * heads", "(cell_x * side + cell_y) * heads"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_planted_fault_is_seen(before, after, monkeypatch):
    text = numpy_tiles.KERNELS.read_text(encoding="utf-8")
    assert text.count(before) == 1
    broken = numpy_tiles.kernels_of(text.replace(before, after))
    monkeypatch.setattr(numpy_tiles, "kernels", lambda: broken)
    work, exact = work_of(9), exact_of(9)
    off = []
    for step in STEPS[1:]:
        out, _ = run_on_numpy(step, work, [(n, 0) for n in (0, 9, 63)])
        rows = out[0, :, 0].isfinite().any(-1)
        far = (out[:, rows] - exact[:, rows].float()).abs() > 1e-3
        off.append(bool(far.any() or out[:, rows].isnan().any() or not rows.any()))
    assert any(off)


@pytest.mark.parametrize("window", [9, 17])
def test_what_is_counted_is_what_the_rectangles_hold(window):
    table = count_steps(work_of(window)).set_index("step")
    assert table.error.max() < 1e-6
    for step in STEPS[1:]:
        assert table.scores[step.name] == pytest.approx(computed_share(step, SIDE, window))
        rows, columns = key_rectangles(step, SIDE, window, 0, 0)
        assert len(rows) * len(columns) % 64 == 0
    assert table.scores["1 rows"] == 2 * SIDE**2 / window**2
    assert table.boxes.tolist()[:5] == [0] * 5
    assert table.addresses["6 boxes"] == 16  # those of its own query


def test_the_notebook_opens_with_what_it_counts():
    path = Path(__file__).parents[2] / "notebooks/11_inside_a_kernel.ipynb"
    text = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]).replace("\n", " ")
    tiles, stripe, squares, boxes, *_ = (computed_share(step, side=128, window=9) for step in STEPS[1:])
    assert f"computes {2 * tiles:.0f} scores for each pair that attends, and the last step {boxes:.1f}." in text
    for share in (f"{2 * tiles:.0f}", f"{tiles:.0f}", f"{stripe:.0f}", f"{squares:.1f}", f"{boxes:.1f}"):
        assert f" | {share} |" in text


def test_the_source_that_is_shown_is_that_of_one_kernel():
    assert source_of("row_kernel").startswith("@gluon.jit\ndef row_kernel(")
    assert source_of("tile_kernel").splitlines()[-1].strip().startswith("write(out,")


def test_on_hopper_they_compile_to_tensor_cores_and_copies_of_boxes():
    pytest.importorskip("triton", reason="triton has no build for this platform")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_steps.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == len(STEPS)
    for step in STEPS:
        facts = found[step.name]
        assert (facts["wgmma"] > 0) == (step.box is not None), step.name
        assert facts["boxes"] == 2 * step.stages, step.name  # a copy of k and of v, before the loop too if one is ahead


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [6, 9, 25])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_on_a_gpu_every_step_equals_the_oracle(step, window, head_dim):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the steps are for Hopper")
    work = Workload(Neighbourhood((SIDE, SIDE), window), SIDE**2, 2, head_dim, torch.device("cuda"))
    q, k, v, _ = work.tensors
    exact, _ = oracle.attention(q.cpu(), k.cpu(), v.cpu(), work.pattern)
    off = (run_step(step, q, k, v, work).cpu().double() - exact).norm() / exact.norm()
    assert off < 0.01  # bfloat16 keeps 8 bits
