"""Parameters, points and grids: what is refused is refused before anything runs."""

import pytest
from tiny_notebooks import PARAMETERS, write_notebook

from hilbert_lib.lab.suite import points


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    return points.read_notebook(write_notebook(tmp_path_factory.mktemp("notebooks"), "00_tiny", "print(seq_len)"))


def test_a_notebook_is_read_with_its_prose_and_its_parameters(notebook, tmp_path):
    assert (notebook.title, notebook.question, notebook.answer) == ("Title", "Question?", "The answer.")
    assert list(notebook.parameters) == ["seq_len", "scale", "causal", "order", "rates", "seed", "output_dir"]
    rates = notebook.parameters["rates"]
    assert (rates.annotation, rates.default, rates.meaning) == ("list[int]", [1, 2], "dilations")
    assert type(notebook.parameters["scale"].default) is float
    # Texts in a cell of parameters may look like code.
    lines = ['a: str = "x = 1 # y"  # what = this #1', "b: list[str] = [", '    "#",  # one', '    "=="]  # # two']
    known = points.read_notebook(write_notebook(tmp_path, "00_a", parameters="\n".join(lines))).parameters
    assert (known["a"].default, known["a"].meaning) == ("x = 1 # y", "what = this #1")
    assert (known["b"].default, known["b"].meaning) == (["#", "=="], "# two")


@pytest.mark.parametrize(
    "line",
    [
        "device: str | None = None  # no such type",
        "seq_len = 8  # no type",
        "seq_len: int = 2**3  # no literal",
        "seq_len: int = 0.5  # another type",
        "seq_len: int",
        "import torch",
        "seq_len: int = = 1",
        "rates: list[int] = [1,",
    ],
)
def test_a_parameter_that_is_no_typed_literal_is_refused(tmp_path, line):
    path = write_notebook(tmp_path, "00_bad", parameters=line)
    with pytest.raises(ValueError, match=r"00_bad\.ipynb"):
        points.read_notebook(path)


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("4", "int", 4),
        ("1", "float", 1.0),
        ("true", "bool", True),
        ("1, 2", "str", "1, 2"),
        ("1,2,4", "list[int]", [1, 2, 4]),
        ("[1, 2, 4]", "list[int]", [1, 2, 4]),
        ("", "list[int]", []),
        ("0.5,1", "list[float]", [0.5, 1.0]),
        ("no, 1, 'a,b'", "list[str]", ["no", "1", "a,b"]),
        ("a=1 # b, don't, =, &c, *d, !e, %f", "list[str]", ["a=1 # b", "don't", "=", "&c", "*d", "!e", "%f"]),
    ],
)
def test_a_word_of_the_command_line_gets_the_type_of_its_parameter(text, annotation, value):
    parsed = points.parse_value("name", text, annotation)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "annotation"),
    [("1.5", "int"), ("", "int"), ("x", "float"), ("1", "bool"), ("1,x", "list[int]"), ("[1, 2", "list[int]"),
     ("[[1], [2]]", "list[int]"), ("'a", "list[str]"), ("\udcff", "str"), (["1"], "str")],
)  # fmt: skip
def test_a_word_of_another_type_is_refused_by_name(text, annotation):
    with pytest.raises(TypeError, match="seed must be"):
        points.parse_value("seed", text, annotation)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"sizes: {seq_len: 8}", "must be flat"),
        (b"a: 1\nsizes: [[8]]", "line 2 is not"),
        (b"- 1", "name: value"),
        (b"a: [1", "is not YAML"),
        (b"a: 1  # caf\xe9", "is not YAML"),
        (b"a: 1\na: 2", "gives a more than once"),
    ],
)
def test_a_file_that_is_not_flat_is_refused(tmp_path, text, message):
    path = tmp_path / "sizes.yaml"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=f"sizes.yaml.*{message}"):
        points.read_parameter_file(path)


def file_of(folder, text):
    (folder / "sizes.yaml").write_text(text)
    return folder / "sizes.yaml"


@pytest.mark.parametrize("text", ["010", "1e1", "1:30", "0x10", "yes", "on", "true", "~", "2026-01-01", "'#'", "1_0"])
@pytest.mark.parametrize("name", ["seq_len", "scale", "causal", "order", "rates"])
def test_a_text_means_in_a_file_what_it_means_on_the_command_line(notebook, tmp_path, name, text):
    def told(*how):
        try:
            return points.make_points(notebook, *how)[0].parameters[name]
        except TypeError as error:
            return str(error)

    in_file = told({}, file_of(tmp_path, f"{name}: {text}"))
    assert in_file in (here := told({name: text.strip("'")}), f"{tmp_path / 'sizes.yaml'}: {here}")


@pytest.mark.parametrize(
    ("name", "message"), [("sed", "did you mean 'seed'"), ("zzz", "there are: seq_len"), ("output_dir", "--out")]
)
def test_an_unknown_parameter_is_refused_with_the_nearest_name(notebook, tmp_path, name, message):
    for how in (({name: "1"},), ({}, file_of(tmp_path, f"{name}: 1"))):
        with pytest.raises(ValueError, match=message):
            points.make_points(notebook, *how)


