"""The numbers that README and notebooks tell are those of the records, and stand in their slots."""

import gzip
import re
import statistics
from math import inf, nan

import pandas as pd
import pytest

from hilbert_lib.lab.cache.points import count_recall
from hilbert_lib.lab.ledger import numbers as ledger_numbers
from hilbert_lib.lab.ledger.answer import ROOT, answers
from hilbert_lib.lab.ledger.claim import HOLDS, HOLDS_NOT, UNTESTED
from hilbert_lib.lab.ledger.claims import LEDGER
from hilbert_lib.lab.ledger.numbers import SLOT, fill, filled_texts, numbers
from hilbert_lib.lab.records import MACHINES, REPORTS, RESULTS, newest_run, read_records

pytestmark = pytest.mark.evidence


def pairs(notebook, sweep, a, b, **given):
    """The records of two sides, whose parameters are as given; b is "" for any."""
    both = [each for each in read_records(newest_run(notebook) / RESULTS) if "a" in each]
    asked = [each for each in both if each["b"]["parameters"].items() >= {"sweep": sweep, **given}.items()]
    return [each for each in asked if a in ("", each["a"]["name"]) and b in ("", each["b"]["name"])]


def test_every_text_holds_the_numbers_of_the_newest_records():
    texts = filled_texts()
    assert {path.name for path in texts} >= {"README.md", "09_verdict.ipynb"}
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not that of the records: make numbers"


def test_a_slot_without_a_number_is_refused():
    text = "<!--a-->1<!--/--> to <!--b-->\n2\n<!--/-->"
    assert fill(text, {"a": "3", "b": "4"}) == "<!--a-->3<!--/--> to <!--b-->4<!--/-->"
    with pytest.raises(ValueError, match="got 'c'"):
        fill("<!--c-->1<!--/-->", {"a": "1"})


def test_numbers_are_found_below_another_root_and_links_lead_from_the_file(tmp_path):
    (tmp_path / "reports").mkdir()
    for name in ("README.md", "reports/README.md"):
        (tmp_path / name).write_text("ran on <!--06_run-->?<!--/-->")
    above, below = filled_texts(tmp_path).values()
    assert "](reports/h100/" in above
    assert "](h100/" in below


