"""Whole calls by their users' functions, on a driver that starts nothing: which of them only start recorded launches.

Prints of each of several calls in a row, forward and backward, "ran" where a backend's function ran, and "replayed"
where the launches of a recording were started instead; and of each replayed one "equal" if its kernels were given what
those of the call before it were. A process of its own, as `first_call.py`: tensors are on the CPU, where the fused
backends come first by a rule of this script.
"""

import json
import re
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from weakref import ref

import torch
import triton
from kept_starts import Compiled, Given, begun, known
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hilbert_lib import DilatedPattern, Neighbourhood, Union, attend, dilated_attention, neighbourhood_attention
from hilbert_lib.attention import autograd, choice, known_calls, merge, tape, zero_keys
from hilbert_lib.attention import joint as joint_room
from hilbert_lib.attention.backends import all_pairs, dense, fused, fused_grid, listed_grid
from hilbert_lib.attention.backends import strided as strided_views
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.rules import Rule
from hilbert_lib.attention.triton import decode
from hilbert_lib.attention.triton import start as starting
from hilbert_lib.attention.triton.hopper import grid_launch, segments
from hilbert_lib.patterns.all_pairs import AllPairs

UNION = Union((Neighbourhood((8, 16), 5), Neighbourhood((8, 16), 3, dilation=2)))
NEAR, PATTERN = Neighbourhood((8, 16), 5), DilatedPattern((32, 128), (1, 2))
LENGTH, EXTRA = 128, 6
ON_A_LINE = 7  # extra queries that "auto" gives to the plain kernels, as it does on a GPU where keys are few
ran: list = []  # functions of backends
told: dict[str, list] = {}


def noted(run):
    """A function that calls the one of a backend, and notes that."""

    def noting(*args):
        ran.append(run)
        return run(*args)

    return noting


def drawn(heads: int = 2, length: int = LENGTH, dtype=torch.bfloat16, columns: int = 64) -> torch.Tensor:
    return torch.zeros(1, length, heads, columns, dtype=dtype).requires_grad_()


def extra_tensors(length: int = EXTRA) -> dict[str, torch.Tensor]:
    return {f"extra_{name}": drawn(length=length) for name in "qkv"}


def step(queries: int = 1) -> dict:
    with torch.no_grad():
        q, k, v = (drawn(length=length).detach() for length in (queries, LENGTH, LENGTH))
    return {"q": q, "k": k, "v": v, "query_start": torch.tensor([5])}


def joint(length: int = EXTRA) -> dict:
    return {"neighbourhood": NEAR, **extra_tensors(length)}


def dense_forward(q, k, v, *_, **__):
    """Stands in for cuDNN's kernel, and notes what it is given."""
    begun.append(["dense forward", *(known(x) for x in (q, k, v))])
    batch, heads, rows, columns = q.shape
    out, lse = q.new_empty(batch, rows, heads, columns).transpose(1, 2), torch.empty(batch, heads, rows, 1)
    alive.extend((out, lse))
    return out, lse


def dense_backward(dout, q, k, v, out, lse, *_, **__):
    begun.append(["dense backward", *(known(x) for x in (dout, q, k, v, out, lse))])
    grads = [torch.empty_like(x) for x in (q, k, v)]
    alive.extend(grads)
    return grads


def hidden(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.bool)


