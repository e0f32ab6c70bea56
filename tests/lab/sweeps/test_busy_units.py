"""scripts/busy_units.py prints what ncu counts of each work's launches."""

import sys

import pytest
import torch
from click.testing import CliRunner
from own_scripts import load_script

script = load_script("busy_units")
HEADER = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'


def install(folder, monkeypatch, *lines: str) -> None:
    """A stand-in for ncu that prints some lines, and a complaint in quotation marks beside them."""
    printed = "\n".join(lines)
    complaint = '"torch.something" is deprecated'
    text = f"#!{sys.executable}\nimport sys\nprint({printed!r})\nprint({complaint!r}, file=sys.stderr)\n"
    (folder / "ncu").write_text(text)
    (folder / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_row_is_a_launch_with_the_shares_of_its_units(monkeypatch, tmp_path):
    values = dict(zip(script.METRICS.values(), ("1,500,000", 40, 30, 20, 10, 750, "1,000"), strict=True))
    rows = [f'"0","7","forward_kernel","","{metric}","","{value}"' for metric, value in values.items()]
    install(tmp_path, monkeypatch, "==PROF== Connected", HEADER, *rows)
    done = CliRunner().invoke(script.main, ["--work", "window 3", "--work", "causal"], catch_exceptions=False)
    shown = [line.strip("| ").split(" | ") for line in done.output.splitlines()[2:]]
    cells = ["forward_kernel", "1.500", "40", "30", "20", "10", "75"]
    assert shown == [["window 3", *cells], ["causal", *cells]]


def test_without_a_gpu_or_ncu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(script.main, [])
    assert (done.exit_code, done.output) == (1, "Error: it needs a GPU, and torch sees none\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", "")
    done = CliRunner().invoke(script.main, ["--work", "grid"])
    assert done.exit_code == 1
    assert "Error: grid: ncu is not on the PATH" in done.output


def test_a_work_without_a_launch_is_said(monkeypatch, tmp_path):
    install(tmp_path, monkeypatch, "==WARNING== No kernels were profiled.")
    done = CliRunner().invoke(script.main, ["--work", "grid"])
    assert done.exit_code == 1
    assert "Error: grid: the program launched no kernel named 'regex:_kernel$': ==WARNING== No kernels" in done.output


@pytest.mark.parametrize("name", ["window 3", "mask", "64 sequences"])
def test_a_work_is_a_forward_and_a_backward(monkeypatch, name):
    asked = []

    def attend(q, k, v, pattern, **options):
        asked.append((q.shape, options))
        return q + k + v

    monkeypatch.setattr(script, "dilated_attention", attend)
    monkeypatch.setattr(script, "neighbourhood_attention", attend)
    script.call_of(name, device="cpu", shrink=16)()
    ((shape, options),) = asked
    assert shape[0] * shape[1] == script.TOKENS
    assert options["backend"] == "hopper"
    hidden = options["key_padding_mask"].sum() if "key_padding_mask" in options else 0
    assert hidden == (8192 if name == "mask" else 0)
