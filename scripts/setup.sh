#!/bin/sh
# Makes the virtual environment that `make` uses. Idempotent: it installs only when pyproject.toml,
# constraints.txt or this file changed since the last success. Usage: sh scripts/setup.sh VENV_FOLDER [EXTRAS]
set -eu
venv=${1:?usage: setup.sh VENV_FOLDER [EXTRAS]}
extras=${2:-dev}      # of pyproject.toml, with commas
needed_mb=4000        # measured: 2.4 GB with torch's CPU build; CUDA builds unpack to more
cuda_needed_mb=12000

fail() { printf 'setup: %s\n' "$1" >&2; exit 1; }

stamp="$venv/.installed"
wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0

# An interrupted set-up leaves an interpreter without pip; it is made again.
is_made() { "$venv/bin/python" -m pip --version >/dev/null 2>&1; }
is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

if ! is_made; then
    python=${PYTHON:-}
    if [ -n "$python" ]; then
        is_recent "$python" || fail "PYTHON=$python is not a working Python 3.11 or later."
    else
        for candidate in python3.11 python3.12 python3.13 python3 python; do
            if is_recent "$candidate"; then python=$candidate; break; fi
        done
        [ -n "$python" ] || fail "no Python 3.11 or later was found; install one, or name it: make PYTHON=/path/to/python3."
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module; on Debian or Ubuntu: apt install python3-venv."
fi

disk=$venv
while [ ! -e "$disk" ]; do disk=$(dirname "$disk"); done
free_mb=$(df -Pk "$disk" | awk 'NR == 2 {print int($4 / 1024)}')
[ "$free_mb" -ge "$needed_mb" ] ||
    fail "the disk of $disk has ${free_mb} MB free; the installation needs ${needed_mb} MB (${cuda_needed_mb} MB with CUDA)."

if ! is_made; then
    echo "setup: making $venv with $("$python" --version 2>&1)"
    "$python" -m venv "$venv" || fail "$python could not make a virtual environment in $venv."
fi
echo "setup: installing the pinned set of constraints.txt (once; some minutes)"
log="$venv/install.log"
if ! "$venv/bin/python" -m pip install --disable-pip-version-check -c constraints.txt -e ".[$extras]" >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    grep -q 'No space left' "$log" && fail "the disk is full; free some space and call make again."
    fail "pip could not install the pinned set; its last lines are above, all of them in $log."
fi
printf '%s' "$wanted" >"$stamp"
echo "setup: ready"