# Function, and of each call its tensors by name and other arguments.
CALLS = {
    "sequence": (dilated_attention, lambda: {"pattern": PATTERN}),
    "causal sequence": (dilated_attention, lambda: {"pattern": PATTERN, "is_causal": True}),
    "plain sequence": (dilated_attention, lambda: {"pattern": PATTERN, "backend": "triton"}),
    "plain sequence with a mask": (
        dilated_attention,
        lambda: {"pattern": PATTERN, "backend": "triton", "key_padding_mask": hidden(LENGTH)},
    ),
    "dropout": (dilated_attention, lambda: {"pattern": PATTERN, "backend": "triton", "dropout_p": 0.5}),
    "several passes": (
        attend,
        lambda: {"pattern": DilatedPattern((16, 32, 128), (1, 8, 32)), "backend": "triton"},
    ),
    # By the kernels for grids, and a launch that goes on from their results.
    "short segments": (dilated_attention, lambda: {"pattern": DilatedPattern((64,), (1,))}),
    "short segments beside others": (
        dilated_attention,
        lambda: {"pattern": DilatedPattern((64, 256), (1, 2)), **{name: drawn(length=256) for name in "qkv"}},
    ),
    "grouped heads": (dilated_attention, lambda: {"pattern": PATTERN, "k": drawn(1), "v": drawn(1)}),
    "grid": (neighbourhood_attention, lambda: {"neighbourhood": NEAR}),
    "grid, several windows": (neighbourhood_attention, lambda: {"neighbourhood": (NEAR, Neighbourhood((8, 16), 3))}),
    "grid with a mask": (neighbourhood_attention, lambda: {"neighbourhood": NEAR, "key_padding_mask": hidden(LENGTH)}),
    "plain grid": (neighbourhood_attention, lambda: {"neighbourhood": NEAR, "backend": "triton"}),
    "extra keys": (
        neighbourhood_attention,
        lambda: {
            "neighbourhood": NEAR,
            "extra_k": drawn(length=EXTRA),
            "extra_v": drawn(length=EXTRA),
            "extra_padding_mask": hidden(EXTRA),
        },
    ),
    "plain grid in float32": (
        neighbourhood_attention,
        lambda: {"neighbourhood": NEAR, **{name: drawn(dtype=torch.float32) for name in "qkv"}},
    ),
    "bias": (neighbourhood_attention, lambda: {"neighbourhood": NEAR, "bias": torch.zeros(2, 9, 9).requires_grad_()}),
    "part of a grid": (
        neighbourhood_attention,
        lambda: {"neighbourhood": NEAR, "q": drawn(length=32), "query_box": ((2, 4), (0, 16))},
    ),
    # Several starts one after the other, each recorded: a merge, a sum, zero keys.
    "union": (attend, lambda: {"pattern": UNION}),
    "zero keys": (attend, lambda: {"pattern": DilatedPattern((32, 96), (1, 2), padding="zeros")}),
    "lists on a grid": (neighbourhood_attention, lambda: {"neighbourhood": NEAR, "backend": "lists"}),
    "lists of a union": (attend, lambda: {"pattern": UNION, "backend": "lists"}),
    # Extra queries: by a dense kernel, for which this script has stand-ins, and by kernels that replay launches.
    "joint": (neighbourhood_attention, joint),
    "joint, no extra keys": (neighbourhood_attention, lambda: {"neighbourhood": NEAR, "extra_q": drawn(length=EXTRA)}),
    "joint on a line": (neighbourhood_attention, lambda: joint(ON_A_LINE)),
    "joint by one kernel": (neighbourhood_attention, lambda: joint(80) | {"backend": "triton"}),
    "joint with a mask": (neighbourhood_attention, lambda: joint() | {"extra_padding_mask": hidden(EXTRA)}),
    "joint of a union": (attend, lambda: {"pattern": UNION, **extra_tensors()}),
}
# Steps of decoding at rows that only the device knows: forward alone.
STEPS = {
    "a step": (dilated_attention, lambda: step() | {"pattern": PATTERN, "is_causal": True}),
    "a step, padded on the left": (
        dilated_attention,
        lambda: step() | {"pattern": PATTERN, "key_start": torch.tensor([3]), "key_padding_mask": hidden(LENGTH)},
    ),
    "a step on a line": (
        neighbourhood_attention,
        lambda: step() | {"neighbourhood": Neighbourhood((LENGTH,), 7, is_causal=True)},
    ),
    "several queries": (dilated_attention, lambda: step(3) | {"pattern": PATTERN, "is_causal": True}),
}
# Their functions copy heads besides: they run, and launches alone are recorded.
BY_HEADS = (NEAR, Neighbourhood((8, 16), 3))
OTHERS = {
    "lists by heads": (neighbourhood_attention, lambda: {"neighbourhood": BY_HEADS, "backend": "lists"}),
}


EVERY = CALLS | STEPS | OTHERS


def arguments_of(name: str) -> dict:
    return {"q": drawn(), "k": drawn(), "v": drawn(), **EVERY[name][1]()}


def launched(tensors: dict[str, torch.Tensor]) -> str:
    """The launches since the last time, with names for the addresses of a call's tensors, numbers for all others."""
    text = repr(begun)
    begun.clear()
    for name, x in tensors.items():
        text = text.replace(str(x.data_ptr()), f"<{name}>")
    others: dict[str, str] = {}
    return re.sub(r"\b\d{13,}\b", lambda found: others.setdefault(found[0], f"<{len(others)}>"), text)


alive: list = []  # all that the starts of a call make: no address stands for two tensors


def noting_made(creator):
    """A function like `Made.creator`, whose tensors live as long as the call."""

    def of(made, device):
        create = creator(made, device)

        def creating():
            alive.append(create())
            return alive[-1]

        return creating

    return of


def computed_of(outs: tuple[torch.Tensor, ...]) -> str:
    """How these results, or their gradients, were computed."""
    return {0: "replayed", len(outs): "ran"}.get(len(ran), f"{len(ran)} ran")


