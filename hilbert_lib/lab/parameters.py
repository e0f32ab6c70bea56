"""The parameters of a notebook, checked under their own names."""

from collections.abc import Callable, Mapping

from hilbert_lib.patterns.dilated import DilatedPattern


def each(check: Callable, values: Mapping[str, object], names: str, **limits) -> None:
    """Hold several values (such as globals()) to one check of `hilbert_lib.checks`, each by its own name.

    >>> from hilbert_lib.checks import integer
    >>> each(integer, {"heads": 4, "kv_heads": 0}, "heads kv_heads", least=1)
    Traceback (most recent call last):
    ValueError: kv_heads must be an integer of at least 1, got 0
    """
    for name in names.split():
        check(name, values[name], **limits)


def pattern_of(values: Mapping[str, object]) -> DilatedPattern:
    """The pattern of the parameters segment_lengths and dilation_rates; errors name these."""
    return DilatedPattern(values["segment_lengths"], values["dilation_rates"])