def test_every_parameter_that_a_program_is_told_of_can_be_set_to_what_it_is_told(notebook):
    for told in notebook.facts()["parameters"]:
        text = ",".join(map(str, told["default"])) if isinstance(told["default"], list) else str(told["default"])
        (point,) = points.make_points(notebook, {told["name"]: text})
        assert point.parameters[told["name"]] == told["default"]
    assert set(point.parameters) == {told["name"] for told in notebook.facts()["parameters"]}


def test_notebooks_are_found_by_name_with_the_nearest_one_told(tmp_path):
    write_notebook(tmp_path, "01_b")
    write_notebook(tmp_path, "00_a")
    (tmp_path / "._00_a.ipynb").write_bytes(b"\x00\x05\x16\x07")  # what macOS leaves on other file systems
    assert [each.name for each in points.find_notebooks(tmp_path)] == ["00_a", "01_b"]
    assert [each.name for each in points.find_notebooks(tmp_path, ["notebooks/01_b.ipynb"])] == ["01_b"]
    with pytest.raises(ValueError, match="did you mean '00_a'"):
        points.find_notebooks(tmp_path, ["00_aa"])
    with pytest.raises(ValueError, match="holds no notebooks"):
        points.find_notebooks(tmp_path / "elsewhere")
    for broken in ("{", "[]", "{}"):
        (tmp_path / "99.ipynb").write_text(broken)
        assert [each.name for each in points.find_notebooks(tmp_path, ["00_a"])] == ["00_a"]
        with pytest.raises(ValueError, match=r"^99\.ipynb: "):
            points.find_notebooks(tmp_path)


def test_a_point_is_known_by_its_code_its_defaults_and_what_differs(tmp_path):
    def point(code="print(1)", parameters=PARAMETERS, **texts):
        notebook = points.read_notebook(write_notebook(tmp_path, "00_a", code, parameters=parameters))
        return points.make_points(notebook, texts)[0]

    default, same, other = point(), point(seq_len="08"), point(seq_len="9")
    assert (default.name, default.key) == (same.name, same.key)
    assert other.name != default.name
    assert other.key != default.key
    edited, another_default = point("print(2)"), point(parameters=PARAMETERS.replace("seed: int = 0", "seed: int = 1"))
    for changed in (edited, another_default):
        assert changed.name == default.name
        assert changed.key != default.key


def test_the_same_code_is_another_run_in_another_notebook_and_with_another_library(tmp_path, monkeypatch):
    a, b = (points.make_points(points.read_notebook(write_notebook(tmp_path, each, "1")), {})[0] for each in "ab")
    assert a.notebook.code_hash == b.notebook.code_hash
    assert a.key != b.key
    before = a.key
    monkeypatch.setattr("hilbert_lib.machine.code_hash", lambda: "01234567")
    assert a.key != before


def test_a_sweep_holds_every_combination_once(notebook, tmp_path):
    texts = {"rates": "1;1,2;[4]", "seed": "0,1,1", "order": "snake"}
    grid = points.make_points(notebook, texts, file_of(tmp_path, "scale: 2"), is_sweep=True)
    found = [(point.parameters["rates"], point.parameters["seed"]) for point in grid]
    assert found == [([1], 0), ([1], 1), ([1, 2], 0), ([1, 2], 1), ([4], 0), ([4], 1)]
    assert all(point.parameters["order"] == "snake" and point.parameters["scale"] == 2.0 for point in grid)
    assert len({point.name for point in grid}) == len(grid)


def test_shards_share_out_every_point_once_and_others_are_refused():
    for jobs in (1, 3, 7):
        shares = [points.take_shard(list(range(6)), f"{job}/{jobs}") for job in range(1, jobs + 1)]
        assert sorted(point for share in shares for point in share) == list(range(6))
    for shard in ("0/2", "3/2", "1", "a/b", "-1/2"):
        with pytest.raises(ValueError, match="shard must be i/n"):
            points.take_shard([1, 2], shard)


@pytest.mark.parametrize(
    ("parameter", "text"),
    [("scale", "nan"), ("scale", "-inf"), ("scale", "1e999"), ("scales", "1,nan"), ("scales", "[0.5, inf]")],
)
def test_a_parameter_that_is_no_finite_number_is_refused_by_its_name(tmp_path, parameter, text):
    """A notebook and its manifest are JSON, which has no word for it."""
    lines = "scale: float = 0.5\nscales: list[float] = [1.0]"
    notebook = points.read_notebook(write_notebook(tmp_path, "00_a", parameters=lines))
    (tmp_path / "values.yaml").write_text(
        f"{parameter}: {text}" if "," not in text else f"{parameter}: [{text.strip('[]')}]"
    )
    for given in (({parameter: text}, None), ({}, tmp_path / "values.yaml")):
        with pytest.raises(ValueError, match=f"{parameter} must be finite, got (nan|-?inf)"):
            points.make_points(notebook, *given)
    swept = text.strip("[]").replace(",", ";") if parameter == "scales" else f"0.5,{text}"
    with pytest.raises(ValueError, match=f"{parameter} must be finite"):
        points.make_points(notebook, {parameter: swept}, is_sweep=True)


@pytest.mark.parametrize(
    "line", ["scale: float = 1e999", "scale: float = -1e999", "scales: list[float] = [1.0, 1e999]"]
)
def test_a_default_that_is_no_finite_number_is_refused(tmp_path, line):
    with pytest.raises(ValueError, match=r"00_a\.ipynb: .*scales? must be finite, got -?inf"):
        points.read_notebook(write_notebook(tmp_path, "00_a", parameters=line))
