"""scripts/compare_configurations.py gives one kernel another configuration, for its side of a pair alone."""

import pytest
import torch
from click.testing import CliRunner
from own_scripts import load_script

arguments = pytest.importorskip("hilbert_lib.attention.triton.arguments", reason="triton has no build here")
launch = pytest.importorskip("hilbert_lib.attention.triton.launch", reason="triton has no build for this platform")


@pytest.fixture(scope="module")
def script():
    return load_script("compare_configurations")


def test_every_configuration_of_the_library_has_others_beside_it(script):
    assert script.CANDIDATES.keys() == arguments.CONFIGS.keys()
    for kernel, table in script.CANDIDATES.items():
        assert table.keys() == arguments.CONFIGS[kernel].keys()
        for key, candidates in table.items():
            others = {arguments.Config(*numbers) for numbers in candidates} - {arguments.CONFIGS[kernel][key]}
            assert len(others) >= 2, (kernel, key)


def test_groups_are_asked_for_by_kernel_dtype_and_head_dim(script):
    assert len(script.GROUPS) == sum(map(len, arguments.CONFIGS.values()))
    assert script.GROUPS["dkv float32 128"] == ("dkv", (4, 128))
    refused = CliRunner().invoke(script.main, ["--only", "dkv float16 128"])
    assert refused.exit_code == 2
    assert "'dkv bfloat16 128'" in refused.output


@pytest.mark.parametrize(("kernel", "size"), [("forward", 2), ("dq", 4), ("dkv", 2)])
def test_the_other_side_alone_has_the_candidate_and_both_are_exact(script, monkeypatch, kernel, size):
    monkeypatch.setattr(script, "PATTERN", script.DilatedPattern((16, 32), (1, 2)))
    asked, key, chosen = [], (size, 64), launch.config_of

    def watched(name, q):
        if name == kernel:
            asked.append(arguments.CONFIGS[name][key])
        return chosen(name, q)  # in the interpreter another

    monkeypatch.setattr(launch, "config_of", watched)
    own = arguments.CONFIGS[kernel][key]
    theirs, ours = next(script.pairs((kernel, key), 48, 1, torch.device("cpu")))
    results = [side.run() for side in (ours, theirs)]
    assert asked == [own, arguments.Config(*script.CANDIDATES[kernel][key][0])]
    assert arguments.CONFIGS[kernel][key] is own
    assert [side.error(each) < 5e-3 for side, each in zip((ours, theirs), results, strict=True)] == [True, True]
