"""Each backend says honestly whether it can serve a call, and why not."""

import importlib.machinery
import importlib.util
import json
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from cases import TOLERANCE, assert_close, attended, determinism, expected

from hilbert_lib import DilatedPattern, explain_backend, machine
from hilbert_lib.attention import choice
from hilbert_lib.attention.backends import backend as backends
from hilbert_lib.attention.backends import dense, flex, fused, presence
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.rules import HALF_RULES

PACKAGES = ["flash_attn_4", "flash_attn_3", "flash_attn_2", "xformers"]
NAMES = ["hopper", "triton", "cudnn", "flash", *PACKAGES, "flex", "sdpa", "eager", "reference"]
PATTERN = DilatedPattern((8, 16), (1, 2))


def test_every_backend_is_listed_and_flash_attention_1_has_no_build():
    assert list(BACKENDS) == NAMES
    q = torch.zeros(1, 16, 2, 16)
    explanation = explain_backend(q, q, q, PATTERN)
    assert set(explanation.reasons) == {*NAMES, "flash_attn_1"}
    assert "no build" in explanation.reasons["flash_attn_1"]
    assert "sdpa" in explanation.reasons["flash_attn_1"]


def on_gpu(dtype=torch.bfloat16, head_dim=64, rows=16, heads=2):
    """What a refusal asks of q or k, on a GPU that is not here."""
    device = SimpleNamespace(type="cuda")
    shape = torch.Size((1, rows, heads, head_dim))
    return SimpleNamespace(
        device=device, dtype=dtype, is_cuda=True, shape=shape, element_size=lambda: dtype.itemsize, requires_grad=False
    )


@pytest.fixture
def gpu(monkeypatch):
    """Sets the capability of that GPU, and says that all packages are there, unless it is to look for them.

    torch has all its operators for it.
    """
    operators = dict.fromkeys(vars(dense.dense_operators), object())
    monkeypatch.setattr(dense, "dense_operators", SimpleNamespace(**operators))

    def set_capability(*capability, with_packages=True):
        monkeypatch.setattr(backends, "capability", lambda device: capability)
        for question in ("absence", "breakage") if with_packages else ():
            monkeypatch.setattr(presence, question, lambda package: "")
        monkeypatch.setattr(fused, "absence", lambda device: "")
        monkeypatch.setattr(fused, "kernel_mode", lambda: "compiled")
        monkeypatch.setattr(flex, "kernel_mode", lambda: "compiled")

    return set_capability


HALVES = {"cudnn", "flash", "flash_attn_2", "flex"}
SERVED = [  # capability, dtype, head_dim, which serve beside triton, eager and reference
    ((6, 1), torch.float32, 64, {"sdpa", "xformers"}),
    ((7, 0), torch.float16, 64, {"sdpa", "xformers"}),
    ((7, 5), torch.float16, 64, {"sdpa", "xformers"}),
    ((7, 5), torch.bfloat16, 64, set()),
    ((8, 0), torch.bfloat16, 64, HALVES | {"sdpa", "xformers"}),
    ((8, 9), torch.float16, 128, HALVES | {"sdpa", "xformers"}),
    ((9, 0), torch.bfloat16, 128, HALVES | {"hopper", "sdpa", "xformers", "flash_attn_3", "flash_attn_4"}),
    ((9, 0), torch.bfloat16, 256, HALVES - {"cudnn"} | {"hopper", "sdpa", "xformers", "flash_attn_3"}),
    ((8, 6), torch.bfloat16, 192, HALVES - {"cudnn"} | {"sdpa", "xformers"}),
    ((8, 6), torch.bfloat16, 200, HALVES - {"cudnn", "flash"} | {"sdpa", "xformers"}),
    ((8, 9), torch.float16, 224, HALVES - {"cudnn", "flash"} | {"sdpa", "xformers"}),
    ((8, 0), torch.bfloat16, 224, HALVES - {"cudnn"} | {"sdpa", "xformers"}),
    ((12, 0), torch.bfloat16, 208, HALVES - {"cudnn", "flash"} | {"sdpa", "xformers"}),
    ((12, 0), torch.bfloat16, 256, HALVES - {"cudnn"} | {"sdpa", "xformers"}),
    ((9, 0), torch.bfloat16, 20, set()),
    ((9, 0), torch.bfloat16, 8, HALVES - {"flex"} | {"hopper", "sdpa", "xformers", "flash_attn_3", "flash_attn_4"}),
    ((9, 0), torch.float32, 64, {"sdpa", "xformers"}),
    ((9, 0), torch.float64, 64, set()),
    ((10, 0), torch.bfloat16, 64, HALVES | {"sdpa", "xformers", "flash_attn_4"}),
    ((12, 0), torch.float32, 64, {"sdpa"}),
]


