"""A limit that was mistyped is no limit: what is refused, in arguments, files and variables, and which limit counts."""

import pytest
import torch
from cases import refusals

from hilbert_lib import (
    DilatedPattern,
    MemorySafetyChecker,
    Neighbourhood,
    ProgressiveTester,
    SafeBenchmarkRunner,
    SafetyConfig,
    Watcher,
    estimate_memory,
)
from hilbert_lib.lab.guarded.cases import attention_points
from hilbert_lib.launch.isolated import run_isolated
from hilbert_lib.limits.config import PREFIX
from hilbert_lib.limits.memory import measure_peak


def test_arguments_are_over_the_environment_over_a_file_over_defaults(tmp_path, monkeypatch):
    file = tmp_path / "limits.toml"
    with pytest.raises(FileNotFoundError):
        SafetyConfig.load(file)
    file.write_text("max_memory_share = 0.5\nmax_seconds = 30\nmin_free_host_gb = 3\n")
    monkeypatch.setenv(f"{PREFIX}MAX_SECONDS", "40")
    monkeypatch.setenv(f"{PREFIX}MIN_FREE_HOST_GB", "4")
    config = SafetyConfig.load(file, min_free_host_gb=5, growth_factor=None)
    expected = {"min_free_host_gb": 5.0, "max_seconds": 40.0, "max_memory_share": 0.5}
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.growth_factor == SafetyConfig().growth_factor


MISTYPED = [  # what stands in a file, or in a variable, and what is said of it
    (b"memory_share = 0.5", r"{path} has no key 'memory_share'; did you mean 'max_memory_share'"),
    (b"max_seconds = = 3", "{path} must be a TOML file: Invalid value"),
    (b"\xff\xfe\x00", "{path} must be a TOML file: .* invalid start byte"),
    (b'max_seconds = "5"', "{path}: max_seconds must be a number, got '5'"),
    (b"max_seconds = 0", "{path}: max_seconds must be above 0 and at most 100000000, got 0"),
    (b"max_seconds = 1e10", "{path}: max_seconds must be above 0 and at most 100000000, got 10000000000"),
    (("GROWTH", "2"), f"there is no variable .*{PREFIX}GROWTH_FACTOR"),
    (("MAX_SECONDS", "long"), f"{PREFIX}MAX_SECONDS must be a number, got 'long'"),
    (("MAX_SECONDS", "nan"), f"{PREFIX}MAX_SECONDS must be above 0 and at most 100000000, got nan"),
    (("MAX_SECONDS", "inf"), f"{PREFIX}MAX_SECONDS must be above 0 and at most 100000000, got inf"),
]


@pytest.mark.parametrize(("content", "words"), MISTYPED, ids=[words for _, words in MISTYPED])
def test_what_is_wrong_in_a_file_or_a_variable_is_told_with_its_name(tmp_path, monkeypatch, content, words):
    path = tmp_path / "limits.toml"
    if is_file := isinstance(content, bytes):
        path.write_bytes(content)
    else:
        monkeypatch.setenv(PREFIX + content[0], content[1])
    error = TypeError if "must be a number, got '5'" in words else ValueError
    with pytest.raises(error, match=f"^{words.format(path=path)}"):
        SafetyConfig.load(path if is_file else None)


PATTERN = DilatedPattern((4, 8), (1, 2))
NEAR = Neighbourhood((4, 4), 3)
POINTS = {"lengths": [8], "backends": ["eager"]}
SIZES = {"length": 64, "heads": 2, "head_dim": 8, "backend": "eager", "device": "cpu"}
NAN = float("nan")


def checker(required):
    return MemorySafetyChecker(device="cpu").check_memory_available(required)


def progressive(*lengths, **options):
    return ProgressiveTester(device="cpu").run_progressive_test(*lengths, **options)


def points(pattern=PATTERN, **options):
    return attention_points(pattern, **{**POINTS, **options})


def ran(point):
    return SafeBenchmarkRunner(device="cpu").run([point])


def estimated(pattern=PATTERN, **options):
    return estimate_memory(pattern, **{**SIZES, **options})


