"""Other packages' dense kernels under the signature of `dense.Kernel`, and whether each package can be used here.

Whether a package is there is read from its files and its metadata; it is imported where nothing else keeps it from a
call, and may turn out not to load. All take (batch, rows, heads, head_dim), of which the views here are transpositions,
and any strides with a last one of 1. Their backwards are given the merged out and lse, as every kernel's is.
"""

import ctypes
import importlib
import importlib.util
import json
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from packaging.version import Version
from torch import Tensor

from hilbert_lib.attention.backends.dense import Problem, by_head, sums_overflow
from hilbert_lib.environment import installed_version

# What flash-attn-4 loads when it first compiles a kernel: distributions, by the names that pip takes.
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
# What the kernels here are imported from.
MODULES = {
    "flash_attn_2": "flash_attn.flash_attn_interface",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute.interface",
    "xformers": "xformers.ops",
}
FLASH_ATTN_2_SINCE = "2.7"  # before it, the functions called here return other things


def absence(package: str) -> str:
    """Why the package behind a backend cannot be used in this process, or "" where its files say that it can.

    Args:
        package: "flash_attn_2", "flash_attn_3", "flash_attn_4" or "xformers".

    Raises:
        ValueError: for another name.

    >>> absence("xformers") == "" or "xformers" in absence("xformers")
    True
    """
    if package not in _ABSENCE:
        raise ValueError(f"package must be one of {', '.join(_ABSENCE)}; got {package!r}")
    return _ABSENCE[package]()


@cache
def breakage(package: str) -> str:
    """`absence`, and where there is none why the package does not load: it is imported.

    Those do not that were built for another torch, or of which a library is missing. Of these xformers can be imported
    all the same: it keeps the error to itself, and each of its calls ends with another.

    Args:
        package: as in `absence`.

    Raises:
        ValueError: as `absence`.

    >>> breakage("xformers") == "" or "xformers" in breakage("xformers")
    True
    """
    if reason := absence(package):
        return reason
    try:
        importlib.import_module(MODULES[package])
    except Exception as error:  # what it raises is its own affair
        return f"{_named(package)} cannot be imported: {_said(error)}"
    if package == "xformers" and (error := _kept_by_xformers()):
        return f"{_named(package)} is imported without its compiled part, and none of its kernels run: {_said(error)}"
    return ""


def _kept_by_xformers() -> BaseException | None:
    """What kept its compiled part from loading, where it is imported."""
    kept = getattr(sys.modules.get("xformers._cpp_lib"), "_cpp_library_load_exception", None)
    while kept is not None and kept.__cause__ is not None:  # the last says what failed, those before it only that
        kept = kept.__cause__
    return kept


def _said(error: BaseException) -> str:
    said, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {said}"


def state(package: str) -> str:
    """What is installed of a package that can be used: name and version, and for xformers what it is compiled for.

    Args:
        package: as in `absence`.

    Raises:
        ValueError: for one that cannot be used, and as `absence`.
    """
    if reason := absence(package):
        raise ValueError(f"package must be one that can be used, got {package!r}: {reason}")
    found = _named(package)
    return f"{found} compiled for torch {_xformers_build()['torch']}" if package == "xformers" else found


def _named(package: str) -> str:
    distribution = package.removesuffix("_2").replace("_", "-")
    return f"{distribution} {installed_version(distribution) or 'of unknown version'}"


@cache
def _xformers_build() -> dict | None:
    """What xformers was compiled for, as it tells it; None where it has no compiled part."""
    build = _folders("xformers")[0] / "cpp_lib.json"
    return json.loads(build.read_text())["version"] if build.exists() else None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _folders(module: str) -> list[Path]:
    # Where a package lies; find_spec of a top-level name imports nothing.
    spec = importlib.util.find_spec(module)
    return [Path(place) for place in spec.submodule_search_locations or ()] if spec else []


def _has(module: str, file: str) -> bool:
    return any((folder / file).exists() for folder in _folders(module))


@cache
def _flash_attn_2_absence() -> str:
    if not _has("flash_attn", "flash_attn_interface.py"):
        return f"{ABSENT}: pip install 'hilbert-lib[flash-attn]' builds flash-attn from source, with the CUDA compiler"
    found = installed_version("flash-attn")
    if found is None or Version(found) < Version(FLASH_ATTN_2_SINCE):
        return f"flash-attn {found or 'of unknown version'} is too old: needs {FLASH_ATTN_2_SINCE} or later"
    if importlib.util.find_spec("flash_attn_2_cuda") is None:
        return f"flash-attn {found} is installed without its compiled part flash_attn_2_cuda"
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
        return f"{ABSENT}: pip install 'hilbert-lib[flash-attn-4]'"
    missing = [name for name in CUTE_STACK if installed_version(name) is None]
    if missing:
        return f"flash-attn-4 {installed_version('flash-attn-4')} is installed without {', '.join(missing)}"
    return ""


