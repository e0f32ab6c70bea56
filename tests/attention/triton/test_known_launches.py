"""A third call of a form only starts recorded launches; one that differs in anything runs its backend's function."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hilbert_lib.internals import WITHOUT_INTERNALS

pytestmark = pytest.mark.skipif(WITHOUT_INTERNALS, reason="without private names somebody may watch every call")


@pytest.fixture(scope="module")
def told():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).parent / "known_launches.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_third_call_starts_what_the_second_one_did_and_runs_no_function_of_a_backend(told):
    others = ("changes", "backward changes", "forgotten", "others", "in inference mode", "joined")
    calls = {name: each for name, each in told.items() if name not in others and "steps" not in name}
    assert len(calls) == 27
    for name, (how, equal, held) in calls.items():
        assert how == [["ran"] * 2] * 2 + [["replayed"] * 2] * 2, name
        assert equal == [True, True], name
        assert held == 0, f"{name}: a tensor of a call is held"


def test_calls_in_inference_mode_are_repeated_where_they_are_of_several_starts_too(told):
    assert len(told["in inference mode"]) == 8
    for name, how in told["in inference mode"].items():
        assert how == [["ran"], ["ran"], ["replayed"], ["replayed"]], name


def test_a_step_of_decoding_is_repeated_where_the_device_alone_knows_its_row(told):
    assert len(told["steps"]) == 4
    for name, (how, equal) in told["steps"].items():
        assert how == [["ran"], ["ran"], ["replayed"], ["replayed"]], name
        assert equal == [True, True], name
    assert not told["steps at rows that the host knows"], "each is of another kind: they would fill the cache"


def test_a_call_that_does_more_than_its_starts_runs_its_function_each_time(told):
    assert len(told["others"]) == 1
    for name, how in told["others"].items():
        assert how == [["ran", "ran"]] * 4, name


def test_a_call_that_differs_in_one_thing_is_computed_anew(told):
    assert len(told["changes"]) == 52
    of_the_forward = ("debugging", "a hook", "TF32")  # alone: its backward begins when they are over
    for name, how in told["changes"].items():
        assert how[0] == "ran", name
        assert set(how) == {"ran"} or name.startswith(of_the_forward), name


def test_a_known_call_starts_nothing_that_was_forgotten(told):
    assert told["forgotten"] == ["ran", "ran"], (
        "other configurations may have taken the place of those of its recording"
    )


def test_a_backward_that_differs_in_one_thing_is_computed_anew(told):
    assert len(told["backward changes"]) == 18
    for name, how in told["backward changes"].items():
        assert how == ["replayed", "ran"], name


def test_starts_that_become_one_do_the_same(told):
    (kinds, launches), (apart_kinds, apart_launches) = told["joined"]
    assert kinds == ["Recording", "Recording"]
    assert apart_kinds == ["Repeated", "Repeated"]
    assert launches == apart_launches
