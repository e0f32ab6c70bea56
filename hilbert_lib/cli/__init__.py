"""The `hilbert` command: main has the group; bench, plan and claims are subcommands of their own."""

import sys


def run() -> None:
    """The command; where a package of [suite] is missing, the error names both."""
    try:
        from hilbert_lib.cli.main import main

        main(prog_name="hilbert")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "hilbert_lib"):
            raise
        sys.exit(
            f"hilbert: the package {error.name} is missing. The command needs the packages of [suite]: "
            "pip install 'FOLDER[suite]', with the folder of the repository"
        )
