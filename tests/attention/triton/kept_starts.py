"""Starts that are kept, beside Triton's own, on a driver that starts nothing and a compiler that compiles nothing.

Prints of each of several calls in a row how many kernels were started, how many of these Triton bound, and "equal" if
every launcher was given what Triton's own start of the same tensors gives it. A process of its own, as `first_call.py`.
"""

import json
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, count, cycle
from types import SimpleNamespace
from weakref import ref

import torch
import triton
from first_call import Driver
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.runtime.jit import JITFunction

from hilbert_lib import DilatedPattern, Neighbourhood
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton import copies, grid_launch, launch, rows, schedule
from hilbert_lib.attention.triton import start as starting
from hilbert_lib.attention.triton.hopper import grid_launch as hopper_grid
from hilbert_lib.ordering import Ordering

PATTERN = DilatedPattern((64, 100, 256), (1, 2, 4))
begun, bound, made, outputs, heard, device, stream = [], [], [], [], [], [0], [100]
numbers = count()
flag = torch.zeros(4, dtype=torch.int32)  # of all calls whose starts are kept


def filled(*given):
    """Stands in for a descriptor's map."""
    made.append(given)
    return given


class Compiled:
    """A kernel as Triton compiles it: of the same source, constants and specialisation there is one."""

    packed_metadata = None
    launch_metadata = None

    def __init__(self, src, target, options, **_):
        self.function = self.hash = next(numbers)
        self.launch_metadata = lambda *_: None
        # Triton's own launcher, above what stands in for its C function.
        self.run = object.__new__(CudaLauncher)
        descriptors = str(src.signature).count("tensordesc")
        meta = {"swizzle": 1, "elem_size": 2, "elem_type": 0, "fp4_padded": False}
        metas = [meta | {"block_size": [self.function, n]} for n in range(descriptors)]
        vars(self.run).update(dict.fromkeys(("arg_annotations", "kernel_signature")), num_ctas=1)
        vars(self.run).update(dict.fromkeys(("launch_cooperative_grid", "launch_pdl", "gsan_enabled"), False))
        vars(self.run).update({f"{x}_scratch_{y}": 0 for x in ("global", "profile") for y in ("size", "align")})
        self.run.launch = wrap_handle_tensordesc(started, src.signature, metas)


def started(*given):
    """Notes what the C function is given, hooks apart; of Triton 3.7 the arguments are one, the last."""
    *given, last = given
    given += last if isinstance(last, list | tuple) else [last]
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    heard.extend(x for x in given if x is hooks[0] and x.calls)
    begun.append([known(x) for x in given if x is not None and not any(x is hook for hook in hooks)])


class Given(Driver):
    """Several devices, and a stream on each."""

    utils = SimpleNamespace(fill_tma_descriptor=filled, fill_tma_descriptor_tiled=filled)

    def get_current_device(self):
        return device[0]

    def get_current_stream(self, at):
        return stream[0] + at


def known(x):
    """What a launcher takes of an argument."""
    if isinstance(x, torch.Tensor):
        return repr(x.data_ptr())
    return repr(x)


def bind(self, *args, original=JITFunction.run, warmup, **named):
    if not warmup:
        bound.append(self)
    return original(self, *args, warmup=warmup, **named)


def noting(finish, new):
    """Notes the tensors that a call made."""
    outputs[:] = new
    return finish(new)


def start(make, tensors=(), *asked, finish=list, **more):
    """As the library starts kernels, and then as Triton does."""
    begun.clear()
    bound.clear()
    made.clear()
    results = starting.start(make, tensors, *asked, finish=partial(noting, finish), **more)
    ours, bindings, told["maps"] = [*begun], len(bound), len(made)
    begun.clear()
    is_flag = [each is starting.FLAG for each in more.get("made", ())]
    for each in make(*(flag if x is None and own else x for x, own in zip(outputs, is_flag, strict=True))):
        each.kernel[each.grid](*each.arguments, **each.named)
    seen.append([len(ours), bindings, "equal" if ours == begun else "other"])
    return results


seen, told = [], {}