@pytest.mark.parametrize(("capability", "dtype", "head_dim", "served"), SERVED)
def test_which_backends_serve_a_plain_call(gpu, capability, dtype, head_dim, served):
    gpu(*capability)
    q = on_gpu(dtype, head_dim)
    serving = {name for name, backend in BACKENDS.items() if not backend.refusal(q, Request(PATTERN))}
    assert serving - {"triton"} == served | {"eager", "reference"}
    assert ("triton" in serving) == (dtype != torch.float64)


# What "auto" tried, in order, when "triton" was the name of the plain kernels and of the warp-specialised ones.
FLASH = ("flash_attn_4", "flash_attn_3", "flash", "flash_attn_2")
BEFORE = {
    (9, 0): ("triton", "cudnn", *FLASH, "xformers", "sdpa", "eager"),
    (8, 0): ("triton", "cudnn", "flash_attn_2", "flash", "xformers", "sdpa", "eager"),
    (10, 0): ("cudnn", "flash_attn_4", "triton", "flash", "flash_attn_2", "xformers", "sdpa", "eager"),
    (7, 5): ("sdpa", "xformers", "eager"),
}
BEFORE_IN_FULL = ("sdpa", "triton", "eager")
PATTERNS = [((1024, 4096), (1, 4)), ((4096,), (3,)), ((2**30,), (5,)), ((4096, 2**30), (4, 7))]
ROWS = {"all": (16400, 16400), "some": (4096, 16400), "one": (1, 16400), "few of few": (6, 20), "few": (12, 12)}
ROWS |= {"a multiple of the rates": (16380, 16380)}
OPTIONS = {
    "plain": {},
    "dropout": {"dropout_p": 0.1},
    "padding": {"key_padding_mask": torch.zeros(1, 1, dtype=torch.bool)},
    "documents": {"cu_seqlens": torch.zeros(2, dtype=torch.int32)},
    "ordering": {},
}


def kernels_before(capability, q, k, call, has_ordering) -> tuple[str, bool]:
    """Which kernels ran by "auto", and whether k and v were copied in sequence order first.

    With a key_padding_mask, with dropout, with packed documents and above a head_dim of 128 the plain ones ran, where
    these run now.
    """
    from hilbert_lib.attention.triton import decode
    from hilbert_lib.attention.triton.hopper import division

    order = BEFORE[capability] if q.element_size() == 2 else BEFORE_IN_FULL
    if call.cu_seqlens is not None:
        order = sorted(order, key=lambda name: name != "triton")
    name = next(each for each in order if not BACKENDS[each].refusal(q, call, k))
    is_copied = has_ordering and choice.is_undone("auto", name, q.device, call, q.shape[1])
    if name != "triton":
        return name, is_copied
    if decode.serves(q, k, call):
        return "decoding", is_copied
    on_hopper = (
        capability == (9, 0)
        and q.element_size() == 2
        and q.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and is_copied == has_ordering
        and any(division.is_reached(w, r, k.shape[1]) for w, r in call.pattern.branches)
    )
    return "warp-specialised" if on_hopper else "plain", is_copied


def kernels_now(q, k, call, has_ordering) -> tuple[str, bool]:
    from hilbert_lib.attention.triton import decode

    name = choice.serving(q, k, call, "auto", gradient=False, has_ordering=has_ordering)
    is_copied = has_ordering and choice.is_undone("auto", name, q.device, call, q.shape[1])
    plain = "decoding" if decode.serves(q, k, call) else "plain"
    return {"hopper": "warp-specialised", "triton": plain}.get(name, name), is_copied


