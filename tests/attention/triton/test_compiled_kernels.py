"""The kernels compile for NVIDIA GPUs without one, and use the instructions that their speed or exactness needs."""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path

import pytest
import torch
from held_operands import held_operands

from hilbert_lib.attention.triton.limits import SHARED_BYTES

arguments = pytest.importorskip(
    "hilbert_lib.attention.triton.arguments", reason="triton has no build for this platform"
)
ARCHITECTURES = (80, 90, 100)
PTX_HASHES = Path(__file__).parent / "ptx_hashes.txt"
SMALL = ("decode", "curves", "rows")
HOPPER = ("attention", "some of hopper", "resident", "some operands", *SMALL)  # one process compiles them, for 90
# The small kernels compile for Hopper in every run, and for all in the full one: they take as long as the large ones.
SMALL_ON = [pytest.param(each, marks=[] if each == 90 else pytest.mark.full) for each in ARCHITECTURES]


def compiled(group: str, architecture: int) -> dict[str, dict[str, int]]:
    """The instructions that matter of each kernel of a group, and how many of each there are."""
    together = HOPPER if architecture == 90 else ("attention",) if group == "ptx" else SMALL
    if group == "ptx":  # of what every run compiles
        return _compiled(architecture, *together)[group]
    return _compiled(architecture, *(together if group in together else (group,)))[group]


@cache
def _compiled(architecture: int, *groups: str) -> dict[str, dict[str, dict[str, int]]]:
    return _told_by("compile_kernels.py", str(architecture), *groups)


def _told_by(script: str, *arguments: str) -> dict:
    return json.loads(_printed_by(script, *arguments))


def _printed_by(script: str, *arguments: str) -> str:
    # By a process without the interpreter.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).parent / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def hashes(lines: list[str]) -> set[tuple[str, ...]]:
    """(architecture, kernel, hash) of lines of ptx_hashes.txt, without the groups that the kernels were compiled in."""
    return {(words[0], *words[-2:]) for words in map(str.split, lines) if words[0].isdigit()}


def test_no_kernel_is_compiled_to_other_ptx_than_the_committed_list_has():
    """`python compile_kernels.py > ptx_hashes.txt`, in this folder, makes the list for those who change a kernel."""
    version, *committed = PTX_HASHES.read_text().splitlines()
    if version != f"triton {version_of('triton')}":
        pytest.skip(f"the list is of {version}")
    made = [line for each in ARCHITECTURES for group in compiled("ptx", each).values() for line in group]
    assert len(made) >= 15
    assert hashes(made) <= hashes(committed)


@pytest.mark.full
def test_the_committed_list_of_ptx_hashes_is_whole():
    version, *committed = PTX_HASHES.read_text().splitlines()
    if version != f"triton {version_of('triton')}":
        pytest.skip(f"the list is of {version}")
    assert _printed_by("compile_kernels.py").splitlines() == [version, *committed]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_those_of_attention_compile(architecture):
    products = compiled("attention", architecture)
    assert set(products) == {"forward", "dq", "dkv"}
    product = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[architecture]
    assert all(product in instructions for instructions in products.values())


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_configuration_compiles_and_its_shared_memory_is_there(architecture):
    """Of those GPUs, an A100 gives a block the least; those that give less are told that the kernels do not serve."""
    taken = compiled("configurations", architecture)
    assert len(taken) == sum(map(len, arguments.CONFIGS.values()))
    room = {80: SHARED_BYTES, 90: 227 * 1024, 100: 227 * 1024}[architecture]
    assert {name: taken_bytes for name, taken_bytes in taken.items() if taken_bytes > room} == {}


@pytest.mark.parametrize(
    ("group", "kernels"), [("some of hopper", 2), pytest.param("hopper", 14, marks=pytest.mark.full)]
)
def test_the_warp_specialised_ones_use_the_copy_engine(group, kernels):
    found = compiled(group, 90)
    assert len(found) == kernels
    assert all({"wgmma.mma_async", "cp.async.bulk.tensor"} <= set(instructions) for instructions in found.values())
    adding = {name for name, instructions in found.items() if "cp.reduce.async.bulk.tensor" in instructions}
    assert adding == {name for name in found if name.startswith("backward") and not name.endswith("without dq")}


@pytest.mark.full
def test_the_wait_for_the_product_with_v_stays_behind_exponentials():
    """ptxas would move it before them, in one of the two groups."""
    loops = compiled("waits", 90)
    assert len(loops) == 2
    assert all(instructions.get("MUFU.EX2", 0) >= 64 for instructions in loops.values())  # one for each of 64 scores


def test_two_narrow_forwards_fit_a_multiprocessor_and_no_product_waits():
    """ptxas puts a wait behind every product where registers are short, which an edit nearby may bring about."""
    of_a_forward, of_a_backward = ({"programs": programs, "serialized": 0} for programs in (2, 1))
    assert compiled("resident", 90) == {
        **{f"forward causal {causal}": of_a_forward for causal in (False, True)},
        "backward causal True": of_a_backward,
    }


@pytest.mark.parametrize(
    ("group", "kernels"), [("some operands", 3), pytest.param("operands", 16, marks=pytest.mark.full)]
)
def test_what_a_backward_holds_in_registers_is_not_written_over(group, kernels):
    """ptxas 12.8 did so where the next scores were asked for without dq: dk was then that of the last queries."""
    found = compiled(group, 90)
    assert len(found) == kernels
    # Two groups, one loop over blocks of queries or two, eight products a block with k and v: four with each.
    loops = {name: 2 if "True" in name.split()[1:3] else 1 for name in found if name.startswith("64")}
    held = {name: 2 * 8 * count for name, count in loops.items()}
    assert found == {name: {"held": held.get(name, 0), "spoilt": []} for name in found}