@contextmanager
def noted(name: str):
    """What was started meanwhile is told under a name."""
    seen.clear()
    yield
    told[name] = [*seen]


def thrice(name: str, call) -> None:
    """Calls of a kind, each of other tensors: the third is served by what the second left."""
    with noted(name):
        for _ in range(3):
            call()


def drawn(*shape, dtype=torch.bfloat16, number=4):
    return [torch.zeros(shape, dtype=dtype) for _ in range(number)]


def along(tensors, again: bool = False, *, on_hopper: bool = False, with_dlse: bool = False, **options) -> None:
    """A forward or, again, a backward along a sequence, by the plain kernels or by the warp-specialised ones."""
    q, k, v, dout = tensors
    call = Request(**{"pattern": PATTERN, "scale": 0.125} | options)
    forward, backward = launch.forward, launch.backward
    if on_hopper:
        forward, backward = launch.forward_on_hopper, launch.backward_on_hopper
    if not again:
        forward(Tensors(q, k, v), call)
    else:
        out, lse = torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[0], q.shape[2], q.shape[1])
        backward(dout, Tensors(q, k, v), out, lse, call, torch.zeros_like(lse) if with_dlse else None)


def on_grid(module, again: bool, **options) -> None:
    near, masks = Neighbourhood((16, 32), 5), options.pop("masks", (None, None))
    q, k, v, dout = drawn(1, 512, 2, 64)
    extra = torch.zeros(1, 8, 2, 64, dtype=q.dtype)
    bias = torch.zeros(2, 9, 9) if options.get("with_bias") else None
    given = Tensors(q, k, v, extra, extra.clone(), bias)
    request = Request(
        near.of_heads(2),
        scale=0.125,
        ordering=options.get("ordering"),
        key_padding_mask=masks[0],
        extra_padding_mask=masks[1],
    )
    if not again:
        module.forward(given, request)
    else:
        dlse = torch.zeros(1, 2, 512) if options.get("with_dlse") else None
        module.backward(dout, given, q.clone(), torch.zeros(1, 2, 512), request, dlse)


def merged(whole: tuple, at: tuple) -> None:
    out, lse = torch.zeros(*whole, 2, 32), torch.zeros(*whole, 2)
    rows.merge_rows(out, lse, at, torch.ones(8, 1, 2, 32), torch.ones(8, 1, 2))


def results_merged() -> None:
    out, lse = torch.zeros(1, 8, 2, 32), torch.zeros(1, 2, 8)
    rows.merge_results(out, lse, torch.ones_like(out), torch.ones_like(lse), torch.float32)


def added(whole: tuple, at: tuple) -> None:
    rows.add_rows(torch.zeros(*whole, 2, 32), at, torch.ones(8, 1, 2, 32))


def copied(*, back: bool = False) -> None:
    """Of all heads of a row, of a row of heads each, and of lse."""
    at, by_head = torch.arange(8), torch.arange(16)
    wholes, some = (torch.zeros(3, 1, n, 2, 32, dtype=torch.bfloat16) for n in (64, 8))
    lse, some_lse = (torch.zeros(1, 2, n).transpose(1, 2)[..., None] for n in (64, 8))
    other = None if back else torch.zeros(1, 5, 1, 32, dtype=torch.bfloat16)
    move = copies.scatter_rows if back else copies.gather_rows
    own = copies.Copy(some[0], wholes[0], by_head, other)
    move([own, copies.Copy(some[1], wholes[1], at), copies.Copy(some_lse, lse, at)])


def summed() -> None:
    at, answers = torch.arange(8), copies.Answers(torch.zeros(5, 2, 1, 32), torch.zeros(16, 3, dtype=torch.int64))
    totals = torch.zeros(2, 1, 64, 2, 32, dtype=torch.bfloat16)
    copies.sum_rows((totals[0], totals[1]), at, [copies.Part(*torch.zeros(2, 1, 8, 2, 32), at)], answers)


def every_option() -> dict:
    tables = {"seed": torch.zeros(1, dtype=torch.int64), "inverse": torch.zeros(256, dtype=torch.int32)}
    return {"is_causal": True, "dropout_p": 0.5, "key_padding_mask": masked(2, 256), **tables}