@pytest.mark.parametrize("capability", BEFORE)
def test_auto_runs_the_kernels_that_it_ran_when_both_had_one_name(monkeypatch, gpu, capability):
    pytest.importorskip("triton", reason="triton has no build for this platform")
    gpu(*capability)
    architecture = [name for least, name in machine.ARCHITECTURES if least <= capability][-1]
    monkeypatch.setattr(choice, "get_gpu_info", lambda device: SimpleNamespace(architecture=architecture))
    monkeypatch.setattr(choice, "remembered_rules", lambda device, dtype: ())
    # Short calls have gone to the plain kernels since.
    monkeypatch.setattr("hilbert_lib.attention.triton.schedule.SHORT_ROWS", 0)
    dtypes, head_dims = (torch.bfloat16, torch.float16, torch.float32, torch.float64), (8, 20, 64, 128, 192)
    seen = set()
    for dtype, head_dim, branches, rows, option in product(dtypes, head_dims, PATTERNS, ROWS.values(), OPTIONS):
        queries, keys = rows
        start = None if queries == keys else keys - queries
        if option == "documents" and start is not None:
            continue
        q, k = on_gpu(dtype, head_dim, queries, heads=8), on_gpu(dtype, head_dim, keys, heads=2)
        call = Request(DilatedPattern(*branches), scale=head_dim**-0.5, query_start=start, **OPTIONS[option])
        found = kernels_now(q, k, call, option == "ordering")
        assert found == kernels_before(capability, q, k, call, option == "ordering"), (q, k, call)
        seen.add(found)
    of_all = {name for name, _ in seen}
    assert ("warp-specialised" in of_all) == (capability == (9, 0))
    assert of_all >= ({"decoding", "plain"} if capability != (7, 5) else {"sdpa", "eager"})
    if capability == (9, 0):
        assert seen >= {("warp-specialised", True), ("warp-specialised", False), ("plain", False), ("decoding", False)}


