"""The committed evidence: pages that lead through it, and numbers that are those of its records."""

import json
import re
import shutil
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_notebooks import LOADS, make_run

from hilbert_lib.cli.main import main
from hilbert_lib.lab.committed import MACHINES, newest_run
from hilbert_lib.lab.ledger.evidence import evidence_pages, write_evidence
from hilbert_lib.lab.records import REPORTS, RESULTS
from hilbert_lib.lab.suite.points import read_notebook
from hilbert_lib.lab.suite.report import write_report

RECORDS = ("05_backend_selection", "06_kernel_benchmarks", "07_ring_attention", "08_where_a_curve_pays")
README = "# Ours\n\n<!-- from the records: by a command -->\nold\n<!-- end of the records -->\n\nKept.\n"


@pytest.fixture
def copied(tmp_path):
    """The committed records that the numbers come from, in folders of other names, and a README above them."""
    for name in RECORDS:
        run = newest_run(name)
        target = tmp_path / "reports" / run.parents[1].name / "another-run" / run.name
        target.mkdir(parents=True)
        for file in [run / RESULTS, run / "manifest.json", *run.glob("speed*.png")]:
            shutil.copy(file, target)
    (tmp_path / "README.md").write_text(README)
    return tmp_path / "reports"


def change(folder, name, change_record):
    (path,) = folder.glob(f"*/*/{name}*/{RESULTS}")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        change_record(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def texts(folder):
    return {path.relative_to(folder.parent).as_posix(): text for path, text in evidence_pages(folder).items()}


def test_readme_and_index_are_what_the_committed_records_give():
    pages = evidence_pages(REPORTS)
    names = {path.relative_to(REPORTS.parent).as_posix() for path in pages}
    assert names == {"README.md", "reports/README.md", "reports/index.html"}
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name} is not that of the records: hilbert report reports"
        )


def test_the_committed_pages_ask_no_host_for_anything_and_lead_to_files_that_exist():
    html, markdown = (REPORTS / name for name in ("index.html", "README.md"))
    assert not LOADS.findall(html.read_text())
    links = re.findall(r'(?:href|src)="([^"]+)"', html.read_text()) + re.findall(r"\]\(([^)]+)\)", markdown.read_text())
    assert len(links) > 30
    for link in links:
        path, _, place = link.partition("#")
        target = (REPORTS / path).resolve() if path else html
        assert target.exists(), link
        assert target.is_relative_to(REPORTS), link
        if place and target.suffix == ".html":
            assert f'id="{place}"' in target.read_text(), link
    above = re.findall(r"\]\((reports/[^)]+)\)", (REPORTS.parent / "README.md").read_text())
    assert len(above) > 10
    assert all((REPORTS.parent / link).exists() for link in above)


def test_every_committed_notebook_is_small():
    sizes = {path: path.stat().st_size for path in REPORTS.glob(f"{MACHINES}/*/*/*.ipynb")}
    assert max(sizes.values()) < 1e6, sizes


