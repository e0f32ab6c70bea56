"""The emulator's copy engine and program: what a copy of a box reads and adds, and what ends a program."""

import pytest
import torch

emulated_tiles = pytest.importorskip(
    "emulated_tiles", reason="triton has no build for this platform", exc_type=ImportError
)

import numpy as np  # noqa: E402
from emulated_program import Program  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

BOXES = [  # of a tensor, of a box, and where it begins
    ((5, 6, 64), (2, 4, 64), (-1, 4, 0)),
    ((5, 6, 64), (2, 4, 64), (4, -3, 0)),
    ((3, 4, 5, 64), (1, 2, 4, 64), (2, -1, -2, 0)),
    ((2, 3, 4, 5, 64), (1, 2, 1, 4, 64), (1, 2, 3, 3, 0)),
    ((2, 3, 4, 5, 64), (1, 2, 1, 4, 64), (2, 0, 0, -4, 0)),  # all outside
]


def described(shape, block, tensor=None):
    # A tensor with NaN before and after it, and its descriptor.
    storage = torch.full((64 + torch.Size(shape).numel() + 64,), torch.nan)
    x = storage[64:-64].view(shape)
    x.copy_(torch.randn(shape) if tensor is None else tensor)
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.float32)
    host = TensorDescriptor(x, list(shape), list(x.stride()), list(block), layout)
    return storage, x, emulated_tiles.Descriptor(host)


def around(x, block, at):
    # The box, by padding the tensor with zeros on all sides.
    sides = [side for size in reversed(block) for side in (size, size)]
    padded = torch.nn.functional.pad(x, sides)
    return padded[tuple(slice(begin + size, begin + 2 * size) for begin, size in zip(at, block, strict=True))]


@pytest.mark.parametrize(("shape", "block", "at"), BOXES)
def test_a_box_is_zero_outside_of_the_tensor(shape, block, at):
    _, x, descriptor = described(shape, block)
    assert torch.equal(torch.from_numpy(descriptor.box(list(at))), around(x, block, at))


@pytest.mark.parametrize(("shape", "block", "at"), BOXES)
def test_what_of_a_box_lies_outside_is_not_added(shape, block, at):
    storage, x, descriptor = described(shape, block, torch.zeros(shape))
    box = torch.randn(block)
    descriptor.reduce(np.add, list(at), box.numpy())
    inside = around(torch.ones(shape), block, at)
    assert torch.equal(around(x, block, at), box * inside)
    assert x.count_nonzero() == inside.sum()
    assert storage[:64].isnan().all()
    assert storage[-64:].isnan().all()


def test_a_barrier_that_too_few_come_to_ends_the_program_at_once():
    program = Program("waits", (0,), 4)
    with pytest.raises(emulated_tiles.Fault, match="nothing brings about"):
        program.split([(lambda: program.meet(8, 288, True), ()), (lambda: program.meet(8, 288, False), ())], [4])


def test_a_group_goes_on_when_all_have_come():
    program, order = Program("waits", (0,), 4), []

    def late():
        order.append("late")
        program.meet(8, 160, False)

    def early():
        program.meet(8, 160, True)
        order.append("early")

    program.split([(early, ()), (late, ())], [1])
    assert order == ["late", "early"]
