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


WRONG = [  # what stands in a file, or in a variable, and what is said of it
    (b"memory_share = 0.5", r"{path} has no key 'memory_share'; did you mean 'max_memory_share'"),
    (b"max_seconds = = 3", "{path} must be a TOML file: Invalid value"),
    (b"\xff\xfe\x00", "{path} must be a TOML file: .* invalid start byte"),
    (b'max_seconds = "5"', "{path}: max_seconds must be a number, got '5'"),
    (b"max_seconds = 0", "{path}: max_seconds must be above 0 and at most 100000000, got 0"),
    (b"max_seconds = 1e10", "{path}: max_seconds must be above 0 and at most 100000000, got 10000000000"),
    (("GROWTH", "2"), f"there is no variable .*{PREFIX}GROWTH_FACTOR"),
    (("MAX_SECONDS", "long"), f"{PREFIX}MAX_SECONDS must be a number, got 'long'"),
    *(
        (("MAX_SECONDS", value), f"{PREFIX}MAX_SECONDS must be above 0 and at most 100000000, got {float(value)}")
        for value in ("0", "nan", "inf")
    ),
]


@pytest.mark.parametrize(("content", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_is_wrong_in_a_file_or_a_variable_is_told_with_its_name(tmp_path, monkeypatch, content, words):
    path = tmp_path / "limits.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        monkeypatch.setenv(PREFIX + content[0], content[1])
    with pytest.raises(
        TypeError if "must be a number, got '5'" in words else ValueError, match=f"^{words.format(path=path)}"
    ):
        SafetyConfig.load(path if isinstance(content, bytes) else None)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        SafetyConfig.load(tmp_path / "none.toml")
