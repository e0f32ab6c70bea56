"""The parameters of a notebook, checked under their own names."""

from collections.abc import Callable, Mapping

from hilbert_lib.pattern import DilatedPattern


def each(check: Callable, values: Mapping[str, object], names: str, **limits) -> None:
    """Hold several values to one check of `hilbert_lib.checks`, each by its own name.

    Args:
        values: by name, such as globals(). names: of those to check, with spaces between.
        **limits: as `check` takes them.

    >>> from hilbert_lib.checks import integer
    >>> each(integer, {"heads": 4, "kv_heads": 0}, "heads kv_heads", least=1)
    Traceback (most recent call last):
    ValueError: kv_heads must be an integer of at least 1, got 0
    """
    for name in names.split():
        check(name, values[name], **limits)


def pattern_of(values: Mapping[str, object], prefix: str = "") -> DilatedPattern:
    """The pattern of the parameters segment_lengths and dilation_rates; errors name these, with their prefix.

    >>> pattern_of({"paper_segment_lengths": [4, 8], "paper_dilation_rates": [1]}, "paper_")
    Traceback (most recent call last):
    ValueError: paper_dilation_rates must have one rate a segment length (2), got 1: (1,)
    """
    try:
        return DilatedPattern(values[f"{prefix}segment_lengths"], values[f"{prefix}dilation_rates"])
    except (TypeError, ValueError) as error:
        raise type(error)(f"{prefix}{error}") from None