TYPES = [
    (lambda: SafetyConfig(min_free_host_gb="1"), "min_free_host_gb must be a number, got '1'"),
    (lambda: checker("1"), "required_gb must be a number, got '1'"),
    (lambda: MemorySafetyChecker({"max_seconds": 1}), "config must be a SafetyConfig or None, got {'max_seconds': 1}"),
    (lambda: Watcher(0.9), "config must be a SafetyConfig or None, got 0.9"),
    (lambda: Watcher(device="cpu", pid="1"), "pid must be an integer of at least 0, got '1'"),
    (lambda: Watcher(device="cpu", on_limit="stop"), "on_limit must be a function or None, got 'stop'"),
    (lambda: ProgressiveTester("safe"), "config must be a SafetyConfig or None, got 'safe'"),
    (lambda: progressive(1.5, 4), "start_len must be an integer of at least 1, got 1.5"),
    (lambda: progressive(4, 8, run=0, estimate=0), "run must be a function of a length, got 0"),
    (lambda: progressive(4, 8, run=torch.zeros, estimate=32), "estimate must be a function of a length, got 32"),
    (lambda: progressive(4, 8, run=torch.zeros, estimate=lambda n: None), r"estimate\(4\) must be a number, got None"),
    (lambda: estimated(None), r"pattern must be a Pattern, such as .*; got NoneType"),
    (lambda: estimated(has_key_padding=torch.zeros(2)), "has_key_padding must be True or False, got tensor"),
    (lambda: estimated(has_kv_ordering="auto"), "has_kv_ordering must be True or False, got 'auto'"),
    (lambda: points(None), "pattern must be a DilatedPattern, got NoneType"),
    (lambda: SafeBenchmarkRunner(benchmark="attention", device="cpu"), "benchmark must be a Benchmark, got 'att"),
]
VALUES = [
    (lambda: SafetyConfig(max_seconds=10**400), "max_seconds must be above 0 and at most 100000000"),
    (lambda: checker(NAN), "required_gb must be at least 0, got nan"),
    (lambda: MemorySafetyChecker(device="meta"), "device must be the CPU or a GPU that this process sees, got meta"),
    (lambda: MemorySafetyChecker(device="cuda:99"), "device must be the CPU or a GPU .* got cuda:99"),
    (lambda: measure_peak(list, "cuda:99"), "device must be the CPU or a GPU .* got cuda:99"),
    (lambda: Watcher(device="cpu", pid=-1), "pid must be an integer of at least 0, got -1"),
    (lambda: progressive(8, 4), "end_len must be an integer of at least 8, got 4"),
    (lambda: progressive(4, 8, run=torch.zeros), "run and estimate must be given together"),
    (lambda: progressive(4, 8, run=torch.zeros, estimate=lambda n: NAN), r"estimate\(4\) must be at least 0, got nan"),
    (lambda: estimated(dtype="bfloat16"), "dtype must be one of torch.float16, .* got 'bfloat16'"),
    (lambda: points(lengths=[]), "lengths must hold at least one integer"),
    (lambda: points(lengths=[8, 2**62]), r"lengths must be such that .* 2\^63 bytes, got 4611686018427387904"),
    (lambda: points(backends="eager"), "backends must be a list of hopper, triton, .* got 'eager'"),
    (lambda: points(backends=["fast"]), r"backends must be a list of .* got \['fast'\]"),
    (lambda: points(dtype="int32"), "dtype must be one of float16, .* got 'int32'"),
    (lambda: points(device="gpu"), "device must be a device that torch knows, .* got 'gpu'"),
    (lambda: ran({"length": 8}), "points must be dictionaries with the names"),
    (lambda: ran({"sides": []}), "points must be dictionaries with the names"),
    (lambda: ran({"sides": ["eager"]}), r"points must have pattern, .* got {'sides': \['eager'\]}"),
    (lambda: ran(points()[0] | {"sides": ["eager", "foo"]}), "points must have sides of hopper, triton, .* got 'foo'"),
    (lambda: run_isolated("print", [], seconds=1), "target must be 'module:function', got 'print'"),
    (lambda: run_isolated("builtins:print", [], seconds=-1), "seconds must be finite and above 0, got -1"),
    (lambda: run_isolated("builtins:print", [], seconds=1e10), r"seconds must be at most 1e\+08, got 1e\+10"),
    (lambda: SafetyConfig(max_memory_share=1.01), "max_memory_share must be above 0 and at most 1, got 1.01"),
    (lambda: SafetyConfig(min_free_gpu_gb=-1), "min_free_gpu_gb must be at least 0 and finite, got -1"),
    (lambda: SafetyConfig(min_free_host_gb=float("inf")), "min_free_host_gb must be at least 0 and finite, got inf"),
    (lambda: SafetyConfig(growth_factor=1), "growth_factor must be above 1 and finite, got 1"),
    (lambda: SafetyConfig(max_temperature_c=NAN), "max_temperature_c must be above 0 and finite, got nan"),
    (lambda: SafetyConfig.load(max_second=1), "load has no argument 'max_second'; did you mean 'max_seconds'"),
    (lambda: estimated(direction="both"), "direction must be one of forward, backward; got 'both'"),
    (lambda: estimated(backend="sdpa", dropout_p=0.5), "backend='sdpa' cannot serve: no dropout"),
    (lambda: estimated(backend="fast"), "backend must be one of .* got 'fast'"),
    (lambda: estimated(queries=65), "queries must be an integer from 1 to 64, got 65"),
    (lambda: estimated(length=0), "length must be an integer of at least 1, got 0"),
    (lambda: estimated(heads=4, kv_heads=3), r"kv_heads must divide heads \(4\), got 3"),
    (lambda: estimated(extra=2), "extra must be 0 unless the call is on a grid, got 2"),
    (lambda: estimated(extra_queries=2), "extra_queries must be 0 unless the call is on a grid, got 2"),
    (lambda: estimated(has_bias=True), "has_bias must be left out unless the call is on a grid, got True"),
    (lambda: estimated(NEAR), "length must be left out for a call on a grid, got 64"),
    (lambda: estimated(NEAR, length=None, is_causal=True), "is_causal must be left out for .* a grid, got True"),
    (lambda: estimated(query_box=((0, 1),)), "query_box must be left out unless the call is on a grid"),
    (lambda: estimated(NEAR, length=None, query_box=((0, 9), (0, 1))), r"query_box\[0\] must be .* 4; got \(0, 9\)"),
    (
        lambda: estimated(Neighbourhood((8,), 3), length=None, query_box=((0, 1),), queries=1),
        "query_box must be left out with queries or has_key_start",
    ),
    (lambda: estimated((NEAR,), length=None), "one for each of the 2 KV heads, got 1"),
    (lambda: estimated(NEAR, length=None, extra=-1), "extra must be an integer of at least 0, got -1"),
]
test_a_wrong_argument_is_refused = refusals({TypeError: TYPES, ValueError: VALUES})