def test_the_numbers_are_those_of_the_records_samples(copied):
    pages = texts(copied)

    def lines(name):
        (path,) = copied.glob(f"*/*/{name}*/{RESULTS}")
        return [json.loads(line) for line in path.read_text().splitlines()]

    speeds = {}
    for record in lines("06_kernel_benchmarks"):
        for side in [record[name] for name in "ab" if name in record]:
            given = side["parameters"]
            work = {name: given.get(name) for name in ("sweep", "pattern", "is_causal", "length", "head_dim")}
            if work == {
                "sweep": "backends",
                "pattern": "reference",
                "is_causal": False,
                "length": 65536,
                "head_dim": 128,
            }:
                key = side["name"], given["direction"]
                speeds.setdefault(key, (side["useful_flop"], []))[1].extend(side["samples_ms"])
    tflop = {key: flop / statistics.median(samples) / 1e9 for key, (flop, samples) in speeds.items()}
    for direction in ("forward", "backward"):
        best = max(value for (name, own), value in tflop.items() if own == direction and name != "triton")
        others = ", ".join(sorted({name for name, own in tflop if own == direction and name != "triton"}))
        said = re.search(
            rf"{direction.capitalize()} of .*?\| (\d+) .*? the best of the others \(([^)]*)\) (\d+)", pages["README.md"]
        )
        assert said.groups() == (f"{tflop['triton', direction]:.0f}", others, f"{best:.0f}")

    grids = [each for each in lines("08_where_a_curve_pays") if each["a"]["name"] == "raster"]
    forward = [each for each in grids if each["b"]["parameters"]["direction"] == "forward"]
    hilbert = [each for each in forward if each["b"]["name"] == "hilbert"]
    ratios, faster = [each["ratio"] for each in hilbert], sum(each["interval"][0] > 1.01 for each in hilbert)
    said = f"{faster} of {len(hilbert)} works were faster forward than stored row by row, the best {max(ratios):.1f} "
    assert said in pages["reports/index.html"]
    assert f"the worst {min(ratios):.2f} times (" in pages["reports/index.html"]
    assert f"hilbert {max(ratios):.2f}, " in pages["README.md"]
    longest = max(lines("07_ring_attention"), key=lambda each: each["tokens"])
    assert f"{longest['tokens']:,} tokens in {longest['forward_ms'] / 1e3:.2f} s" in pages["reports/README.md"]


def test_a_new_record_changes_the_numbers_and_links_and_nothing_else_of_the_readme(copied):
    write_evidence(copied)
    before = (copied.parent / "README.md").read_text()
    assert before.startswith("# Ours\n\n<!-- from the records: by a command -->\n1. ")
    assert before.endswith("<!-- end of the records -->\n\nKept.\n")
    assert "old" not in before.split()
    assert set(re.findall(r"reports/h200[^)]*?/([^/)]+)/0", before)) == {"another-run"}

    def double(record):
        record["ratio"] *= 2 if record["b"]["name"] in ("hilbert", "tile", "morton") else 1

    change(copied, "08_where_a_curve_pays", double)
    write_evidence(copied)
    after = (copied.parent / "README.md").read_text()
    changed = [line for line, other in zip(before.splitlines(), after.splitlines(), strict=True) if line != other]
    assert len(changed) == 2  # the sentence and the line of the grid


def test_an_answer_that_the_records_no_longer_bear_out_is_refused(copied):
    def slow(record):
        record["ratio"] = 1.0

    change(copied, "08_where_a_curve_pays", slow)
    with pytest.raises(ValueError, match="no longer bear this out: It pays where tokens lie on a grid"):
        evidence_pages(copied)


def test_a_record_that_lacks_what_is_told_of_it_is_named(copied):
    def rename(record):
        record["b"]["name"] = "tiles" if record["b"]["name"] == "tile" else record["b"]["name"]

    change(copied, "08_where_a_curve_pays", rename)
    with pytest.raises(ValueError, match=r"the newest records lack what is told .*08_where_a_curve_pays"):
        evidence_pages(copied)


def test_a_backend_s_lead_is_the_paired_ratio_and_no_quotient_of_medians(copied):
    def level(record):
        if record.get("b", record)["parameters"]["sweep"] == "backends":
            record |= {"ratio": 1.25, "interval": [1.2, 1.31]}

    change(copied, "06_kernel_benchmarks", level)
    lead = "1.25 (1.20 to 1.31)"
    assert f"{lead} and {lead} times as fast as the best of cudnn," in texts(copied)["README.md"]


