"""Names of torch and Triton that are private, or that their releases spell differently: each stands here, once.

Each function says in which release its name was read, what it gives, and what is done without it. A function below
`_private` is that fallback: torch's own stands in its place where the release has it, so that a call costs no more.
Names that load torch's compiler or Triton are imported inside the functions.

With HILBERT_WITHOUT_INTERNALS=1 in the environment every fallback is taken. Tests set it. Some fallbacks load Triton
when the library is imported: where there is no GPU, TRITON_INTERPRET=1 must then be set too.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial, reduce
from inspect import getclosurevars, isfunction, signature
from operator import or_
from types import NoneType, SimpleNamespace

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

WITHOUT_INTERNALS = os.environ.get("HILBERT_WITHOUT_INTERNALS") == "1"


def _private(read: Callable[[], object]) -> Callable[[Callable], Callable]:
    """A decorator of a fallback: what `read` finds in torch stands in its place, if that release has it."""

    def choose(fallback: Callable) -> Callable:
        if WITHOUT_INTERNALS:
            return fallback
        try:
            return read()
        except (AttributeError, ImportError):
            return fallback

    return choose


# The dispatcher of operators.


def _bits(*names: str) -> int:
    key_set, keys = torch._C.DispatchKeySet, torch._C.DispatchKey
    return reduce(or_, (key_set(getattr(keys, name)) for name in names)).raw_repr()


def _read_is_thread_watched() -> Callable[[], bool]:
    included, function_modes = torch._C._dispatch_tls_local_include_set, torch._C._len_torch_function_stack
    is_profiled = torch.autograd._profiler_enabled
    _ = forward_ad._current_level, torch.autograd.profiler._is_profiler_enabled  # read anew in every call
    # Dispatch keys of a thread in which nobody watches operators: any other is a mode's or a transform's.
    watched = ~_bits("BackendSelect", "ADInplaceOrView")

    def is_thread_watched() -> bool:
        return (
            torch.compiler.is_compiling()
            or included().raw_repr() & watched != 0
            or function_modes() != 0
            or forward_ad._current_level >= 0  # the numbers of forward-mode differentiation show by this alone
            or is_profiled()
            or torch.autograd.profiler._is_profiler_enabled  # in all threads
        )

    return is_thread_watched


@_private(_read_is_thread_watched)
def is_thread_watched() -> bool:
    """Whether a compiler, a mode, a transform or a profiler may look at operators of this thread.

    Read in torch 2.13: dispatch keys of the thread, modes, profilers. Without it: True, and every call goes through
    torch's dispatcher.
    """
    return True


def _read_plain_keys() -> Callable[[Tensor], int]:
    keys_of = torch._C._dispatch_keys
    # Keys of tensors that are nothing but data.
    special = ~_bits("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA", "ADInplaceOrView")

    def plain_keys(x: Tensor) -> int:
        keys = keys_of(x).raw_repr()
        return 0 if keys & special else keys

    return plain_keys


@_private(_read_plain_keys)
def plain_keys(x: Tensor) -> int:
    """The dispatch keys of a tensor that is nothing but data, as a number; 0 of any other one.

    Read in torch 2.13. Without it: 0, asked only where `is_thread_watched` is False, which it then never is.
    """
    return 0


_PLAIN_TENSORS, _NO_TENSORS = {Tensor, torch.nn.Parameter}, {NoneType, bool, int, float, str, tuple, list}


def is_watched(args: tuple) -> bool:
    """Whether somebody watches this thread, or one of the arguments is a tensor that is more than its data.

    Read in torch 2.13, by `is_thread_watched` and `plain_keys`. Without it: True.
    """
    if is_thread_watched():
        return True
    for x in args:
        if (kind := type(x)) in _PLAIN_TENSORS:
            if not plain_keys(x):
                return True
        elif kind not in _NO_TENSORS and isinstance(x, Tensor):
            return True
    return False


def _read_plain_apply() -> Callable[[type], Callable]:
    _ = super(torch.autograd.Function, torch.autograd.Function).apply
    return lambda function: super(torch.autograd.Function, function).apply


@_private(_read_plain_apply)
def plain_apply(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply`, for calls where no transform of torch.func runs and no argument is of one.

    Read in torch 2.13: the method beneath, which does not look for them. Without it: that method itself.
    """
    return function.apply


