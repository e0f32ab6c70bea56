"""Whether other packages of dense kernels can be used here, and which they are.

Presence is read from files and metadata; a package is imported only where nothing else keeps it from a call.
"""

import ctypes
import importlib
import importlib.util
import json
import sys
from functools import cache
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from hilbert_lib.internals import compile_time_constant
from hilbert_lib.machine import installed_version

# The distributions that flash-attn-4 loads when it first compiles a kernel.
CUTE_STACK = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "quack-kernels",
    "apache-tvm-ffi",
    "torch-c-dlpack-ext",
    "einops",
)
ABSENT = "absent"  # how a reason begins where nothing is installed
FOLDER = "FOLDER is that of this repository"
MODULES = {  # the kernels are imported from these
    "flash_attn_2": "flash_attn.flash_attn_interface",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute.interface",
    "xformers": "xformers.ops",
}
FLASH_ATTN_2_SINCE = "2.7"  # before it, the functions called here return other things


@compile_time_constant
def absence(package: str) -> str:
    """The reason why a package (a key of `MODULES`) cannot be used in this process, or "" where its files are there."""
    if package not in _ABSENCE:
        raise ValueError(f"package must be one of {', '.join(_ABSENCE)}; got {package!r}")
    return _ABSENCE[package]()


@compile_time_constant
def breakage(package: str) -> str:
    """`absence`, or why the package does not load when it is imported: built for another torch, a missing library."""
    return absence(package) or _breakage(package)


@cache
def _breakage(package: str) -> str:
    try:
        importlib.import_module(MODULES[package])
    except Exception as error:  # what it raises is its own affair
        return f"{_named(package)} cannot be imported: {_first_line(error)}"
    # xformers keeps such an error to itself, and each of its calls then ends with another.
    error = getattr(sys.modules.get("xformers._cpp_lib"), "_cpp_library_load_exception", None)
    if package != "xformers" or error is None:
        return ""
    while error.__cause__ is not None:  # the last one says what failed
        error = error.__cause__
    return f"{_named(package)} is imported without its compiled part, and none of its kernels run: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    message, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {message}"


def state(package: str) -> str:
    """Name and version of a package that can be used, and for xformers what it is compiled for."""
    built = f" compiled for torch {_xformers_build()['torch']}" if package == "xformers" else ""
    return _named(package) + built


def _named(package: str) -> str:
    distribution = package.removesuffix("_2").replace("_", "-")
    return f"{distribution} {installed_version(distribution) or 'of unknown version'}"


@cache
def _xformers_build() -> dict | None:
    """The releases that xformers was compiled for; None where it has no compiled part."""
    build = _folders("xformers")[0] / "cpp_lib.json"
    return json.loads(build.read_text(encoding="utf-8"))["version"] if build.exists() else None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _folders(module: str) -> list[Path]:
    # The folders of a package; find_spec of a top-level name imports nothing.
    spec = importlib.util.find_spec(module)
    return [Path(place) for place in spec.submodule_search_locations or ()] if spec else []


def _has(module: str, file: str) -> bool:
    return any((folder / file).exists() for folder in _folders(module))


@cache
def _flash_attn_2_absence() -> str:
    if not _has("flash_attn", "flash_attn_interface.py"):
        return f"{ABSENT}: pip install 'FOLDER[flash-attn]' builds it from source, with the CUDA compiler; {FOLDER}"
    version = installed_version("flash-attn")
    if version is None or TorchVersion(version) < FLASH_ATTN_2_SINCE:
        return f"flash-attn {version or 'of unknown version'} is too old: needs {FLASH_ATTN_2_SINCE} or later"
    if importlib.util.find_spec("flash_attn_2_cuda") is None:
        return f"flash-attn {version} is installed without its compiled part flash_attn_2_cuda"
    return ""


@cache
def _flash_attn_3_absence() -> str:
    if importlib.util.find_spec("flash_attn_interface") is None:
        return (
            f"{ABSENT}: there is no module flash_attn_interface; it is built from the folder hopper of "
            "FlashAttention's repository"
        )
    if not _folders("flash_attn_3"):
        return "flash_attn_interface is there without its compiled part flash_attn_3"
    return ""


@cache
def _flash_attn_4_absence() -> str:
    if not _has("flash_attn", "cute/interface.py"):
        return f"{ABSENT}: pip install 'FOLDER[flash-attn-4]'; {FOLDER}"
    missing = [name for name in CUTE_STACK if installed_version(name) is None]
    if missing:
        return f"flash-attn-4 {installed_version('flash-attn-4')} is installed without {', '.join(missing)}"
    if not _folders("cutlass"):
        version = installed_version("flash-attn-4")
        return (
            f"flash-attn-4 {version} finds no module cutlass: nvidia-cutlass-dsl adds its folder by a .pth file, which "
            "Python reads in site-packages alone; elsewhere PYTHONPATH needs nvidia_cutlass_dsl/dsl_packages, too"
        )
    return ""


@cache
def _xformers_absence() -> str:
    if not _folders("xformers"):
        return f"{ABSENT}: pip install 'FOLDER[xformers]'; {FOLDER}"
    version = installed_version("xformers")
    if importlib.util.find_spec("flash_attn") and not _has("flash_attn", "flash_attn_interface.py"):
        return (
            f"xformers {version} cannot be imported: it takes flash_attn for FlashAttention-2, "
            "and flash-attn-4 alone is there, without flash_attn_interface"
        )
    build = _xformers_build()
    if build is None:
        return f"xformers {version} is installed without its compiled part, and none of its kernels run"
    runtime = f"libcudart.so.{(build['cuda'] or 0) // 100}"
    if torch.version.cuda and build["cuda"] and not _loads(runtime):
        # Its compiled part is then not loaded, with a warning, and every call ends with an error.
        return f"xformers {version} is compiled for a CUDA whose {runtime} is not found here"
    return ""


_ABSENCE = {
    "flash_attn_2": _flash_attn_2_absence,
    "flash_attn_3": _flash_attn_3_absence,
    "flash_attn_4": _flash_attn_4_absence,
    "xformers": _xformers_absence,
}
