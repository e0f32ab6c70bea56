"""What the subcommands of `hilbert` share: options, and errors that are told without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}
MOST = 2**40  # more tokens than a machine holds; torch and Python count what has them in 64 bits

out_option = partial(
    click.option,
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("reports/local"),
    show_default=True,
)


class Number(click.ParamType):
    """A whole number, with or without its unit: `1g` is 1,073,741,824."""

    name = "number"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Of a text; the defaults are texts too."""
        digits, unit = (value[:-1], value[-1]) if value[-1:].lower() in UNITS else (value, "")
        if not digits.isdecimal() or int(digits) < 1:
            self.fail(f"{value!r} is no whole number above 0, such as 3000, 4k, 1m or 1g", param, ctx)
        if (found := int(digits) * UNITS.get(unit.lower(), 1)) > MOST:
            self.fail(f"{value!r} is above {MOST // UNITS['g']}g", param, ctx)
        return found


class Numbers(click.ParamType):
    """Whole numbers: `1k:1m` doubles from 1,024 to 1,048,576, the end included; `1k,4k,3000` is a list."""

    name = "numbers"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Of a text; the defaults are texts too."""
        numbers = []
        for part in value.split(","):
            first, *last = (Number().convert(text, param, ctx) for text in part.split(":", 1))
            if last and last[0] < first:
                self.fail(f"{part!r} ends below its start", param, ctx)
            numbers.append(first)
            while last and numbers[-1] * 2 <= last[0]:
                numbers.append(numbers[-1] * 2)
            if last and numbers[-1] < last[0]:  # the last step may be a shorter one: an end that is named is meant
                numbers.append(last[0])
        return numbers


@contextmanager
def usage_errors() -> Iterator[None]:
    """A wrong argument, found before anything ran, or a GPU that torch cannot use is told without a traceback."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def disk_errors() -> Iterator[None]:
    """A full or read-only disk is told without a traceback."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"the results cannot be written: {error}") from error