def _form_of(x: Tensor) -> tuple:
    return type(x), plain_keys(x), x.dtype, x.get_device(), x.requires_grad, x.shape, x.stride()


def _read_form_check() -> Callable[..., Callable[..., bool]]:
    guards = torch._C._dynamo.guards.TensorGuards

    def form_check(*tensors: Tensor) -> Callable[..., bool]:
        sides, strides = [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors]
        return guards(*tensors, dynamic_dims_sizes=sides, dynamic_dims_strides=strides).check

    return form_check


@_private(_read_form_check)
def form_check(*tensors: Tensor) -> Callable[..., bool]:
    """A function that says whether as many tensors are like these but for values and addresses. It holds no tensor.

    Alike are type, dispatch keys, dtype, device, shape, strides, and whether a gradient is asked for. One tensor in two
    places is like none. Read in torch 2.13: what torch.compile checks inputs by, in one call of C++, with the dispatch
    keys of the thread. Without it: one by one.
    """
    forms = [*map(_form_of, tensors)]
    return lambda *others: [*map(_form_of, others)] == forms


def _read_is_below_autograd() -> Callable[[], bool]:
    return partial(torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.AutogradOther)


@_private(_read_is_below_autograd)
def is_below_autograd() -> bool:
    """Whether this thread runs below autograd, which records nothing here.

    Read in torch 2.13. Without it: False, asked only where `is_watched` is False, which it then never is.
    """
    return False


def _read_run_below_autograd() -> Callable:
    guard = torch._C._AutoDispatchBelowAutograd

    def run_below_autograd(operator: Callable, *args: object) -> tuple[Tensor, ...]:
        with guard():
            return operator(*args)

    return run_below_autograd


@_private(_read_run_below_autograd)
def run_below_autograd(operator: Callable, *args: object) -> tuple[Tensor, ...]:
    """The results of an operator that returns tensors, run by what torch's dispatcher has below autograd.

    Read in torch 2.13: a guard of dispatch keys. Without it: inference mode, which excludes the same keys. Its tensors
    serve no backward: each result is copied, and for a moment held twice, which `estimate_memory` does not count. In a
    checkpoint that torch.compile compiles torch refuses them.
    """
    with torch.inference_mode():
        results = operator(*args)
    return tuple(x.clone() for x in results)


@_private(lambda: torch._C._are_functorch_transforms_active)
def is_functorch_active() -> bool:
    """Whether torch.func's grad, jvp, vmap and the like run.

    Read in torch 2.13. Without it: False, and torch refuses what has no rule for them in words of its own.
    """
    return False


@_private(lambda: torch._C._functorch.is_batchedtensor)
def is_batched(x: Tensor) -> bool:
    """Whether torch.func.vmap maps over a tensor.

    Read in torch 2.13. Without it: False, and torch refuses to give its values in words of its own.
    """
    return False


def _read_is_forward_ad_active() -> Callable[[], bool]:
    _ = forward_ad._current_level  # read anew in every call
    return lambda: forward_ad._current_level >= 0


@_private(_read_is_forward_ad_active)
def is_forward_ad_active() -> bool:
    """Whether forward-mode differentiation may run.

    Read in torch 2.13: the number of its level. Without it: True; who needs to know asks every tensor.
    """
    return True


# Tensors without data, and modes that make them.


def _read_has_values() -> Callable[[Tensor], bool]:
    from torch._subclasses.fake_tensor import FakeTensor

    return lambda x: not x.is_meta and not isinstance(x, FakeTensor)


@_private(_read_has_values)
def has_values(x: Tensor) -> bool:
    """Whether the values of a tensor can be read: it is neither a meta tensor nor a fake one.

    Read in torch 2.13: the class of fake tensors. Without it: no subclass of Tensor but Parameter has any.
    """
    return not x.is_meta and type(x) in (Tensor, torch.nn.Parameter)


@_private(lambda: torch._assert_async)
def assert_async(condition: Tensor, message: str) -> None:
    """Stop the device, or raise RuntimeError on the CPU, where a tensor of one element is False; no wait.

    Read in torch 2.13, which compiles and exports it. Without it: the host waits, and a program that is compiled or
    exported does not check.
    """
    if not torch.compiler.is_compiling() and has_values(condition) and not condition:
        raise RuntimeError(message)


