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


def test_every_configuration_has_others_beside_it_and_is_asked_for_by_name(script):
    assert {kernel: set(table) for kernel, table in script.CANDIDATES.items()} == {
        kernel: set(table) for kernel, table in arguments.CONFIGS.items()
    }
    for name, (kernel, key) in script.GROUPS.items():
        others = {arguments.Config(*numbers) for numbers in script.CANDIDATES[kernel][key]}
        assert len(others - {arguments.CONFIGS[kernel][key]}) >= 2, name
    refused = CliRunner().invoke(script.main, ["--only", "dkv float16 128"])
    assert refused.exit_code == 2
    assert "'dkv bfloat16 128'" in refused.output


@pytest.mark.parametrize(("kernel", "size"), [("forward", 2), ("dkv", 2)])
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
    for side, config in ((ours, own), (theirs, arguments.Config(*script.CANDIDATES[kernel][key][0]))):
        asked.clear()
        assert side.error(side.run()) < 5e-3
        assert set(asked) == {config}
    assert arguments.CONFIGS[kernel][key] is own
