"""The house: imports go downward, the library does not know the laboratory, public names are where one looks."""

import ast
import doctest
import gc
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from unittest.mock import Mock

import pytest
import tile_shapes
from own_scripts import load_script

import hilbert_lib

HOME = {name: module for module, names in hilbert_lib.PUBLIC.items() for name in names}
ROOT = Path(hilbert_lib.__file__).parent
# From the ground up; a room imports only those before it. Below the line stands the laboratory.
ROOMS = [
    "lazy",
    "internals",
    "files",
    "checks",
    "machine",
    "graph_cache",
    "curves",
    "ordering",
    "patterns",
]
ROOMS += ["attention", "limits", "launch", "ring", "adapters"]
LABORATORY = ["lab", "cli"]
# The same inside two rooms of several floors.
FLOORS = {
    "attention": [
        *(
            "request",
            "grid_parts",
            "grid_lists",
            "dropout",
            "documents",
            "starts",
            "aligned",
            "transforms",
            "failures",
            "tape",
            "triton",
            "merge",
            "backends",
            "rules",
        ),
        *(
            "measured_rules",
            "choice",
            "zero_keys",
            "autograd",
            "flop_count",
            "registration",
            "operators",
            "validation",
            "dtensors",
            "joint",
            "known_calls",
            "api",
        ),
        *("two_resolutions", "torchscale", "caches", "modules", "grid_module", "point_module", "explain", "weights"),
    ],
    "ring": ["plan", "rank", "agreement", "points", "spread", "attention", "module"],
}
FOLDERS = {
    "attention": "attention_weights dilated_attention explain_backend DilatedAttention MultiheadDilatedAttention "
    "neighbourhood_attention NeighbourhoodAttention PointAttention two_resolution_attention",
    "curves": "curve_coordinates curve_index",
    "ring": "PointShard Rectangles RingDilatedAttention RingNeighbourhoodAttention Runs gather plan_halo plan_ring "
    "ring_attend ring_dilated_attention ring_neighbourhood_attention run_ranks shard",
    "ring.plan": "plan_halo plan_ring",
    "launch": "run_ranks run_isolated ProgressiveTester",
    "limits": "SafetyConfig MemorySafetyChecker Watcher estimate_memory",
}


@cache
def files() -> dict[str, Path]:
    """Every module below hilbert_lib by its dotted name, without "hilbert_lib."; the top itself is ""."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix("__init__").rstrip(".")] = path
    return found


def home_of(name: str) -> str:
    """The module that an imported name is or comes from; a package may import it lazily. "" is the library's top."""
    if name in files():
        return name
    package, _, last = name.rpartition(".")
    if files()[package].name != "__init__.py":
        return package
    value = getattr(importlib.import_module(f"hilbert_lib.{package}".rstrip(".")), last, None)
    home = getattr(inspect.unwrap(value), "__module__", "")
    return home.removeprefix("hilbert_lib.") if home.startswith("hilbert_lib.") else package


@cache
def parsed(text: str) -> ast.Module:
    """Sources are read by several tests."""
    return ast.parse(text)


def edges_of(name: str, text: str) -> set[str]:
    """The modules that a source imports anywhere in it; ruff forbids relative imports."""
    found = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    own = {each.removeprefix("hilbert_lib").lstrip(".") for each in found if each.split(".")[0] == "hilbert_lib"}
    return set(map(home_of, own)) - {name}


@cache
def graph() -> dict[str, set[str]]:
    return {name: edges_of(name, text) for name, text in sources().items()}


def faults(edges: dict[str, set[str]]) -> list[str]:
    """Imports that run up, reach the laboratory from above the line, or close a circle."""
    found = []
    order = ROOMS + LABORATORY
    for name, targets in edges.items():
        room = name.split(".")[0]
        if "" in targets and room in ROOMS:
            found.append(f"{name} imports the whole library, which lies above it")
        for target in targets - {""}:
            other = target.split(".")[0]
            if name and order.index(other) > order.index(room):
                found.append(f"{name} imports {target}, which lies above it")
            if room == other and room in FLOORS and "." in name and "." in target and floor_of(target) > floor_of(name):
                found.append(f"{name} imports {target}, which lies above it")
    try:
        TopologicalSorter({name: targets - {""} for name, targets in edges.items()}).prepare()
    except CycleError as error:
        found.append(f"{' imports '.join(error.args[1])}, which is a circle")
    return found


