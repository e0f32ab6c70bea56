"""Scripts of this folder, each run in a copy of this process, which has loaded torch, Triton and the kernels.

A process of its own would take more than a second to load them. Reads lines of JSON, [script, *arguments], and prints
for each its exit status, and what it wrote to its standard output and error.
"""

import json
import os
import runpy
import sys
import tempfile

import compile_kernels  # noqa: F401  all that the scripts load


def run_copy(script: str, *arguments: str) -> list:
    """Exit status of a script in a copy of this process, its output and its errors."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        copy = os.fork()
        if copy == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        _, status = os.waitpid(copy, 0)
        for file in (out, err):
            file.seek(0)
        return [os.waitstatus_to_exitcode(status), out.read(), err.read()]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run_copy(*json.loads(line))), flush=True)