def _read_made_outside_modes() -> Callable:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    def made_outside_modes(build: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        with _disable_current_modes() as modes:
            tensors = build()
        fake = next((mode for mode in modes if isinstance(mode, FakeTensorMode)), None)
        if fake is None or fake.allow_non_fake_inputs:  # torch.export takes real tensors as constants
            return tensors
        return tuple(fake.from_tensor(x, static_shapes=True) for x in tensors)

    return made_outside_modes


@_private(_read_made_outside_modes)
def made_outside_modes(build: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Tensors made outside of fake tensors and tracing, for every later call; as the mode that runs takes them.

    Read in torch 2.13: the modes of the thread are put off, and fake ones of the tensors made. Without it: another
    thread, which has none of the modes, makes the tensors; fake tensors of their shapes stand for them.
    """
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def build_on_stream() -> tuple[Tensor, ...]:
        with torch.cuda.stream(stream):
            return build()

    with ThreadPoolExecutor(1) as pool:
        tensors = pool.submit(build_on_stream).result()
    if torch.compiler.is_compiling() or type(torch.empty(0)) is Tensor:
        return tensors
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors)


def _read_dispatch_mode() -> Callable[[], type]:
    from torch.utils._python_dispatch import TorchDispatchMode

    return lambda: TorchDispatchMode


@_private(_read_dispatch_mode)
def dispatch_mode() -> type:
    """The class of modes that see every operator that runs: `__torch_dispatch__` is called for it.

    Read in torch 2.13, in a module whose name is private. Without it: the one that torch's counter of FLOP, a public
    module, has imported; this loads Triton where that is installed.
    """
    from torch.utils import flop_counter

    return flop_counter.TorchDispatchMode


# torch's compiler.


def _mark_constant(function: Callable) -> Callable:
    function._dynamo_marked_constant = True
    return function


@_private(lambda: _mark_constant)
def compile_time_constant(function: Callable) -> Callable:
    """A decorator: torch.compile calls the function once and takes its answer as a constant of the program.

    Read in torch 2.13: an attribute, which is all that torch.compiler.assume_constant_result gives a function. Without
    it: that function, which imports torch's compiler, and with it Triton, at once.
    """
    return torch.compiler.assume_constant_result(function)


def _mark_disabled(function: Callable) -> Callable:
    function._torchdynamo_disable = True
    return function


@_private(lambda: _mark_disabled)
def untraced(function: Callable) -> Callable:
    """A decorator: torch.compile breaks the graph at a call of the function.

    Read in torch 2.13: an attribute. Without it: torch.compiler.disable, which imports torch's compiler at once.
    """
    return torch.compiler.disable(function)


def _mark_rows_dynamic(x: Tensor) -> None:
    x._dynamo_weak_dynamic_indices = {0}
    x._has_dynamo_dim_marking = True


@_private(lambda: _mark_rows_dynamic)
def mark_rows_dynamic(x: Tensor) -> None:
    """Have torch.compile take the first side of a tensor as a symbol from its first graph on.

    Read in torch 2.13, whose `torch._dynamo.maybe_mark_dynamic` does so and loads the compiler. Without it: the side is
    a symbol once torch.compile has seen two.
    """


def is_compiler_loaded() -> bool:
    """Whether torch's compiler, which torch.compile loads, is there, so that it may trace.

    Read in torch 2.13: the name of its module. Without it: True.
    """
    return WITHOUT_INTERNALS or "torch._dynamo" in sys.modules


def buffers_kept(**options: bool) -> AbstractContextManager:
    """A context: what is compiled in it has a backward that may run again, since it takes over no buffers.

    options: others of torch's AOTAutograd. Read in torch 2.13: its configuration. Without it: nothing is set, and torch
    refuses to run such a backward twice.
    """
    if WITHOUT_INTERNALS:
        return nullcontext()
    try:
        from torch._functorch import config

        return config.patch(donated_buffer=False, **options)
    except (AttributeError, ImportError):
        return nullcontext()


def _give_up_no_buffers(node: object) -> None:
    node._forward_cls.metadata.bw_donated_idxs = []


@_private(lambda: _give_up_no_buffers)
def let_run_again(node: object) -> None:
    """Say of the backward of compiled code, an autograd node, that it takes over no buffers.

    torch 2.11 to 2.13 refuse to run one again unless the indices of these buffers are the empty list; they are None
    where nobody looked for any. Without it: nothing is said, and torch refuses to run it twice.
    """


@cache
def _small_tiles(block_size: int) -> object:
    from torch._inductor.choices import InductorChoices

    class SmallTiles(InductorChoices):
        def get_flex_attention_fwd_configs(self, *args, **kwargs):
            return cut(super().get_flex_attention_fwd_configs(*args, **kwargs), "block_m", "block_n")

        def get_flex_attention_bwd_configs(self, *args, **kwargs):
            configs = super().get_flex_attention_bwd_configs(*args, **kwargs)
            return cut(configs, "block_m1", "block_n1", "block_m2", "block_n2")

    def cut(configs, *sides):
        # 4 warps: inductor gives them to its own tiles of 64 rows.
        rows = [{axis: min(getattr(config, axis), block_size) for axis in sides} for config in configs]
        return [replace(config, num_warps=4, **least) for config, least in zip(configs, rows, strict=True)]

    return SmallTiles()


def multiplies_by_amx() -> bool:
    """Whether oneDNN, which torch computes with on a CPU, multiplies bfloat16 by the matrix unit of some Intel CPUs.

    Read in torch 2.13: torch.cpu. Without it: False; `estimate_memory` then leaves out copies of k and v. A limit in
    `ONEDNN_MAX_CPU_ISA` switches the unit off unless it names it.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX")
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return not WITHOUT_INTERNALS and supported is not None and "AMX" in limit.upper() and supported()


def flex_tiles_within(block_size: int) -> AbstractContextManager:
    """A context: FlexAttention is compiled, by this thread, with tiles of at most so many rows and columns.

    Read in torch 2.13: inductor's choices. Without it: nothing is set; where inductor's tiles are larger than a block
    of the mask, it finds no kernel and raises.
    """
    if WITHOUT_INTERNALS:
        return nullcontext()
    try:
        from torch._inductor.virtualized import V

        return V.set_choices_handler(_small_tiles(block_size))
    except (AttributeError, ImportError):
        return nullcontext()


def while_jit_traces(method: Callable) -> Callable[[type], type]:
    """A class decorator: torch.jit.trace calls `method` of a module in the place of `forward`.

    Read in torch 2.13: nn.Module's `_slow_forward`. Without it: `forward` is called, and must refuse tracers itself.
    """

    def decorate(layer: type) -> type:
        if not WITHOUT_INTERNALS and hasattr(torch.nn.Module, "_slow_forward"):
            layer._slow_forward = method
        return layer

    return decorate


def _read_has_hooks() -> Callable[[torch.nn.Module], bool]:
    def has_hooks(layer: torch.nn.Module) -> bool:
        of_forward = layer._forward_pre_hooks or layer._forward_hooks
        return bool(of_forward or layer._backward_pre_hooks or layer._backward_hooks)

    has_hooks(torch.nn.Identity())
    return has_hooks


@_private(_read_has_hooks)
def has_hooks(layer: torch.nn.Module) -> bool:
    """Whether a call of a layer runs hooks besides: pruning, weight normalisation and others work by them.

    Read in torch 2.13: the hooks of nn.Module. Without it: True, and nobody computes by a layer's weight alone.
    """
    return True


# torch's dense attention: operators beneath `scaled_dot_product_attention` that return lse.


def _dense_operators() -> SimpleNamespace:
    names = "flash_attention_for_cpu", "efficient_attention", "flash_attention", "cudnn_attention"
    both = [f"{name}{direction}" for name in names for direction in ("", "_backward")]
    packets = (None if WITHOUT_INTERNALS else getattr(torch.ops.aten, f"_scaled_dot_product_{x}", None) for x in both)
    return SimpleNamespace(**dict(zip(both, packets, strict=True)))


dense_operators = _dense_operators()
"""torch's `_scaled_dot_product_<name>` and `<name>_backward`, read in torch 2.13.

An operator that a release lacks is None. Without it: on the CPU `scaled_dot_product_attention` itself, with lse and
gradients by matrix products; on CUDA the backend refuses and says which operator is missing.
"""


# Devices and process groups.


def _read_spin() -> Callable[[int], None]:
    return torch.cuda._sleep


@_private(_read_spin)
def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many cycles.

    Read in torch 2.13, whose tests use it for this. Without it: nothing is queued, and a sample says that the device
    waited for the host.
    """


@_private(lambda: torch.cuda._parse_visible_devices)
def visible_devices() -> list[int] | list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows, as CUDA reads it: numbers, or UUIDs as strings.

    Without the variable: more numbers than there are GPUs. Read in torch 2.13. Without it: the variable is split here,
    up to the first word that is no number or no UUID.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(64))
    prefix = next((kind for kind in ("GPU-", "MIG-") if text.startswith(kind)), None)
    shown = []
    for word in text.split(","):
        number = re.match(r"\s*\+?\d+", word)
        if not (word.startswith(prefix) if prefix else number):
            break
        device = word if prefix else int(number[0])
        if device in shown:  # CUDA shows none where one is named twice
            return []
        shown.append(device)
    return shown


@_private(lambda: torch.cuda._transform_uuid_to_ordinals)
def ordinals_of(shown: list[str], uuids: list[str]) -> list[int]:
    """The numbers of GPUs named by UUIDs or by their beginnings, up to the first that names no one GPU.

    Read in torch 2.13. Without it: the same, written here.
    """
    ordinals = []
    for name in shown:
        matches = [number for number, uuid in enumerate(uuids) if uuid.startswith(name)]
        if len(matches) != 1:
            break
        ordinals += matches
    return ordinals if len(set(ordinals)) == len(ordinals) else []


def group_timeout(group: ProcessGroup, device: torch.device) -> timedelta | None:
    """After how long a process group's backend for a device misses a rank.

    Read in torch 2.13: the options of the backend. Without it: None, for which torch takes its default.
    """
    if WITHOUT_INTERNALS:
        return None
    try:
        return group._get_backend(device).options._timeout
    except AttributeError:
        return None


# Triton's launchers.


def launch_of(compiled: object, grid: tuple[int, ...]) -> tuple | None:
    """A start of a compiled kernel of Triton without hooks, in less host time than `kernel[grid](...)`.

    Read in Triton 3.6 to 3.9: the launcher of a kernel, and what it gives its own C function. Without it: None, and
    Triton starts every kernel.

    Returns:
        The function to call. Its fixed arguments: those before the stream, those after it, and whether the kernel's
        own arguments, which come last, are passed as one tuple. And for each tensor descriptor the function that
        prepares it, where the launcher does not.
    """
    if WITHOUT_INTERNALS:
        return None
    run, metas = _bare(compiled.run)
    launch, fixed_arguments = _through(run, grid, (compiled.function, compiled.packed_metadata))
    return launch, fixed_arguments, metas


def _through(run: Callable, grid: tuple, compiled: tuple) -> tuple[Callable, tuple[tuple, tuple, bool]]:
    # The function to call for a start without hooks, and its fixed arguments, as `launch_of` returns them. It is the
    # launcher's C function, unless the launcher allocates memory for every start or serves Triton's sanitizer (gsan,
    # from 3.8 on). A probe in its place shows what the launcher passes.
    stream, launched = object(), []
    scratch = "global_scratch_size", "profile_scratch_size"
    if any(getattr(run, name, 1) for name in scratch) or getattr(run, "gsan_enabled", False):
        return run, (grid, (*compiled, None, None, None), False)
    probe = _like(run, launch=lambda *arguments: launched.extend(arguments))
    probe(*grid, stream, *compiled, None, None, None)
    place, is_one = launched.index(stream), launched[-1] == ()  # from Triton 3.7 on
    return run.launch, (tuple(launched[:place]), tuple(launched[place + 1 : len(launched) - is_one]), is_one)


def _like(x: object, **changed) -> object:
    # A copy of an object, with `changed` attributes.
    copied = object.__new__(type(x))
    copied.__dict__ = vars(x) | changed
    return copied


def _bare(run: Callable) -> tuple[Callable, Iterator[Callable]]:
    # Triton's launcher makes maps of descriptors anew at every start, which takes as long as the rest. The launcher
    # below it, and what makes a map of each descriptor; or the launcher itself where it is another than we know.
    launch = getattr(run, "launch", None)
    inside = getclosurevars(launch) if isfunction(launch) else None
    if inside is None or not {"launcher", "tensordesc_meta"} <= inside.nonlocals.keys():
        return run, iter(())
    # A global name of the launcher's module in Triton 3.7, an argument of the wrapper from 3.8 on.
    make = (inside.globals | inside.nonlocals).get("make_tensordesc_arg")
    metas = inside.nonlocals["tensordesc_meta"]
    if make is None or not metas or None in metas:
        return run, iter(())
    run = _like(run, launch=inside.nonlocals["launcher"])
    # From Triton 3.8 on it takes a third argument, which is not read for NVIDIA's GPUs.
    unread = (None,) * (len(signature(make).parameters) - 2)
    return run, (partial(_map_of, make, meta, unread) for meta in metas)


def _map_of(make: Callable, meta: dict, unread: tuple, x: object) -> list:
    return make(x, meta, *unread)


# Triton's interpreter.


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """A context in which Triton's interpreter runs one kernel in a third of its time.

    Triton computes each sum and product of small integers again in 64 bits to find an overflow, which no compiled
    kernel does. It also changes its language anew for each call of a function inside the kernel. Here nothing is
    computed again, and the language is changed once for each function. Results have the same bits.

    Read in Triton 3.7.1: the options of the interpreter's builder, and what changes the language. Without it: the
    interpreter as it is.
    """
    if WITHOUT_INTERNALS:
        yield
        return
    from triton.runtime import interpreter

    builder, change = getattr(interpreter, "interpreter_builder", None), getattr(interpreter, "_patch_lang", None)
    if change is None or not hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        yield
        return
    options, changes = builder.options, {}

    def change_once(function: Callable) -> SimpleNamespace:
        is_kernel = not changes
        if function not in changes:
            changes[function] = change(function)
        return SimpleNamespace(restore=restore if is_kernel else lambda: None)

    def restore() -> None:
        for each in reversed(changes.values()):
            if each is not None:
                each.restore()
        changes.clear()

    builder.options, interpreter._patch_lang = replace(options, sanitize_overflow=False), change_once
    try:
        yield
    finally:
        builder.options, interpreter._patch_lang = options, change


# Gluon's names.


def group_barrier():
    """Gluon's barrier of the warps of a group: `barrier` from Triton 3.7 on, which 3.6 calls `thread_barrier`."""
    from triton.experimental.gluon import language

    return language.barrier if hasattr(language, "barrier") else language.thread_barrier


def async_load():
    """Gluon's copy from global to shared memory: (descriptor, coordinates, barrier, tile).

    `async_load` from Triton 3.8 on. Triton 3.6 and 3.7 call it `async_copy_global_to_shared`, a name that raises in
    3.9.
    """
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def async_store():
    """Gluon's copy from shared to global memory: (descriptor, coordinates, tile).

    `async_store` from Triton 3.8 on. Triton 3.6 and 3.7 call it `async_copy_shared_to_global`, a name that raises in
    3.9.
    """
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def async_add():
    """Gluon's addition of a tile in shared memory to global memory: (descriptor, coordinates, tile).

    `async_atomic_add` from Triton 3.8 on. Triton 3.6 and 3.7 have no name for it: there the builder's
    `create_async_tma_reduce` is called, as read in 3.7.1.
    """
    from triton.experimental.gluon.language.nvidia.hopper import tma

    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add

    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def add_shared_to_global(descriptor, coordinates, source, _semantic=None):
        coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
        _semantic.builder.create_async_tma_reduce(
            ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
        )

    return add_shared_to_global


def reinterpret():
    """Gluon's view of a tile in shared memory with another dtype, shape and layout: (tile, dtype, shape, layout).

    `tile.reinterpret` from Triton 3.9 on. Triton 3.6 to 3.8 call it `tile._reinterpret`.
    """
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def view(tile, dtype, shape, layout, _semantic=None):
        method = tile.reinterpret if hasattr(tile, "reinterpret") else tile._reinterpret
        return method(dtype, shape, layout, _semantic=_semantic)

    return view