def floor_of(name: str) -> int:
    """The number of the floor of a module: of the longest of its names that stands there."""
    room, _, inside = name.partition(".")
    parts = inside.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return FLOORS[room].index(next((each for each in names if each in FLOORS[room]), parts[0]))


@cache
def sources() -> dict[str, str]:
    return {name: path.read_text(encoding="utf-8") for name, path in files().items()}


def test_imports_run_downward_and_close_no_circle():
    edges = graph()
    assert len(edges) > 100
    assert faults({name: targets for name, targets in edges.items() if name}) == []


@pytest.mark.parametrize(
    ("module", "line", "fault"),
    [
        ("attention.api", "from hilbert_lib.lab.records import append_records", "lies above it"),
        ("patterns.dilated", "def f():\n    import hilbert_lib.attention.api", "lies above it"),
        ("attention.request", "from hilbert_lib.attention import dilated_attention", "lies above it"),
        ("attention.api", "from hilbert_lib import SafeBenchmarkRunner", "lies above it"),
        ("attention.grid_parts", "from hilbert_lib.attention.backends import flex", "lies above it"),
        ("patterns.dilated", "from hilbert_lib import dilated_attention", "lies above it"),
        ("attention.api", "def f():\n    import hilbert_lib\n    hilbert_lib.SafeBenchmarkRunner", "lies above it"),
        ("curves.hilbert", "from hilbert_lib.curves.coordinates import KINDS", "circle"),
        ("ring.plan.rows", "from hilbert_lib.ring.plan.plan import plan_ring", "circle"),
    ],
)
def test_an_import_that_runs_up_or_round_is_found(module, line, fault):
    planted = graph() | {module: edges_of(module, f"{sources()[module]}\n{line}\n")}
    assert any(module in each and fault in each for each in faults(planted))


