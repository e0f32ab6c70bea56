"""The sweep of notebook 06c: a wrong or missing way gets no time, and shares are those of the times."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch

from hilbert_lib import DilatedPattern, Neighbourhood
from hilbert_lib.adapters import natten
from hilbert_lib.lab.calls import Call, Inputs, Way
from hilbert_lib.lab.figures.options import share_bars
from hilbert_lib.lab.ledger.answer import judged
from hilbert_lib.lab.ledger.claims import LEDGER, WAITING
from hilbert_lib.lab.records import committed_runs
from hilbert_lib.lab.sweeps import options as sweep
from hilbert_lib.lab.sweeps import video
from hilbert_lib.lab.workload import BOTH

CPU = torch.device("cpu")
GRID = Call(Neighbourhood((6, 5), 3), 30, 2, 8, CPU, dtype="float32")
LINE = Call(DilatedPattern((8, 16), (1, 2)), 32, 2, 8, CPU, dtype="float32")
ON_GRIDS = {
    "base": {},
    "padded": {"padded": 5},
    "extra": {"extra_keys": 2},
    "joint": {"extra_keys": 2, "extra_queries": 3},
    "bias": {"has_bias": True},
    "hilbert": {"order": "hilbert"},
    "all": {"order": "hilbert", "padded": 5, "extra_keys": 2, "extra_queries": 3, "has_bias": True},
    "stride": {"pattern": Neighbourhood((6, 5), 4, stride=2)},
    "dilation": {"pattern": Neighbourhood((6, 5), 2, dilation=2)},
}
ON_LINES = {
    "base": {},
    "padded": {"padded": 4},
    "dropout": {"dropout_p": 0.3},
    "causal": {"is_causal": True},
    "left padded": {"batch": 2, "left_padded": 6},
    "causal, left padded": {"is_causal": True, "left_padded": 6},
    "batch": {"batch": 3},
    "decoding": {"queries": 1},
    "documents": {"documents": 4},
}
CALLS = {f"grid {name}": replace(GRID, **changes) for name, changes in ON_GRIDS.items()}
CALLS |= {f"line {name}": replace(LINE, **changes) for name, changes in ON_LINES.items()}


class LyingBackward(torch.autograd.Function):
    """Its input; gradients are 1 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.01 * gradient


@pytest.mark.parametrize("name", CALLS)
def test_ours_is_exact_on_every_option(name):
    call = CALLS[name]
    assert call.error(call.by(), gradient=not call.queries) < 1e-5


@pytest.mark.parametrize("name", Inputs._fields)
def test_a_wrong_gradient_of_any_input_is_seen(name):
    call = CALLS["grid all"]
    way = call.by()

    def lie(x):
        return way.attend(x._replace(**{name: LyingBackward.apply(getattr(x, name))}))

    lying = Way("lying", lie, way.ordering)
    assert call.error(lying, gradient=False) < 1e-5
    assert call.error(lying, gradient=True) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    "name", ["grid padded", "grid joint", "line padded", "line left padded", "line causal", "line dropout"]
)
def test_a_wrong_output_is_seen(name):
    call = CALLS[name]
    changed = replace(call, padded=0, left_padded=0, extra_queries=0, extra_keys=0, is_causal=False, dropout_p=0.0)

    def without_option(x):
        out = changed.by().attend(Inputs(x.q, x.k, x.v))
        return (*out, x.extra_q) if x.extra_q is not None else out

    assert call.error(Way("without the option", without_option), gradient=False) > 0.05