@pytest.mark.parametrize(
    ("given", "queries", "words"),
    [
        ({"capability": (8, 0)}, 16, "needs compute capability 9.x"),
        ({"dtype": torch.float32}, 16, "serves float16 and bfloat16, got float32"),
        ({"head_dim": 264}, 16, "serves a head_dim up to 256, a multiple of 8; got 264"),
        ({"head_dim": 20}, 16, "serves a head_dim up to 256, a multiple of 8; got 20"),
        ({"head_dim": 256}, 16, ""),
        (
            {"dropout_p": 0.1, "seed": torch.zeros(12, dtype=torch.int32)},
            16,
            "no dropout of a part of a larger call, got dropout_p=0.1; 'triton' serves it",
        ),
        ({"dropout_p": 0.1, "seed": torch.zeros(1, dtype=torch.int64)}, 16, ""),
        ({"cu_seqlens": torch.tensor([0, 16])}, 16, ""),
        ({"inverse": torch.arange(16)}, 16, "reads k and v in sequence order alone; 'triton' serves it"),
        ({"pattern": DilatedPattern((64,), (3,))}, 16, "no branch of 16 keys is one; 'triton' serves it"),
        ({"query_start": 15}, 1, "decodes nothing: 1 queries of 16 keys are shared out key by key; 'triton' serves it"),
        ({}, 24, "no query without a key at its position, got 24 queries of 16 keys; 'triton' serves it"),
        ({"query_start": 10}, 6, ""),
        ({"key_padding_mask": torch.zeros(1, 16, dtype=torch.bool)}, 16, ""),
        ({}, 16, ""),
    ],
)
def test_what_the_warp_specialised_kernels_do_not_serve_is_named(gpu, given, queries, words):
    pytest.importorskip("triton", reason="triton has no build for this platform")
    given = {"pattern": PATTERN, "capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 64, **given}
    gpu(*given.pop("capability"))
    form = given.pop("dtype"), given.pop("head_dim")
    q, k = on_gpu(*form, queries), on_gpu(*form)
    refusal = BACKENDS["hopper"].refusal(q, Request(**given), k)
    assert words in refusal
    assert bool(words) == bool(refusal)


def test_the_choice_of_an_exported_program_asks_for_no_length(monkeypatch, gpu):
    pytest.importorskip("triton", reason="triton has no build for this platform")
    gpu(9, 0)
    unreached = Request(DilatedPattern((64,), (3,)))
    assert BACKENDS["hopper"].refusal(on_gpu(), unreached)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert not BACKENDS["hopper"].refusal(on_gpu(), unreached)


@pytest.mark.parametrize("option", ["dropout_p", "key_padding_mask", "query_start"])
def test_options_that_a_kernel_lacks_are_refused_by_name(gpu, option):
    gpu(9, 0)
    given = {"dropout_p": 0.1, "key_padding_mask": torch.zeros(1, 16, dtype=torch.bool), "query_start": 3}[option]
    for name in NAMES:
        refusal = BACKENDS[name].refusal(on_gpu(), Request(PATTERN, **{option: given}))
        lacks_it = name not in ("hopper", "triton", "eager", "reference")
        assert refusal.startswith(f"no {option.removesuffix('_p')}") if lacks_it else not refusal, name


def test_that_flex_fails_under_reduce_overhead_is_told(gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(presence, "state", lambda package: "")
    monkeypatch.setattr(choice, "rule_for", lambda *_, **__: HALF_RULES["Hopper"])
    for name in ("auto", "flex"):
        told = choice.explain(on_gpu(), on_gpu(), Request(PATTERN), name, gradient=False).reasons
        assert "torch refused it under torch.compile(mode='reduce-overhead')" in told["flex"]
        assert "reduce-overhead" not in told["triton"]


@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize("direction", ["", "_backward"])
def test_a_backend_is_refused_where_torch_lacks_its_operator(monkeypatch, gpu, name, direction):
    gpu(9, 0)
    monkeypatch.setattr(dense.dense_operators, f"{name}_attention{direction}", None)
    other = {"flash": "cudnn", "cudnn": "flash"}[name]
    assert f"has no operator _scaled_dot_product_{name}" in BACKENDS[name].refusal(on_gpu(), Request(PATTERN))
    assert not BACKENDS[other].refusal(on_gpu(), Request(PATTERN))


def test_cudnn_is_refused_where_torch_is_asked_for_determinism(gpu):
    gpu(9, 0)
    assert not BACKENDS["cudnn"].refusal(on_gpu(), Request(PATTERN))
    with determinism():
        assert "order that varies" in BACKENDS["cudnn"].refusal(on_gpu(), Request(PATTERN))
        assert not BACKENDS["flash"].refusal(on_gpu(), Request(PATTERN))


# What is installed: files below a folder of packages, and the versions that their metadata names.
FA2 = {"flash_attn/__init__.py": "", "flash_attn/flash_attn_interface.py": "", "flash_attn_2_cuda.py": ""}
NOT_COMPILED = {name: text for name, text in FA2.items() if name != "flash_attn_2_cuda.py"}
FA4 = {"flash_attn/cute/interface.py": "", "cutlass/__init__.py": ""}
ON_A_PATH = {"flash_attn/cute/interface.py": ""}  # a folder on PYTHONPATH, whose .pth files nobody reads
STACK = dict.fromkeys(presence.CUTE_STACK, "1.0")
LACKING = {"flash-attn-4": "4.0.0b36", **STACK} | {"quack-kernels": None, "apache-tvm-ffi": None}
AT_35 = {"xformers": "0.0.35"}
XFORMERS = {
    "xformers/__init__.py": "",
    "xformers/cpp_lib.json": json.dumps({"version": {"torch": "2.10.0+cu128", "cuda": 1208}}),
}
STATES = {
    "nothing": ({}, {}, "flash_attn_2", "absent: pip install 'FOLDER[flash-attn]'"),
    "nothing of 3": ({}, {}, "flash_attn_3", "absent: there is no module flash_attn_interface"),
    "nothing of 4": (FA2, {"flash-attn": "2.8.3"}, "flash_attn_4", "absent: pip install 'FOLDER[flash-attn-4]'"),
    "nothing of xformers": ({}, {}, "xformers", "absent: pip install 'FOLDER[xformers]'"),
    "2": (FA2, {"flash-attn": "2.10.0"}, "flash_attn_2", ""),  # as text it is less than "2.7"
    "2, old": (FA2, {"flash-attn": "2.6.1"}, "flash_attn_2", "flash-attn 2.6.1 is too old: needs 2.7 or later"),
    "2, not compiled": (NOT_COMPILED, {"flash-attn": "2.8.3"}, "flash_attn_2", "part flash_attn_2_cuda"),
    "4 is no 2": (FA4, {"flash-attn-4": "4.0.0b36"}, "flash_attn_2", "absent: pip"),
    "3": ({"flash_attn_interface.py": "", "flash_attn_3/__init__.py": ""}, {}, "flash_attn_3", ""),
    "3, not compiled": ({"flash_attn_interface.py": ""}, {}, "flash_attn_3", "without its compiled part flash_attn_3"),
    "4": (FA4, {"flash-attn-4": "4.0.0b36", **STACK}, "flash_attn_4", ""),
    "4 beside 2": ({**FA2, **FA4}, {"flash-attn": "2.8.3", "flash-attn-4": "4", **STACK}, "flash_attn_4", ""),
    "4 on a path": (
        ON_A_PATH,
        {"flash-attn-4": "4", **STACK},
        "flash_attn_4",
        "flash-attn-4 4 finds no module cutlass",
    ),
    "4 without its stack": (FA4, LACKING, "flash_attn_4", "b36 is installed without quack-kernels, apache-tvm-ffi"),
    "xformers": (XFORMERS, AT_35, "xformers", ""),
    "xformers, not compiled": ({"xformers/__init__.py": ""}, AT_35, "xformers", "without its compiled part"),
    "xformers beside 2": ({**XFORMERS, **FA2}, AT_35, "xformers", ""),
    "xformers beside 4": ({**XFORMERS, **FA4}, AT_35, "xformers", "xformers 0.0.35 cannot be imported"),
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes a machine of files and versions, of which nothing can be imported."""

    def install(files, versions):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text or "raise AssertionError('imported')\n")

        def version(name):
            if versions.get(name) is None:
                raise PackageNotFoundError(name)
            return versions[name]

        find = partial(importlib.machinery.PathFinder.find_spec, path=[str(tmp_path)])
        monkeypatch.setattr(importlib.util, "find_spec", find)
        monkeypatch.setattr(machine, "version", version)
        monkeypatch.setattr(presence, "_loads", lambda library: True)  # a CUDA build of torch asks for a runtime
        forget()

    yield install
    forget()


def forget():
    for question in (*presence._ABSENCE.values(), presence._xformers_build, presence._breakage):
        question.cache_clear()


@pytest.mark.parametrize("case", STATES)
def test_the_state_of_a_package_is_told_in_words_and_nothing_is_imported(installed, case):
    files, versions, package, reason = STATES[case]
    installed(files, versions)
    got = presence.absence(package)
    assert reason in got if reason else got == ""


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """Lets those files be imported, and forgets the modules."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_package_that_does_not_load_serves_nothing_and_says_why(gpu, installed, importable, tmp_path):
    error = "libtvm_ffi.so: cannot open shared object file"
    files = FA4 | {"flash_attn/cute/interface.py": f"raise ImportError({error!r} + chr(10) + 'more')\n"}
    installed(files, {"flash-attn-4": "4.0.0b36", **STACK})
    gpu(9, 0, with_packages=False)
    backend, wanted = BACKENDS["flash_attn_4"], f"flash-attn-4 4.0.0b36 cannot be imported: ImportError: {error}"
    assert backend.refusal(on_gpu(torch.float32), Request(PATTERN)).startswith("serves float16")
    assert "flash_attn.cute" not in sys.modules  # nothing that cannot serve anyway is imported
    assert backend.refusal(on_gpu(), Request(PATTERN)) == wanted
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("")
    importlib.invalidate_caches()
    assert backend.refusal(on_gpu(), Request(PATTERN)) == wanted  # asked once: what has failed to load is not whole
    presence._breakage.cache_clear()
    assert not backend.refusal(on_gpu(), Request(PATTERN))


@pytest.mark.parametrize(("cuda", "found"), [("13.0", True), ("13.0", False), (None, False)])
def test_whether_the_kernels_of_xformers_load_is_told(installed, monkeypatch, cuda, found):
    asked = []
    monkeypatch.setattr(torch.version, "cuda", cuda)
    installed(XFORMERS, AT_35)
    monkeypatch.setattr(presence, "_loads", lambda library: asked.append(library) or found)
    reason = presence.absence("xformers")
    assert asked == ["libcudart.so.12"] * bool(cuda)
    if cuda and not found:
        assert reason == "xformers 0.0.35 is compiled for a CUDA whose libcudart.so.12 is not found here"
    else:
        assert reason == ""
        assert presence.state("xformers") == "xformers 0.0.35 compiled for torch 2.10.0+cu128"


# How xformers 0.0.35 keeps to itself that its compiled part does not load, and how it tells that it does.
KEPT = {
    "undefined symbol": """
class InvalidLib(Exception):
    pass

try:
    try:
        cause = OSError("_C.so: undefined symbol: _ZN3c104warn" + chr(10) + "more")
        raise OSError("Could not load this library: _C.so") from cause  # as torch does
    except OSError as error:
        raise InvalidLib("can't load C++/CUDA extensions. It was built for:" + chr(10) + "torch 2.10") from error
except InvalidLib as error:
    _cpp_library_load_exception = error
""",
    "not built": "_cpp_library_load_exception = RuntimeError('Need to compile C++ extensions')",
    "loaded": "_cpp_library_load_exception = None",
    "another release": "pass",
}
TOLD = {
    "undefined symbol": "OSError: _C.so: undefined symbol: _ZN3c104warn",
    "not built": "RuntimeError: Need to compile C++ extensions",
}


@pytest.mark.parametrize("case", KEPT)
def test_xformers_without_its_compiled_part_cannot_serve(gpu, installed, importable, case):
    files = {"xformers/__init__.py": "from . import _cpp_lib", "xformers/ops.py": "pass"}
    installed({**XFORMERS, **files, "xformers/_cpp_lib.py": KEPT[case]}, AT_35)
    gpu(9, 0, with_packages=False)
    said = "xformers 0.0.35 is imported without its compiled part, and none of its kernels run: "
    assert BACKENDS["xformers"].refusal(on_gpu(), Request(PATTERN)) == (said + TOLD[case] if case in TOLD else "")


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", [*PACKAGES, "flex"])
def test_what_serves_on_this_gpu_equals_the_oracle(name, is_causal):
    pattern, tensors, *exact, grads = expected("sparse", "branch", "softmax", torch.bfloat16, "wide", is_causal)
    tensors = [x.cuda() for x in tensors]
    explanation = explain_backend(*tensors[:3], pattern, is_causal=is_causal, backend=name)
    if not explanation.chosen:
        pytest.skip(explanation.reasons[name])
    most, _, of_gradients = TOLERANCE[torch.bfloat16]
    tolerances = most, 2e-3, *[of_gradients] * 3
    assert_close(attended(tensors, pattern, name, is_causal=is_causal), (*exact, *grads), tolerances)


def test_an_option_that_came_later_is_refused_unless_it_is_named(monkeypatch):
    monkeypatch.setattr(backends, "_LATER", (("softcap", 0.0),))
    q = torch.ones(1, 4, 1, 8)

    def asked(softcap):
        call = Request(DilatedPattern((4,), (1,)))
        object.__setattr__(call, "softcap", softcap)
        return call

    for backend in BACKENDS.values():
        assert backend.refusal(q, asked(1.0)) == "no softcap"
        assert replace(backend, options=("softcap",)).refusal(q, asked(1.0)) == backend.refusal(q, asked(0.0))
