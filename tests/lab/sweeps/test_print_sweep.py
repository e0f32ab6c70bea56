"""The sweep of notebook 12: every side computes what it says, and claims are judged over all cases of a record."""

from dataclasses import replace
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import torch
from IPython.display import HTML

from hilbert_lib.lab.cache import in_print as counting
from hilbert_lib.lab.figures.plots import bars
from hilbert_lib.lab.figures.record import show
from hilbert_lib.lab.ledger import in_print as ledger
from hilbert_lib.lab.ledger.answer import NOT_YET, judged, standing
from hilbert_lib.lab.ledger.claim import When
from hilbert_lib.lab.ledger.claims import LEDGER
from hilbert_lib.lab.sweeps import in_print as sweep
from hilbert_lib.lab.tables import sides_of
from hilbert_lib.patterns.neighbourhood import Neighbourhood

CPU = {"device": torch.device("cpu"), "dtype": "float32"}
PICTURES = ["8x8 4 2x2x16", "4x8 2 1x1x16"]  # two images, so that images and heads cannot change places
SLIDES = ["5x7 3 1x2x16", "8x8 5 1x2x16"]


def pairs():
    yield from sweep.window_pairs(PICTURES, **CPU)
    yield from sweep.slide_pairs(SLIDES, **CPU)
    yield from sweep.tile_pairs(["8x8 6 3 2x16"], **CPU)
    yield from sweep.order_pairs(["8x8 3x5 2x16"], **CPU)
    yield from sweep.stride_pairs(["4x6x6 2x3x4 2x3x4 1x16"], "P5", **CPU)
    yield from sweep.stride_pairs(["9x8 5x4 4x3 1x16"], "P6", **CPU)


@pytest.fixture(scope="module")
def records():
    return sweep.run_in_print(pairs(), device=CPU["device"])


def names(records, claim):
    found = [record for record in records if claim_of(record) == claim]
    return [(record["a"]["name"], record["b"]["name"]) for record in found]


def test_each_claim_has_its_pairs(records):
    curve = "FlexAttention, hilbert"
    others = ["fused", "FlexAttention, raster", "ours", f"{curve}, reordered"]
    windows, slides = ["eager", *others], ["convolutions", *others[1:]]
    printed = [("eager", "FlexAttention"), ("convolutions", "FlexAttention")]
    expected = [printed[0], *((name, curve) for name in windows * 2)]
    expected += [printed[1], *((name, curve) for name in slides * 2)]
    assert names(records, "P1") == expected
    assert names(records, "P2") == [
        ("dense", "FlexAttention"),
        ("dense", "batches"),
        ("windows", "FlexAttention"),
        ("windows", "batches"),
        ("FlexAttention, reordered", "FlexAttention"),
    ]
    morton = "FlexAttention, morton"
    assert names(records, "P4") == [("FlexAttention, raster", morton), (curve, morton), ("ours", morton)]
    for claim in ("P5", "P6"):
        assert names(records, claim) == [("dense", "ours"), ("ours", "ours"), ("FlexAttention, tiles", "ours")]


def test_each_side_computes_what_it_says(records):
    for record in records:
        for side in sides_of(record):
            assert side["error"] < 1e-5, side["name"]


def test_useful_work_is_of_the_pairs_that_attend(records):
    flop = {
        (side["parameters"]["claim"], side["name"], side["parameters"]["grid"]): side["useful_flop"]
        for record in records
        for side in sides_of(record)
    }
    per_pair = 4 * 16
    assert flop["P1", "eager", "8x8"] == per_pair * 64 * 16 * 4  # cells, keys, images * heads
    assert flop["P1", "FlexAttention", "4x8"] == per_pair * 32 * 4
    reach, cells = 12, 64
    around = sum(min(cells - 1, place + reach) - max(0, place - reach) + 1 for place in range(cells))
    assert flop["P1", "FlexAttention", "8x8"] == per_pair * around * 2
    tiles = counting.Tiles((8, 8), 6, 3)
    assert flop["P2", "batches", "8x8"] == per_pair * tiles.pairs * 2
    assert flop["P2", "dense", "8x8"] == per_pair * 70**2 * 2
    assert flop["P6", "FlexAttention, tiles", "9x8"] == per_pair * Neighbourhood((9, 8), (5, 4), stride=(4, 3)).pairs


def test_a_pair_that_fails_ends_a_run_without_a_gpu():
    side = next(sweep.order_pairs(["8x8 3x5 2x16"], **CPU))[0]
    broken = sweep.replace(side, run=lambda: [][1])
    with pytest.raises(IndexError):
        sweep.run_in_print([(broken, side)], device=CPU["device"])


