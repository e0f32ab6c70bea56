"""Private names of torch and Triton stand in `hilbert_lib/internals.py` alone, each with what is done without it."""

import ast
import doctest
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import hilbert_lib
from hilbert_lib import internals

ROOT = Path(hilbert_lib.__file__).resolve().parent
SOURCES = [*ROOT.rglob("*.py"), *(ROOT.parent / "scripts").glob("*.py")]
# Private names of others: of Python, of packages of kernels, of Jupyter, of diffusers.
OTHERS = {
    *("_asdict", "_fields", "_make", "_replace", "_exit", "_getframe", "_handle_fromlist", "_repr_mimebundle_"),
    *("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_fwd", "_flash_attn_bwd"),
    *("_cpp_library_load_exception", "_parallel_config"),
}
# Names of objects that torch and Triton make for themselves, which no underscore marks.
UNMARKED = {
    *("bw_donated_idxs", "packed_metadata", "global_scratch_size", "profile_scratch_size", "gsan_enabled"),
    *("tensordesc_meta", "make_tensordesc_arg"),
}
MODULE = re.compile(r"(torch|triton)(\.\w+)+")


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None or name in UNMARKED


@cache
def own_names() -> frozenset[str]:
    """Names that the library defines, and `OTHERS`: functions, classes, variables and attributes of `self`."""
    names = set(OTHERS)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                names.add(node.attr)
    return frozenset(names)


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def dotted(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; an expression that is no name stands as "()"."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else "()"]


def note_module(note: Callable, node: ast.AST, name: str) -> None:
    """Note a module of torch or Triton, or what is imported from one, that has a private part."""
    root, *parts = name.split(".")
    if root in ("torch", "triton"):
        note(node, name, parts)


def private_uses(text: str) -> list[tuple[int, str]]:
    """The line and the name of every private name of torch or Triton that a source has.

    Found are private parts of imports, of attributes of what is imported from the two, and of modules named in strings;
    private attributes of any object that neither the library nor one of `OTHERS` has; methods of nn.Module that a class
    overrides; all of these in examples of docstrings.
    """
    tree, uses, imported = ast.parse(text), [], {"torch", "triton"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "triton"):
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname for alias in node.names if alias.asname and MODULE.fullmatch(alias.name)}

    def note(node: ast.AST, name: str, parts: list[str], own: frozenset[str] = frozenset()) -> None:
        if any(is_private(part) and part not in own for part in parts):
            uses.append((node.lineno, name))

    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    note_module(note, node, alias.name)
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    note_module(note, node, f"{module}.{alias.name}")
            case ast.Attribute(value=value, attr=attribute) if not is_self(value):
                names = dotted(node)
                own = frozenset() if names[0] in imported else own_names()
                note(node, ".".join(names), [attribute], own)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[_, name, *_]):
                if isinstance(name, ast.Constant):
                    note(node, name.value, [name.value], own_names())
            case ast.Constant(value=str(value)) if value in UNMARKED:
                note(node, value, [value])
            case ast.Constant(value=str(value)) if MODULE.fullmatch(value):
                note_module(note, node, value)
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                examples = doctest.DocTestParser().get_examples(docstring)
                uses += [(node.lineno, name) for _, name in private_uses("".join(each.source for each in examples))]
            case ast.ClassDef(body=body):
                for each in body:
                    name = getattr(each, "name", "")
                    note(each, f"nn.Module.{name}", [name] if hasattr(nn.Module, name) else [])
    return sorted(set(uses))


def test_private_names_of_torch_and_triton_stand_in_internals_alone():
    found = [
        f"{path.relative_to(ROOT.parent)}:{line} {name}"
        for path in SOURCES
        if path != ROOT / "internals.py"
        for line, name in private_uses(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    assert len(private_uses((ROOT / "internals.py").read_text(encoding="utf-8"))) > 30


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._functorch import config",
        "from torch.utils._pytree import tree_leaves",
        "from torch.distributed import distributed_c10d as c10d\nc10d._get_default_group()",
        "import torch.distributed as dist\ndist._get_default_group()",
        "torch._C._dispatch_keys(x)",
        "torch.autograd.forward_ad._current_level",
        "aten = torch.ops.aten\naten._scaled_dot_product_flash_attention(q, k, v)",
        "x.untyped_storage()._cdata",
        "group._get_backend(device)",
        "node.metadata.bw_donated_idxs = []",
        "getattr(launcher, 'gsan_enabled', False)",
        "hasattr(node, '_forward_cls')",
        "function._dynamo_marked_constant = True",
        "'torch._dynamo' in sys.modules",
        "triton.runtime._allocation",
        "class Layer(nn.Module):\n    def _slow_forward(self): ...",
        "'''Text.\n\n>>> from torch.testing._internal.distributed.fake_pg import FakeStore\n'''",
    ],
)
def test_a_private_name_is_found_wherever_it_is_planted(line):
    source = (ROOT / "ordering.py").read_text(encoding="utf-8")
    uses = private_uses(f"{source}\n{line}\n")
    assert uses
    for at, name in uses:
        assert at > source.count("\n")
        assert name.split(".")[-1] in line