def test_another_package_is_named_where_it_is_ahead_and_where_it_was_timed(copied):
    package, notebooks = "flash_attn_4", ("05_backend_selection", "06_kernel_benchmarks")

    def lead(record):  # as in some record of either, and not in another
        sides = [record.get(name, record) for name in "ab"]
        if {side["name"] for side in sides} == {package, "triton"} and sides[0]["parameters"]["length"] == 262144:
            ratio = 0.9 if sides[0]["name"] == package else 1 / 0.9
            record |= {"ratio": ratio, "interval": [ratio, ratio]}
            for side in sides:
                side["samples_ms"] = [0.9 if side["name"] == package else 1.0] * len(side["samples_ms"])

    def rename(record):
        for side in (record.get("a", record), record.get("b", record)):
            side["name"] = side["name"].replace(package, "cudnn")

    for notebook in notebooks:
        change(copied, notebook, lead)
    for notebook in notebooks:  # where either of them timed it
        assert f"; elsewhere {package} is ahead, by up to " in texts(copied)["README.md"]
        change(copied, notebook, rename)
    assert "elsewhere" not in texts(copied)["README.md"]
    assert package not in texts(copied)["README.md"]


def test_records_beside_those_of_notebooks_are_led_to(copied):
    (machine,) = copied.glob("h200/*")
    (machine / "claims_K4").mkdir()
    (machine / "claims_K4" / RESULTS).touch()
    assert "[h200/another-run/claims_K4](h200/another-run/claims_K4)" in texts(copied)["reports/README.md"]


def test_small_rows_gain_where_the_records_say(copied):
    def gain(record):
        work = record["b"]["parameters"] if "b" in record else {}
        if work.get("sweep") == "decoding" and (work["row_bytes"], work["dilation"], work["queries"]) == (128, 16, 4):
            record["ratio"] = {"residue": 3.0, "hilbert": 2.5, "no table": 2.0}.get(record["b"]["name"], 1.0)

    change(copied, "06_kernel_benchmarks", gain)
    row = "most in decoding: rows of 128 B, dilation 16 | residue 1.50, Hilbert 1.25 times as fast as sequence order"
    assert row in texts(copied)["README.md"]


def test_every_number_says_on_what_it_was_measured(copied):
    rows = [line for line in texts(copied)["README.md"].splitlines() if re.match(r"\|.*/another-run/", line)]
    assert {(line.split(" | ")[2], line.split("[")[1][:2]) for line in rows} == {
        ("NVIDIA H200", "06"),
        ("NVIDIA H200", "08"),
        ("4 × NVIDIA H200", "07"),
    }


@pytest.mark.parametrize("figures", ["speeds.png", "speedups_*.png"])
def test_a_record_without_its_figure_is_named(copied, figures):
    for path in copied.glob(f"*/*/*/{figures}"):
        path.unlink()
    with pytest.raises(ValueError, match=f"holds no {figures.replace('*', '[0-9]+')}"):
        evidence_pages(copied)


def test_the_figure_is_that_of_the_blocks_with_the_best_of_the_answer(copied):
    (path,) = copied.glob("*/*/08*/results.jsonl")
    ratios = [
        (each["ratio"], each["b"]["parameters"]["block_size"])
        for each in map(json.loads, path.read_text().splitlines())
        if (each["a"]["name"], each["b"]["name"]) == ("raster", "hilbert")
        and each["b"]["parameters"]["direction"] == "forward"
    ]
    pages = texts(copied)
    for name in ("README.md", "reports/README.md", "reports/index.html"):
        assert f"speedups_{max(ratios)[1]}.png" in pages[name]
        assert f"in blocks of {max(ratios)[1]}" in pages[name]


def test_the_kernels_of_another_gpu_are_told_beside_and_change_nothing_else(copied):
    before = texts(copied)["README.md"].splitlines()
    (run,) = copied.glob("h200/*/06_kernel_benchmarks*")
    shutil.copytree(run, copied / "h100" / "a-run" / run.name)
    (path,) = copied.glob(f"h100/*/*/{RESULTS}")
    elsewhere = path.read_text().replace('"hardware": "NVIDIA H200"', '"hardware": "NVIDIA H100"')
    newer = re.sub(r'"utc": "\d{4}', '"utc": "9999', elsewhere)
    assert newer != elsewhere
    path.write_text(newer)
    after = texts(copied)["README.md"].splitlines()
    assert not set(before) - set(after)
    added = [line for line in after if line not in before]
    assert len(added) == 4
    assert all("| NVIDIA H100 | [06](reports/h100/a-run/06" in line for line in added)


