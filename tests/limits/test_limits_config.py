"""Limits: where they come from, in which order, and what is refused."""

import pytest

from hilbert_lib.limits.config import PREFIX, SafetyConfig


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


WRONG = [  # what stands in a file, or in a variable, and what is said of it
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


@pytest.mark.parametrize(("content", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_is_wrong_in_a_file_or_a_variable_is_told_with_its_name(tmp_path, monkeypatch, content, words):
    path = tmp_path / "limits.toml"
    if is_file := isinstance(content, bytes):
        path.write_bytes(content)
    else:
        monkeypatch.setenv(PREFIX + content[0], content[1])
    error = TypeError if "must be a number, got '5'" in words else ValueError
    with pytest.raises(error, match=f"^{words.format(path=path)}"):
        SafetyConfig.load(path if is_file else None)