def of_documents(*lengths: int) -> dict:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {"cu_seqlens": ends, "max_seqlen": max(lengths)}


def masked(batch: int, keys: int) -> torch.Tensor:
    return torch.zeros(batch, keys, dtype=torch.bool)


if __name__ == "__main__":
    triton.runtime.driver.set_active(Given())
    triton.compiler.compile = Compiled
    triton.knobs.runtime.jit_post_compile_hook = lambda **_: None  # Triton tells it each kernel's constants, as JSON
    JITFunction.run = bind
    torch.cuda.set_device = lambda _: None
    starting._flags.next_address = lambda *_: flag.data_ptr()
    for module in (launch, launch.decode, grid_launch, hopper_grid, rows, copies):
        module.start = start
    hopper_grid.multiprocessors = lambda _: 132
    passes = DilatedPattern((32, 64, 256), (1, 8, 64))
    for again in (False, True):
        thrice(f"sequence in one launch {again}", lambda again=again: along(drawn(2, 256, 4, 64), again))
    schedule.SHORT_ROWS = 0  # of the rest none is so short
    starting.forget()
    for again in (False, True):
        for on_hopper in (True, False):
            run = partial(along, again=again, on_hopper=on_hopper)
            thrice(f"sequence {on_hopper} {again}", lambda run=run: run(drawn(2, 256, 4, 64)))
        # By the plain kernels.
        thrice(f"several passes {again}", lambda again=again: along(drawn(2, 256, 4, 64), again, pattern=passes))
        thrice(f"all options {again}", lambda again=again: along(drawn(2, 256, 4, 64), again, **every_option()))
        for name, module in (("plain", grid_launch), ("hopper", hopper_grid)):
            given = partial(on_grid, module, again)
            thrice(f"grid {name} {again}", lambda given=given: given(masks=(masked(1, 512), masked(1, 8))))
    for on_hopper, module in ((False, grid_launch), (True, hopper_grid)):
        run = partial(along, again=True, on_hopper=on_hopper, with_dlse=True)
        thrice(f"sequence with dlse {on_hopper}", lambda run=run: run(drawn(2, 256, 4, 64)))
        thrice(f"grid with dlse {on_hopper}", lambda module=module: on_grid(module, True, with_dlse=True))
    for again, on_hopper in ((False, False), (False, True), (True, False), (True, True)):
        run = partial(along, again=again, on_hopper=on_hopper)
        # Tables are made for lengths up to 256, whichever the longest is.
        packed = cycle((of_documents(100, 156), of_documents(30, 226), of_documents(255, 1)))
        name = f"kept documents {on_hopper} {again}"
        thrice(name, lambda run=run, packed=packed: run(drawn(1, 256, 4, 64), **next(packed)))
        with noted(f"another number of documents {on_hopper} {again}"):
            run(drawn(1, 256, 4, 64), **of_documents(100, 100, 56))
        with noted(f"documents of another bound {on_hopper} {again}"):
            run(drawn(1, 256, 4, 64), **of_documents(128, 128))
    order = Ordering.from_curve("hilbert", 512, grid=(16, 32))
    thrice("grid in an order", lambda: on_grid(grid_launch, True, ordering=order))
    for again in (False, True):
        thrice(f"grid with bias {again}", lambda again=again: on_grid(grid_launch, again, with_bias=True))
        thrice(f"grid with bias on hopper {again}", lambda again=again: on_grid(hopper_grid, again, with_bias=True))

    # What differs from a kept call in one thing is not served by it.
    base = lambda: drawn(1, 256, 2, 48)  # noqa: E731
    flat, wide = torch.zeros(256 * 2 * 48 + 1, dtype=torch.bfloat16)[1:], drawn(1, 256, 4, 48, number=1)[0]
    calls = {  # tensors and options of each call in a row; by default `base` and none
        "kept": [{}, {}, {}],
        "alignment": [{"tensors": [flat.view(1, 256, 2, 48), *base()[:3]]}],
        "stride": [{"tensors": [wide[:, :, ::2], *base()[:3]]}],
        "dtype": [{"tensors": drawn(1, 256, 2, 48, dtype=torch.float16)}],
        "length": [{"tensors": drawn(1, 255, 2, 48)}],
        "one head": [{"tensors": drawn(1, 256, 1, 48)}],
        "scale": [{"scale": 0.5}],
        "a scale that is an integer": [{"scale": 1.0}, {"scale": 1.0}, {"scale": 1}],
        "causal": [{"is_causal": True}],
        "pattern": [{"pattern": DilatedPattern((64, 100, 128), (1, 2, 4))}],
        "padding": [{"key_padding_mask": masked(1, 256)}],
        "seed": [{"dropout_p": 0.5, "seed": torch.zeros(1, dtype=torch.int64)}],
        "one tensor as q, k and v": [*({"tensors": [base()[0]] * 4} for _ in range(3)), {}],
    }
    for name, several in calls.items():
        with noted(name):
            for options in several:
                along(**{"tensors": base(), **options})
    with noted("device"):
        device[0] = 1
        along(base())
        device[0] = 0
    with noted("debugging"):
        triton.knobs.runtime.debug = True
        along(base())
        triton.knobs.runtime.debug = False
    with noted("precision"):
        for allowed in ("ieee", "ieee", "ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = allowed
            along(drawn(1, 256, 2, 48, dtype=torch.float32))
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    with noted("hook"):
        triton.knobs.runtime.launch_enter_hook.add(print)
        along(base())
        triton.knobs.runtime.launch_enter_hook.remove(print)
    with noted("a hook of a kernel"):
        launch.forward_kernel.add_pre_run_hook(lambda *_, **__: heard.append(None))
        along(base())
        launch.forward_kernel.pre_run_hooks.clear()
    torch.cuda.is_current_stream_capturing, original = lambda: True, torch.cuda.is_current_stream_capturing
    told["capture"] = bool(starting._is_watched(SimpleNamespace(is_cuda=True)))
    torch.cuda.is_current_stream_capturing = original
    with noted("tables that are gone"):
        schedule.tables.cache_clear()
        along(base())
        along(base())
    # Of a mask, which is none of the call's tensors.
    thrice("copies", lambda: along(drawn(2, 256, 2, 48), key_padding_mask=masked(256, 2).T))
    with noted("strangers"):  # a tensor that is not told of, though it lives on
        out, dout, delta = torch.zeros(3, 1, 8, 2, 32)
        for _ in range(3):
            start(lambda dout=dout: [grid_launch.delta_of(dout, out, delta)], (dout, out))
    places = (torch.arange(8), torch.arange(8).flip(0))
    for at in (places, places[:1]):
        whole = (64, 1) if len(at) == 1 else (8, 8, 1)
        thrice(f"kept merges {len(at)}", partial(merged, whole, at))
        thrice(f"kept sums {len(at)}", partial(added, whole, at))
    thrice("kept zeros", lambda: rows.add_zero_keys(*map(torch.zeros, ((1, 8, 2, 32), (1, 2, 8), (2, 1, 8)))))
    thrice("kept results", results_merged)
    thrice("kept copies", copied)
    thrice("kept copies back", partial(copied, back=True))
    thrice("kept sums of copies", summed)
    with noted("at the same addresses"):
        out, delta, *douts = torch.zeros(4, 1, 8, 2, 32)
        for stream[0], dout in zip([100] * 6 + [200] * 4, douts * 5, strict=True):
            start(lambda dout=dout: [grid_launch.delta_of(dout, out, delta)], (out, dout, delta))
    # Nothing of a call is held. The fourth is of the same tensors: maps of their descriptors are there.
    tensors = base()
    for n in range(4):
        along(tensors if n else base(), on_hopper=True)
    maps = told["maps"]
    refs = [*map(ref, tensors)]
    del tensors
    begun.clear()
    told["held"] = sum(each() is not None for each in refs)
    starting.forget()
    with noted("forgotten"):
        along(base(), on_hopper=True)
    print(json.dumps(told | {"heard": len(heard), "maps": maps}))
