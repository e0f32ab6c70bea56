"""Calls back to back: windows of several in turn, and what a GPU tells meanwhile."""

import time
from types import SimpleNamespace

import pynvml
import pytest
import torch

from hilbert_lib.lab import sustained
from hilbert_lib.lab.sustained import WARM_WINDOWS, WINDOWS, _told, back_to_back, seconds_of_a_call

POWER = pynvml.nvmlClocksEventReasonSwPowerCap
HEAT = pynvml.nvmlClocksEventReasonSwThermalSlowdown


@pytest.fixture
def takes(monkeypatch):
    """A call that takes so many seconds, by a clock that such calls alone move on."""
    now = [0.0]
    monkeypatch.setattr(sustained, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return lambda seconds: lambda: now.__setitem__(0, now[0] + seconds)


def test_windows_are_timed_by_the_call_and_each_call_keeps_its_own_times(takes):
    slow, fast = back_to_back([takes(0.004), takes(0.001)], torch.device("cpu"), calls=[1, 3])
    assert slow["windows_ms"] == pytest.approx([4.0] * WINDOWS)
    assert fast["windows_ms"] == pytest.approx([1.0] * WINDOWS)
    assert (slow["host"], fast["host"]) == pytest.approx((4.0, 1.0))
    assert (slow["warmup"], fast["warmup"]) == (WARM_WINDOWS // 2, 3 * (WARM_WINDOWS // 2))


def test_energy_belongs_to_the_windows_in_which_it_was_spent():
    # 100 W from the start on, 700 W from second 1.1 to second 2.1, then 100 W again, as power follows a call late; a
    # look every tenth of a second.
    looks = [n / 10 for n in range(32)]
    joules = [100 * t + 600 * min(max(t - 1.1, 0), 1) for t in looks]
    bits = [POWER if 1 <= t <= 2 else HEAT for t in looks]
    seen = [(t, j, 1500 + 10 * (1 <= t <= 2), 60, b) for t, j, b in zip(looks, joules, bits, strict=True)]
    hot = _told([(1.0, 1.5), (1.55, 2.0)], seen, calls=10)
    energy = {"watts": pytest.approx(700), "joules": pytest.approx(66.5)}
    assert hot == {"mhz": 1510, "celsius": 60, "held_by": "power", **energy}
    cool = _told([(0.0, 1.0), (2.01, 3.0)], seen, calls=10)
    assert cool["watts"] == pytest.approx(100)
    assert cool["held_by"] == "heat"


def test_a_gpu_that_was_not_looked_at_to_the_end_tells_nothing():
    looks = [(n / 10, 70.0 * n, 1500, 60, 0) for n in range(21)]
    assert _told([(0.0, 0.01)], looks[5:], calls=1) == {}
    assert _told([(0.0, 1.0), (1.0, 2.01)], looks, calls=1) == {}
    assert _told([(0.0, 1.0), (1.0, 2.0)], looks, calls=1)["watts"] == pytest.approx(700)


def test_a_call_among_others_takes_as_long_as_it_does_alone(takes):
    assert seconds_of_a_call(takes(0.002), torch.device("cpu"), alone=0.01) == pytest.approx(0.002)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_tells_its_clock_power_and_energy():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    x @ x
    start.record()
    for _ in range(50):
        x @ x
    end.record()
    torch.cuda.synchronize()
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(x.device).uuid}")
    before, began = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu), time.perf_counter()
    (found,) = back_to_back([lambda: x @ x], x.device, calls=[2000])
    watts = (pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - before) / 1e3 / (time.perf_counter() - began)
    assert sorted(found["windows_ms"])[WINDOWS // 2] == pytest.approx(start.elapsed_time(end) / 50, rel=0.3)
    assert found["watts"] == pytest.approx(watts, rel=0.15)
    assert found["joules"] == pytest.approx(watts * start.elapsed_time(end) / 50 / 1e3, rel=0.4)
    assert 300 < found["mhz"] < 2500
    assert 10 < found["celsius"] < 100
