"""How "auto" chooses: by rules that agree with the committed record, and by what was measured on this machine."""

import errno
import json
import multiprocessing
import os
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from cases import attended, drawn, norms
from fake_machine import FakeMachine
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hilbert_lib import (
    DilatedPattern,
    Neighbourhood,
    Ordering,
    Union,
    dilated_attention,
    explain_backend,
    select_attention_backend,
)
from hilbert_lib.attention import choice, rules
from hilbert_lib.attention import measured_rules as remembered
from hilbert_lib.attention.backends import all_pairs, fused, presence
from hilbert_lib.attention.backends.dense import CpuFlash, Eager
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.measured_rules import ShapeClass, folder, remember, remembered_rules
from hilbert_lib.attention.request import GridPart, Request
from hilbert_lib.attention.rules import FULL_RULE, HALF_RULES, Rule
from hilbert_lib.internals import WITHOUT_INTERNALS
from hilbert_lib.lab.records import RESULTS, committed_records, committed_runs, read_records
from hilbert_lib.lab.selection import choice_table, shape_class
from hilbert_lib.lab.sweeps.grids import GRID_SWEEP
from hilbert_lib.lab.tables import of_sweep, ratio_table, side_table
from hilbert_lib.lab.workload import Workload
from hilbert_lib.machine import ARCHITECTURES, gpu_info
from hilbert_lib.patterns.all_pairs import AllPairs
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods

