"""Runs the source of Triton's and Gluon's kernels on a CPU: stubs for both languages, and the library's own launches.

`emulated_tiles` has the values, `emulated_program` the threads and barriers. Only inline assembly is replaced. Layouts
of registers, numbers that outgrow 32 bits and what Triton's compiler makes of the source are not seen.
"""

import builtins
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import prod
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace

import numpy as np
import torch
from emulated_program import Barrier, Barriers, Program
from emulated_tiles import FUNCTIONS, Descriptor, Fault, Memory, Pointer, SharedTile, Value, fence, matrix_product, raw
from mutations import Mutation
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import hilbert_lib
from hilbert_lib.attention.triton.start import FLAG, Made, Start

PACKAGE = "hilbert_lib.attention.triton"
EMULATED = {  # all that a call runs but what is decided without triton
    "hilbert_lib.internals",
    *(
        f"{PACKAGE}.{name}"
        for name in (
            "geometry",
            "arguments",
            "forward",
            "backward",
            "launch",
            "grid",
            "grid_bias",
            "grid_launch",
            "packed",
            "rows",
        )
    ),
    *(
        f"{PACKAGE}.hopper.{name}"
        for name in (
            "tiles",
            "order",
            "steps",
            "dropout",
            "forward",
            "backward",
            "wide_keys",
            "wide_queries",
            "queries",
            "launch",
        )
    ),
    *(
        f"{PACKAGE}.hopper.{name}"
        for name in (
            "bias",
            "bias_tables",
            "boxes",
            "places",
            "masks",
            "box_descriptors",
            "grid_forward",
            "grid_backward",
            "wide",
            "grid_wide",
            "grid_wide_backward",
            "grid_whole",
            "grid_launch",
            "segments",
        )
    ),
}
LAYOUTS = ("SliceLayout", "DotOperandLayout", "BlockedLayout", "NVMMADistributedLayout", "SwizzledSharedLayout")
OPTIONS = {"num_warps", "num_stages", "maxnreg"}  # of a launch, which no kernel is given
running: Program | None = None  # the program that runs


class Product:
    """A product of tiles on the tensor cores, computed at some time after it is asked for."""

    def __init__(self, a, b, acc):
        self.a, self.b, self.acc, self.result = a, b, acc, None

    def compute(self):
        a, b = (x.by_engines if isinstance(x, SharedTile) else x.array for x in (self.a, self.b))
        # A product may go on from one that is not waited for: they are computed in turn.
        acc = self.acc.done() if isinstance(self.acc, Product) else self.acc
        self.result = matrix_product(a, b, acc)

    def done(self):
        if self.result is None:
            raise Fault("a product is used that was not waited for")
        return self.result


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    if a.dtype != b.dtype or a.dtype == gl.float32:
        raise Fault(f"a product of {a.dtype} and {b.dtype}")
    product = Product(a, b, acc if use_acc else None)
    running.group.products.append(product.compute)
    running.wait()
    return product if is_async else warpgroup_mma_wait(0, [product])


def warpgroup_mma_wait(num_outstanding=0, deps=()):
    products = running.group.products
    running.wait(lambda: len(products) <= num_outstanding)
    done = tuple(each.done() for each in deps)
    return done if len(done) > 1 else done[0]


def init(barrier, count):
    barrier.one.count = barrier.one.left = count


def expect(barrier, nbytes):
    barrier.one.change(1, nbytes)
    running.wait()


def arrive(barrier, *, count=1):
    barrier.one.change(count, 0)
    running.wait()


def wait(barrier, phase):
    cell, phase = barrier.one, int(phase)
    running.wait(lambda: cell.phase & 1 != phase)


def copy_to_shared(descriptor, coordinates, barrier, tile):
    at, cell = [int(x) for x in coordinates], barrier.one
    if list(tile.shape) != descriptor.block_shape:
        raise Fault(f"a box of {descriptor.block_shape} copied to a tile of {list(tile.shape)}")

    def copy():
        tile.fill(descriptor.box(at))
        cell.change(0, -descriptor.block_type.nbytes)

    running.copies.insert(running.random.randint(0, len(running.copies)), copy)
    running.wait()


