"""Parts that the subcommands of `hilbert` share: options, numbers with units, and errors told without a traceback."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path

import click

from hilbert_lib.files import json_text

UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}
MOST = 2**40  # more tokens than a machine holds; torch and Python count what has them in 64 bits
DTYPES = ("bfloat16", "float16", "float32", "float64")

option = partial(click.option, show_default=True)
LOCAL = Path("reports/local")
OUT = click.Path(file_okay=False, path_type=Path)
out_option = option("--out", type=OUT, default=LOCAL, help="Folder of the runs.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print a list of objects, for programs.")


def together(*options: Callable) -> Callable:
    """Several options as one decorator, shown in this order."""
    return lambda command: reduce(lambda command, option: option(command), reversed(options), command)


def number(text: str) -> int:
    """A whole number, with or without its unit: `1g` is 1,073,741,824."""
    digits, unit = (text[:-1], text[-1]) if text[-1:].lower() in UNITS else (text, "")
    if not digits.isdecimal() or int(digits) < 1:
        raise click.BadParameter(f"{text!r} is no whole number above 0, such as 3000, 4k, 1m or 1g")
    if (count := int(digits) * UNITS.get(unit.lower(), 1)) > MOST:
        raise click.BadParameter(f"{text!r} is above {MOST // UNITS['g']}g")
    return count


def numbers(text: str) -> list[int]:
    """Whole numbers: `1k:1m` doubles from 1,024 to 1,048,576, the end included; `1k,4k,3000` is a list."""
    counts = []
    for part in text.split(","):
        first, *last = map(number, part.split(":", 1))
        if last and last[0] < first:
            raise click.BadParameter(f"{part!r} ends below its start")
        while last and first < last[0]:
            counts.append(first)
            first = min(first * 2, last[0])  # the last step may be a shorter one: an end that is named is meant
        counts.append(first)
    return counts


def seconds(text: str) -> float:
    """A time above 0; `inf` is none that ends."""
    try:
        if (duration := float(text)) > 0:  # not a number is not above 0
            return duration
    except ValueError:
        pass
    raise click.BadParameter(f"{text!r} is no time in seconds above 0")


def words(text: str) -> list[str]:
    """A list that commas separate."""
    return [word.strip() for word in text.split(",")]


def work_options(*, segments: str, rates: str, heads: int) -> Callable:
    """The options that say what dilated attention is asked for, with these defaults."""
    return together(
        option("--segment-lengths", type=numbers, default=segments, help="w of each branch."),
        option("--dilation-rates", type=numbers, default=rates, help="r of each branch."),
        option("--heads", type=click.IntRange(min=1), default=heads, help="Of q, in the whole batch."),
        option("--head-dim", type=click.IntRange(1, 256), default=64),
        click.option("--causal", is_flag=True, help="Exclude the keys after the query."),
    )


def print_json(objects: Sequence[dict]) -> None:
    """A list of objects on stdout."""
    click.echo(json_text(objects, indent=1, default=str))


@contextmanager
def usage_errors() -> Iterator[None]:
    """A wrong argument, found before anything ran, or a GPU that torch cannot use is told without a traceback."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
