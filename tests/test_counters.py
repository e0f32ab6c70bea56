"""Reading hardware counters: what `ncu` prints becomes a table, and what keeps it from printing is said."""

import stat
import sys

import pytest

from hilbert_lib.locality.counters import METRICS, count_launches, parse_counters

HEADER = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
VALUES = {name: f"{10**n:,}" for n, name in enumerate(METRICS)}


def printed(launches=2, values=VALUES):
    rows = [
        f'"{launch}","7","forward_kernel","Command line profiler metrics","{METRICS[name]}","sector","{value}"'
        for launch in range(launches)
        for name, value in values.items()
    ]
    before = [
        "==PROF== Connected to process 7",
        'the program says "ID", too',
        '==PROF== Profiling "forward_kernel": 0%',
    ]
    return "\n".join([*before, HEADER, *rows, "==PROF== Disconnected from process 7"])


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """A stand-in for ncu that prints what it is told, and the folder where it notes its arguments."""

    def install(text, status=0):
        script = tmp_path / "ncu"
        script.write_text(
            f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'args')!r}, 'w').write(repr(sys.argv))\n"
        )
        script.write_text(script.read_text() + f"print({text!r})\nsys.exit({status})\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path / "args"

    return install


def test_every_launch_is_a_row_in_order_and_every_metric_a_column():
    table = parse_counters(printed())
    assert table.columns.tolist() == ["launch", *METRICS]
    assert table.launch.tolist() == [0, 1]
    assert table.iloc[1][list(METRICS)].tolist() == [10.0**n for n in range(len(METRICS))]


def test_the_clock_is_left_alone_and_one_kernel_is_watched(ncu):
    arguments = ncu(printed(1))
    assert len(count_launches(["program", "-x"], kernel="forward_kernel")) == 1
    given = arguments.read_text()
    assert "'--clock-control', 'none', '--csv'" in given
    assert "'--kernel-name', 'forward_kernel'" in given
    assert given.endswith("'program', '-x']")


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", 1, "may not read the GPU's counters"),
        ("==ERROR== LibraryNotLoaded", 9, "status 9: ==ERROR== LibraryNotLoaded"),
        ("==WARNING== No kernels were profiled.", 0, "launched no kernel named 'forward_kernel'"),
    ],
)
def test_what_keeps_ncu_from_counting_is_said(ncu, text, status, words):
    ncu(text, status)
    with pytest.raises(RuntimeError, match=words):
        count_launches(["program"], kernel="forward_kernel")


def test_a_machine_without_ncu_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="ncu is not on the PATH"):
        count_launches(["program"], kernel="forward_kernel")


@pytest.mark.parametrize("value", ["n/a", None])
def test_a_metric_without_a_number_is_refused(value):
    values = {**VALUES, "time_ns": value} if value else {k: v for k, v in VALUES.items() if k != "time_ns"}
    with pytest.raises(ValueError, match=r"no number for gpu__time_duration\.sum"):
        parse_counters(printed(values=values))
