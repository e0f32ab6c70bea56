"""What the tests' faster interpreter has in the place of Triton's gives the same bits."""

import importlib
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from hilbert_lib.machine import kernel_mode

if kernel_mode() != "interpreted":
    pytest.skip("kernels are not interpreted here", allow_module_level=True)

import hastened
import interpreted
import triton.language as tl
from hastened import OPERATORS
from triton.language import core
from triton.runtime import interpreter

TRITONS = {name: getattr(tl.tensor, name) for name in (*OPERATORS, "__getitem__")}
TRITONS_REWRITING = hastened.rewritten.__kwdefaults__["own"]
DTYPES = (tl.int1, tl.int32, tl.int64, tl.uint32, tl.float16, tl.float32, tl.bfloat16, tl.pointer_type(tl.float32))
SIDES = ((4, 1), (1, 2), (4, 2))
NUMBERS = (3, -2, 2.5, True, 2**40)


@pytest.fixture(autouse=True)
def kernels_language():
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    yield
    scope.restore()


def tile(dtype: tl.dtype, sides: tuple[int, ...]) -> tl.tensor:
    """A tensor of these sides, or of a number where there are none, without zeros: they divide."""
    random = np.random.default_rng(len(dtype.name) + sum(sides))
    numbers = random.integers(1, 100, sides or (1,)).astype(interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(numbers, dtype), tl.block_type(dtype, list(sides)) if sides else dtype)


def told(operator, *operands, **named) -> tuple:
    """The types of the result and its bytes, or what is raised."""
    try:
        found = operator(*operands, **named)
    except Exception as error:
        return type(error), str(error)
    if not isinstance(found, tl.tensor):
        return type(found), found
    handle = found.handle
    return found.type.name, handle.dtype.name, handle.data.dtype, handle.data.shape, handle.data.tobytes()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of products beyond float16
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_the_bits_of_tritons_at_its_first_and_second_call(name):
    semantic = interpreter.interpreter_semantic
    tiles = [
        tile(dtype, sides)
        for dtype, sides in zip(DTYPES * 2, (*SIDES, *SIDES, *SIDES, *SIDES[:2], *[()] * 5), strict=False)
    ]
    others = (*NUMBERS, tl.constexpr(3)) if OPERATORS[name] else (*tiles, *NUMBERS, tl.constexpr(3))
    for left in tiles:
        for right in others:
            wanted = told(TRITONS[name], left, right, _semantic=semantic)
            for _ in range(2):
                assert told(getattr(tl.tensor, name), left, right) == wanted, (left.type, right)


@pytest.mark.parametrize("places", [(slice(None), None), (None, slice(None)), (None, slice(None), None), None, (0,)])
def test_a_tile_with_new_axes_is_tritons(places):
    for each in (tile(tl.int32, (4,)), tile(tl.float32, (4, 2))):
        wanted = told(TRITONS["__getitem__"], each, places, _semantic=interpreter.interpreter_semantic)
        for _ in range(2):
            assert told(tl.tensor.__getitem__, each, places) == wanted


@pytest.mark.parametrize("module", ["forward", "grid", "lists", "rows", "decode"])
def test_a_kernel_is_rewritten_as_triton_does(module):
    module = importlib.import_module(f"hilbert_lib.attention.triton.{module}")
    hastened.definitions.cache_clear()  # what is rewritten is taken from there
    kernels = [x for x in vars(module).values() if isinstance(x, interpreter.InterpretedFunction)]
    assert kernels
    for kernel in kernels:
        found, wanted = (rewrite(kernel.rewriter) for rewrite in (hastened.rewritten, TRITONS_REWRITING))
        assert found.__code__ == wanted.__code__
        assert found.__defaults__ == wanted.__defaults__


@pytest.mark.parametrize(
    ("mask", "other"), [(None, None), *product([(4, 2), (4, 1)], [None, 0.0, 0.5, (1, 2)])], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_what_is_read_is_what_triton_reads(monkeypatch, dtype, other, mask):
    monkeypatch.setattr(interpreted, "THROUGH_TABLES", Mock(__contains__=lambda *_: True))  # no kernel is started
    memory = torch.tensor([1.5, 0.0, 3.0, -1.0, 0.0, 2.0, 7.0, 8.0]).to(dtype)
    semantic, of_triton = interpreter.interpreter_semantic, super(hastened.Semantic, interpreter.interpreter_semantic)
    pointed = tl.pointer_type({torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.bool: tl.int1}[dtype])
    addresses = memory.data_ptr() + memory.element_size() * np.arange(8, dtype=np.uint64).reshape(4, 2)
    pointers = tl.tensor(interpreter.TensorHandle(addresses, pointed), tl.block_type(pointed, [4, 2]))
    if isinstance(other, tuple):
        other = tile(tl.int32, other)
    if isinstance(other, float):
        other = semantic.to_tensor(other)
    if mask is not None:
        shown = np.arange(8).reshape(4, 2)[: mask[0], : mask[1]] % 3 > 0
        mask = tl.tensor(interpreter.TensorHandle(shown, tl.int1), tl.block_type(tl.int1, list(mask)))
    operands = pointers, mask, other, (), "", "", "", False
    wanted = told(of_triton.load, *operands)
    assert not isinstance(wanted[0], type), wanted
    for _ in range(3):
        assert told(semantic.load, *operands) == wanted
