"""scripts/compare_kernels.py puts a version's kernels in the library's place, for its side of a pair alone."""

import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from own_scripts import load_script

pytest.importorskip("hilbert_lib.attention.triton.launch", reason="triton has no build for this platform")
SHAPE = {"lengths": [48], "dilation_rates": [1, 2], "directions": ("forward", "backward"), "heads": 1}
SHAPE |= {"head_dims": [16], "device": torch.device("cpu")}


@pytest.fixture(scope="module")
def script():
    return load_script("compare_kernels")


@pytest.fixture
def version(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "forward.py").write_text("mark = 'of the version'\n")
    return folder


def test_a_version_stands_in_the_librarys_place_while_its_side_runs(script, tmp_path):
    ours, launch = script.OURS["steps"], script.hopper
    (tmp_path / "steps.py").write_text("mark = 'of the version'\n")
    (tmp_path / "division.py").write_text("mark = 'of the version'\n")
    (tmp_path / "forward.py").write_text(
        "from hilbert_lib.attention.triton.hopper.steps import mark\nHOPPER_FORWARD = {64: 'another'}\n"
    )
    forward, backward = launch.HOPPER_FORWARD, launch.HOPPER_BACKWARD
    with script.in_place(tmp_path):
        assert script.package.forward.mark == script.launch.division.mark == "of the version"
        assert script.package.backward is script.OURS["backward"]  # it has none of its own
        assert launch.HOPPER_FORWARD == {64: "another"}
        assert launch.HOPPER_BACKWARD is backward
    assert launch.HOPPER_FORWARD is forward
    assert (script.package.forward, script.launch.division) == (script.OURS["forward"], script.OURS["division"])
    assert sys.modules["hilbert_lib.attention.triton.hopper.steps"] is ours


def test_each_side_computes_the_reference_work_with_its_own_kernels(script, version, monkeypatch):
    seen, original = [], script.launch.forward

    def forward(*arguments):
        seen.append(hasattr(script.package.forward, "mark"))
        return original(*arguments)

    monkeypatch.setattr(script.launch, "forward", forward)
    records = script.run_sides(script.pairs([version], **SHAPE), device="cpu")
    assert [record["a"]["parameters"]["direction"] for record in records] == ["forward", "backward"] * 2
    assert all(record["output_difference"] == 0 for record in records)
    assert {record["a"]["name"] for record in records} == {record["a"]["name"] for record in records[:1]}
    assert records[0]["a"]["name"].startswith("other-")
    assert records[0]["b"]["name"] == "triton"
    assert True in seen
    assert False in seen


def test_what_is_no_version_is_told(script, tmp_path):
    done = CliRunner().invoke(script.main, [str(tmp_path)])
    assert done.exit_code == 2
    assert "must hold one of steps.py, forward.py, backward.py, division.py" in " ".join(done.output.split())


def test_a_part_is_left_out_of_the_forward_as_it_is_today(script, tmp_path):
    for part in script.PARTS:
        made = script.without(part, tmp_path)
        changed = {name for name in ("steps", "forward") if (made / f"{name}.py").read_text() != own(script, name)}
        assert changed == {name for name, *_ in script.PARTS[part]}
    with script.in_place(script.without("softmax+copies", tmp_path)):
        assert script.package.forward.step.fn.__module__ == script.package.steps.__name__
    with pytest.raises(click.BadParameter, match="parts must be of exponentials, softmax, copies, got 'masks'"):
        script.without("masks", tmp_path)


def test_a_part_that_is_no_longer_there_is_missed(script, tmp_path, monkeypatch):
    monkeypatch.setitem(script.PARTS, "copies", [("forward", "no such line", "", 1)])
    with pytest.raises(ValueError, match=r"forward\.py must have 1 of 'no such line'"):
        script.without("copies", tmp_path)


def own(script, name):
    return Path(script.OURS[name].__file__).read_text()