def reduce_from_shared(function, descriptor, coordinates, tile):
    if list(tile.shape) != descriptor.block_shape:
        raise Fault(f"a tile of {list(tile.shape)} added in boxes of {descriptor.block_shape}")
    running.group.sent.append(lambda: descriptor.reduce(function, coordinates, tile.by_engines))
    running.wait()


def copy_from_shared(descriptor, coordinates, tile):
    reduce_from_shared(lambda before, box: box, descriptor, coordinates, tile)


def store_wait(pendings=0):
    sent = running.group.sent
    running.wait(lambda: len(sent) <= pendings)


@lru_cache
def barrier_in(asm: str) -> tuple[int, int, bool] | None:
    """Of assembly with one of the hardware's barriers: which register has its number, its threads, whether it waits."""
    before, bar, after = asm.partition("bar.")
    if not bar:
        return None
    kind, place, threads = re.match(r"(arrive|sync) (\S+), (\d+);", after).groups()
    # The number may have been moved: then the register was named last.
    register = re.findall(r"\$(\d+)", before + place)[-1]
    return int(register), int(threads), kind == "sync"


def inline_asm(asm, constraints, args, *, dtype, is_pure, pack):
    """What the kernels' assembly does: `tiles.arrive` and its like, `steps._scaled_if_any`, dropout, sums of `bias`."""
    if "@never" in asm:  # `tiles.held`: only the compiler sees it
        return args[0]
    if barrier := barrier_in(asm):
        register, threads, is_waited_for = barrier
        # Registers of the result come first, and each operand has `pack`.
        running.meet(int(args[register // pack - 1]), threads, is_waited_for)
        return None
    if asm == "mov.b32 $0, $1;":  # `dropout._anew`: only the compiler sees it
        return args[0]
    if "shfl" in asm or "is_kept" in asm:
        return on_registers(asm, constraints, args, pack)
    if ".shared" in asm:
        return on_sums(asm, args, pack)
    if "mul.f32" in asm:
        return args[0] * args[1]
    raise NotImplementedError(asm)


def on_registers(asm: str, constraints: str, args: list, pack: int) -> Value:
    """What assembly computes of products in registers, or of a word in each thread of a row."""
    operands = [np.asarray(raw(x)) for x in args]
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    operands = [x if x.dtype == np.float32 else word(x) for x in operands]
    registers = [x.reshape(-1)[registers_of(x.shape, shape, pack)] for x in operands]
    found = function_of(asm, constraints, pack)(*(register for x in registers for register in x))
    tile = np.stack(found).reshape(-1)[places_in_registers(shape, pack)]
    return Value(tile.astype(np.int64) if tile.dtype == np.uint32 else tile)


@lru_cache
def function_of(asm: str, constraints: str, pack: int) -> Callable:
    """A function of operands, element by element, that gives the results of assembly for all threads of four warps.

    It is Python of one line for each that writes a register, which is a variable.
    """
    operands = enumerate(constraints.split(",")[pack:])
    lines = [f"r{constraint} = r{pack + i}" for i, constraint in operands if constraint.isdigit()]
    for line in re.findall(r"(?:[^;{}]|\{[^;{}]*\})+;", asm):
        lines += as_python(line.strip("; \n"))
    given = ", ".join(f"r{pack + i}" for i, _ in enumerate(constraints.split(",")[pack:]))
    results = ", ".join(f"r{i}" for i in range(pack))
    names = {}
    text = "\n    ".join([f"def compute({given}):", *lines, f"return [{results}]"])
    exec(text, {"np": np, "halves": halves, "chosen_bytes": chosen_bytes}, names)
    return names["compute"]


def as_python(line: str) -> list[str]:
    """A line of assembly as Python: none that names registers, two of one that writes two of them."""
    guard = re.match(r"@(\w+) ", line)
    name, _, rest = line.removeprefix(guard[0] if guard else "").partition(" ")
    if name == ".reg":
        return []
    if name == "mov.b64":  # the halves of words of 64 bits, as they lie in memory
        low, high, wide = re.match(r"\{(\w+), (\w+)\}, (\w+)", rest).groups()
        return [f"{low}, {high} = halves({wide})"]
    to, *read = [x.strip().replace("$", "r") for x in rest.split(",")]
    if name.startswith("shfl.sync.bfly"):
        return [f"{to} = {read[0]}[:, np.arange(128) ^ {int(read[1])}]"]
    computed = COMPUTED[name].format(*(x if x.isidentifier() else number_of(x) for x in read))
    return [f"{to} = np.where({guard[1]}, {computed}, {to})" if guard else f"{to} = {computed}"]


def number_of(text: str) -> str:
    """A number of assembly as Python."""
    return "np.float32(0)" if text == "0f00000000" else str(int(text, 0) & 0xFFFFFFFF)


def word(x) -> np.ndarray:
    """Words of 32 bits."""
    return x if x.dtype == np.uint32 else x.astype(np.uint32)


def halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high words of words of 64 bits."""
    both = words.view(np.uint32)
    return both[:, ::2], both[:, 1::2]


def chosen_bytes(words: np.ndarray, others: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    """Bytes of words and of others, as prmt chooses them."""
    both = words | others.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(words)
    for byte in range(4):
        chosen = selectors >> np.uint32(4 * byte) & np.uint32(15)
        if (chosen > 7).any():
            raise Fault("prmt chooses a sign")
        found |= word(both >> chosen.astype(np.uint64) * np.uint64(8) & np.uint64(255)) << np.uint32(8 * byte)
    return found


COMPUTED = {  # Python, by the names of instructions
    "mov.b32": "{}",
    "xor.b32": "{} ^ {}",
    "or.b32": "{} | {}",
    "and.b32": "{} & {}",
    "add.s32": "{} + {}",
    "mul.wide.u32": "np.multiply({}, {}, dtype=np.uint64)",
    "setp.gt.u32": "{} > {}",
    "setp.ne.b32": "{} != {}",
    "selp.f32": "np.where({2}, {0}, {1})",
    "prmt.b32": "chosen_bytes({}, {}, {})",
}


def on_sums(asm: str, args: list, pack: int):
    """What assembly does with 32-bit sums in shared memory, which hold anything at first."""
    if words := re.search(r"\.b32 \w+\[(\d+)\]", asm):
        running.sums = np.full(int(words[1]), 12345)
        return Value(np.int64(0))
    if asm.startswith("ld.shared"):
        at = args[0].array // 4
        found = running.sums[at]
        running.sums[at] = 0
        return Value(found)
    tiles = np.broadcast_arrays(*map(raw, args))
    by_element = [of_threads(x) for x in tiles] if pack > 1 else [x[None] for x in tiles]
    registers = {f"${n}": by_element[max(n // pack - 1, 0)][n % pack] for n in range((len(args) + 1) * pack)}
    for line in asm.strip("{} ").split(";"):
        run_line(line.strip(), registers)
    return args[0]


def of_threads(tile: np.ndarray) -> np.ndarray:
    """A product of 64 rows, or a word for each thread of a row, as four warps hold it: [elements, threads]."""
    columns = tile.shape[1]
    eights, pairs = (columns // 8, 2) if columns > 4 else (1, 1)
    # Warp, row of two, row of eight, columns of eight, thread of a row, column of two.
    warps = tile.reshape(4, 2, 8, eights, 4, pairs)
    return warps.transpose(3, 1, 5, 0, 2, 4).reshape(-1, 128)


@lru_cache
def registers_of(shape: tuple[int, ...], tile: tuple[int, int], pack: int) -> np.ndarray:
    """Where in an operand of a shape the registers of threads lie, where it is a tile: [pack, calls, threads]."""
    places = np.broadcast_to(np.arange(prod(shape)).reshape(shape), tile)
    return np.ascontiguousarray(of_threads(places).reshape(-1, pack, 128).transpose(1, 0, 2))


@lru_cache
def places_in_registers(tile: tuple[int, int], pack: int) -> np.ndarray:
    """Where in registers [pack, calls, threads] the elements of a tile lie."""
    return np.argsort(registers_of(tile, tile, pack), axis=None).reshape(tile)


def run_line(line: str, registers: dict[str, np.ndarray]) -> None:
    """Run a line of assembly for all threads."""
    name, _, rest = line.partition(" ")
    to, *read = [x.strip() for x in rest.split(",")]
    if name in ("", ".reg"):
        return
    if name == "red.shared.add.s32":
        register, _, further = to.strip("[]").partition("+")
        at = registers[register] + int(further or 0)
        if (at % 4).any() or not 0 <= at.min() <= at.max() < 4 * running.sums.size:
            raise Fault(f"addresses {at.min()} to {at.max()} of {running.sums.size} sums")
        np.add.at(running.sums, at // 4, registers[read[0]])
        if np.abs(running.sums).max() >= 2**31:
            raise Fault("a sum leaves 32 bits")
        return
    values = [registers[x] for x in read]
    does = {
        "mov.f32": lambda x: x,
        "add.f32": np.add,
        "mul.f32": np.multiply,
        "cvt.rni.s32.f32": lambda x: np.rint(x).astype(np.int64),
    }
    registers[to] = does[name](*values)


def allocate(dtype, shape, layout):
    if layout is Barrier:
        return Barriers([Barrier() for _ in range(prod(shape))], shape)
    anything = np.float32(np.nan) if dtype.is_floating() else np.int64(12345)
    return SharedTile(dtype, *(np.full(shape, anything) for _ in range(2)))


def static_assert(condition, message=""):
    assert condition, message


def jit(function=None, **_):
    """A kernel, or a function of one, is the function itself."""
    if function is None:
        return jit
    code = function.__code__
    function.arg_names = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return function


def constant(x):
    return x


def no_layout(*_, **__):
    """A layout of registers, which numpy has not."""


LANGUAGE = SimpleNamespace(
    **FUNCTIONS,
    **{
        name: getattr(gl, name)
        for name in ("int1", "int8", "int32", "uint32", "int64", "float16", "bfloat16", "float32", "float64")
    },
    **dict.fromkeys(LAYOUTS, no_layout),
    NVMMASharedLayout=gl.NVMMASharedLayout,
    tensor=Value,
    shared_memory_descriptor=SharedTile,
    constexpr=constant,
    static_range=range,
    static_assert=static_assert,
    program_id=lambda axis: Value(np.int64(running.ids[axis])),
    barrier=lambda: None,  # the threads of a group run as one
    num_programs=lambda axis: Value(np.int64(running.grid[axis])),
    allocate_shared_memory=allocate,
    warp_specialize=lambda parts, warps, registers: running.split(parts, warps),
    inline_asm_elementwise=inline_asm,
)
SEMANTIC = SimpleNamespace(
    _convert_to_ir_values=lambda values, require_i64: [int(x) for x in values],
    builder=SimpleNamespace(create_async_tma_reduce=reduce_from_shared),
)
GLUON = SimpleNamespace(jit=jit, constexpr_function=lru_cache, language=LANGUAGE)
TRITON = SimpleNamespace(
    jit=jit,
    JITFunction=object,
    language=LANGUAGE,
    cdiv=lambda a, b: -(-a // b),
    knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)),
)
HOPPER = SimpleNamespace(
    fence_async_shared=fence,
    mbarrier=SimpleNamespace(MBarrierLayout=lambda: Barrier, init=init, expect=expect, arrive=arrive, wait=wait),
    tma=SimpleNamespace(
        async_copy_global_to_shared=copy_to_shared, async_copy_shared_to_global=copy_from_shared, store_wait=store_wait
    ),
    warpgroup_mma=warpgroup_mma,
    warpgroup_mma_wait=warpgroup_mma_wait,
)


STUBS = {
    "triton": TRITON,
    "triton.language": LANGUAGE,
    "triton._C.libtriton": SimpleNamespace(ir=SimpleNamespace(DESCRIPTOR_REDUCE_KIND=SimpleNamespace(ADD=np.add))),
    "triton.experimental": SimpleNamespace(gluon=GLUON),
    "triton.experimental.gluon": GLUON,
    "triton.experimental.gluon.language._core": SimpleNamespace(
        builtin=lambda function: partial(function, _semantic=SEMANTIC)
    ),
    "triton.experimental.gluon.language.nvidia.hopper": HOPPER,
}


@cache
def compiled(source: str, path: Path) -> CodeType:
    """Of all sources, of which one is edited, those that are not are compiled once."""
    return compile(source, path, "exec")


class Sources:
    """The library's modules of kernels and launches, loaded from their source with the stubs in place of Triton.

    edits: of a module by its name below `attention.triton`, a text that stands there once, and what replaces it.
    """

    def __init__(self, edits: dict[str, tuple[str, str]] | None = None):
        self.edits = {f"{PACKAGE}.{name}": edit for name, edit in (edits or {}).items()}
        self.modules = {f"{PACKAGE}.start": SimpleNamespace(Start=Start, Made=Made, FLAG=FLAG, start=self._start)}
        self.starts: list[Start] = []
        self.run = run
        self.launch = self.module(f"{PACKAGE}.launch")
        self.grids = self.module(f"{PACKAGE}.hopper.grid_launch")
        self.grids.multiprocessors = lambda device: 3  # so that a program takes several tiles

    def module(self, name: str) -> ModuleType:
        if name not in self.modules:
            path = Path(hilbert_lib.__file__).parents[1].joinpath(*name.split(".")).with_suffix(".py")
            source = path.read_text(encoding="utf-8")
            if name in self.edits:
                before, after = self.edits[name]
                assert source.count(before) == 1, f"{before!r} stands {source.count(before)} times in {path.name}"
                source = source.replace(before, after)
            module = self.modules[name] = ModuleType(name)
            module.__builtins__ = {**vars(builtins), "__import__": self._import}
            exec(compiled(source, path), vars(module))
        return self.modules[name]

    def _import(self, name, globals=None, locals=None, fromlist=(), level=0):
        if name in STUBS:
            return STUBS[name] if fromlist else STUBS[name.split(".")[0]]
        if name in self.modules or name in EMULATED:
            return self.module(name)
        inside = {each: f"{name}.{each}" for each in fromlist or () if f"{name}.{each}" in EMULATED}
        others = tuple(each for each in fromlist or () if each not in inside)
        found = __import__(name, globals, locals, others, level)
        if not inside:
            return found
        emulated = {each: self.module(whole) for each, whole in inside.items()}
        return SimpleNamespace(**emulated, **{each: getattr(found, each) for each in others})

    def _start(
        self, make: Callable[..., Sequence[Start]], tensors: Sequence = (), *_, made: Sequence = (), finish=list, **__
    ) -> Sequence:
        new = [each and each.creator(tensors[0].device)() for each in made]
        for each in make(*new):
            self.starts.append(each)
            self.run(each)
        return finish(new)


def run(each: Start) -> None:
    global running
    kernel = each.kernel
    arguments = [_given(x) for x in each.arguments]
    named = {name: _given(x) for name, x in each.named.items() if name not in OPTIONS}
    for number in range(prod(each.grid)):
        ids = np.unravel_index(number, each.grid, order="F")
        running = Program(kernel.__name__, tuple(map(int, ids)), each.grid, each.named.get("num_warps", 4))
        with np.errstate(all="ignore"):
            kernel(*arguments, **named)
        if running.copies or any(group.products or group.sent for group in running.groups):
            raise Fault("a program ends with copies or products that nothing waited for")


def _given(x):
    # What a kernel is given for an argument.
    if isinstance(x, torch.Tensor):
        return Pointer(Memory(x), x.storage_offset())
    return Descriptor(x) if isinstance(x, TensorDescriptor) else x


def edited(mutation: Mutation) -> Sources:
    return Sources({mutation.module: (mutation.before, mutation.after)})


def wrong(results: dict[str, torch.Tensor | None], right: Sequence[torch.Tensor], bound: float) -> str | None:
    """Which result is not right and how far off it is, if any: by the norm of its errors, and of those in a row."""
    for (name, found), expected in zip(results.items(), right, strict=True):
        if found is None:  # of extra keys that there are none of
            if expected.numel():
                return f"{name}: none"
            continue
        found = found.double()
        if name == "lse":
            same = torch.where(found == expected, 0, found - expected).abs()
            if not same.max() < 1e-5:
                return f"lse: {same.max():.1e}"
        elif found.numel():
            error = (found - expected).norm(dim=-1)
            size = expected.norm() / expected.shape[:-1].numel() ** 0.5  # of a row
            if not (error.norm() <= bound * expected.norm() and error.max() <= 10 * bound * size):
                return f"{name}: {error.norm() / expected.norm():.1e}, in a row {error.max() / size:.1e}"
    return None