def test_the_newest_finished_run_of_each_machine_is_shown_and_no_local_one(tmp_path):
    reports = tmp_path / "reports"
    make_run(reports / "h200" / "old")
    make_run(reports / "h200x4" / "four", prose="# Older\n\nQuestion?")
    make_run(
        reports / "h200" / "new", changes={"seq_len": 16}, prose="# Title\n\nSee [b](01_b.ipynb), [c](02_c.ipynb)."
    )
    make_run(reports / "h200" / "new", "01_b")
    make_run(reports / "h100" / "last", "01_b")
    make_run(reports / "h200" / "newer", error={"type": "ValueError", "message": "no", "cell": 1})
    make_run(reports / "local" / "cpu-1", "03_local")
    for run in reports.glob("*/*/"):
        write_report(run)
    write_evidence(reports)
    page, markdown = ((reports / name).read_text() for name in ("index.html", "README.md"))
    assert re.findall(r'<section id="(\w+)"', page) == re.findall(r'<a id="(\w+)"', markdown) == ["00_a", "01_b"]
    for text in (page, markdown):
        assert set(re.findall(r"(h\d+\w*/\w+)/0", text)) == {"h200/new", "h200x4/four", "h100/last"}
        assert "local" not in text
        assert "Older" not in text
        assert "waits for records of 06_kernel_benchmarks" in text
    links = re.findall(r'href="([^"#]+)', page) + re.findall(r"\]\(([^)]+)\)", markdown)
    assert all((reports / link).exists() for link in links)
    assert "h200/new/01_b/01_b.html" in links
    assert "h200/new/01_b/01_b.ipynb" in links
    assert "[b](h200/new/01_b/01_b.ipynb)" in markdown, "numbers and words are of what an H200 showed"
    assert "02_c" not in page + markdown


def test_the_command_builds_the_pages_where_machines_lie_and_only_there(copied):
    def report(folder):
        result = CliRunner().invoke(main, ["report", str(folder)])
        assert result.exit_code == 0, result.output
        return {Path(line).resolve() for line in result.output.splitlines()}

    ours = {copied / "index.html", copied / "README.md", copied.parent / "README.md"}
    assert not ours & report(copied / "h200")
    assert ours <= report(copied)
    assert "old" not in (copied.parent / "README.md").read_text().split()


def test_no_record_names_a_folder_of_the_machine_that_made_it():
    for path in REPORTS.glob(f"{MACHINES}/**/*"):
        if path.suffix in (".ipynb", ".html", ".json", ".jsonl", ".csv", ".md"):
            found = re.findall(r"\W((?:/|\.\./)(?:tmp|home|root|work|mnt)/\w+)", path.read_text())
            assert not found, (path.name, found[:3])


def test_a_notebook_beside_the_reports_says_what_its_newest_run_showed(tmp_path):
    make_run(tmp_path / "reports" / "h200" / "one", prose="# Older\n\nWhat?\n\n## Answer\n\nNot yet.")
    told = evidence_pages(tmp_path / "reports")[tmp_path / "reports" / "README.md"]
    assert "Not yet." in told
    assert "text of its time" not in told
    name = re.search(r'<a id="(\w+)">', told)[1]
    notebook = json.loads((Path(__file__).parents[3] / "notebooks" / "03_cache_lines.ipynb").read_text())
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / f"{name}.ipynb").write_text(json.dumps(notebook))
    told = evidence_pages(tmp_path / "reports")[tmp_path / "reports" / "README.md"]
    assert "Not yet." not in told
    assert "with the text of its time, the answer above is newer" in told
    assert read_notebook(tmp_path / "notebooks" / f"{name}.ipynb").title in told
