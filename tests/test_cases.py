"""Checks that tests share fail where one value of one result is wrong; one that says yes to all would show nothing."""

from functools import partial

import cases
import pytest
import torch

from hilbert_lib.attention import autograd, known_calls, operators

CHECKS = {
    "sequence": partial(
        cases.check, "uneven", "head", "softmax", "random", "eager", torch.float64, "small_grouped", "bshd", True
    ),
    "grid": partial(cases.check_grouped_windows, "eager"),
    "part": partial(cases.check_part, cases.part_of("line, causal"), "eager"),
    "points": partial(cases.check_points, "eager", "odd", torch.float64, 2, 1, 4, 2, True),
    "joint": partial(cases.check_joint, cases.neighbourhoods("plane", "one"), (9, 12), None, torch.float64, "eager"),
}
LEAST = {"sequence": 5, "grid": 7, "part": 7, "points": 7, "joint": 10}  # results that each compares, some in parts


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_sees_a_wrong_value_of_every_result(name, monkeypatch):
    results = []  # numbers of the results that a backend computes, in the order of a call

    def spoiled(run, wrong):
        def spoil(*arguments):
            made = list(run(*arguments))
            for n, x in enumerate(made):
                if x.numel():
                    results.append(n)
                    if len(results) - 1 == wrong:
                        made[n] = x.clone()
                        finite = x.isfinite().flatten().nonzero()
                        made[n].view(-1)[finite[len(finite) // 3]] += 1e-4  # a row that a part of a grid computes
            return tuple(made)

        return spoil

    originals = {run: getattr(autograd, run) for run in ("run_forward", "run_backward")}

    def check(wrong=None):
        results.clear()
        for module in (autograd, operators, known_calls):
            for run, original in originals.items():
                if hasattr(module, run):
                    monkeypatch.setattr(module, run, spoiled(original, wrong))
        CHECKS[name]()

    check()
    count = len(results)
    assert count >= LEAST[name]
    for wrong in range(count):
        with pytest.raises(AssertionError):
            check(wrong)