WRONG = {
    "windows": ["8x8 3 1x2x16", "8x8 4 2x16", "8x8 4", "8 4 1x2x16", "8x8 0 1x2x16", "a b c"],
    "slides": ["8x8 4 1x2x16", "8x8 9 1x2x16"],
    "tiles": ["8x8 6 7 2x16"],
    "orders": ["8x8 3 2x16"],
    "volumes": ["4x6x6 2x3x4 2x3 1x16"],
    "strides": ["9x8 5x4 6x3 1x16"],
}
RIGHT = {"windows": PICTURES, "slides": SLIDES, "tiles": ["8x8 6 3 2x16"], "orders": ["8x8 3x5 2x16"]}
RIGHT |= {"volumes": ["4x6x6 2x3x4 2x3x4 1x16"], "strides": ["9x8 5x4 4x3 1x16"]}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_works_are_refused_by_the_name_of_their_list(name, text):
    sweep.check_works(**RIGHT)
    with pytest.raises(ValueError, match=f"^{name} must name .*; got {text!r}: "):
        sweep.check_works(**RIGHT | {name: [text]})
    with pytest.raises(ValueError, match=f"^{name} must name .*; got none"):
        sweep.check_works(**RIGHT | {name: []})


def as_timed(records, ms_of):
    """Records as a GPU's run makes them: each side takes the milliseconds that are told of it."""
    made = []
    for record in records:
        a, b = (float(ms_of(side)) for side in sides_of(record))
        sides = {
            name: side | {"samples_ms": [ms] * 5} for name, side, ms in zip("ab", sides_of(record), (a, b), strict=True)
        }
        timed = {"kind": "comparison", "ratio": a / b, "interval": (a / b - 0.001, a / b + 0.001)}
        made.append(record | sides | timed)
    return made


def quick(side):
    """A machine on which every claim of the record holds."""
    if side["parameters"]["claim"] in ("P5", "P6"):
        by_cells = side["parameters"]["stride"] == "1"
        return side["useful_flop"] / 1e9 / (100 if by_cells else 700)
    is_own = side["name"] in ("FlexAttention", "batches", "FlexAttention, hilbert", "FlexAttention, morton")
    return 1 if is_own else 20


CASES = {"P1": 2 + 2 * 4 + 2 * 3, "P2": 2, "P4": 1, "P5": 3, "P6": 2}


@pytest.mark.parametrize("claim", CASES)
def test_a_claim_holds_where_all_cases_do(records, claim):
    verdict, cases = judged(claim, as_timed(records, quick))
    assert (verdict, len(cases)) == ("holds", CASES[claim])


def slow(claim):
    """The same machine, on which one side of a claim is slow: its verdict may not be kept."""

    def ms_of(side):
        about = side["parameters"]
        if about["claim"] == claim and claim == "P1" and side["name"] == "ours" and about["grid"] == "8x8":
            return 1
        if about["claim"] == claim == "P2" and side["name"] == "windows":
            return 0.5
        if about["claim"] == claim == "P4" and side["name"] == "FlexAttention, raster":
            return 0.9
        if about["claim"] == claim and claim in ("P5", "P6") and side["name"] == "FlexAttention, tiles":
            return side["useful_flop"] / 1e9 / 400
        return quick(side)

    return ms_of


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ("P1", "does not hold (14 of 16 cases)"),
        ("P2", "does not hold (1 of 2 cases)"),
        ("P4", "does not hold"),
        ("P5", "does not hold (2 of 3 cases)"),
        ("P6", "does not hold (1 of 2 cases)"),
    ],
)
def test_one_slow_case_changes_the_verdict(records, claim, said):
    assert judged(claim, as_timed(records, slow(claim)))[0] == said


def test_windows_that_slide_by_cells_may_not_be_as_fast(records):
    def ms_of(side):
        return side["useful_flop"] / 1e9 / 700

    assert judged("P5", as_timed(records, ms_of))[0] == "does not hold (2 of 3 cases)"


def test_tiles_are_judged_by_their_faster_way(records):
    def ms_of(side):
        return 2 if side["name"] == "batches" else quick(side)

    _, cases = judged("P2", as_timed(records, ms_of))
    assert cases.b.tolist() == ["FlexAttention"] * 2
    assert cases.value.tolist() == [20, 20]


def test_the_table_of_verdicts_states_conditions(records, monkeypatch):
    beside_dense = replace(LEDGER["P2"], when=When("beside dense attention", "beside == 'dense'"))
    monkeypatch.setitem(LEDGER, "P2", beside_dense)
    verdicts = standing("P", {"12_in_print": as_timed(records, slow("P2"))}).set_index("id").verdict
    assert verdicts["P2"] == "holds beside dense attention (1 of 2 cases)"