# A loop in a loop, in the form of nvdisasm: R8 to R11 are loaded before both, R4 to R7 made in every pass.
LOOPS = [
    "LDSM.16.M88.4 R8, [R2]",
    ".L_x_1:",
    "IADD3 R3, R3, 0x1, RZ",
    ".L_x_2:",
    "HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], RZ, !UPT",
    "F2FP.BF16.F32.PACK_AB R4, R25, R24",
    *(f"F2FP.BF16.F32.PACK_AB R{n}, R25, R24" for n in (5, 6, 7)),
    "HGMMA.64x64x16.F32.BF16 R56, R4, gdesc[UR4], R56, gsb0",
    "@P0 BRA `(.L_x_2)",
    "@P1 BRA `(.L_x_1)",
]


@pytest.mark.parametrize("planted", ["", "MOV R9, R1", "@!P2 SHFL.BFLY PT, R11, R1, 0x1, 0x1f", "LDS.64 R10, [R2]"])
@pytest.mark.parametrize("place", [3, 5, 10], ids=["around the loop", "after the product", "at the end of the loop"])
def test_a_held_operand_that_anything_writes_is_told(place, planted):
    lines = [*LOOPS[:place], *([planted] if planted else []), *LOOPS[place:]]
    sass = "\n".join(line if line.endswith(":") else f"        /*0000*/  {line} ;" for line in lines)
    assert held_operands(sass) == {"held": 1, "spoilt": [LOOPS[4]] if planted else []}


@pytest.mark.parametrize("architecture", SMALL_ON)
def test_those_for_few_queries_compile(architecture):
    instructions = compiled("decode", architecture)
    assert all("cp.async.cg" in instructions[rows] for rows in ("16 rows", "32 rows"))  # 16 bytes at a time, ahead
    assert "ld.global.v4.b32" in instructions["merge"]


@pytest.mark.parametrize("architecture", SMALL_ON)
def test_those_of_the_hilbert_curve_compile(architecture):
    """A cell of a plane leaves as one write of 16 bytes, and what encoding reads of a block comes in one read."""
    accesses = compiled("curves", architecture)
    assert set(accesses) == {"decode 2", "decode 3", "encode 2", "encode 3"}
    assert "st.global.v2.b64" in accesses["decode 2"]
    assert all("ld.global.v4.b32" in accesses[f"encode {ndim}"] for ndim in (2, 3))


@pytest.mark.parametrize("architecture", SMALL_ON)
def test_those_for_rows_compile_and_move_sixteen_bytes_at_a_time(architecture):
    found = compiled("rows", architecture)
    assert len(found) == 4
    assert all({"ld.global.v4.b32", "st.global.v4.b32"} <= set(instructions) for instructions in found.values())
    # A merged lse enters the backward: it must not lose digits to a GPU's approximations of exp and log.
    assert not [
        name for instructions in found.values() for name in instructions if name[:10] in ("ex2.approx", "lg2.approx")
    ]


@pytest.mark.parametrize(("dtype", "rate", "columns"), [(torch.bfloat16, 6, 64), (torch.float32, 1, 32)])
def test_a_descriptor_is_what_triton_makes_of_the_tensor(dtype, rate, columns):
    from hilbert_lib.attention.triton.hopper import tiles as hopper_tiles

    for x in torch.zeros(2, 2, 41, 3, 64, dtype=dtype):  # the second has the first one's shape
        made = hopper_tiles.descriptor(x, rate, 64, columns)
        assert made.base is x
        shape, strides = [2, 41 // rate, rate + 41 % rate, 3, 64], [41 * 192, rate * 192, 192, 64, 1]
        wanted = type(made)(x, shape, strides, [1, 64, 1, 1, columns], made.layout)  # which Triton checks
        assert {**vars(made), "base": None} == {**vars(wanted), "base": None}
        assert made.layout.element_bitwidth == 8 * dtype.itemsize


def test_a_stride_of_which_no_row_is_taken_may_be_anything():
    from hilbert_lib.attention.triton.hopper import tiles as hopper_tiles

    x = torch.zeros(2, 32 * 64 + 1, dtype=torch.bfloat16)[:, :-1].unflatten(1, (32, 1, 64))[:1]
    assert x.is_contiguous()
    assert x.stride(0) % 8
    assert hopper_tiles.descriptor(x, 1, 64, 64).base is x


@pytest.mark.parametrize(
    ("head_dim", "causal", "forwards", "backwards"),
    [
        ("64", "whole", 1, 1),
        # Two launches, and the plain kernel for each, should one give NaN.
        pytest.param("64", "causal", 4, 2, marks=pytest.mark.full),
        pytest.param("128", "causal", 4, 2, marks=pytest.mark.full),
    ],
)
def test_a_first_call_compiles_its_kernels_at_once_and_a_second_none(head_dim, causal, forwards, backwards):
    told = _told_by("first_call.py", head_dim, causal)
    expected = {
        "forward": ["forward_kernel"] * forwards,
        "backward": ["delta_kernel", *["backward_kernel"] * backwards],
    }
    for name, kernels in expected.items():
        first, second = told[f"first {name}"], told[f"second {name}"]
        assert first["compiled"] == sorted(kernels)
        assert first["at once"] == len(kernels)
        assert first["before any starts"]
        assert second["compiled"] == []
        assert first["started"] == second["started"] == kernels
    assert told["devices"] == ["cpu"], "a thread that loads kernels has the tensors' device"
    assert told["collected"] == {"inside": False, "after": True}