def test_the_table_of_runs_has_the_newest_of_each_notebook_and_machine():
    folders = re.findall(r"\[its records\]\((\S+)\)", numbers()["runs"])
    kinds = [(folder.split("/")[1], folder.split("/")[3][:2]) for folder in folders]
    assert len(kinds) == len(set(kinds))
    notebooks = {path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {name for _, name in kinds} == notebooks
    newest = newest_run("06_kernel_benchmarks").relative_to(ROOT).as_posix()
    assert newest in folders


def test_what_became_of_the_other_ideas_is_counted_or_of_the_record():
    slots = numbers()
    assert slots["bound_keys"] == str((8 + 5 - 1) ** 2)
    assert slots["bound_row"] == str((64 + 5 - 1) * 5)
    assert slots["along_keys"] == f"{sum(2048 // 2**branch for branch in range(5)):,}"
    assert int(slots["along_window"]) ** 2 == pytest.approx(3968, rel=0.01)
    run = newest_run("14_directions") or newest_run("14_directions", machines=REPORTS.glob(MACHINES))
    kinds = {}
    for record in read_records(run / RESULTS):
        kinds.setdefault(record["kind"], []).append(record)
    fewer = []
    for cloud in ("tissue", "room"):
        searched = {each["name"]: each["keys"] for each in kinds["annealing"] if each["parameters"]["cloud"] == cloud}
        fewer.append(1 - min(keys[-1] for keys in searched.values()) / searched["hilbert, halved"][0])
    assert slots["searched"] == f"{100 * max(fewer):.1f}"
    errors = {each["name"]: each["errors"] for each in kinds["approximation"] if each["parameters"]["near"] == 3}
    near, alone = (statistics.mean(errors[way]) for way in ("near tokens and means", "near tokens alone"))
    assert slots["means_near"] == f"{100 * near:.1f}"
    assert slots["means_gain"] == f"{alone / near:.1f}"
    losses = {}
    for record in kinds["training"]:
        losses.setdefault(record["name"], []).extend(record["losses"])
    for name in ("morton", "hilbert", "windows"):
        ratios = [loss / of_rows for loss, of_rows in zip(losses[name], losses["raster"], strict=True)]
        assert slots[f"learnt_{name}"] == f"{statistics.geometric_mean(ratios):.2f}"


def test_speeds_are_those_of_the_records_samples():
    work = {"pattern": "reference", "is_causal": False, "length": 65536, "head_dim": 128, "direction": "forward"}
    found = pairs("06_kernel_benchmarks", "backends", "", "hopper", **work)
    own = [ms for each in found for ms in each["b"]["samples_ms"]]
    nearest = min(found, key=lambda each: each["ratio"])
    beside = statistics.median(nearest["a"]["samples_ms"])
    assert numbers()["forward_128"] == f"{found[0]['b']['useful_flop'] / statistics.median(own) / 1e9:.0f}"
    assert numbers()["forward_128_other"] == nearest["a"]["name"]
    assert numbers()["forward_128_other_speed"] == f"{nearest['a']['useful_flop'] / beside / 1e9:.0f}"
    others = {numbers()[f"{way}_{size}_other"] for way in ("forward", "backward") for size in (64, 128)}
    assert len(others) == 1, "README names one nearest other for all four rows"
    assert numbers()["forward_128_ratio"] == f"{nearest['ratio']:.2f}"


def test_what_an_order_gains_is_that_of_the_record():
    whole = pairs("06b_orders_and_counters", "layouts", "linear", "hilbert")
    whole = [each["ratio"] for each in whole if each["b"]["parameters"]["row_bytes"] % 128 == 0]
    sizes = pairs("06b_orders_and_counters", "claims", "linear", "hilbert", pair="two layouts")
    every = [*whole, *(each["ratio"] for each in sizes)]
    assert numbers()["rows_works"] == str(len(every))
    assert numbers()["rows_hilbert_low"] == f"{min(every):.2f}"
    assert numbers()["rows_hilbert_high"] == f"{max(every):.2f}"
    gains = {}
    for each in pairs("06b_orders_and_counters", "decoding", "linear", ""):
        at, name = each["b"]["parameters"], each["b"]["name"]
        gains.setdefault((at["length"], at["queries"], at["row_bytes"], at["dilation"]), {})[name] = each["ratio"]
    over = {at: {name: ratio / of["no table"] for name, ratio in of.items()} for at, of in gains.items()}
    best = max((ratio, at) for at, of in over.items() for name, ratio in of.items() if name != "no table")
    assert numbers()["decoding_best"] == f"{best[0]:.2f}"
    assert numbers()["decoding_row_bytes"] == str(best[1][2])
    assert numbers()["decoding_hilbert"] == f"{over[best[1]]['hilbert']:.2f}"


def test_grids_and_what_reordering_costs_are_those_of_the_record():
    record = "08b_kernels_on_grids", "neighbourhood"
    hilbert = pairs(*record, "raster", "hilbert", direction="forward")
    ratios = [each["ratio"] for each in hilbert]
    assert numbers()["grid_works"] == str(len(hilbert))
    assert numbers()["grid_faster"] == str(sum(each["interval"][0] > 1.01 for each in hilbert))
    assert (numbers()["grid_best"], numbers()["grid_worst"]) == (f"{max(ratios):.2f}", f"{min(ratios):.2f}")
    anew = pairs(*record, "hilbert", "hilbert, reordered", direction="forward")
    kept = [each["ratio"] for each in anew]
    assert (numbers()["reordered_low"], numbers()["reordered_high"]) == (f"{min(kept):.2f}", f"{max(kept):.2f}")
    left = {}
    for one, other in zip(hilbert, anew, strict=True):
        assert one["b"]["parameters"] == other["b"]["parameters"]
        if one["interval"][0] > 1.01:
            left[other["ratio"]] = one["ratio"]
    assert numbers()["small_each"] == f"{min(left) * left[min(left)]:.2f}"
    assert numbers()["small_once"] == f"{left[min(left)]:.2f}"


def test_the_narrowest_window_that_was_timed_is_wider_than_those_where_raster_is_ahead():
    hilbert = pairs("08b_kernels_on_grids", "neighbourhood", "raster", "hilbert", direction="forward")
    windows = [str(each["b"]["parameters"]["window"]) for each in hilbert]
    narrowest = min(int(side) for window in windows for side in window.split(" x ")[-2:])
    assert numbers()["timed_window"] == str(narrowest)
    assert int(numbers()["least_window_128"]) < int(numbers()["least_window_64"]) < narrowest


def test_what_is_counted_over_points_is_what_the_cases_of_the_claim_say():
    cases = answers()["G3"].cases.value
    assert (numbers()["points_used_low"], numbers()["points_used_high"]) == (f"{cases.min():.2f}", f"{cases.max():.2f}")
    recall = count_recall(int(numbers()["points_counted"].replace(",", "")), orders=["hilbert"]).recall
    lost = [f"{100 * (1 - share):.0f}" for share in (recall.max(), recall.min())]
    assert [numbers()["points_lost_low"], numbers()["points_lost_high"]] == lost


def test_what_another_program_makes_is_told_of_every_record_of_it():
    runs = [newest_run("04_safe_benchmarking"), *REPORTS.glob("h*/*/causes")]
    causes = [each for run in runs for each in read_records(run / RESULTS) if each.get("cause") == "two programs"]
    for printed in ("7.95", "2.66", "1.66"):
        ratios = [each["ratio"] for each in causes if each["printed"] == printed]
        assert len(ratios) == 2
        told = f"{min(ratios):.1f} to {max(ratios):.1f}"
        assert numbers()[f"made_{printed}".replace(".", "_")] == told


def test_what_boxes_gain_is_over_the_fastest_order_of_each_work():
    for direction in ("forward", "backward"):
        works = {}
        for each in pairs("08b_kernels_on_grids", "neighbourhood", "", "boxes, raster", direction=direction):
            if "," not in each["a"]["name"]:
                at = each["b"]["parameters"]
                work = at["side"], at["window"], at["head_dim"]
                works[work] = min(each["ratio"], works.get(work, inf))
        ends = (min(works.values()), max(works.values())) if works else (nan, nan)
        for end, value in zip(("low", "high"), ends, strict=True):
            assert numbers()[f"boxes_{direction}_{end}"] == f"{value:.2f}"


def test_the_longest_sequences_are_those_of_the_records():
    def checked(run):
        return [each for each in read_records(run / RESULTS) if each["out_error"] is not None]

    longest = max(checked(newest_run("07_ring_attention")), key=lambda each: each["tokens"])
    assert numbers()["ring_forward_tokens"] == f"{longest['tokens']:,}"
    assert numbers()["ring_forward_seconds"] == f"{longest['forward_ms'] / 1e3:.2f}"
    # Both ways of any run: not every one goes to the longest.
    runs = [path.parent for path in sorted(REPORTS.glob("h*/*/07_*/results.jsonl.gz"))]
    both = [each for run in runs for each in checked(run) if each["backward"]]
    both = max(both, key=lambda each: (each["tokens"], each["environment"]["utc"]))
    assert numbers()["ring_both_tokens"] == f"{both['tokens']:,}"
    assert numbers()["ring_both_seconds"] == f"{(both['forward_ms'] + both['backward_ms']) / 1e3:.2f}"


def test_the_sequence_of_a_models_heads_is_the_longest_that_was_checked_both_ways():
    records = read_records(newest_run("07_ring_attention") / RESULTS)
    wide = [each for each in records if each["heads"] > 7 and each["head_dim"] > 63 and each["backward"]]
    longest = max((each for each in wide if each["side"] == "auto"), key=lambda each: each["tokens"])
    assert longest["out_error"] is not None
    assert numbers()["ring_model_tokens"] == f"{longest['tokens']:,}"
    assert numbers()["ring_model_seconds"] == f"{(longest['forward_ms'] + longest['backward_ms']) / 1e3:.2f}"
    assert (numbers()["ring_model_heads"], numbers()["ring_model_head_dim"]) == (
        str(longest["heads"]),
        str(longest["head_dim"]),
    )


def test_what_ways_to_exchange_cost_is_that_of_the_record():
    every = read_records(newest_run("07_ring_attention") / RESULTS)
    runs = {(each["sweep"], each["is_causal"], each["side"]): each for each in every if each["ranks"] == 4}
    for passes, names in (("both", ("forward_ms", "backward_ms")), ("forward", ("forward_ms",))):
        took = {run: sum(each[name] for name in names) for run, each in runs.items() if each["backward"]}
        of = {side: {run[:2]: ms for run, ms in took.items() if run[2] == side} for _, _, side in took}
        over = [of["gathered"][run] / of["auto"][run] for run in of["gathered"]]
        ends = [numbers()[f"ring_gathered_{passes}_{end}"] for end in ("low", "high")]
        assert ends == [f"{min(over):.1f}", f"{max(over):.1f}"]
        tables = [of["linear order"][run] / of["auto"][run] for run in of["linear order"]]
        assert numbers()[f"ring_table_{passes}_high"] == f"{max(tables):.2f}"
        causal = ("transports", True)
        behind = 100 * (of["auto"][causal] / of["all_gather"][causal] - 1)
        assert numbers()[f"ring_causal_behind_{passes}"] == f"{behind:.0f}"


def test_what_is_hidden_and_what_runs_wait_for_are_those_of_the_records():
    auto = [each for each in read_records(newest_run("07_ring_attention") / RESULTS) if each["side"] == "auto"]
    (causal,) = (each for each in auto if each["is_causal"])
    for direction in ("forward", "backward"):
        assert numbers()[f"ring_causal_hidden_{direction}"] == f"{causal[f'hidden_{direction}']:.2f}"
    for card in ("h200", "h100"):
        (run,) = REPORTS.glob(f"{card}x4/*/07_*/")
        weak = [each for each in read_records(run / "grids.jsonl") if each["sweep"] == "weak"]
        hidden = [each["hidden_forward"] for each in weak if each["side"] == "rectangles" and each["ranks"] > 1]
        ends = tuple(numbers()[f"grids_hidden_{card}_{end}"] for end in ("low", "high"))
        assert ends == (f"{min(hidden):.2f}", f"{max(hidden):.2f}")
        runs = [each for each in read_records(run / "grids.jsonl") if each["side"] == "Hilbert runs"]
        (two,) = (each for each in runs if each["ranks"] == 2)
        if card == "h200":
            assert numbers()["runs_forward_ms"] == f"{two['forward_ms']:.2f}"
            assert numbers()["runs_exchange_ms"] == f"{two['exchange_ms_forward']:.2f}"


def test_the_documents_milliseconds_are_over_those_of_the_rebuilt_loop():
    runs = [newest_run("04_safe_benchmarking"), *REPORTS.glob("h*/*/causes")]
    rebuilt = [each for run in runs for each in read_records(run / RESULTS) if each.get("printed") == "7.95"]
    loops = [each for each in rebuilt if each["cause"] == "two programs"]
    longer = sorted(138.66 / statistics.median(each["standard_ms"]) for each in loops)
    first = sorted(each["standard_ms"][0] for each in rebuilt if each["cause"] == "first call")
    for name, ends in {"longer_7_95": longer, "first_7_95": first}.items():
        assert [numbers()[f"{name}_low"], numbers()[f"{name}_high"]] == [f"{end:.0f}" for end in ends]
    assert {f"{each['segment']:,}" for each in loops} == {numbers()["made_7_95_segment"]}


def test_the_claims_are_counted_as_their_verdicts_say():
    verdicts = [claim.verdict for claim in LEDGER.values()]
    counts = [sum(each in (HOLDS, f"{HOLDS} as planned") for each in verdicts)]
    counts += [sum(each.startswith(words) for each in verdicts) for words in (HOLDS_NOT, UNTESTED)]
    told = [int(numbers()[f"claims{kind}"]) for kind in ("_hold", "_hold_not", "_untested", "_hold_when", "")]
    assert told == [*counts, len(verdicts) - sum(counts), len(verdicts)]


def test_what_the_notebook_of_the_ledger_shows_is_of_all_claims():
    shown = (ROOT / "notebooks/09_verdict.ipynb").read_text(encoding="utf-8")
    assert re.search(r"(\d+) claims: ", shown)[1] == str(len(LEDGER)), "09 shows an older ledger: make figures"


def test_every_sentence_of_the_evidence_with_a_measured_number_has_a_slot():
    text = SLOT.sub("", (REPORTS / "README.md").read_text())
    assert not re.findall(r"\d+\.\d+x?\b", re.sub(r"\(\S+\)", "", text)), "a measured number is typed by hand"


def test_no_record_names_a_folder_of_the_machine_that_made_it():
    for path in REPORTS.glob("h*/**/*"):
        if path.suffix in (".ipynb", ".json", ".jsonl", ".gz"):
            content = path.read_bytes()
            text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
            found = re.findall(r"\W((?:/|\.\./)(?:tmp|home|root|work|mnt)/\w+)", text)
            assert not found, (path.name, found[:3])


def test_the_loop_over_segments_has_a_ratio_for_each_segment():
    rows = [(512, 11.04), (128, 39.2), (1024, 5.36), (1024, 8.13), (4096, 1.6)]
    table = pd.DataFrame(rows, columns=["segment", "ratio"])
    said = "39 times as long at 128, 11 at 512, 5.4 to 8.1 at 1,024, 1.6 at 4,096"
    assert ledger_numbers._by_segment(table) == said
    assert ledger_numbers._over_segments(table) == "1.6 to 39 times as long at segments of 128 to 4,096"
    of_one = table[table.segment == 1024]
    assert ledger_numbers._over_segments(of_one) == "5.4 to 8.1 times as long at a segment of 1,024"


def test_work_row_by_row_over_points_is_that_of_the_samples():
    found = pairs("13_points", "orders of points", "raster, stored raster", "")
    ratios = [statistics.median(each["a"]["samples_ms"]) / statistics.median(each["b"]["samples_ms"]) for each in found]
    slots = numbers()
    assert len(ratios) == int(slots["points_works"])
    assert float(slots["points_order_low"]) == pytest.approx(min(ratios), rel=0.02)
    assert float(slots["points_order_high"]) == pytest.approx(max(ratios), rel=0.02)


def test_points_over_gpus_are_those_of_the_samples():
    lines = read_records(newest_run("07_ring_attention", "clouds.jsonl") / "clouds.jsonl")
    kept = {each["ranks"]: each for each in lines if each["side"] == "runs of points"}
    one, most = kept[1], kept[max(kept)]
    took = [statistics.median(each["sustained_samples_ms"]) for each in (one, most)]
    slots = numbers()
    assert int(slots["clouds_points"].replace(",", "")) * most["ranks"] == most["points"]
    assert float(slots["clouds_kept"]) == pytest.approx(100 * took[0] / took[1], rel=0.02)
    assert float(slots["clouds_border"]) == pytest.approx(100 * most["border"], abs=0.06)
