"""Calls back to back: windows of several in turn, and what a GPU tells meanwhile."""

import time

import pynvml
import pytest
import torch

from hilbert_lib.lab.sustained import WARM_WINDOWS, WINDOWS, _told, back_to_back

POWER = pynvml.nvmlClocksEventReasonSwPowerCap
HEAT = pynvml.nvmlClocksEventReasonSwThermalSlowdown


def test_a_window_is_timed_by_the_call():
    calls = []
    (found,) = back_to_back([lambda: calls.append(time.sleep(0.002))], torch.device("cpu"), calls=[3])
    assert len(found["windows_ms"]) == WINDOWS
    assert found["warmup"] == 3 * WARM_WINDOWS
    assert all(2 <= each < 20 for each in [*found["windows_ms"], found["host"]])


def test_a_slow_call_and_a_fast_one_keep_their_own_times():
    runs = [lambda: time.sleep(0.004), lambda: time.sleep(0.001)]
    slow, fast = back_to_back(runs, torch.device("cpu"), calls=[1, 4])
    assert min(slow["windows_ms"]) >= 4 > max(fast["windows_ms"]) >= 1
    assert slow["host"] >= 4 > fast["host"]


def test_energy_belongs_to_the_windows_in_which_it_was_spent():
    # 100 W from the start on, 700 W from second 1 to second 2, then 100 W again; a look every tenth of a second.
    looks = [n / 10 for n in range(31)]
    joules = [100 * t + 600 * min(max(t - 1, 0), 1) for t in looks]
    bits = [POWER if 1 <= t <= 2 else HEAT for t in looks]
    seen = [(t, j, 1500 + 10 * (1 <= t <= 2), 60, b) for t, j, b in zip(looks, joules, bits, strict=True)]
    hot = _told([(1.0, 1.5), (1.55, 2.0)], seen, calls=10)
    assert hot == {
        "mhz": 1510,
        "celsius": 60,
        "held_by": "power",
        "watts": pytest.approx(700),
        "joules": pytest.approx(66.5),
    }
    cool = _told([(0.0, 1.0), (2.05, 3.0)], seen, calls=10)
    assert cool["watts"] == pytest.approx(100)
    assert cool["held_by"] == "heat"


def test_a_gpu_that_was_not_looked_at_tells_nothing():
    assert _told([(0.0, 0.01)], [(5.0, 1.0, 1500, 60, 0)], calls=1) == {}


@pytest.mark.gpu
def test_a_gpu_tells_its_clock_power_and_energy():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    x @ x
    start.record()
    for _ in range(50):
        x @ x
    end.record()
    torch.cuda.synchronize()
    (found,) = back_to_back([lambda: x @ x], x.device, calls=[1000])
    assert sorted(found["windows_ms"])[WINDOWS // 2] == pytest.approx(start.elapsed_time(end) / 50, rel=0.3)
    assert 100 < found["watts"] < 1000
    assert found["joules"] == pytest.approx(found["watts"] * sum(found["windows_ms"]) / WINDOWS / 1e3, rel=0.01)
    assert 300 < found["mhz"] < 2500
    assert 10 < found["celsius"] < 100