def test_cells_of_a_stride_lie_one_after_the_other():
    shape, stride = (5, 4, 4), (2, 3, 4)  # neither of the first two sides is whole tiles
    call = sweep.Call(Neighbourhood(shape, stride, stride=stride), 80, 1, 16, **CPU)
    cells = torch.unravel_index(sweep._in_tiles(call).ordering.perm, shape)
    tiles = torch.stack([line // step for line, step in zip(cells, stride, strict=True)], 1)
    changes = int((tiles[1:] != tiles[:-1]).any(1).sum())
    assert changes == 3 * 2 * 1 - 1


def test_what_is_timed_with_its_layout_is_no_case(records):
    timed = as_timed(records, quick)
    cases = ledger.curve_windows(timed)
    assert len(cases) == CASES["P1"] + 4
    assert cases[cases.printed].unfused.tolist() == [True, True]
    for claim in ("P1", "P2"):
        _, judged_cases = judged(claim, timed)
        assert not judged_cases.reordered.any()


def claim_of(record):
    return record["a"]["parameters"]["claim"]


def point_record(ratio, kernel="patches"):
    about = {"sweep": "points", "cloud": "room", "points": 100, "window": 5, "head_dim": 16, "direction": "forward"}
    sides = {"parameters": about, "samples_ms": [1.0] * 5, "error": 0.0}
    pair = {"a": {"name": kernel, **sides}, "b": {"name": "lists", **sides}}
    return {
        "kind": "comparison",
        "ratio": ratio,
        "interval": (ratio - 0.1, ratio + 0.1),
        "output_difference": None,
        **pair,
    }


def test_patches_are_judged_by_the_time_of_lists():
    _, cases = judged("P3", [point_record(2.0), point_record(2.0, "gather")])
    (case,) = cases.itertuples()
    assert (case.value, case.low, case.high) == pytest.approx((0.5, 1 / 2.1, 1 / 1.9))
    verdicts = standing("P", {"13_points": [point_record(0.5)]}).set_index("id").verdict
    assert verdicts["P3"] == "holds"
    assert verdicts.drop("P3").eq(NOT_YET).all()


def test_a_part_of_a_record_is_judged_by_what_it_holds(records):
    timed = as_timed(records, quick)
    part = [record for record in timed if claim_of(record) == "P4"]
    verdicts = standing("P", {"12_in_print": part}).set_index("id").verdict
    assert verdicts.to_dict() == dict.fromkeys(("P1", "P2", "P3", "P5", "P6"), NOT_YET) | {"P4": "holds"}
    assert standing("P", {}).verdict.eq(NOT_YET).all()


@pytest.mark.parametrize("claims", [["P1", "P2", "P4", "P5", "P6"], ["P1"], ["printed"], ["P4"], ["P5"]])
def test_the_notebook_shows_what_a_gpu_measured_whole_or_in_part(records, claims, capsys, rough_pictures):
    notebook = nbformat.read(Path(__file__).parents[3] / "notebooks/12_in_print.ipynb", as_version=4)
    cells = {cell.id: cell.source for cell in notebook.cells}
    shown = []
    timed = as_timed(records, slow("P1"))
    timed = timed[:1] if claims == ["printed"] else [each for each in timed if claim_of(each) in claims]
    failed = [{"kind": "not tried", "reason": "no room", "a": timed[0]["a"], "b": timed[0]["b"]}]
    values = {"pd": pd, "HTML": HTML, "display": shown.append, "show": show, "bars": bars, "output_dir": ""}
    values |= {"records": timed + failed, "shown": lambda table, **formats: shown.append(table)}
    for name in ("checked", "record", "curve", "tables", "cost", "verdicts"):
        exec(cells[name], values)
    told = capsys.readouterr().out
    assert f"{len(timed) + 1} pairs, 1 not tried:" in told
    verdicts = shown[-1].set_index("id").verdict
    by_claims = {"P1": "does not hold (14 of 16 cases)", "printed": "holds"}
    assert verdicts["P1"] == by_claims.get(claims[0], NOT_YET)
    assert verdicts["P4"] == ("holds" if "P4" in claims else NOT_YET)
    figures = [each for each in shown if type(each).__name__ == "Figure"]
    assert len(figures) == (claims[0] in by_claims)
    if "P1" in claims:
        assert "As printed the curve is 20.0 to 20.0 times as fast" in figures[0].get_suptitle()
        assert "a call with its reordering takes 20.00 to 20.00 times as long" in told