PATTERN = DilatedPattern((8, 32), (1, 4))
CPU = torch.device("cpu")
SHAPE = ShapeClass("cpu", "float32", 64, 2, 8, False, False, PATTERN)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A cache folder of its own."""
    monkeypatch.setenv(remembered.VARIABLE, str(tmp_path))
    remembered._rules_in.cache_clear()
    yield tmp_path
    remembered._rules_in.cache_clear()


def tensors(length=64, heads=2, head_dim=8):
    return [torch.randn(1, length, heads, head_dim) for _ in range(3)]


def test_every_architecture_has_a_rule():
    assert set(HALF_RULES) == {name for _, name in ARCHITECTURES}
    for rule in (*HALF_RULES.values(), FULL_RULE, rules.CPU_RULE):
        assert set(rule.order) <= set(BACKENDS)
        assert len(set(rule.order)) == len(rule.order)
        assert rule.record


PADDING = torch.zeros(1, 64, dtype=torch.bool)
REFUSED = [
    (torch.float32, {}, "sdpa"),
    (torch.float32, {"dropout_p": 0.1}, "triton"),
    (torch.float32, {"key_padding_mask": PADDING}, "triton"),
    (torch.float32, {"query_start": 3}, "triton"),
    (torch.float64, {"dropout_p": 0.1}, "eager"),
]


@pytest.mark.parametrize(("dtype", "options", "chosen"), REFUSED)
def test_what_sdpa_refuses_goes_to_the_fused_kernels_or_to_eager(monkeypatch, dtype, options, chosen):
    # On the CPU by a GPU's rules.
    monkeypatch.setattr(choice, "_known_rule", lambda device, dtype: FULL_RULE)
    monkeypatch.setattr(fused, "absence", lambda device: "")
    q, k, v = (x.to(dtype) for x in tensors())
    if "query_start" in options:
        q = q[:, 3:5]
    assert explain_backend(q, k, v, PATTERN, **options).chosen == chosen


def first_that_is_there(times):
    """The backend that the rule for Hopper takes of those that were timed."""
    return next(name for name in HALF_RULES["Hopper"].order if name in times)


@pytest.mark.evidence
def test_the_rules_for_hopper_lose_little_in_the_committed_kernels():
    sides = [record[side] for record in of_sweep(committed_records(), "backends") for side in "ab"]
    calls = pd.DataFrame([{"name": side["name"], "ms": side["call_ms"], **side["parameters"]} for side in sides])
    calls = calls[calls.name.isin(BACKENDS) & ~calls.pattern.str.endswith("groups")]
    for work, group in calls.groupby(["branches", "length", "heads", "head_dim", "is_causal"]):
        times = group.pivot_table(index="direction", columns="name", values="ms")
        for gradient, taken in ((False, times.loc["forward"]), (True, times.sum())):
            assert taken[first_that_is_there(taken)] <= 1.05 * taken.min(), (work, gradient)


@pytest.mark.parametrize("absent", [(), ("flash_attn_4",), ("flash_attn_4", "cudnn")], ids=str)
@pytest.mark.evidence
def test_the_rules_for_hopper_lose_little_in_the_committed_choices(absent):
    records = committed_records("05_backend_selection")
    calls, alone = choice_table(records), choice_table(records, on_device=True)
    # The device takes longer than the host in all calls of 262,144 tokens; what the record says of the host there
    # holds waits for room in the queue of launches.
    times = pd.concat([calls[calls.length < 2**18], alone[alone.length >= 2**18]])
    names = [name for name in BACKENDS if name in times and name not in absent]
    for row in times.itertuples():
        taken = {name: getattr(row, name) for name in names}
        assert taken[first_that_is_there(taken)] <= 1.05 * min(taken.values()), row


@pytest.mark.evidence
@pytest.mark.parametrize(("rule", "order"), [(rules.GRID_BY_ROW, "raster"), (rules.GRID_COMPACT, "hilbert")])
def test_the_rules_for_grids_are_the_order_of_speeds_in_every_committed_work(rule, order):
    names = {"boxes": "hopper", "rectangles": "triton", "blocks": "flex"}
    for run in committed_runs("08b_kernels_on_grids"):
        sides = side_table(read_records(run / RESULTS), GRID_SWEEP)
        sides = sides[(sides.order == order) & sides.kernel.isin(names) & ~sides.name.str.endswith("reordered")]
        works = list(sides.groupby(["direction", "side", "window", "head_dim"]))
        assert len(works) == 18
        for work, each in works:
            fastest_first = each.sort_values("tflop_per_s", ascending=False).kernel.map(names)
            timed = [name for name in rule.order if name in names.values()]
            assert list(fastest_first) == timed, (run, work)


def on_a_gpu(monkeypatch, capability: tuple[int, int], kib: int) -> None:
    """A GPU that is not here: questions about a device are answered as for it."""
    properties = SimpleNamespace(
        name="a GPU", total_memory=2**34, multi_processor_count=80, L2_cache_size=2**22,
        shared_memory_per_block_optin=kib * 1024,
    )  # fmt: skip
    info = gpu_info(capability, properties)
    for module in (choice, fused):
        monkeypatch.setattr(module, "get_gpu_info", lambda device: info)
    monkeypatch.setattr(fused, "kernel_mode", lambda: "compiled")
    monkeypatch.setattr(choice, "remembered_rules", lambda *_: ())


@pytest.mark.parametrize(("capability", "kind"), [((8, 0), "Ampere"), ((8, 9), "Ada"), ((12, 0), "Blackwell")])
def test_a_rule_says_that_it_was_measured_on_another_kind_of_gpu(monkeypatch, capability, kind):
    on_a_gpu(monkeypatch, capability, 99)
    device, near = torch.device("cuda", 0), Neighbourhood((64, 64), 3)
    asked = SimpleNamespace(device=device, dtype=torch.bfloat16, shape=(1, 4_096, 2, 64), element_size=lambda: 2)
    words = f"; not measured on this kind of GPU ({kind})"
    of_grids = choice._rule_for(asked, Request(near.of_heads(2)), gradient=False)
    assert (of_grids.order, of_grids.record) == (rules.GRID_BY_ROW.order, rules.GRID_BY_ROW.record + words)
    assert choice._known_rule(device, torch.float32).record == FULL_RULE.record + words
    assert choice._known_rule(device, torch.bfloat16).record == rules.NOT_MEASURED
    on_a_gpu(monkeypatch, (9, 0), 227)
    assert choice._rule_for(asked, Request(near.of_heads(2)), gradient=False) == rules.GRID_BY_ROW
    assert choice._known_rule(device, torch.float32) is FULL_RULE


@pytest.mark.parametrize(("capability", "kib", "refused"), [((8, 6), 99, False), ((7, 5), 64, True)])
def test_the_fused_kernels_serve_every_gpu_with_room_for_their_tiles(monkeypatch, capability, kib, refused):
    on_a_gpu(monkeypatch, capability, kib)
    reason = fused.absence(torch.device("cuda", 0))
    assert bool(reason) == refused
    assert not refused or "need 101376 bytes of shared memory, this GPU has 65536" in reason


def test_an_exported_program_asks_for_no_length(monkeypatch):
    remember(SHAPE, ("eager",), {})
    q, *_ = tensors()
    assert choice.choose(q, q, Request(PATTERN), "auto", gradient=False) == "eager"
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert choice.choose(q, q, Request(PATTERN), "auto", gradient=False) == "sdpa"


def test_auto_goes_by_a_remembered_measurement_and_says_so_in_one_graph_too():
    q, k, v = tensors()
    assert explain_backend(q, k, v, PATTERN).chosen == "sdpa"
    remember(SHAPE, ("eager", "sdpa"), {"eager": 1.0, "sdpa": 2.0})
    explanation = explain_backend(q, k, v, PATTERN)
    assert explanation.chosen == "eager"
    assert explanation.is_measured
    assert "measured on this machine" in str(explanation)
    by_auto = partial(dilated_attention, pattern=PATTERN)
    compiled = torch.compile(by_auto, fullgraph=True, backend="aot_eager")
    for attend in (by_auto, compiled):
        assert torch.equal(attend(q, k, v), dilated_attention(q, k, v, PATTERN, backend="eager"))


def test_a_nan_that_spreads_is_told_of_the_backends_that_let_it():
    reasons = explain_backend(*tensors(), PATTERN).reasons
    told = {name for name, reason in reasons.items() if "a NaN in a masked key reaches other rows" in reason}
    assert told == {"sdpa", "eager"}
    assert reasons["sdpa"].startswith("chosen: torch's fused kernel over strided views; a NaN")
    assert reasons["eager"].startswith("can serve, after 'sdpa'; a NaN")


OTHERS = [{"length": 65}, {"length": 32}, {"heads": 3}, {"head_dim": 16}, {"dtype": "float64"}, {"is_causal": True}]
OTHERS += [{"gradient": True}, {"pattern": DilatedPattern((8, 32), (1, 2))}, {"device": "cuda"}]
OTHERS += [{"pattern": DilatedPattern((8, 32), (1, 4), padding="zeros")}]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_measurement_speaks_for_its_own_class_alone(other):
    remember(SHAPE._replace(**other), ("eager",), {})
    assert explain_backend(*tensors(), PATTERN).chosen == "sdpa"


def test_a_measurement_speaks_for_sizes_up_to_the_next_power_of_two():
    remember(SHAPE, ("eager",), {})
    assert explain_backend(*tensors(length=33), PATTERN).chosen == "eager"
    assert explain_backend(*[x.expand(2, -1, -1, -1) for x in tensors(heads=1)], PATTERN).chosen == "eager"


BROKEN = {
    "half a file": lambda text: text[: len(text) // 2],
    "another thing": lambda text: "[1, 2]",
    "no digest": lambda text: "{}",
    "another machine": lambda text: text.replace('"hardware": "', '"hardware": "no '),
    "no end of brackets": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_corrupt_or_foreign_file_is_ignored_with_a_warning_that_names_it(damage):
    path = remember(SHAPE, ("eager",), {})
    text = path.read_text()
    assert BROKEN[damage](text) != text
    path.write_text(BROKEN[damage](text))
    with pytest.warns(UserWarning, match=f"{path.name} is ignored"):
        assert explain_backend(*tensors(), PATTERN).chosen == "sdpa"
    remember(SHAPE, ("eager",), {})  # and is replaced by the next measurement
    assert explain_backend(*tensors(), PATTERN).chosen == "eager"


@pytest.mark.parametrize("changed", ["hardware", "torch", "triton", "cudnn", "driver", "code_hash", "packages"])
def test_a_measurement_of_another_machine_or_software_is_forgotten(monkeypatch, changed):
    remember(SHAPE, ("eager",), {})
    assert len(remembered_rules(CPU, torch.float32)) == 1
    other = {**remembered.machine_facts(), changed: {"flash-attn-4": "9.9"} if changed == "packages" else "9.9"}
    monkeypatch.setattr(remembered, "machine_facts", lambda: other)
    remembered._rules_in.cache_clear()
    assert remembered_rules(CPU, torch.float32) == ()


def test_a_measurement_is_forgotten_where_a_package_has_come(monkeypatch):
    q, k, v = tensors()
    monkeypatch.setattr(presence, "absence", lambda package: "absent: not there")
    remember(SHAPE, ("eager",), {})
    assert explain_backend(q, k, v, PATTERN).is_measured
    remembered._rules_in.cache_clear()
    monkeypatch.setattr(presence, "absence", lambda package: "" if package == "xformers" else "absent: not there")
    monkeypatch.setattr(presence, "state", lambda package: f"{package} 1.0")
    assert not explain_backend(q, k, v, PATTERN).is_measured


OLD = {  # of a file: whether it is kept
    "another machine's": ({"machine": {"hardware": "another"}}, True),
    "of today": ({"version": 2}, True),
    "without triton": ({"order": ["sdpa", "eager"]}, True),
    "of a grid": ({"shape": {"pattern": Neighbourhood((8, 8), 3).of_any_heads().specification}}, True),
    "of a sequence": ({}, False),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", OLD)
def test_an_order_of_when_triton_was_two_backends_is_discarded_with_a_word(kind):
    changed, is_kept = OLD[kind]
    path = remember(SHAPE, ("triton", "eager"), {})
    held = json.loads(path.read_text())
    del held["version"]
    old = path.rename(path.with_name("0123456789ab-0123456789ab.json"))  # of other code
    old.write_text(json.dumps(held | changed))
    if is_kept:
        assert remembered_rules(CPU, torch.float32) == ()
    else:
        with pytest.warns(UserWarning, match=f"{old.name} is discarded: .*'hopper' now; measure again"):
            assert remembered_rules(CPU, torch.float32) == ()
    assert old.exists() == is_kept
    remembered._rules_in.cache_clear()
    assert remembered_rules(CPU, torch.float32) == ()  # and no word about it again


def _write(number: int) -> None:
    for length in (2**number, 2**20):  # one class of its own, one that all write
        remember(SHAPE._replace(length=length), ("eager",), {"eager": float(number)})


def test_what_processes_write_at_once_is_seen_at_once_and_nothing_is_lost(place):
    assert remembered_rules(CPU, torch.float32) == ()
    time.sleep(0.01)  # a clock tick of the file system
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_write, range(6, 14))
    assert len(list(place.iterdir())) == 9
    assert [rule.order for _, rule in remembered_rules(CPU, torch.float32)] == [("eager",)] * 9


@pytest.mark.filterwarnings("error")
def test_a_folder_of_any_name_is_read_but_for_files_of_other_machines(monkeypatch, tmp_path):
    monkeypatch.setenv(remembered.VARIABLE, str(tmp_path / "runs[1]" / "a?b*"))
    path = remember(SHAPE, ("eager",), {})
    path.with_name("0123456789ab-0123456789ab.json").write_text("{")
    assert len(remembered_rules(CPU, torch.float32)) == 1


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    assert folder() == tmp_path
    monkeypatch.delenv(remembered.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(folder()) == "/somewhere/hilbert_lib"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/someone")
    assert str(folder()) == "/someone/.cache/hilbert_lib"


@pytest.mark.skipif(WITHOUT_INTERNALS, reason="torch's kernel for the CPU, which is timed, has a private name")
def test_benchmark_backends_measures_once_and_remembers(place, monkeypatch):
    machine = FakeMachine(monkeypatch)
    for backend, milliseconds in ((CpuFlash, 5), (Eager, 1)):  # the rules take the other one

        def run(*inputs, forward=backend.forward, milliseconds=milliseconds):
            machine.now_ns += milliseconds * 1_000_000
            return forward(*inputs)

        monkeypatch.setattr(backend, "forward", staticmethod(run))
    q, k, v = tensors()
    assert select_attention_backend(q, k, v, PATTERN) == "sdpa"
    assert not list(place.iterdir())
    first = select_attention_backend(q, k, v, PATTERN, benchmark_backends=True)
    (path,) = place.iterdir()
    written = path.stat().st_mtime_ns
    held = json.loads(path.read_text())
    assert first == held["order"][0] == "eager"
    assert held["times_ms"].keys() == {"sdpa", "eager"}
    assert held["times_ms"]["eager"] < held["times_ms"]["sdpa"]
    assert select_attention_backend(q, k, v, PATTERN, benchmark_backends=True) == first
    assert path.stat().st_mtime_ns == written
    q.requires_grad_()
    select_attention_backend(q, k, v, PATTERN, benchmark_backends=True)
    assert len(list(place.iterdir())) == 2


@pytest.mark.parametrize("reason", ["File exists", "No space left on device"])
def test_a_measurement_that_cannot_be_kept_holds_for_its_call(reason, place, monkeypatch):
    q, k, v = tensors()
    times = {"cudnn": 0.1, "eager": 0.5, "sdpa": 1.0}  # the fastest may refuse what sets the call apart from its class
    monkeypatch.setattr("hilbert_lib.lab.selection.measured_times", lambda *_, **__: (times, times))
    if reason == "File exists":
        place = place / "file"
        place.touch()
        monkeypatch.setenv(remembered.VARIABLE, str(place))
    else:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(remembered, "write_whole", Mock(side_effect=full))
    with pytest.warns(UserWarning, match=f"measured, but not kept: {place}: {reason}"):
        assert select_attention_backend(q, k, v, PATTERN, benchmark_backends=True) == "eager"
    assert select_attention_backend(q, k, v, PATTERN) == "sdpa"


KEPT = {"benchmark_backends": True}  # what a measurement cannot be kept for
UNSERVED = [
    ({"backend": "cudnn"}, "backend='cudnn' cannot serve: needs a CUDA device"),
    ({"dropout_p": 0.5, **KEPT}, "benchmark_backends must be False where dropout_p is given"),
    ({"key_padding_mask": PADDING, **KEPT}, "where key_padding_mask is given"),
    ({"query_start": 2, **KEPT}, "where query_start is given"),
    ({"key_start": torch.zeros(1, dtype=torch.int64), **KEPT}, "where key_start is given"),
    ({"backend": "eager", **KEPT}, "where backend is given"),
    ({"benchmark_backends": 1}, "benchmark_backends must be True or False, got"),
]


@pytest.mark.parametrize(("options", "words"), UNSERVED)
def test_select_attention_backend_refuses_by_name(options, words):
    q, k, v = tensors()
    with pytest.raises((TypeError, ValueError), match=words):
        select_attention_backend(q[:, options.get("query_start", 0) :], k, v, PATTERN, **options)


@pytest.mark.parametrize("order", [(), ("sdpa",), ("eager", "fast")])
def test_an_order_that_could_not_be_read_again_is_not_kept(order, place):
    with pytest.raises(ValueError, match="order must"):
        remember(SHAPE, order, {})
    assert not list(place.iterdir())


@pytest.mark.parametrize("package", ["", "flash_attn", None])
def test_an_unknown_package_is_refused(package):
    for ask in (presence.absence, presence.breakage):
        with pytest.raises(ValueError, match="package must be one of flash_attn_2, "):
            ask(package)


@pytest.mark.evidence
def test_a_curve_in_every_segment_reads_hardly_faster():
    chunks = ratio_table(committed_records("06b_orders_and_counters"), "layouts").query("b == 'hilbert per segment'")
    assert len(chunks) >= 20
    assert chunks.ratio.max() < 1.05


def test_a_measurement_under_autocast_is_of_the_dtype_that_will_run(place):
    q, k, v = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        select_attention_backend(q, k, v, PATTERN, benchmark_backends=True)
        assert explain_backend(q, k, v, PATTERN).is_measured
    assert not explain_backend(q, k, v, PATTERN).is_measured
    (path,) = place.iterdir()
    assert json.loads(path.read_text())["shape"]["dtype"] == "bfloat16"


def test_each_gpu_of_a_machine_goes_by_what_was_measured_on_its_own_model(monkeypatch):
    models = {"cuda:0": ("NVIDIA A100", "Ampere"), **dict.fromkeys(("cuda:1", "cuda:2"), ("NVIDIA H200", "Hopper"))}

    infos = {at: SimpleNamespace(name=name, architecture=kind) for at, (name, kind) in models.items()}
    for module in (choice, remembered):
        monkeypatch.setattr(module, "get_gpu_info", lambda device: infos[str(device)])
    work = Workload(PATTERN, 64, 2, 8, torch.device("cuda:1"))
    remember(shape_class(work, gradient=False), ("eager",), {})
    given = {"dtype": torch.bfloat16, "shape": (1, 64, 2, 8)}
    tensors = (SimpleNamespace(device=torch.device(name), **given) for name in models)
    orders = [choice.rule_for(q, Request(PATTERN), gradient=False).order for q in tensors]
    assert orders == [HALF_RULES["Ampere"].order, ("eager",), ("eager",)]


def test_extra_queries_go_to_dense_kernels_first(monkeypatch):
    q = SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.bfloat16, shape=(1, 64, 2, 8))
    for architecture, rule in HALF_RULES.items():
        info = SimpleNamespace(architecture=architecture)
        monkeypatch.setattr(choice, "get_gpu_info", lambda device, info=info: info)
        order = choice.rule_for(q, Request(AllPairs()), gradient=False).order
        fused = [name for name in rule.order if name in ("hopper", "triton")]
        dense = [name for name in rule.order if name not in (*fused, "eager")]
        assert order == (*dense, *fused, "eager")


def test_few_extra_queries_over_many_keys_go_to_a_kernel_that_splits_the_keys(monkeypatch):
    k = SimpleNamespace(shape=(1, 65_536, 8, 64))

    def first(rows, gradient, heads=8, dtype=torch.bfloat16):
        q = SimpleNamespace(device=torch.device("cuda:0"), dtype=dtype, shape=(1, rows, heads, 64))
        return choice.rule_for(q, Request(AllPairs()), gradient=gradient, k=k).order[0]

    for architecture, rule in HALF_RULES.items():
        info = SimpleNamespace(architecture=architecture)
        monkeypatch.setattr(choice, "get_gpu_info", lambda device, info=info: info)
        flash, other = ("flash", "cudnn") if "flash" in rule.order else ("sdpa", "sdpa")
        other = "flash_attn_4" if rule.order[0] == "flash_attn_4" else other
        assert [first(rows, True) for rows in (77, 256, 257)] == [flash, flash, other]
        assert [first(rows, False) for rows in (257, 768, 769)] == [flash, flash, other]
        assert first(1, False, heads=49) == other
        record = choice.rule_for(
            SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.bfloat16, shape=(1, 77, 8, 64)),
            Request(AllPairs()), gradient=True, k=k,
        ).record  # fmt: skip
        assert ("not measured" in record) == (architecture != "Hopper")
        assert first(77, True, dtype=torch.float32) == "sdpa"


def test_extra_queries_over_few_keys_go_to_one_launch_first(monkeypatch):
    monkeypatch.setattr(all_pairs, "MOST_ON_A_LINE", 100)

    def order(rows, dtype=torch.bfloat16, **given):
        q = SimpleNamespace(device=torch.device("cuda:0"), dtype=dtype, shape=(1, rows, 2, 8))
        return choice.rule_for(q, Request(AllPairs()), gradient=False, **given).order

    keys = {rows: SimpleNamespace(shape=(1, rows, 2, 8)) for rows in (63, 64, 100, 101)}
    for architecture, rule in HALF_RULES.items():
        info = SimpleNamespace(architecture=architecture)
        monkeypatch.setattr(choice, "get_gpu_info", lambda device, info=info: info)
        usual, behind = order(64, k=keys[101]), order(64)
        first = tuple(name for name in ("triton",) if name in rule.order)
        for rows in (64, 100):
            assert order(64, k=keys[rows]) == (*first, *(name for name in behind if name != "triton"))
            assert order(64, torch.float32, k=keys[rows]) == order(64, torch.float32)
        assert order(64, k=keys[63]) == usual
        for bound, most in (("MOST_PAIRS", 2 * 64 * 64 - 1), ("MOST_SEQUENCES", 1)):
            with monkeypatch.context() as patch:
                patch.setattr(all_pairs, bound, most)
                assert order(64, k=keys[64]) == usual
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            assert order(64, k=keys[64]) == usual


@pytest.mark.parametrize(
    ("dtype", "backend", "words"),
    [
        (torch.bfloat16, "auto", ""),
        (torch.float32, "auto", "'hopper' cannot serve: serves float16 and bfloat16, got float32"),
        (torch.bfloat16, "triton", "'hopper' not asked for: 'triton' was"),
    ],
)
def test_a_call_off_the_fast_path_says_why(monkeypatch, dtype, backend, words):
    # On what a refusal asks of a tensor, by the rules of a Hopper GPU.
    q = SimpleNamespace(
        device=SimpleNamespace(type="cuda"), is_cuda=True, dtype=dtype, shape=(1, 64, 2, 8),
        element_size=lambda: dtype.itemsize, requires_grad=False,
    )  # fmt: skip
    monkeypatch.setattr("hilbert_lib.attention.backends.backend.capability", lambda device: (9, 0))
    monkeypatch.setattr(fused, "kernel_mode", lambda: "compiled")
    monkeypatch.setattr(fused, "absence", lambda device: "")
    monkeypatch.setattr(choice, "rule_for", lambda *_, **__: HALF_RULES["Hopper"])
    monkeypatch.setattr(choice, "failure", lambda *_: "")
    monkeypatch.setattr(presence, "absence", lambda package: "absent")
    found = choice.explain(q, q, Request(PATTERN), backend, gradient=False)
    assert found.chosen == ("triton" if words else "hopper")
    assert found.off_fast_path == words
    assert ("off the fast path" in str(found)) == bool(words)


def test_branches_of_plain_kernels_are_off_the_fast_path_and_a_cpu_has_none():
    q = torch.ones(1, 8, 2, 4)
    assert explain_backend(q, q, q, DilatedPattern((4,), (1,)), dropout_p=0.1).off_fast_path == ""
    q = SimpleNamespace(device=SimpleNamespace(type="cuda"), shape=(1, 33, 2, 8))
    backends = {"hopper": SimpleNamespace(here=lambda q, call: "")}
    pattern = DilatedPattern((8, 64), (1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "backends_for", lambda pattern: backends)
        words = choice._off_fast_path("hopper", q, q, Request(pattern), {"hopper": "chosen"})
        wide = SimpleNamespace(device=q.device, shape=(1, 33, 2, 136))
        of_wide = choice._off_fast_path("hopper", wide, wide, Request(pattern), {"hopper": "chosen"})
        reached = DilatedPattern((8, 32), (1, 2))
        masked = Request(reached, key_padding_mask=torch.zeros(1, 33, dtype=torch.bool))
        of_reached, of_masked = (
            choice._off_fast_path("hopper", wide, wide, call, {"hopper": "chosen"})
            for call in (Request(reached), masked)
        )
        ends = torch.tensor([0, 33], dtype=torch.int32)
        of_packed, of_wide_packed = (
            choice._off_fast_path("hopper", x, x, Request(pattern, cu_seqlens=ends), {"hopper": "chosen"})
            for x in (q, wide)
        )
    assert words == "plain kernels compute the branches 64:2"
    assert of_wide == f"{words} and dq at a head_dim above 128"
    assert (of_reached, of_masked) == ("", "plain kernels compute dq at a head_dim above 128")
    assert of_packed == words
    assert of_wide_packed == f"{words} and the backward of packed documents at a head_dim above 128"


@pytest.mark.parametrize(("head_dim", "gradient"), [(128, True), (136, False), (136, True)])
def test_boxes_go_first_at_every_head_dim(monkeypatch, head_dim, gradient):
    q = SimpleNamespace(
        device=SimpleNamespace(type="cuda"), shape=(1, 33, 2, head_dim), dtype=torch.bfloat16, element_size=lambda: 2
    )  # fmt: skip
    monkeypatch.setattr(choice, "remembered_rules", lambda *_: ())
    monkeypatch.setattr(choice, "_architecture", lambda device: "Hopper")
    call = Request(Neighbourhood((1_033,), 3).of_heads(2))
    assert choice.rule_for(q, call, gradient=gradient).order[:2] == ("hopper", "lists")
    monkeypatch.setattr(choice, "backends_for", lambda pattern: {"hopper": SimpleNamespace(here=lambda q, call: "")})
    assert choice._off_fast_path("hopper", q, q, call, {"hopper": "chosen"}) == ""


SMALL = Neighbourhood((16, 16), 7)
PART = GridPart((range(16),) * 2, (range(4), range(16)), (range(16),) * 2)


@pytest.mark.parametrize(
    ("call", "batch", "dtype", "first"),
    [
        (Request(SMALL.of_heads(2)), 1, torch.bfloat16, "lists"),
        (Request(Union((SMALL, Neighbourhood((16, 16), 3))).of_heads(2)), 1, torch.bfloat16, "lists"),
        (Request(SMALL.of_heads(2)), 64, torch.bfloat16, "hopper"),
        (Request(Neighbourhood((32, 33), 3).of_heads(2)), 1, torch.bfloat16, "hopper"),
        (Request(SMALL.of_heads(2)), 1, torch.float32, "lists"),
        (Request(SMALL.of_heads(2), has_bias=True), 1, torch.bfloat16, "hopper"),
        (Request(SMALL.of_heads(2), part=PART), 1, torch.bfloat16, "hopper"),
        (Request(HeadNeighbourhoods((SMALL, replace(SMALL, window=3)))), 1, torch.bfloat16, "hopper"),
    ],
)
def test_a_short_call_on_a_grid_goes_to_the_kernels_with_one_launch(monkeypatch, call, batch, dtype, first):
    device = SimpleNamespace(type="cuda")
    q = SimpleNamespace(device=device, shape=(batch, 256, 2, 64), dtype=dtype, element_size=lambda: dtype.itemsize)
    monkeypatch.setattr(choice, "remembered_rules", lambda *_: ())
    monkeypatch.setattr(choice, "_architecture", lambda device: "Hopper")
    rule = choice.rule_for(q, call, gradient=True)
    assert rule.order[0] == first
    assert (rule.record == rules.HOST_RECORD) == (first == "lists" and dtype == torch.bfloat16)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choice.rule_for(q, call, gradient=True).order[0] == ("lists" if dtype == torch.float32 else "hopper")


TWO = DilatedPattern((64, 256), (1, 2))


@pytest.mark.parametrize(
    ("call", "rows", "batch", "dtype", "first"),
    [
        (Request(TWO), 256, 1, torch.bfloat16, "triton"),
        (Request(TWO, is_causal=True), 256, 1, torch.float16, "triton"),
        (Request(DilatedPattern((4096,), (1,))), 256, 1, torch.bfloat16, "triton"),
        (Request(Union((TWO, DilatedPattern((32,), (4,))))), 256, 1, torch.bfloat16, "hopper"),  # its parts are short
        (Request(TWO), 256, 32, torch.bfloat16, "triton"),  # 512 tiles
        (Request(TWO), 256, 33, torch.bfloat16, "hopper"),
        (Request(TWO), 1025, 1, torch.bfloat16, "hopper"),
        (Request(DilatedPattern((1024,), (1,))), 1024, 1, torch.bfloat16, "triton"),
        (Request(DilatedPattern((1024,), (1,))), 1024, 3, torch.bfloat16, "hopper"),  # 6 * 2^20 pairs
        (Request(TWO), 256, 1, torch.float32, "sdpa"),
        (Request(TWO, query_start=100), 1, 1, torch.bfloat16, "hopper"),
        (Request(TWO, cu_seqlens=torch.tensor([0, 256])), 256, 1, torch.bfloat16, "hopper"),  # which reads documents
    ],
)
def test_a_short_sequence_goes_to_the_kernels_with_one_launch(monkeypatch, call, rows, batch, dtype, first):
    device = SimpleNamespace(type="cuda")
    q = SimpleNamespace(device=device, shape=(batch, rows, 2, 64), dtype=dtype, element_size=lambda: dtype.itemsize)
    monkeypatch.setattr(choice, "remembered_rules", lambda *_: ())
    known = rules.HALF_RULES["Hopper"] if dtype.itemsize == 2 else rules.FULL_RULE
    monkeypatch.setattr(choice, "_known_rule", lambda *_: known)
    rule = choice.rule_for(q, call, gradient=True)
    assert rule.order[0] == first
    assert (rule.record == rules.HOST_RECORD) == (first == "triton")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choice.rule_for(q, call, gradient=True).order[0] == ("hopper" if first == "triton" else first)


@pytest.mark.parametrize("call", [Request(TWO), Request(SMALL.of_heads(4))], ids=["sequence", "grid"])
def test_the_choice_does_not_hang_on_sizes_that_are_symbols(monkeypatch, call):
    """As `make_fx` traces with symbols, outside of torch.compile."""
    shapes = ShapeEnv()
    x = FakeTensorMode(shape_env=shapes).from_tensor(torch.empty(2, 256, 4, 64, device="meta"))
    assert any(isinstance(size, torch.SymInt) for size in x.shape)
    q = SimpleNamespace(
        device=SimpleNamespace(type="cuda"), shape=x.shape, dtype=torch.bfloat16, element_size=lambda: 2
    )
    monkeypatch.setattr(choice, "remembered_rules", lambda *_: ())
    monkeypatch.setattr(choice, "_known_rule", lambda *_: rules.HALF_RULES["Hopper"])
    monkeypatch.setattr(choice, "_architecture", lambda device: "Hopper")
    assert choice.rule_for(q, call, gradient=True).order[0] == "hopper"
    assert shapes.guards == []


SQUARE = Neighbourhood((64, 64), 9)
WIDE_SQUARE, FAR_SQUARE = replace(SQUARE, window=17), replace(SQUARE, dilation=4)
OBLONG = replace(SQUARE, window=(17, 5))
CUBE = Neighbourhood((16, 16, 16), 3)


@pytest.mark.parametrize(
    ("parts", "head_dim", "gradient", "first"),
    [
        ((SQUARE, WIDE_SQUARE), 64, False, "lists"),
        ((SQUARE, WIDE_SQUARE), 64, True, "lists"),
        ((SQUARE, WIDE_SQUARE), 72, True, "hopper"),  # 1.12 times as many boxes as tiles of lists
        ((SQUARE, replace(SQUARE, window=5)), 128, False, "lists"),
        ((SQUARE, replace(SQUARE, window=5)), 136, True, "hopper"),
        ((SQUARE, OBLONG), 128, False, "hopper"),
        ((SQUARE, OBLONG), 128, True, "lists"),  # 1.28 times
        ((CUBE, replace(CUBE, window=7)), 128, False, "lists"),  # 2.49 times
        ((SQUARE, replace(SQUARE, window=19)), 64, True, "hopper"),
        ((SQUARE, FAR_SQUARE), 64, True, "hopper"),
        ((HeadNeighbourhoods((SQUARE, WIDE_SQUARE)), SQUARE), 64, True, "hopper"),
        ((WIDE_SQUARE,), 64, True, "hopper"),
        ((Union((SQUARE,)),), 64, True, "hopper"),
    ],
)
def test_a_union_of_narrow_windows_goes_to_the_kernels_with_one_pass(monkeypatch, parts, head_dim, gradient, first):
    device = SimpleNamespace(type="cuda")
    q = SimpleNamespace(device=device, shape=(1, 4096, 2, head_dim), dtype=torch.bfloat16, element_size=lambda: 2)
    monkeypatch.setattr(choice, "remembered_rules", lambda *_: ())
    monkeypatch.setattr(choice, "_architecture", lambda device: "Hopper")
    call = Request((Union(parts) if len(parts) > 1 else parts[0]).of_heads(2))
    rule = choice.rule_for(q, call, gradient=gradient)
    assert rule.order[0] == first
    assert (rule.record == rules.UNION_RECORD) == (first == "lists")


@pytest.mark.parametrize(
    ("near", "head_dim", "first"),
    [
        (Neighbourhood((257, 257), 33, dilation=2), 128, "hopper"),
        (Neighbourhood((257, 257), 7, dilation=2), 64, "hopper"),  # 1.69 products for a tile of lists
        (Neighbourhood((128, 128), 7, dilation=8), 64, "lists"),  # 2.00
        (Neighbourhood((129, 129), 7, dilation=8), 72, "hopper"),  # 2.24
        (Neighbourhood((33, 33, 33), 5, dilation=2), 128, "lists"),  # 2.47
        (Neighbourhood((33, 33, 33), 5, dilation=2), 136, "hopper"),
        (Neighbourhood((33, 33, 33), 5), 64, "hopper"),
        (Neighbourhood((256, 256), 3, dilation=2), 64, "hopper"),  # 3.00, of residues of 128 x 128
        (Neighbourhood((1, 30, 32), (1, 9, 9), dilation=(2, 1, 1)), 64, "hopper"),  # a dilation of one cell is none
        (Neighbourhood((2**20,), 9, dilation=2**17), 64, "hopper"),
        (Neighbourhood((33, 33, 33), 5, dilation=2, stride=2), 64, "hopper"),
        (Neighbourhood((24, 44, 80), (24, 4, 16), dilation=(1, 11, 5)), 64, "hopper"),  # 2.00, of 1,536 cells
    ],
    ids=str,
)
def test_dilated_windows_on_small_residues_go_to_lists(monkeypatch, near, head_dim, first):
    device, heads = SimpleNamespace(type="cuda"), 64  # so that no call is short
    q = SimpleNamespace(
        device=device, shape=(1, near.length, heads, head_dim), dtype=torch.bfloat16, element_size=lambda: 2
    )
    monkeypatch.setattr(choice, "remembered_rules", lambda *_: ())
    monkeypatch.setattr(choice, "_architecture", lambda device: "Hopper")
    rule = choice.rule_for(q, Request(near.of_heads(2)), gradient=True)
    assert rule.order[0] == first
    assert (rule.record == rules.RESIDUES_RECORD) == (first == "lists")


def test_a_short_call_on_a_grid_is_not_off_the_fast_path(monkeypatch):
    q = torch.ones(1, 256, 2, 64)
    monkeypatch.setattr(choice, "rule_for", lambda *_, **__: Rule(("lists", "hopper"), rules.HOST_RECORD))
    monkeypatch.setattr(choice, "choose", lambda *_, **__: "lists")
    monkeypatch.setattr(choice, "_off_fast_path", lambda *_: "of boxes")
    call = Request(SMALL.of_heads(2))
    told = [choice.explain(q, q, call, name, gradient=False).off_fast_path for name in ("auto", "lists")]
    assert told == ["", "of boxes"]
    monkeypatch.setattr(choice, "choose", lambda *_, **__: "triton")  # what stands first cannot serve
    assert choice.explain(q, q, call, "auto", gradient=False).off_fast_path == "of boxes"


def test_auto_that_finds_no_backend_says_why_of_each(monkeypatch):
    monkeypatch.setattr("hilbert_lib.attention.choice.choose", lambda *_, **__: "")
    q = torch.ones(1, 8, 2, 4)
    with pytest.raises(ValueError, match=r"backend='auto' .*triton .*cudnn .*needs a CUDA device"):
        dilated_attention(q, q, q, DilatedPattern((4,), (1,)))


def test_keys_are_put_in_sequence_order_where_a_copy_costs_less_than_a_table():
    gpu, many = torch.device("cuda"), choice.UNDONE_FROM
    long, sparse = Request(DilatedPattern((1024, 4096), (1, 4))), Request(DilatedPattern((2048, 16384), (2, 8)))
    assert choice.is_undone("auto", "triton", gpu, long, many)
    assert choice.is_undone("auto", "sdpa", CPU, sparse, 1)  # which reads through no table
    for asked, device, call, rows in (
        ("triton", gpu, long, many),  # asked for by name, as those do who measure it
        ("auto", gpu, long, many - 1),
        ("auto", gpu, sparse, many),
        ("auto", gpu, replace(long, query_start=10), many),  # decoding: a few queries read few rows
        ("auto", CPU, long, many),
    ):
        assert not choice.is_undone(asked, "triton", device, call, rows)


def test_an_explanation_says_that_keys_are_copied_in_sequence_order(monkeypatch):
    q = torch.ones(1, 8, 2, 4)
    told, explain = "k and v are copied in sequence order first", partial(explain_backend, q, q, q, PATTERN)
    ordered = partial(explain, kv_ordering=Ordering.random(8, seed=1))
    assert ordered().reasons["sdpa"].endswith(told), "it reads through no table"
    assert str(ordered()).count(told) == 1
    assert told not in str(ordered(backend="triton")), "the kernels read through a table"
    assert told not in str(explain())
    monkeypatch.setattr(choice, "is_undone", lambda *asked: asked[:2] == ("triton", "triton") and asked[4] == 8)
    assert told in str(ordered(backend="triton")), "as the call asks"


@pytest.mark.gpu
def test_undone_orderings_change_nothing():
    length = choice.UNDONE_FROM
    q, k, v, dout = drawn(length, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    order = Ordering.from_curve("hilbert", length)
    stored = order.apply(k, dim=1), order.apply(v, dim=1)
    pattern = DilatedPattern((1024, 4096), (1, 4))
    out, lse, *grads = attended((q, k, v, dout), pattern, "auto")
    *same, dq, dk, dv = attended((q, *stored, dout), pattern, "auto", kv_ordering=order)
    assert all(map(torch.equal, same, (out, lse)))
    assert "copied in sequence order" in str(explain_backend(q, *stored, pattern, kv_ordering=order))
    # dq is summed in an order that varies.
    assert max(norms((dq, order.undo(dk, dim=1), order.undo(dv, dim=1)), [x.double() for x in grads])) < 1e-3