@cache
def _xformers_absence() -> str:
    if not _folders("xformers"):
        return f"{ABSENT}: pip install 'hilbert-lib[xformers]'"
    found = installed_version("xformers")
    if importlib.util.find_spec("flash_attn") and not _has("flash_attn", "flash_attn_interface.py"):
        return (
            f"xformers {found} cannot be imported: it takes flash_attn for FlashAttention-2, "
            "and flash-attn-4 alone is there, without flash_attn_interface"
        )
    build = _xformers_build()
    if build is None:
        return f"xformers {found} is installed without its compiled part, and none of its kernels run"
    runtime = f"libcudart.so.{(build['cuda'] or 0) // 100}"
    if torch.version.cuda and build["cuda"] and not _loads(runtime):
        # Its compiled part then stays away with a warning, and every call ends with an error.
        return f"xformers {found} is compiled for a CUDA whose {runtime} is not found here"
    return ""


_ABSENCE = {
    "flash_attn_2": _flash_attn_2_absence,
    "flash_attn_3": _flash_attn_3_absence,
    "flash_attn_4": _flash_attn_4_absence,
    "xformers": _xformers_absence,
}


def _rows_first(*tensors: Tensor) -> list[Tensor]:
    """(batch, heads, rows, head_dim) <-> (batch, rows, heads, head_dim), as views."""
    return [x.transpose(1, 2) for x in tensors]


class FlashAttn2:
    """flash-attn."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_forward

        options = FlashAttn2._options(problem)
        out, lse, *_ = _flash_attn_forward(*_rows_first(q, k, v), return_softmax=False, **options)
        return out.transpose(1, 2), lse

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_backward

        if sums_overflow(q):
            return by_head(FlashAttn2.backward, problem, dout, q, k, v, out, lse)
        dout, q, k, v, out = _rows_first(dout, q, k, v, out)
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        options = FlashAttn2._options(problem) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        _flash_attn_backward(dout, q, k, v, out, lse.contiguous(), *grads, **options)
        return tuple(_rows_first(*grads))

    @staticmethod
    def _options(problem: Problem) -> dict:
        windows = {"window_size_left": -1, "window_size_right": -1}
        options = {"softmax_scale": problem.scale, "causal": problem.is_causal, "softcap": 0.0, "alibi_slopes": None}
        return {"dropout_p": 0.0, **options, **windows}


class FlashAttn3:
    """FlashAttention-3."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        from flash_attn_interface import _flash_attn_forward

        options = {"softmax_scale": problem.scale, "causal": problem.is_causal}
        out, lse, *_ = _flash_attn_forward(*_rows_first(q, k, v), **options)
        return out.transpose(1, 2), lse

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn_interface import _flash_attn_backward

        dout, q, k, v, out = _rows_first(dout, q, k, v, out)
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        # By place: releases name some of these differently. The six are lengths of packed sequences, of which none.
        given = dout, q, k, v, out, lse.contiguous(), *[None] * 6, *grads, problem.scale, problem.is_causal
        _flash_attn_backward(*given, deterministic=torch.are_deterministic_algorithms_enabled())
        return tuple(_rows_first(*grads))


@cache
def _without_its_warning() -> None:
    # FlashAttention-4's compiler warns of an argument of its own, which no caller can change, as often as it compiles.
    # Once for the process: each change of the filters has Python repeat the warnings that it shows once.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")


class FlashAttn4:
    """FlashAttention-4, written in CuTe: a kernel is compiled when it is first used."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        _without_its_warning()
        options = {"softmax_scale": problem.scale, "causal": problem.is_causal}
        out, lse, *_ = _flash_attn_fwd(*_rows_first(q, k, v), return_lse=True, **options)
        return out.transpose(1, 2), lse

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_bwd

        _without_its_warning()
        dout, q, k, v, out = _rows_first(dout, q, k, v, out)
        options = {"softmax_scale": problem.scale, "causal": problem.is_causal}
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        grads = _flash_attn_bwd(q, k, v, out, dout, lse.contiguous(), **options)
        return tuple(_rows_first(*grads[:3]))


class Xformers:
    """xformers: it takes the fastest of its own kernels that load. Its lse can be padded with rows."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        from xformers.ops import fmha

        mask = fmha.attn_bias.LowerTriangularMask() if problem.is_causal else None
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(
            *_rows_first(q, k, v), attn_bias=mask, scale=problem.scale
        )
        return out.transpose(1, 2), lse[..., : q.shape[2]]

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        from xformers.ops import fmha

        mask = fmha.attn_bias.LowerTriangularMask() if problem.is_causal else None
        dout, q, k, v, out = _rows_first(dout, q, k, v, out)
        # Dense: torch's memory-efficient kernel may run beneath, which reads a strided out wrongly (dense.Efficient).
        grads = fmha.memory_efficient_attention_backward(
            dout, out.contiguous(), lse.contiguous(), q, k, v, attn_bias=mask, scale=problem.scale
        )
        return tuple(_rows_first(*grads))
