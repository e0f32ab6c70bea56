"""The `hilbert` command: main has the group; bench, plan and claims are subcommands of their own."""

import os
import sys

from hilbert_lib.lazy import is_of_a_package


def run() -> None:
    """The command; where a package of [suite] is missing, the error names both."""
    _open_streams()
    try:
        from hilbert_lib.cli.main import main

        for stream in (sys.stdout, sys.stderr):  # a file's name may be no text; it is printed as it is
            stream.reconfigure(errors="surrogateescape" if stream.encoding == "utf-8" else "backslashreplace")
        main(prog_name="hilbert")
    except OSError as error:  # of what click prints before a command begins: the help, on a disk that is full
        sys.exit(f"hilbert: {error}")
    except ModuleNotFoundError as error:
        if not is_of_a_package(error):
            raise
        sys.exit(
            f"hilbert: the package {error.name} is missing. The command needs the packages of [suite]: "
            "pip install 'FOLDER[suite]', with the folder of the repository"
        )


def _open_streams() -> None:
    # A daemon or `>&-` starts a process without these; then Python has None, and the next file that is opened would
    # take the stream's number. The lowest free number is always taken, so that each gets its own.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)  # for kernels of notebooks and ranks
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
