"""Limits: where they come from, in which order, and what is refused."""

import pytest

from hilbert_lib.limits.config import PREFIX, SafetyConfig


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text("max_memory_share = 0.5\nmax_seconds = 30\nmin_free_host_gb = 3\n")
    return path


def test_arguments_are_over_the_environment_over_a_file_over_defaults(file, monkeypatch):
    monkeypatch.setenv(f"{PREFIX}MAX_SECONDS", "40")
    monkeypatch.setenv(f"{PREFIX}MIN_FREE_HOST_GB", "4")
    config = SafetyConfig.load(file, min_free_host_gb=5, growth_factor=None)
    expected = {"min_free_host_gb": 5.0, "max_seconds": 40.0, "max_memory_share": 0.5}
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.growth_factor == SafetyConfig().growth_factor


def test_unknown_names_are_refused_wherever_they_stand_and_the_nearest_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="has no argument 'max_second'; did you mean 'max_seconds'"):
        SafetyConfig.load(max_second=1)
    path = tmp_path / "limits.toml"
    path.write_text("memory_share = 0.5\n")
    with pytest.raises(ValueError, match=r"limits\.toml has no key 'memory_share'; did you mean 'max_memory_share'"):
        SafetyConfig.load(path)
    monkeypatch.setenv(f"{PREFIX}GROWTH", "2")
    with pytest.raises(ValueError, match=f"{PREFIX}GROWTH_FACTOR"):
        SafetyConfig.load()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_memory_share", 0, "above 0 and at most 1"),
        ("max_memory_share", 1.01, "above 0 and at most 1"),
        ("min_free_gpu_gb", -1, "at least 0"),
        ("min_free_host_gb", float("inf"), "finite"),
        ("max_seconds", 0, "above 0"),
        ("growth_factor", 1, "above 1"),
        ("max_temperature_c", float("nan"), "above 0"),
    ],
)
def test_values_out_of_range_are_refused(name, value, allowed):
    with pytest.raises(ValueError, match=f"{name} must be .*{allowed}"):
        SafetyConfig(**{name: value})


@pytest.mark.parametrize("value", ["90", None, True])
def test_values_that_are_no_numbers_are_refused(value):
    with pytest.raises(TypeError, match="max_seconds must be a number"):
        SafetyConfig(max_seconds=value)


def test_a_variable_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv(f"{PREFIX}MAX_SECONDS", "long")
    with pytest.raises(ValueError, match=f"{PREFIX}MAX_SECONDS must be a number, got 'long'"):
        SafetyConfig.load()


@pytest.mark.parametrize("value", ["0", "nan", "inf"])
def test_a_variable_out_of_range_is_named(monkeypatch, value):
    monkeypatch.setenv(f"{PREFIX}MAX_SECONDS", value)
    with pytest.raises(
        ValueError, match=f"{PREFIX}MAX_SECONDS must be above 0 and at most 100000000, got {float(value)}"
    ):
        SafetyConfig.load()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"max_seconds = = 3", " must be a TOML file: Invalid value"),
        (b"\xff\xfe\x00", " must be a TOML file: .* invalid start byte"),
        (b'max_seconds = "5"', ": max_seconds must be a number, got '5'"),
        (b"max_seconds = 0", ": max_seconds must be above 0 and at most 100000000, got 0"),
        (b"max_seconds = 1e10", ": max_seconds must be above 0 and at most 100000000, got 10000000000"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_name(tmp_path, content, words):
    path = tmp_path / "limits.toml"
    path.write_bytes(content)
    with pytest.raises((ValueError, TypeError), match=f"^{path}{words}"):
        SafetyConfig.load(path)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        SafetyConfig.load(tmp_path / "none.toml")