def vague_forwards(module: str, source: str) -> list[str]:
    """Functions called `forward` that are no method, and not a backend's either: what they compute has a name."""
    tree = parsed(source)
    of_classes = {id(node) for each in ast.walk(tree) if isinstance(each, ast.ClassDef) for node in each.body}
    on_top = {node.name: id(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    if module.startswith(("attention.backends.", "attention.triton.")) and "backward" in on_top:
        of_classes.add(on_top.get("forward"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    return [f"{module}, line {node.lineno}" for node in functions if id(node) not in of_classes]


def test_forward_is_what_a_method_or_a_backends_function_is_called():
    assert [place for module, source in sources().items() for place in vague_forwards(module, source)] == []
    assert vague_forwards("ring.rank.passes", "def forward(): ...\ndef backward(): ...")
    assert vague_forwards("attention.triton.decode", "def forward(): ...")
    assert vague_forwards("lab.workload", "class Work:\n    def side(self):\n        def forward(): ...")


@cache
def kernels() -> dict[str, tile_shapes.Module]:
    """The modules with Triton kernels."""
    below = {"hilbert_lib.attention.triton": "attention/triton"}
    below |= {f"hilbert_lib.{room.replace('/', '.')}": room for room in ("curves", "patterns", "lab/inside")}
    return {name: module for package, room in below.items() for name, module in tile_shapes.read(ROOT / room, package)}


def test_every_tile_of_a_kernel_says_its_shape():
    assert sum(len(module.kernels) for module in kernels().values()) > 100
    assert tile_shapes.unmarked(kernels()) == []
    decorated = {
        f"hilbert_lib.{name}" for name, text in sources().items() if re.search(r"^@(triton|gluon)\.jit", text, re.M)
    }
    of_the_laboratory = {
        "hilbert_lib.lab.seed_kernel",
        "hilbert_lib.lab.exponentials",
    }  # they compute no attention of ours
    assert decorated - of_the_laboratory == {name for name, module in kernels().items() if module.kernels}


@pytest.mark.parametrize(
    ("module", "line", "planted"),
    [
        ("grid", "exists = (r0 < last0) & (r1 < last1) & (r2 < last2)  # [BLOCK_M]", ""),
        ("grid", "scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]", ""),
        ("forward", "acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]", "# [BLOCK_M]"),
        ("hopper.backward", "k_rows = k_rows.load(gl.DotOperandLayout(0, SCORES, 2))  # [GROUP_ROWS, BLOCK_D]", ""),
        ("hopper.steps", "scores = order.masked(scores, sight)  # [GROUP_ROWS, KEYS]", "# [GROUP_ROWS, BLOCK_D]"),
    ],
)
def test_a_tile_that_says_no_shape_or_a_wrong_one_is_found(module, line, planted):
    name = f"hilbert_lib.attention.triton.{module}"
    code, said = line.split("  # ")
    text = kernels()[name].text
    assert line in text
    (fault,) = tile_shapes.unmarked(kernels() | {name: tile_shapes.Module(name, text.replace(line, code + planted, 1))})
    assert name in fault
    assert fault.endswith(f"needs # {said}")


def test_names_that_say_nothing_are_counted(tmp_path):
    count = load_script("count_names").counted
    (tmp_path / "names.py").write_text("""
def f(given, *, keys, _own=1):
    each: int = given.at
    found2 = own_lowest = [side for side, row in keys]
    kept.more += (whole := 3)
""")
    total, words = count(tmp_path / "names.py")
    assert total == 9
    assert words == dict.fromkeys(("given", "own", "each", "found", "side", "whole"), 1)


def test_a_function_of_triton_whose_shape_is_not_known_is_named():
    text = "@triton.jit\ndef sorted_kernel(x):\n    tile = tl.sort(tl.arange(0, 8))\n"
    with pytest.raises(NotImplementedError, match=r"the shape of tl\.sort is not known"):
        tile_shapes.unmarked({"kernels": tile_shapes.Module("kernels", text)})


@pytest.mark.parametrize("folder", ["attention/triton", "patterns"])
def test_at_most_two_names_in_a_hundred_say_nothing(folder):
    count = load_script("count_names").counted
    counts = {path.name: count(path) for path in (ROOT / folder).rglob("*.py")}
    total, empty = sum(names for names, _ in counts.values()), sum(words.total() for _, words in counts.values())
    assert empty <= 0.02 * total, {name: words for name, (_, words) in counts.items() if words}


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in ROOT.glob("lab/**/__init__.py")), ids=lambda f: f.name
)
def test_the_docstring_of_a_folder_of_the_laboratory_lists_its_files(folder):
    listed = re.findall(
        r"^(\w+)  +\S", ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), re.MULTILINE
    )
    inside = [path.stem for path in folder.glob("[!_]*.py")] + [
        path.parent.name for path in folder.glob("*/__init__.py")
    ]
    assert sorted(listed) == sorted(inside)


def test_docstrings_do_not_begin_with_a_clause_in_place_of_a_noun():
    begins = re.compile(r"(What|How|Which|Where|When|Why|Who)\b")
    clauses = [
        f"{name}.{getattr(node, 'name', '')}"
        for name, text in sources().items()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and begins.match(ast.get_docstring(node) or "")
    ]
    assert clauses == []


def test_no_private_name_crosses_a_module():
    crossing = [
        f"{name} imports {alias.name}"
        for name, text in sources().items()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hilbert_lib")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert crossing == []


def printed_by(code: str, *options: str) -> str:
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_what_the_tests_start_collects_garbage_as_they_do():
    assert printed_by("import gc; print(gc.get_threshold())") == f"{gc.get_threshold()}\n"
    assert gc.get_threshold()[0] > 10_000, "tests/startup takes a third of the time off many starts"


TRACE_CALL = ROOT.parent / "scripts/trace_call.py"
MOST_FILES = {"auto": 9, "triton": 13}  # a reader opens no more to follow a warm call, on a CPU or to a kernel


def test_a_warm_call_crosses_few_files():
    script = f"import hastened, runpy; hastened.hasten(); runpy.run_path({str(TRACE_CALL)!r}, run_name='__main__')"
    command = [sys.executable, "-c", script]
    tests = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": tests}
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=interpreted).stdout
    calls = re.findall(r"^(\w+), (\w+): (\d+) files", told, re.MULTILINE)
    assert [call for call, _, _ in calls] == ["sequence", "grid"] * 2
    for _, backend, files in calls:
        assert int(files) <= MOST_FILES[backend], told


# What a process of its own is started with, for a point or as a rank.
MEASURING = ["hilbert_lib.lab." + name for name in ("guarded.cases", "sweeps.causes", "sweeps.ring")]
SUITE = ("pandas", "matplotlib", "click", "yaml", "papermill", "nbformat", "IPython", "PIL", "packaging")


PRODUCT = [name for name, module in HOME.items() if not module.startswith("hilbert_lib.lab")]
STAR = "from {} import *\nprint(*[name for name in globals() if name[0] != '_'])\nimport sys; print(*sys.modules)"
PROGRAMS = {
    # Beyond torch: first of what most programs name, then of all the product, and at last with what measures.
    "imports": f"""
import sys, torch
from cProfile import Profile
before, profile = set(sys.modules), Profile()
profile.runctx("from hilbert_lib import DilatedPattern, Ordering, dilated_attention", {{}}, {{}})
first = sys.modules.keys() - before
import hilbert_lib, torch.distributed
before = set(sys.modules)
[getattr(hilbert_lib, name) for name in {PRODUCT}]
print(sum(entry.callcount for entry in profile.getstats()))
print(*first)
print(*first, *sys.modules.keys() - before)
import {", ".join(MEASURING)}
print(*sys.modules)
""",
    "star of hilbert_lib": STAR.format("hilbert_lib"),
    "star of hilbert_lib.ring": STAR.format("hilbert_lib.ring"),
    "help": "import hilbert_lib; help(hilbert_lib)",
    "help after a star": "from hilbert_lib import *; import hilbert_lib; help(hilbert_lib)",
    # Who makes the layout itself is not warned.
    "heads first": """
import warnings, torch
from hilbert_lib import DilatedPattern, MultiheadDilatedAttention, NeighbourhoodAttention
from hilbert_lib import dilated_attention, estimate_memory
q, x, pattern = torch.ones(1, 8, 1024, 64), torch.ones(1, 8, 1024), DilatedPattern((4,), (1,))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    estimate_memory(pattern, length=8, heads=1024, head_dim=64, device="cpu")
    MultiheadDilatedAttention(1024, 1024, pattern)(x, x, x)
    NeighbourhoodAttention(1024, 1024, 2)(x)
    dilated_attention(*[q.transpose(1, 2)] * 3, pattern)
    before = len(seen)
    for _ in range(3):
        dilated_attention(q, q, q, pattern)
print(before, len(seen), seen[0].filename, seen[0].message)
""",
}
# Each program in a copy of a process that has loaded torch: a process of its own would take a second to load it.
COPIES = """
import json, os, sys, tempfile, torch
printed = []
for program in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as file:
        copy = os.fork()
        if copy == 0:
            os.dup2(file.fileno(), 1)
            exec(program, {"__name__": "__main__"})
            sys.exit()
        _, status = os.waitpid(copy, 0)
        assert status == 0, program
        file.seek(0)
        printed.append(file.read())
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each of `PROGRAMS` prints, where nothing of the library was loaded before it."""
    command = [sys.executable, "-c", COPIES, json.dumps(list(PROGRAMS.values()))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(PROGRAMS, json.loads(done.stdout), strict=True))


@pytest.fixture
def imported(printed):
    """Calls, the names of modules that came with the first and with both, and at last with what measures."""
    assert set(HOME) - set(PRODUCT) == {"SafeBenchmarkRunner", "select_attention_backend"}
    calls, first, every, measuring = printed["imports"].splitlines()
    return int(calls), first.split(), every.split(), measuring.split()


def test_the_library_loads_neither_the_laboratory_nor_its_packages(imported):
    rooms = printed_by("import sys, hilbert_lib, hilbert_lib.ring; print(*sys.modules)").split()
    assert not {"torch", "hilbert_lib.ring.attention"} & set(rooms)
    _, _, loaded, _ = imported
    assert "hilbert_lib.ring.attention" in loaded
    assert not [name for name in loaded if name.startswith(("hilbert_lib.lab", "hilbert_lib.cli"))]
    assert not [name for name in loaded if name.split(".")[0] in SUITE]


def test_a_process_that_measures_loads_no_package_for_tables_or_figures(imported):
    *_, loaded = imported
    assert set(MEASURING) <= set(loaded)
    assert not [name for name in loaded if name.split(".")[0] in SUITE]


def test_the_library_takes_a_quarter_of_a_second_beyond_torch(imported):
    """As the calls that so much time has room for: a time would hang on what runs beside."""
    calls, loaded, _, _ = imported
    assert calls < 50_000
    assert {name.split(".")[0] for name in loaded} <= {"hilbert_lib", "torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("folder", FOLDERS)
def test_public_names_are_importable_from_the_top_and_from_their_folder(folder):
    module = importlib.import_module(f"hilbert_lib.{folder}")
    assert folder != "ring" or " ".join(sorted(module.__all__)) == FOLDERS["ring"]
    for name in FOLDERS[folder].split():
        assert name in dir(module)
        assert inspect.unwrap(getattr(module, name)).__name__ == name
        if name in dir(hilbert_lib):
            assert getattr(module, name) is getattr(hilbert_lib, name)
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


def test_type_checkers_read_the_names_that_are_there():
    (block,) = [node for node in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert typed == {name: module for name, module in HOME.items() if not module.startswith("hilbert_lib.lab")}
    assert (ROOT / "py.typed").exists()
    assert hilbert_lib.__version__


@pytest.mark.parametrize(("package", "names"), [("hilbert_lib", HOME), ("hilbert_lib.ring", FOLDERS["ring"].split())])
def test_a_star_imports_the_public_names_but_for_those_of_the_suite(printed, package, names):
    imported, modules = printed[f"star of {package}"].splitlines()
    assert set(imported.split()) == {name for name in names if not HOME[name].startswith("hilbert_lib.lab")}
    assert not set(SUITE) & set(modules.split())


@pytest.mark.parametrize("program", ["help", "help after a star"])
def test_help_is_one_screen_that_begins_with_what_one_calls(printed, program):
    lines = printed[program].splitlines()
    assert len(lines) <= 60
    assert any("dilated_attention(q, k, v" in line for line in lines[:8])


@pytest.mark.parametrize("name", sorted(HOME))
def test_every_public_name_has_an_example_that_runs(name):
    public = inspect.unwrap(getattr(hilbert_lib, name))
    assert public.__doc__, name
    found = doctest.DocTestFinder().find(public, name, globs=vars(inspect.getmodule(public)).copy())
    examples = [test for test in found if test.examples]
    assert examples or name in ("GpuInfo",), f"{name} has no example"
    if public is not getattr(hilbert_lib, name):  # pytest, which runs the others, passes over what a decorator wraps
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        assert not any(runner.run(test).failed for test in examples)


def test_a_near_name_is_suggested():
    with pytest.raises(ImportError, match="did you mean 'neighbourhood_attention'"):
        from hilbert_lib import neighborhood_attention  # noqa: F401
    with pytest.raises(AttributeError, match="did you mean 'neighbourhood_attention'"):
        hilbert_lib.neighborhood_attention  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no 'nothing_like_it'$"):
        hilbert_lib.nothing_like_it  # noqa: B018
    assert not hasattr(hilbert_lib, "shards")
    assert getattr(importlib.import_module("hilbert_lib.ring"), "run_rank", None) is None
    for called in ("dilated_attention", "explain_backend", "ring_dilated_attention", "neighbourhood_attention"):
        asked, near = ("order", "ordering") if called == "neighbourhood_attention" else ("causal", "is_causal")
        with pytest.raises(TypeError, match=rf"{called} has no argument {asked!r}; did you mean {near!r}\?"):
            getattr(hilbert_lib, called)(1, 2, 3, 4, **{asked: True})


def test_tensors_that_look_heads_first_are_warned_of_once(printed):
    assert printed["heads first"].startswith("0 1 <string> k has 1024 heads and 8 rows: ")
    assert "give x.transpose(1, 2)" in printed["heads first"]


@pytest.mark.parametrize(
    ("module", "lacked", "is_told"),
    [
        ("hilbert_lib.lab.records", "pandas", True), ("hilbert_lib.lab.records", "pandas.core", True),
        ("hilbert_lib.lab.records", "hilbert_lib.lab.gone", False), ("hilbert_lib.lab.records", "tomllib", False),
        ("hilbert_lib.ordering", "triton", False),
    ],
)  # fmt: skip
def test_the_suite_is_named_only_where_the_laboratory_lacks_anothers_package(monkeypatch, module, lacked, is_told):
    missing = ModuleNotFoundError(f"No module named {lacked!r}", name=lacked)
    monkeypatch.setattr(hilbert_lib.lazy, "import_module", Mock(side_effect=missing))
    get, _ = hilbert_lib.lazy.lazily("hilbert_lib", {module: ("name",)})
    with pytest.raises(ModuleNotFoundError) as caught:
        get("name")
    assert ("name needs the packages of [suite]" in str(caught.value)) == is_told
    assert caught.value.name == lacked


def test_a_public_name_or_command_that_lacks_the_suite_names_it(tmp_path, monkeypatch):
    missing = ModuleNotFoundError("No module named 'pandas'", name="pandas")
    monkeypatch.setattr(hilbert_lib.lazy, "import_module", Mock(side_effect=missing))
    monkeypatch.delitem(vars(hilbert_lib), "SafeBenchmarkRunner", raising=False)
    said = r"SafeBenchmarkRunner needs the packages of \[suite\].*pandas is missing"
    with pytest.raises(ModuleNotFoundError, match=said):
        hilbert_lib.SafeBenchmarkRunner  # noqa: B018
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError(\"No module named 'click'\", name='click')\n")
    command = "import sys; sys.path.insert(0, sys.argv.pop()); from hilbert_lib.cli import run; run()"
    done = subprocess.run([sys.executable, "-c", command, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "click is missing. The command needs the packages of [suite]" in done.stderr


def read_or_written_as_the_system_spells(text: str) -> list[str]:
    """Calls that read or write text without naming its encoding, which is another one on other systems."""
    found = []
    for node in ast.walk(parsed(text)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        written = [each.value for each in node.args if isinstance(each, ast.Constant)]
        is_text = name in ("read_text", "write_text") or (
            name == "open" and isinstance(node.func, ast.Name) and not any("b" in str(mode) for mode in written[-1:])
        )
        is_named = any(each.arg == "encoding" for each in node.keywords) or (name == "read_text" and node.args)
        if is_text and not is_named and not any(str(each).startswith("/proc/") for each in constants_of(node)):
            found.append(ast.unparse(node))
    return found


def constants_of(node: ast.AST) -> list:
    return [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]


def test_text_is_read_and_written_in_a_named_encoding():
    found = {name: read_or_written_as_the_system_spells(text) for name, text in sources().items()}
    assert {name: calls for name, calls in found.items() if calls} == {}
    assert read_or_written_as_the_system_spells("path.read_text()\nopen('a', 'w')\npath.write_text('x')") != []
    assert read_or_written_as_the_system_spells("open('a', 'rb')\npath.read_text('utf-8')") == []


def test_a_checkout_holds_the_same_bytes_where_git_writes_other_line_ends(tmp_path):
    """On Windows git writes carriage returns, and knows no executable files."""
    root = ROOT.parent
    if not (root / ".git").exists():
        pytest.skip("no repository")
    options = ["-c", "core.autocrlf=true", "-c", "core.eol=crlf", "-c", "core.fileMode=false"]
    kept = [".gitattributes", "scripts", "Makefile", "hilbert_lib/files.py", "notebooks/00_question.ipynb", "README.md"]
    command = [
        "git",
        *options,
        f"--work-tree={tmp_path}",
        "checkout-index",
        "--all",
        "--force",
        f"--prefix={tmp_path}/",
    ]
    index = subprocess.run(["git", "ls-files", "-z", *kept], cwd=root, capture_output=True, check=True).stdout
    command[command.index("--all")] = "-z"
    subprocess.run([*command, "--stdin"], cwd=root, input=index, check=True)
    names = index.decode().strip("\0").split("\0")
    assert len(names) > 5
    for name in names:
        content = (tmp_path / name).read_bytes()
        assert b"\r\n" not in content, name


def test_the_oracle_imports_nothing_of_the_library():
    tree = ast.parse(Path(__file__).with_name("oracle.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert {module.partition(".")[0] for module in modules} == {"collections", "functools", "itertools", "torch"}
