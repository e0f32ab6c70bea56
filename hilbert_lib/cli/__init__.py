"""The `hilbert` command: main has the group; bench, plan and claims are subcommands of their own."""

import sys

from hilbert_lib.lazy import is_of_a_package


def run() -> None:
    """The command; where a package of [suite] is missing, the error names both."""
    try:
        from hilbert_lib.cli.main import main

        for stream in (sys.stdout, sys.stderr):  # a file's name may be no text; it is printed as it is
            stream.reconfigure(errors="surrogateescape" if stream.encoding == "utf-8" else "backslashreplace")
        main(prog_name="hilbert")
    except ModuleNotFoundError as error:
        if not is_of_a_package(error):
            raise
        sys.exit(
            f"hilbert: the package {error.name} is missing. The command needs the packages of [suite]: "
            "pip install 'FOLDER[suite]', with the folder of the repository"
        )