@pytest.mark.parametrize("name", CALLS)
def test_pairs_are_those_that_have_a_weight(name):
    """Counted by the gradient of v: with uniform weights each pair of a row adds 1 / pairs of the row."""
    call = CALLS[name]
    keys = torch.arange(call.length - call.left_padded)
    documents = keys // (call.length // max(1, call.documents))
    total = 0
    for head in range(call.heads):
        for part in call.pattern.head_parts(head, call.heads):
            place = keys if not call.documents else keys % (call.length // call.documents)
            seen = call.pattern.mask(part, place, place, kv_head=head, kv_heads=call.heads, is_causal=call.is_causal)
            seen = seen & (documents[:, None] == documents) & (keys < call.length - call.padded)
            total += int(seen[-call.queries :].sum())
        total += call.length * call.extra_keys
        total += call.extra_queries * (call.length - call.padded + call.extra_keys)
    assert call.pairs == call.batch * total
    assert call.flop(BOTH) == 14 * call.head_dim * call.pairs


def test_records_tell_options_apart_and_nothing_else():
    told = [call.parameters for call in CALLS.values()]
    assert all(told.count(one) == 1 for one in told)
    assert "padded" not in GRID.parameters
    assert CALLS["grid stride"].parameters["stride"] == [2, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padded": 3}, "padded must be whole rows of 5 cells, got 3"),
    ],
)
def test_what_cannot_be_counted_is_refused_on_grids(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(GRID, **changes)


def test_what_cannot_be_counted_is_refused_along_sequences():
    with pytest.raises(ValueError, match="padded must be 0 for a causal call"):
        replace(LINE, padded=4, is_causal=True)
    with pytest.raises(ValueError, match="left_padded must be 0 on grids, and beside padded, queries and documents"):
        replace(LINE, left_padded=4, queries=1)
    with pytest.raises(ValueError, match="documents must divide length, 32, got 5"):
        replace(LINE, documents=5)


@pytest.mark.parametrize("name", ["grid base", "grid padded", "grid joint", "grid bias", "grid stride"])
@pytest.mark.parametrize("order", ["raster", "morton"])
def test_flex_attention_computes_the_option(name, order, compiled_code_is_forgotten):
    call = CALLS[name]
    assert call.error(sweep.by_flex(call, order, 128), gradient=False) < 1e-5


def test_flex_attention_with_padding_by_hand_computes_it(monkeypatch, compiled_code_is_forgotten):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(sweep, "compiled_flex_attention", flex_attention)
    call = CALLS["line padded"]
    assert call.error(sweep.by_padded_flex(call), gradient=False) < 1e-5
    unpadded = Way("without the mask", lambda x: sweep.by_name(replace(call, padded=0), "eager").attend(x))
    assert call.error(unpadded, gradient=False) > 0.05


@pytest.mark.parametrize("pattern", [LINE.pattern, DilatedPattern((8, 32), (1, 4))])
def test_gathered_keys_are_those_of_the_query(pattern):
    call = replace(LINE, pattern=pattern, queries=1, heads=4)
    assert call.error(sweep.by_gathered_keys(call), gradient=True) < 1e-5


@pytest.mark.parametrize("name", ["grid base", "grid stride", "grid dilation", "grid extra"])
def test_natten_is_given_the_same_window(monkeypatch, name):
    def na2d(q, k, v, *, additional_keys=None, additional_values=None, **rules):
        if additional_keys is None:
            return natten.na2d(q, k, v, **rules)
        near = Neighbourhood(q.shape[1:3], rules["kernel_size"], stride=rules["stride"], dilation=rules["dilation"])
        rows = (x.flatten(1, 2) for x in (q, k, v))
        from hilbert_lib import attend

        return attend(*rows, near, extra_k=additional_keys, extra_v=additional_values).unflatten(1, q.shape[1:3])

    monkeypatch.setitem(sys.modules, "natten", SimpleNamespace(na2d=na2d))
    call = CALLS[name]
    (make,) = sweep.natten_ways(call).values()
    assert call.error(make(), gradient=True) < 1e-5


def test_natten_is_tried_in_each_of_its_tiles(monkeypatch):
    tiles = [(((8, 8), (8, 16)), "cooperative"), (((16, 8), (8, 8)), "pingpong")]
    monkeypatch.setitem(
        sys.modules, "natten", SimpleNamespace(na2d=None, get_configs_for_hopper_fna=lambda q, k, v: tiles)
    )
    assert list(sweep.natten_ways(GRID)) == ["NATTEN, tiles 8x8 8x16 cooperative", "NATTEN, tiles 16x8 8x8 pingpong"]
    with pytest.raises(ValueError, match="NATTEN takes no bias, order of storage"):
        sweep.by_natten(replace(GRID, has_bias=True, order="hilbert"), "NATTEN", {})


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose calls take milliseconds that hang on the name and the parameters: of ours 2, with padding 4."""

    def time_cases(*cases, **_):
        def took(case):
            slower = 2.0 if case.parameters.get("padded") else 1.0
            return (2.0 if case.name == "ours" else 3.0) * slower

        facts = [case.facts | {"samples_ms": [took(case)] * 5, "device": "cuda:0"} for case in cases]
        record = {"kind": "measurement", **facts[0]}
        if len(cases) == 2:
            ratio = took(cases[0]) / took(cases[1])
            record = {"kind": "comparison", "ratio": ratio, "interval": (ratio, ratio), "a": facts[0], "b": facts[1]}
        return SimpleNamespace(record=lambda: record)

    monkeypatch.setattr(sweep, "time_cases", time_cases)
    monkeypatch.setattr(sweep, "_seconds_of", lambda case: 1e-3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    return torch.device("cuda")


def calls_of(*names):
    return [(name.split()[0], name.split()[1], CALLS[name]) for name in names]


def absent(call):
    raise ImportError("other is not installed")


def wrong(call):
    return Way("wrong", lambda x: (2 * call.by().attend(x)[0],))


def others(base, option, call):
    return {
        "right": lambda: call.by(name="right"),
        "wrong": lambda: wrong(call),
        "absent": lambda: absent(call),
    }


def test_a_way_that_is_wrong_or_absent_has_a_reason_and_no_time(gpu, tmp_path, capsys):
    names = ["line base", "line padded", "line decoding"]
    how = {"device": gpu, "output_dir": str(tmp_path)}
    records = sweep.run_options(calls_of(*names), **how) + sweep.run_options(calls_of(*names), others, **how)
    table = sweep.option_table(records).set_index(["option", "direction"])
    assert table.index.tolist() == [
        *((name, way) for name in ("base", "padded") for way in sweep.DIRECTIONS), ("decoding", "forward"),
    ]  # fmt: skip
    assert (table.other == "right").all()
    assert table.not_tried.str.fullmatch(r"wrong: off by .* from float64, .*; absent: other is not installed").all()
    assert table.ratio.tolist() == [1.5] * 5
    kept = CALLS["line padded"].pairs / LINE.pairs / 2
    for name in ("share", "share_low", "share_high"):  # every sample of a call is as long
        assert table[name].tolist()[:4] == pytest.approx([1, 1, kept, kept])
    assert table.other_share.tolist()[:4] == pytest.approx([2 / 3, 2 / 3, kept * 2 / 3, kept * 2 / 3])
    assert "line, base, forward, absent: not tried: other is not installed" in capsys.readouterr().out


def test_an_interrupted_sweep_measures_nothing_again(gpu, tmp_path, monkeypatch):
    names, how = ["line base", "grid base"], {"device": gpu, "output_dir": str(tmp_path)}
    first = sweep.run_options(calls_of(*names), others, **how)
    monkeypatch.setattr(sweep, "_measured", lambda *_, **__: pytest.fail("measured again"))
    assert len(sweep.run_options(calls_of(*names), others, **how)) == len(first) == 12


def test_ours_is_held_against_float64_once_for_all_rivals(gpu, monkeypatch):
    names, error = [], Call.error
    monkeypatch.setattr(Call, "error", lambda call, way, **how: names.append(way.name) or error(call, way, **how))
    makers = {"one": LINE.by, "two": LINE.by, "three": LINE.by}
    sweep.run_options([("line", "base", LINE)], lambda *_: makers, device=gpu, directions=["forward"])
    assert names.count("ours") == 4  # the three rivals are ours here, too


def test_ours_that_is_wrong_has_no_speed(gpu, monkeypatch):
    by = Call.by
    monkeypatch.setattr(Call, "by", lambda call: Way("ours", lambda x: (2 * by(call).attend(x)[0],)))
    table = sweep.option_table(sweep.run_options(calls_of("line base"), device=gpu))
    assert table.failed.str.startswith("off by").all()
    assert table[["median_ms", "tflop_per_s", "share", "error"]].isna().all(axis=None)


def test_without_a_gpu_ways_are_checked_and_nothing_is_written(tmp_path):
    records = sweep.run_options(calls_of("line base"), others, device=CPU, output_dir=str(tmp_path))
    assert {record["kind"] for record in records} == {"check"}
    assert not list(tmp_path.iterdir())


def test_tf32_is_allowed_for_the_option_alone():
    before = torch.get_float32_matmul_precision()
    with sweep.tf32(True):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    with sweep.tf32(False):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == before


def test_layers_of_the_video_model_are_as_sparse_as_its_configuration_says():
    table = video.step_table([])
    assert table.layers.tolist() == [2, 3, 7, 15, 1, 28]
    assert (100 * (1 - table.share)).round().tolist()[:5] == [98, 95, 92, 77, 55]
    mean = (table.share * table.layers).iloc[:5].sum() / 28
    assert table.share.iloc[-1] == pytest.approx(mean)


@pytest.fixture
def timed(gpu):
    """Records of options and of the video model, as a GPU would give them."""
    half = [(base, option, replace(call, dtype="bfloat16")) for base, option, call in calls_of(*CALLS)]
    records = sweep.run_options(half, device=gpu) + sweep.run_options(half, others, device=gpu)
    works = list(video.video_calls((2, 4, 5), heads=1, head_dim=8, device=CPU, dtype="float32"))
    how = {"device": gpu, "sweep_name": video.VIDEO_SWEEP, "directions": ["forward"]}
    return [*records, *sweep.run_options(works, **how), *sweep.run_options(works, others, **how)]


def test_claims_are_judged_over_all_cases(timed):
    table = sweep.option_table(timed)
    _, cases = judged("O1", timed)
    assert len(cases) == (table.option != "base").sum()
    assert cases.value.tolist() == pytest.approx(table[table.option != "base"].share.tolist())
    verdict, cases = judged("O2", timed)
    assert (verdict, len(cases)) == ("holds", len(table))
    verdict, cases = judged("O3", timed)
    assert len(cases) == len(video.COSMOS_LAYERS)
    assert cases.value.tolist() == pytest.approx(cases.share.tolist())  # every call takes as long


def test_one_step_is_the_sum_of_its_layers(timed):
    table = video.step_table(timed)
    assert table.ours_ms.tolist() == [2.0 * count for count in (2, 3, 7, 15, 1, 28)]
    assert table.other_ms.tolist() == [3.0 * count for count in (2, 3, 7, 15, 1, 28)]
    assert table.times.tolist() == [1.0] * 6
    assert table.promised.iloc[-1] == pytest.approx(1 / table.share.iloc[-1])


def test_a_claim_waits_until_its_record_is_committed():
    for name, claim in WAITING.items():
        assert name not in LEDGER
        assert not committed_runs(claim.record), f"read the verdict of {name} from the record"


def test_the_figure_has_a_bar_for_each_option(timed):
    table = sweep.option_table(timed)
    look = {"panel": "base", "row": "option", "by": "direction", "share": "share", "other": "other_share"}
    figure = share_bars(table, title="shares", goal=0.85, **look)
    assert [axes.get_title() for axes in figure.axes] == ["grid", "line"]
    for axes, (_, part) in zip(figure.axes, table.groupby("base", sort=False), strict=True):
        widths = [bar.get_width() for bar in axes.patches]
        assert sorted(widths) == pytest.approx(sorted(part.share))
        assert [label.get_text() for label in axes.get_yticklabels()] == list(dict.fromkeys(part.option))


def test_the_notebook_shows_what_a_gpu_measured(timed, capsys):
    """The cells after the sweeps, on records of a made GPU."""
    cells = nbformat.read(Path(__file__).parents[3] / "notebooks/06c_options.ipynb", as_version=4).cells
    code = {cell.id: cell.source for cell in cells if cell.cell_type == "code"}
    pieces = []
    for record in timed:
        record["environment"] = {"hardware": "a made GPU", "gpus": [{"name": "a made GPU"}]}
    values = {"records": timed, "filmed": [], "output_dir": "", "option_table": sweep.option_table}
    exec(code["counted"], values)
    values["display"] = pieces.append
    for name in ("record", "shares", "shares-table", "step", "claims"):
        exec(code[name], values)
    printed = capsys.readouterr().out
    assert "One step's attention takes" in printed
    assert "O1, 0.85 of the base: does not hold (" in printed
    assert "O2, no faster other way: holds" in printed
    assert len(pieces) == 8  # a figure, two tables of options with headings, one of reasons, one of the step
