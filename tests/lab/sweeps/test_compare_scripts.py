"""scripts/compare_kernels.py and compare_configurations.py change kernels for their side of a pair alone."""

import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from own_scripts import load_script

arguments = pytest.importorskip("hilbert_lib.attention.triton.arguments", reason="triton has no build here")
launch = pytest.importorskip("hilbert_lib.attention.triton.launch", reason="triton has no build for this platform")
SHAPE = {"lengths": [48], "dilation_rates": [1, 2], "directions": ("forward", "backward"), "heads": 1}
SHAPE |= {"head_dims": [16], "device": torch.device("cpu")}


@pytest.fixture(scope="module")
def configurations():
    return load_script("compare_configurations")


@pytest.fixture(scope="module")
def kernels():
    return load_script("compare_kernels")


def test_every_configuration_has_others_beside_it_and_is_asked_for_by_name(configurations):
    configured = {kernel: set(table) for kernel, table in arguments.CONFIGS.items()}
    del configured["backward"]  # of short calls, whose time is that of the host
    assert {kernel: set(table) for kernel, table in configurations.CANDIDATES.items()} == configured
    for name, (kernel, key) in configurations.GROUPS.items():
        others = {arguments.Config(*numbers) for numbers in configurations.CANDIDATES[kernel][key]}
        assert len(others - {arguments.CONFIGS[kernel][key]}) >= 2, name
    refused = CliRunner().invoke(configurations.main, ["--only", "dkv float16 128"])
    assert refused.exit_code == 2
    assert "'dkv bfloat16 128'" in refused.output


@pytest.mark.parametrize(("kernel", "size"), [("forward", 2), ("dkv", 2)])
def test_the_other_side_alone_has_the_candidate_and_both_are_exact(configurations, monkeypatch, kernel, size):
    monkeypatch.setattr(configurations, "PATTERN", configurations.DilatedPattern((16, 32), (1, 2)))
    monkeypatch.setattr(launch.schedule, "SHORT_ROWS", 0)
    asked, key, chosen = [], (size, 64), launch.config_of

    def watched(name, q):
        if name == kernel:
            asked.append(arguments.CONFIGS[name][key])
        return chosen(name, q)  # in the interpreter another

    monkeypatch.setattr(launch, "config_of", watched)
    own = arguments.CONFIGS[kernel][key]
    theirs, ours = next(configurations.pairs((kernel, key), 48, 1, torch.device("cpu")))
    for side, config in ((ours, own), (theirs, arguments.Config(*configurations.CANDIDATES[kernel][key][0]))):
        asked.clear()
        assert side.error(side.run()) < 5e-3
        assert set(asked) == {config}
    assert arguments.CONFIGS[kernel][key] is own


def test_a_version_stands_in_the_librarys_place_while_its_side_runs(kernels, tmp_path):
    ours, launch = kernels.OURS["steps"], kernels.hopper
    (tmp_path / "order.py").write_text("mark = 'of the version'\n")
    (tmp_path / "steps.py").write_text("from hilbert_lib.attention.triton.hopper import order\nmark = order.mark\n")
    (tmp_path / "division.py").write_text("mark = 'of the version'\n")
    (tmp_path / "forward.py").write_text(
        "from hilbert_lib.attention.triton.hopper.steps import mark\nHOPPER_FORWARD = {64: 'another'}\n"
    )
    forward, backward = launch.HOPPER_FORWARD, launch.HOPPER_BACKWARD
    with kernels.in_place(tmp_path):
        assert kernels.package.forward.mark == kernels.launch.division.mark == "of the version"
        assert kernels.package.backward is kernels.OURS["backward"]  # it has none of its own
        assert launch.HOPPER_FORWARD == {64: "another"}
        assert launch.HOPPER_BACKWARD is backward
    assert launch.HOPPER_FORWARD is forward
    assert (kernels.package.forward, kernels.launch.division) == (kernels.OURS["forward"], kernels.OURS["division"])
    assert sys.modules["hilbert_lib.attention.triton.hopper.steps"] is ours
    assert kernels.package.order is kernels.OURS["order"]


def test_each_side_computes_the_reference_work_with_its_own_kernels(kernels, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/forward.py").write_text("mark = 'of the version'\n")
    seen, original = [], kernels.launch.forward

    def forward(*arguments):
        seen.append(hasattr(kernels.package.forward, "mark"))
        return original(*arguments)

    monkeypatch.setattr(kernels.launch, "forward", forward)
    records = kernels.run_sides(kernels.pairs([tmp_path / "other"], **SHAPE), device="cpu")
    assert [record["a"]["parameters"]["direction"] for record in records] == ["forward", "backward"] * 2
    assert all(record["output_difference"] == 0 for record in records)
    assert {record["a"]["name"] for record in records} == {record["a"]["name"] for record in records[:1]}
    assert records[0]["a"]["name"].startswith("other-")
    assert records[0]["b"]["name"] == "triton"
    assert set(seen) == {True, False}


def test_what_is_no_version_is_told(kernels, tmp_path):
    done = CliRunner().invoke(kernels.main, [str(tmp_path)])
    assert done.exit_code == 2
    assert "must hold one of order.py, steps.py, forward.py, backward.py, division.py" in " ".join(done.output.split())


def test_a_part_is_left_out_of_the_forward_as_it_is_today(kernels, tmp_path, monkeypatch):
    for part in kernels.PARTS:
        made = kernels.without(part, tmp_path)
        own = {name: Path(kernels.OURS[name].__file__).read_text() for name in ("steps", "forward")}
        changed = {name for name, text in own.items() if (made / f"{name}.py").read_text() != text}
        assert changed == {name for name, *_ in kernels.PARTS[part]}
    with kernels.in_place(kernels.without("softmax+copies", tmp_path)):
        assert kernels.package.forward.step.fn.__module__ == kernels.package.steps.__name__
    with pytest.raises(click.BadParameter, match="parts must be of exponentials, softmax, copies, got 'masks'"):
        kernels.without("masks", tmp_path)
    monkeypatch.setitem(kernels.PARTS, "copies", [("forward", "no such line", "", 1)])
    with pytest.raises(ValueError, match=r"forward\.py must have 1 of 'no such line'"):
        kernels.without("copies", tmp_path)
