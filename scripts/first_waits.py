"""What a user waits for before the first result: imports, and the first call of each backend, forward and backward.

    python scripts/first_waits.py

Each is a process of its own. Compiled kernels are not kept from earlier runs: caches of Triton and of torch's compiler
lie in a folder that is removed. A line has seconds by the clock, and seconds of processors, which other work disturbs
less. On a GPU the tensors are there, and "hopper", "triton" and "lists" compile.
"""

import json
import os
import subprocess
import sys
import tempfile

import click

IMPORTS = {
    "import torch": "import torch",
    "import hilbert_lib": "import hilbert_lib",
    "from hilbert_lib import dilated_attention": "from hilbert_lib import dilated_attention",
    "from hilbert_lib import ring_attend": "from hilbert_lib import ring_attend",
}
# A program that is given the call's pattern and backend, and prints what it took from the beginning of a part on.
CALL = """
import json, sys, time, resource
import torch
from hilbert_lib import DilatedPattern, Neighbourhood, attend
attend
pattern = {"sequence": DilatedPattern((64, 256), (1, 2)), "grid": Neighbourhood((16, 16), 7)}[sys.argv[1]]
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
q, k, v = (torch.randn(1, 256, 4, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

def spent():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(each.ru_utime + each.ru_stime for each in used)

begun = spent()
try:
    out = attend(q, k, v, pattern, backend=sys.argv[2])
    middle = spent()
    out.float().square().sum().backward()
    q.grad.sum().item()
except (ValueError, RuntimeError) as error:
    print(json.dumps(str(error)[:120]))
else:
    end = spent()
    print(json.dumps([[b - a for a, b in zip(*each)] for each in ((begun, middle), (middle, end))]))
"""


def run(*command: str, interpret: bool = False) -> tuple[str, float, float]:
    """What a process prints, and its seconds: by the clock, of processors."""
    code = (
        "import resource, subprocess, sys, time; begun = time.perf_counter(); "
        "subprocess.run(sys.argv[1:], check=True); used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(time.perf_counter() - begun, used.ru_utime + used.ru_stime)"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        env |= {"TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, env=env)
    if done.returncode:
        raise click.ClickException(done.stderr[-2000:])
    *printed, seconds = done.stdout.strip().splitlines()
    wall, used = map(float, seconds.split())
    return "\n".join(printed), wall, used


@click.command(help=__doc__)
@click.option("--backend", "backends", multiple=True, help="By default all that serve a sequence or a grid here.")
def main(backends) -> None:
    """Print the table."""
    click.echo("| what | seconds | of processors |\n| --- | --- | --- |")
    if not backends:
        for name, code in IMPORTS.items():
            _, wall, used = min(run(sys.executable, "-c", code) for _ in range(3))
            click.echo(f"| `{name}` | {wall:.2f} | {used:.2f} |")
    import torch  # the table of imports comes first

    from hilbert_lib.attention.backends.registry import backends_for
    from hilbert_lib.patterns.dilated import DilatedPattern
    from hilbert_lib.patterns.neighbourhood import Neighbourhood

    kinds = {"sequence": DilatedPattern((64, 256), (1, 2)), "grid": Neighbourhood((16, 16), 7).of_heads(4)}
    for kind, pattern in kinds.items():
        for name in backends or backends_for(pattern):
            interpret = name in ("triton", "lists") and not torch.cuda.is_available()
            printed, *_ = run(sys.executable, "-c", CALL, kind, name, interpret=interpret)
            found = json.loads(printed.splitlines()[-1])
            if isinstance(found, str):
                click.echo(f"| {kind}, {name} | not here: {found} | |")
                continue
            for way, (wall, used) in zip(("forward", "backward"), found, strict=True):
                click.echo(f"| {kind}, {name}, first {way} | {wall:.2f} | {used:.2f} |")


if __name__ == "__main__":
    main()