@pytest.fixture
def forced(monkeypatch):
    """`hilbert_lib.internals` as it is where torch and Triton have none of its names."""
    monkeypatch.setenv("HILBERT_WITHOUT_INTERNALS", "1")
    spec = importlib.util.spec_from_file_location("internals_forced", ROOT / "internals.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_name_says_where_it_was_read_and_what_is_done_without_it(forced):
    public = [each for name, each in vars(forced).items() if inspect.isfunction(each) and not name.startswith("_")]
    own = [each for each in public if each.__module__ == forced.__name__]
    assert len(own) > 20
    for each in own:
        assert re.search(r"[Tt]riton 3\.\d|torch 2\.\d", each.__doc__), each.__name__
    for each in own:
        if each.__name__ not in (
            "group_barrier",
            "async_load",
            "async_store",
            "async_add",
            "reinterpret",
        ):  # these are always there
            assert "Without it:" in " ".join(each.__doc__.split()), each.__name__


LISTS = [None, "", "0,1", "-1", "1, 0", "2,x,1", "0,0", "3gpu,+1", "GPU-a,GPU-b,1", "MIG-a,GPU-b", "GPU-a,GPU-a"]


@pytest.mark.parametrize("shown", LISTS)
def test_without_torchs_parser_the_same_devices_are_visible(monkeypatch, forced, shown):
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert forced.visible_devices() == internals.visible_devices()


@pytest.mark.parametrize("shown", ["", "ab", "a", "b ac", "b b", "x b"])
def test_without_torchs_search_the_same_ordinals_are_found(forced, shown):
    shown, uuids = [f"GPU-{each}" for each in shown.split()], ["GPU-abc", "GPU-acd", "GPU-bcd"]
    assert forced.ordinals_of(shown, uuids) == internals.ordinals_of(shown, uuids)


SCRIPT = """
import sys, torch
from hilbert_lib import DilatedPattern, Neighbourhood, Ordering, dilated_attention, internals, neighbourhood_attention
x = torch.linspace(-3, 3, 3 * 64 * 2 * 4, dtype=torch.float64).sin().view(3, 1, 64, 2, 4)
calls = [
    lambda q, k, v: dilated_attention(q, k, v, DilatedPattern((16, 64), (1, 4)), backend=backend, is_causal=True)
    for backend in ("eager", "sdpa", "reference")
]
calls.append(lambda q, k, v: neighbourhood_attention(q, k, v, Neighbourhood((8, 8), 3), backend="eager"))
ordering = Ordering.from_curve("hilbert", 64)
calls.append(lambda q, k, v: dilated_attention(q, k, v, DilatedPattern((16,), (2,)), kv_ordering=ordering))
for call in calls:
    leaves = [each.clone().requires_grad_() for each in x]
    out = call(*leaves)
    grads = torch.autograd.grad(out.cos().sum(), leaves)
    print(*(f"{each.sum():.9f} {each.norm():.9f}" for each in (out, *grads)))
print(internals.WITHOUT_INTERNALS, file=sys.stderr)
"""


def test_without_any_private_name_outputs_and_gradients_are_the_same():
    printed = {}
    for forced in ("0", "1"):
        env = os.environ | {"HILBERT_WITHOUT_INTERNALS": forced, "TRITON_INTERPRET": "1"}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
        assert done.stderr.split()[-1] == str(forced == "1")
        printed[forced] = done.stdout
    assert printed["0"] == printed["1"]
    assert printed["0"].count("\n") == 5


INTERPRETED = """
import json
import torch
import triton.language as tl
from triton.runtime import interpreter
from hilbert_lib import Neighbourhood, neighbourhood_attention
places, changes, own = (tl, tl.core, tl.math), [], interpreter._patch_lang_core
interpreter._patch_lang_core = lambda *arguments: changes.append(arguments) or own(*arguments)
before = [dict(vars(each)) for each in places]
leaves = [each.requires_grad_() for each in torch.linspace(-3, 3, 3 * 64 * 16).sin().view(3, 1, 64, 1, 16)]
out = neighbourhood_attention(*leaves, Neighbourhood((8, 8), 3), backend="triton")
grads = torch.autograd.grad(out.cos().sum(), leaves)
bits = [each.flatten().tolist() for each in (out, *grads)]
is_as_before = before == [dict(vars(each)) for each in places]
print(json.dumps([bits, len(changes), is_as_before, interpreter.interpreter_builder.options.sanitize_overflow]))
"""


def test_the_interpreter_changes_its_language_once_for_a_function_and_back_and_gives_the_same_bits():
    pytest.importorskip("triton", reason="triton has no build for this platform")
    told = {}
    for forced in ("0", "1"):
        env = os.environ | {"HILBERT_WITHOUT_INTERNALS": forced, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True, check=True)
        told[forced] = json.loads(done.stdout)
    bits, changes, is_as_before, is_sanitized = told["0"]
    assert bits == told["1"][0]
    assert changes * 10 < told["1"][1]
    assert is_as_before
    assert is_sanitized


@pytest.mark.parametrize("is_forced", [False, True])
def test_results_from_below_autograd_have_no_gradient_and_serve_a_backward(forced, is_forced):
    run = (forced if is_forced else internals).run_below_autograd
    x = torch.ones(3, requires_grad=True)
    (y,) = run(lambda x: (x * 2,), x)
    assert not y.requires_grad
    (x * y).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("is_forced", [False, True])
def test_tensors_made_outside_of_fake_ones_have_values(forced, is_forced):
    from torch._subclasses.fake_tensor import FakeTensorMode

    made, made_outside_modes = [], (forced if is_forced else internals).made_outside_modes
    with FakeTensorMode():
        (fake,) = made_outside_modes(lambda: made.append(torch.arange(3)) or (made[0],))
        assert fake.shape == (3,)
        assert not internals.has_values(fake)
        assert not forced.has_values(fake)
    assert made[0].tolist() == [0, 1, 2]
    assert internals.has_values(made[0])
    assert forced.has_values(made[0])
    assert made_outside_modes(lambda: (made[0],))[0] is made[0]


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_false_condition_stops_what_runs(forced, is_forced):
    assert_async = (forced if is_forced else internals).assert_async
    assert_async(torch.tensor(True), "words")
    with pytest.raises(RuntimeError, match="words"):
        assert_async(torch.tensor(False), "words")