def called(name: str, arguments: dict | None = None, during=nullcontext, during_backward=nullcontext, dout=None):
    """A forward and a backward: how each was computed, and its launches. dout: makes one of so many rows."""
    arguments = arguments_of(name) if arguments is None else arguments
    tensors = {key: x for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    leaves = [x for x in tensors.values() if x.requires_grad]
    ran.clear()
    begun.clear()
    with during():
        made = EVERY[name][0](**arguments, return_lse=True)
    results = tensors | {f"result {n}": x for n, x in enumerate(made)}
    outs = made[::2]  # of cells, and of extra queries
    how, launches = [computed_of(outs)], [launched(results)]
    if outs[0].requires_grad:
        ran.clear()
        douts = [torch.zeros_like(x) if dout is None else dout(x.shape[1]) for x in outs]
        with during_backward():
            grads = torch.autograd.grad(outs, leaves, douts)
        how.append(computed_of(outs))
        of_backward = {f"dout {n}": x for n, x in enumerate(douts)} | {f"grad {n}": x for n, x in enumerate(grads)}
        launches.append(launched(results | of_backward))
        assert [x.shape for x in grads] == [x.shape for x in leaves]
    alive.clear()
    return how, launches, [ref(x) for x in (*tensors.values(), *made)]


@contextmanager
def setting(put, value, before):
    put(value)
    try:
        yield
    finally:
        put(before)


def put_precision(value: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = value


def put_debug(value: bool) -> None:
    triton.knobs.runtime.debug = value


@contextmanager
def hooked():
    hook = lambda *_: None  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen.append(function)
        return function(*args, **(kwargs or {}))


seen: list = []


def unaligned(rows: int = LENGTH) -> torch.Tensor:
    return torch.zeros(rows * 2 * 64 + 8, dtype=torch.bfloat16)[1:-7].view(1, rows, 2, 64)


def strided(rows: int = LENGTH) -> torch.Tensor:
    return torch.zeros(1, rows, 4, 64, dtype=torch.bfloat16)[:, :, ::2]


# What a call hangs on besides: a context in which it is computed anew, or other arguments.
CHANGES = {
    "determinism": {"during": partial(setting, torch.use_deterministic_algorithms, True, False)},
    "grad mode": {"during": torch.no_grad},
    "inference": {"during": torch.inference_mode},
    "autocast": {"during": lambda: torch.autocast("cpu", torch.float16)},
    "debugging": {"during": partial(setting, put_debug, True, False)},
    "a hook of Triton": {"during": hooked},
    "a profiler": {"during": torch.profiler.profile},
    "a mode of functions": {"during": SeesFunctions},
    "a mode of operators": {"during": SeesOperators},
    "forward-mode differentiation": {"during": torch.autograd.forward_ad.dual_level},
    "stride": {"q": lambda: strided().requires_grad_()},
    "alignment": {"q": lambda: unaligned().requires_grad_()},
    "alignment of v": {"v": lambda: unaligned().requires_grad_()},
    "dtype": {name: partial(drawn, dtype=torch.float16) for name in "qkv"},
    "columns": {name: partial(drawn, columns=48) for name in "qkv"},
    "no gradient of q": {"q": lambda: drawn().detach()},
}
# Of extra queries, whose tensors are checked apart.
JOINT_CHANGES = {
    "stride of extra_q": {"extra_q": lambda: strided(EXTRA).requires_grad_()},
    "alignment of extra_q": {"extra_q": lambda: unaligned(EXTRA).requires_grad_()},
    "alignment of extra_v": {"extra_v": lambda: unaligned(EXTRA).requires_grad_()},
    "no gradient of extra_q": {"extra_q": lambda: drawn(length=EXTRA).detach()},
    "dtype of all": {f"{part}{name}": partial(drawn, length=rows, dtype=torch.float16)
                     for part, rows in (("", LENGTH), ("extra_", EXTRA)) for name in "qkv"},
}  # fmt: skip
BACKWARD_CHANGES = {
    "determinism": {"during_backward": partial(setting, torch.use_deterministic_algorithms, True, False)},
    "a mode of operators": {"during_backward": SeesOperators},
    "a hook of Triton": {"during_backward": hooked},
    "stride of dout": {"dout": strided},
    "alignment of dout": {"dout": unaligned},
    "expanded dout": {"dout": lambda rows: torch.zeros((), dtype=torch.bfloat16).expand(1, rows, 2, 64)},
}


def changed(name: str, change: dict) -> list[str]:
    """How a call is computed that comes after three others and differs from them in one thing."""
    forget()
    for _ in range(3):
        how, *_ = called(name)
    assert set(how) == {"replayed"}
    arguments = arguments_of(name) | {key: make() for key, make in change.items() if key[-1] in "qkv"}
    rest = {key: x for key, x in change.items() if key.startswith("during")}
    how, *_ = called(name, arguments, dout=change.get("dout"), **rest)
    return how


def joined_or_not(name: str, at_once: int) -> list:
    """What is kept of a call, both ways, and its launches, where starts that become one may hold so many bytes more."""
    forget()
    tape.AT_ONCE, before = at_once, tape.AT_ONCE
    for _ in range(3):
        how, launches, _ = called(name)
    tape.AT_ONCE = before
    assert set(how) == {"replayed"}
    ((alike,),) = known_calls._calls.values()
    kept = alike.call.recording, alike.call.backward_recordings[0].recording
    return [[type(x).__name__ for x in kept], launches]


choose_any = joint_room.choose


def choose_dense(q, k, request, name, **how):
    by_auto = "triton" if q.shape[1] == ON_A_LINE else "cudnn"
    return choose_any(q, k, request, by_auto if name == "auto" else name, **how)


def forget() -> None:
    known_calls.forget()
    starting.forget()


def on_a_driver_that_starts_nothing() -> None:
    """Have this process compile and start nothing, take CPUs for GPUs, and choose as on Hopper."""
    triton.runtime.driver.set_active(Given())
    triton.compiler.compile = Compiled
    triton.knobs.runtime.jit_post_compile_hook = lambda **_: None
    torch.cuda.set_device = lambda _: None
    flags = count(1 << 40, 16)
    starting._flags.next_address = lambda *_: next(flags)
    grid_launch.multiprocessors = lambda _: 132
    segments.FEWEST_TILES = 0
    merge.kernel_serves = zero_keys.kernel_serves = all_pairs.kernel_serves = lambda _: True
    for room in (fused, fused_grid, listed_grid):
        for backend in room.BACKENDS:
            object.__setattr__(backend, "here", lambda q, request: "")
    choice.rule_for = lambda *_, **__: Rule(("hopper", "triton", "eager"), "of a test")
    # Extra queries: by cuDNN as a GPU has it.
    strided_views._is_on_gpu = lambda q, kernel: kernel is dense.CuDnn
    dense.dense_operators.cudnn_attention = dense_forward
    dense.dense_operators.cudnn_attention_backward = dense_backward
    for kind in (AllPairs, DilatedPattern):
        object.__setattr__(backends_for(kind)["cudnn"], "here", lambda q, request: "")
    joint_room.choose = choose_dense


if __name__ == "__main__":
    on_a_driver_that_starts_nothing()
    starting.Made.creator = noting_made(starting.Made.creator)
    autograd._forward_of_one = noted(autograd._forward_of_one)
    autograd._backward_of_one = noted(autograd._backward_of_one)
    for name in CALLS:
        calls = [called(name) for _ in range(4)]
        equal = [calls[n][1] == calls[1][1] for n in (2, 3)]
        kept = sum(each() is not None for *_, refs in calls for each in refs)
        told[name] = [[how for how, *_ in calls], equal, kept]
    kinds = ("sequence", "grid", "joint")
    told["changes"] = {
        f"{name}, {kind}": changed(kind, change)
        for name, change in CHANGES.items()
        for kind in kinds
        if kind != "joint" or name not in ("dtype", "columns")  # extra tensors have those of q
    }
    told["changes"] |= {f"{name}, joint": changed("joint", change) for name, change in JOINT_CHANGES.items()}
    told["backward changes"] = {
        f"{name}, {kind}": changed(kind, change) for name, change in BACKWARD_CHANGES.items() for kind in kinds
    }
    told["in inference mode"] = {}
    for name in ("grid", "union", "zero keys", "joint"):
        forget()
        with torch.inference_mode():
            of_mode = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in arguments_of(name).items()}
        for kind, arguments in (("made there", of_mode), ("made elsewhere", arguments_of(name))):
            how = [called(name, arguments, during=torch.inference_mode)[0] for _ in range(4)]
            told["in inference mode"][f"{name}, {kind}"] = how
    told["steps"] = {name: [called(name) for _ in range(4)] for name in STEPS}
    told["steps"] = {
        name: [[how for how, *_ in calls], [calls[n][1] == calls[1][1] for n in (2, 3)]]
        for name, calls in told["steps"].items()
    }
    known = Request(PATTERN, query_start=5, is_causal=True)
    told["steps at rows that the host knows"] = decode.is_repeated(known)
    told["others"] = {name: [called(name)[0] for _ in range(4)] for name in OTHERS}
    told["joined"] = [joined_or_not("union", at_once) for at_once in (tape.AT_ONCE, -1)]
    precision = {"during": partial(setting, put_precision, "tf32", "ieee")}
    for _ in range(3):
        called("grid")
    starting.forget()
    told["forgotten"] = called("grid")[0]
    told["changes"]["TF32"] = changed("plain grid in float32", precision)
    print(json.dumps(told))
