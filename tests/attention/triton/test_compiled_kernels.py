"""The kernels compile for NVIDIA GPUs without one, and use the instructions that their speed or exactness needs."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version as version_of
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from held_operands import held_operands, kept_in_memory, narrow_products, overwritten_tiles, transposed_products
from own_scripts import load_script
from packaging.requirements import Requirement

from hilbert_lib.attention.triton.limits import SHARED_BYTES
from hilbert_lib.internals import WITHOUT_INTERNALS
from hilbert_lib.lab.suite.doctor import TRIED

arguments = pytest.importorskip(
    "hilbert_lib.attention.triton.arguments", reason="triton has no build for this platform"
)
from compile_kernels import SAMPLE  # noqa: E402

from hilbert_lib.attention.triton import grid_launch  # noqa: E402
from hilbert_lib.attention.triton.hopper import grid_launch as box_launch  # noqa: E402
from hilbert_lib.attention.triton.hopper import tiles as hopper_tiles  # noqa: E402

ARCHITECTURES = (80, 90, 100)
PTX_HASHES = Path(__file__).parent / "ptx_hashes.txt"
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
# KiB of shared memory that a block has, bytes of registers that a thread keeps in memory, and how often a loop of
# products moves any of these; most of a plain kernel in bfloat16. A100; RTX 3090; RTX 4090; H100 and H200, whose steps
# were fastest with that; B200; RTX 5090.
TARGETS = {80: (163, 0, 0), 86: (99, 0, 0), 89: (99, 0, 0), 90: (227, 1088, 368), 100: (227, 0, 0), 120: (99, 0, 0)}
WIDE_SPILLED = {"3.6.0": 20, "3.8.0": 12}  # bytes of a thread of wide gradients, by releases with more than 4; 3.9.0: 0
AT_ONCE = 100  # bytes that a kernel of all gradients, which has the tiles of each, may keep around its loops besides
FEW = ("sequence forward 64", "grid dq 64", "grid dkv 64", "lists dq 64")
# Every run compiles a few kernels for Hopper, the full one all of them for every architecture.
RUNS = [(90, "sample"), *(pytest.param((each, "every"), marks=pytest.mark.full) for each in ARCHITECTURES)]


FOLDER = Path(__file__).parent


def start(script: str, *arguments: str, packages: Path | None = None) -> subprocess.Popen:
    """A script of this folder, in a process without the interpreter.

    packages: a folder whose packages come before the installed.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if packages is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), env.get("PYTHONPATH"))))
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, FOLDER / script, *arguments], text=True, env=env, **pipes)


def told(status: int, out: str, err: str) -> dict:
    """What a script prints."""
    # Triton 3.9 ends a process that failed with hundreds of lines about its own objects.
    errors = [line for line in err.splitlines() if "nanobind" not in line and not line.startswith(" - ")]
    assert status == 0, "\n".join(errors)[-2000:]
    return json.loads(out)


def told_by(script: str, *arguments: str, packages: Path) -> dict:
    """What a script prints beside the packages of a folder."""
    process = start(script, *arguments, packages=packages)
    out, err = process.communicate()
    return told(process.returncode, out, err)


@pytest.fixture(scope="module")
def told_by_copy():
    """What a script prints, in a copy of one process."""
    with start("copied_scripts.py") as process:

        def run(script: str, *arguments: str) -> dict:
            process.stdin.write(json.dumps([str(FOLDER / script), *arguments]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, process.stderr.read()[-2000:]
            return told(*json.loads(answer))

        yield run


@pytest.fixture(scope="module", params=RUNS, ids=str)
def run(request, told_by_copy):
    """The architecture, whether all its kernels are compiled, and what is told of each."""
    architecture, which = request.param
    return architecture, which == "every", told_by_copy("compile_kernels.py", str(architecture), which)


@pytest.fixture
def some(run):
    """Those kernels whose names begin so, as many as there have to be in a sample and in all."""
    _, is_whole, kernels = run

    def beginning(start: str, sampled: int, every: int) -> dict[str, dict]:
        found = {name: facts for name, facts in kernels.items() if name.startswith(start)}
        assert len(found) == (every if is_whole else sampled)
        return found

    return beginning


@pytest.fixture
def on_hopper(run):
    """Of the warp-specialised kernels, which are for one architecture."""
    if run[0] != 90:
        pytest.skip("of another architecture")


def test_every_kernel_is_compiled_to_the_ptx_that_the_committed_list_has(run):
    """`python compile_kernels.py > ptx_hashes.txt`, in this folder, makes the list for those who change a kernel."""
    architecture, is_whole, kernels = run
    version, *committed = PTX_HASHES.read_text().splitlines()
    if version != f"triton {version_of('triton')}":
        pytest.skip(f"the list is of {version}")
    made = [facts["hash"] for facts in kernels.values()]
    assert set(made) <= set(committed)
    assert not is_whole or made == [line for line in committed if line.startswith(f"{architecture} ")]


def test_those_of_attention_compile_and_their_shared_memory_is_there(run, some):
    """On Hopper steps are larger than elsewhere; a GPU that gives less is told that the kernels do not serve."""
    product = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[run[0]]
    room = 227 * 1024 if run[0] == 90 else SHARED_BYTES
    for name in ("forward", "dq", "dkv", "backward"):
        for kernel, facts in some(f"{name} ", 1, len(arguments.CONFIGS[name])).items():
            assert facts["shared"] <= room, kernel
            # Of those that multiply 16 bits, at a head_dim that every GPU's products take.
            assert product in facts["instructions"] or kernel != f"{name} 2 64"


def test_dropout_leaves_them_room(run, some):
    for name, facts in (some("dropout ", 0, 4) | some("masked dropout ", 1, 4)).items():
        assert facts["shared"] <= (227 * 1024 if run[0] == 90 else SHARED_BYTES), name


def test_the_plain_ones_for_grids_fit_every_gpu(run, some):
    if run[0] != 80:
        pytest.skip("of another architecture")
    for name, facts in some("grid ", 0, 4 * len(grid_launch.CONFIGS)).items():
        assert facts["shared"] <= SHARED_BYTES, name


def test_those_for_lists_fit_every_gpu(run, some):
    product = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[run[0]]
    for name, facts in some("lists ", 2, 11).items():
        assert facts["shared"] <= SHARED_BYTES, name
        assert product in facts["instructions"] or name.startswith("lists delta"), name


@pytest.fixture(
    scope="module",
    params=[(86, FEW), *(pytest.param((target, ()), marks=pytest.mark.full) for target in TARGETS)],
    ids=lambda param: f"sm_{param[0]}{' few' if param[1] else ''}",
)
def portable(request, told_by_copy):
    """A kind of GPU, and what is told of the plain kernels that any of them runs."""
    target, names = request.param
    kernels = told_by_copy("compile_kernels.py", str(target), "portable", *names)
    assert len(kernels) == (8 if names else 48)
    return target, kernels


def test_a_portable_kernel_fits_its_gpu_and_keeps_nothing_in_memory_but_on_hopper(portable):
    target, kernels = portable
    room, spilled, moves = TARGETS[target]
    for name, facts in kernels.items():
        assert facts["shared"] <= room * 1024, name
        assert facts["spilled"] <= spilled + AT_ONCE * ("backward" in name), name
        assert facts["in loops"] <= moves, name


@pytest.mark.parametrize(
    ("capability", "architecture", "wanted"),
    [
        ((8, 0), "Ampere", "elsewhere"),
        ((8, 9), "Ada", "elsewhere"),
        ((9, 0), "Hopper", "measured"),
        ((10, 0), "Blackwell", "B200"),
        ((10, 3), "Blackwell", "B200"),
        ((12, 0), "Blackwell", "elsewhere"),
        (None, "none", "measured"),
    ],
)
def test_a_gpu_gets_the_steps_of_its_kind(monkeypatch, capability, architecture, wanted):
    info = SimpleNamespace(capability=capability, architecture=architecture)
    monkeypatch.setattr(arguments, "get_gpu_info", lambda device: info)
    for asked in ("is_measured", "has_tensor_memory"):  # without what was found of this machine's
        monkeypatch.setattr(arguments, asked, getattr(arguments, asked).__wrapped__)
    tables = {"measured": "measured"}, {"elsewhere": "elsewhere"}, {"B200": "B200"}
    assert arguments.for_device(torch.device("cuda"), *tables) == {wanted: wanted}


@pytest.mark.full
def test_with_the_steps_of_other_gpus_nothing_would_be_kept_in_memory_on_hopper(told_by_copy):
    kernels = told_by_copy("compile_kernels.py", "90", "elsewhere")
    assert len(kernels) == 40
    assert {name: facts["spilled"] for name, facts in kernels.items() if facts["spilled"]} == {}


def test_the_table_of_portable_kernels_is_what_the_compiler_says(portable):
    """`python scripts/kernel_resources.py` prints it."""
    target, kernels = portable
    table = load_script("kernel_resources")
    if table.version_of_page() != version_of("triton"):
        pytest.skip("the page is of another release of Triton")
    cells = table.cells_of_page()
    for name, facts in kernels.items():
        assert cells[name, target] == table.cell(facts), name


def test_the_warp_specialised_ones_use_the_copy_engine(on_hopper, some):
    boxes = ("grid", 2, 12), ("strided", 1, 3), ("wide", 2, 6), ("whole", 1, 1), ("small", 0, 2)
    kinds = (
        ("forward", 2, 14),
        ("backward", 2, 24),
        ("padded", 2, 18),
        ("dropout", 2, 24),
        ("queries", 1, 8),
        ("keys", 1, 4),
        ("dq", 1, 4),
    )
    for start, sampled, every in (*kinds, *boxes):
        for name, facts in some(f"hopper {start}", sampled, every).items():
            assert {"wgmma.mma_async", "cp.async.bulk.tensor"} <= set(facts["instructions"]), name
            if start in [name for name, *_ in kinds]:
                adds_dq = "backward" in name and name.endswith("True")
                assert ("cp.reduce.async.bulk.tensor" in facts["instructions"]) == adds_dq, name


@pytest.mark.parametrize(
    ("start", "sampled", "every", "loops", "least"),
    [
        ("forward 128 False False", 0, 1, 1, 64),
        ("forward 128 True", 0, 2, 2, 64),
        ("forward 256 False", 0, 1, 1, 32),
        ("forward 256 True", 0, 1, 2, 32),
        ("packed forward 128", 1, 2, 2, 64),
        ("padded forward 128 False", 1, 1, 1, 64),
        ("dropout forward 128 False", 1, 1, 1, 64),
        ("dropout forward 128 True", 0, 1, 2, 64),
        ("grid forward 128", 1, 2, 1, 32),
        ("whole forward 128", 1, 1, 1, 64),
        ("small forward 128", 0, 1, 1, 32),
    ],
)
def test_the_wait_for_the_product_with_v_stays_behind_exponentials(
    on_hopper, some, start, sampled, every, loops, least
):
    """ptxas would move it before them, in one of the two groups, which have one for each of so many scores.

    Where blocks are cut off a group has a loop over whole blocks and one over the others.
    """
    for name, facts in some(f"hopper {start}", sampled, every).items():
        assert len(facts["exponentials"]) == 2 * loops, name
        assert min(facts["exponentials"]) >= least, name


@pytest.mark.parametrize(
    ("start", "sampled", "every"),
    [("forward 128 True", 0, 2), ("packed forward 128", 1, 2)],
)
def test_loops_over_blocks_that_may_be_cut_off_keep_next_to_nothing_in_memory(on_hopper, some, start, sampled, every):
    for name, facts in some(f"hopper {start}", sampled, every).items():
        assert facts["in loops"] <= 2, name  # 2 by Triton 3.8, 0 by the others


def programs_of(name: str) -> int:
    """Programs of a warp-specialised kernel that a multiprocessor has at once."""
    return 2 if "forward 32" in name or "forward 64" in name else 1


def test_two_narrow_forwards_fit_a_multiprocessor_and_no_product_waits(on_hopper, some):
    """ptxas puts a wait behind every product where registers are short, which an edit nearby may bring about."""
    alone = [("backward 64 True True True", 1, 1), ("grid forward 128", 1, 2), ("grid dq", 0, 4), ("grid dkv", 0, 4)]
    alone += [("strided", 1, 3), ("wide", 2, 6), ("whole", 1, 1), ("small forward 128", 0, 1)]
    narrow = [("forward 32", 1, 4), ("forward 64", 1, 4), ("grid forward 64", 1, 2), ("small forward 64", 0, 1)]
    for start, sampled, every in narrow + alone:
        for name, facts in some(f"hopper {start}", sampled, every).items():
            assert (facts["programs"], facts["serialized"]) == (programs_of(name), 0), name


def test_masks_of_keys_dropout_and_wide_heads_cost_no_program_and_no_wait(on_hopper, some):
    kernels = some("hopper padded", 2, 18) | some("hopper dropout", 2, 24) | some("hopper forward 256", 0, 2)
    kernels |= some("hopper queries", 1, 8) | some("hopper keys", 1, 4) | some("hopper dq", 1, 4)
    for name, facts in kernels.items():
        assert facts["shared"] <= 227 * 1024, name
        assert (facts["programs"], facts["serialized"]) == (programs_of(name), 0), name
        if "keys" in name or "dq" in name:  # bytes of registers that a thread of wide gradients keeps in memory
            drops = "dropout" in name or ("dq" in name and name.endswith("True"))
            assert facts["spilled"] <= (132 if drops else WIDE_SPILLED.get(facts["triton"], 4)), name
            assert facts["unjoined"] == 0, name


def test_a_bias_costs_no_program_and_no_wait(on_hopper, some):
    for name, facts in some("hopper bias", 1, 6).items():
        assert (facts["programs"], facts["serialized"]) == (programs_of(name), 0), name
        assert facts["unjoined"] == 0, name
        if "dq" in name:  # the sums of the gradient of a bias have room beside its tiles
            room, *_ = box_launch.BESIDE_SUMS[int(name.split()[-1])][0]
            assert facts["shared"] + room <= 227 * 1024


@pytest.mark.parametrize(
    ("start", "sampled", "held"), [("forward 64", 1, 0), ("forward 128", 1, 24), ("dkv 64", 0, 16), ("dkv 128", 0, 0)]
)
def test_queries_that_boxes_hold_in_registers_are_not_written_over(on_hopper, some, start, sampled, held):
    """In each of two groups, a box: at 128 columns eight products with k and four with v, of weights made a box before.

    At 64 columns eight for dk and dv, of weights and slopes made a box before.
    """
    for name, facts in some(f"hopper grid {start}", sampled, 2).items():
        assert facts["held"] == held, name
        assert [each for each in facts["spoilt"] if ".tnspB" not in each] == [], name


def test_what_a_backward_holds_in_registers_is_not_written_over(on_hopper, some):
    """ptxas 12.8 did so where the next scores were asked for without dq: dk was then that of the last queries."""
    kernels = some("hopper backward", 2, 24) | some("hopper padded backward", 1, 12)
    kernels |= some("hopper dropout backward", 1, 12)
    for name, facts in kernels.items():
        columns, causal, cut, _ = name.split()[-4:]
        # Two groups, one loop over blocks of queries or two, and a product for 16 columns of k and of v.
        held = 2 * (2 * int(columns) // 16) * (2 if "True" in (causal, cut) else 1) if int(columns) <= 64 else 0
        assert (facts["held"], facts["spoilt"]) == (held, []), name


@pytest.fixture(scope="module", params=[triton for _, triton in TRIED])
def release(request, tmp_path_factory):
    """A release of Triton that was tried, and a folder that holds it alone."""
    folder = tmp_path_factory.mktemp("triton")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
    subprocess.run([*command, f"triton=={request.param}"], check=True, capture_output=True)
    yield request.param, folder
    shutil.rmtree(folder)


@pytest.mark.releases
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sample_of_all_kernels_compiles_with_every_release_of_triton_that_was_tried(release, architecture):
    version, folder = release
    found = told_by("compile_kernels.py", str(architecture), "sample", packages=folder)
    assert {facts["triton"] for facts in found.values()} == {version}
    wanted = [name for name in SAMPLE if architecture == 90 or not name.startswith(("grid", "hopper", "bias"))]
    assert set(found) == set(wanted)
    assert not any(facts["overwritten"] or facts["narrow"] or facts.get("serialized") for facts in found.values())


@pytest.mark.releases
def test_a_kept_start_is_what_every_release_of_triton_starts(release):
    assert_kept(told_by("kept_starts.py", packages=release[1]))


def test_the_oldest_triton_that_is_allowed_is_among_those_tried():
    requirements = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    (own,) = [Requirement(each) for each in requirements if each.startswith("triton")]
    tried = [triton for _, triton in TRIED]
    assert {each.operator: each.version for each in own.specifier}[">="] == ".".join(min(tried).split(".")[:2])
    assert all(map(own.specifier.contains, tried))


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


def printed(lines: list[str]) -> str:
    return "\n".join(line if line.endswith(":") else f"        /*0000*/  {line} ;" for line in lines)


@pytest.mark.parametrize("planted", ["", "MOV R9, R1", "@!P2 SHFL.BFLY PT, R11, R1, 0x1, 0x1f", "LDS.64 R10, [R2]"])
@pytest.mark.parametrize("place", [3, 5, 10], ids=["around the loop", "after the product", "at the end of the loop"])
def test_a_held_operand_that_anything_writes_is_told(place, planted):
    lines = [*LOOPS[:place], *([planted] if planted else []), *LOOPS[place:]]
    assert held_operands(printed(lines)) == {"held": 1, "spoilt": [LOOPS[4]] if planted else []}


@pytest.mark.parametrize("planted", ["LDL.64 R10, [R1]", "STL [R1+0x8], R3"])
@pytest.mark.parametrize(("place", "counted"), [(0, 0), (2, 0), (4, 1), (10, 1), (12, 0)])
def test_registers_in_memory_count_in_the_loop_of_products_alone(place, counted, planted):
    lines = [*LOOPS[:place], planted, *LOOPS[place:]]
    assert kept_in_memory(printed(lines)) == counted
    assert kept_in_memory(printed(LOOPS)) == 0


def test_no_product_reads_a_tile_that_is_written_meanwhile(run):
    for name, facts in run[2].items():
        assert facts["overwritten"] == [], name


def test_no_product_is_transposed_in_registers(run):
    """Scores that are read transposed are computed so, or stored first: see `transposed_products`."""
    for name, facts in run[2].items():
        assert facts["transposed"] == [], name
    of_tiles = "%b = ttg.memdesc_trans %a {order = array<i32: 1, 0>} : !ttg.memdesc<64x64xbf16, #shared, #smem>"
    of_a_product = (
        "%d = tt.trans %s {order = array<i32: 1, 0>} : tensor<64x64xbf16, #mma> -> tensor<64x64xbf16, #linear>"
    )
    assert transposed_products(f"{of_tiles}\n{of_a_product}") == ["%d"]


def test_no_product_has_operands_that_lie_wider_than_they_are(run):
    for name, facts in run[2].items():
        assert facts["narrow"] == [], name


@pytest.mark.parametrize(("columns", "width", "is_told"), [(16, 8, True), (16, 4, False), (32, 8, False)])
def test_a_product_of_too_few_columns_is_told(columns, width, is_told):
    left = f"tensor<16x{columns}xf32, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {width}}}>>"
    layout = "#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [1, 8], instrShape = [16, 8]}>"
    product = (
        f"%d = tt.dot %a, %b, %c, inputPrecision = tf32 : {left} * tensor<{columns}x256xf32> -> tensor<16x256xf32>"
    )
    assert narrow_products(f"{layout}\n{product}") == ([left] if is_told else [])


@pytest.mark.parametrize(
    ("slots", "ahead", "left", "is_told"),
    [(2, 1, 1, False), (1, 1, 1, True), (1, 1, 0, False), (2, 2, 1, True), (2, 1, 3, True), (3, 2, 3, True)],
)
def test_a_tile_that_is_copied_over_under_a_product_is_told(slots, ahead, left, is_told):
    """A loop with one product, of which `left` run on when the next tile is copied."""
    copy = "%c = ttg.async_copy_global_to_local %p, %at mask %m : tensor<64x!tt.ptr<bf16>> -> <64xbf16, #smem>"
    ttgir = f"""
      %tile = ttg.local_alloc : () -> !ttg.memdesc<{slots}x64xbf16, #shared, #smem, mutable>
      %at = ttg.memdesc_index %tile[%zero] : !ttg.memdesc<{slots}x64xbf16> -> !ttg.memdesc<64xbf16>
      {(copy + chr(10)) * ahead}
      %r:1 = scf.for %i = %zero to %n step %one iter_args(%acc = %none) -> (tensor<64x64xf32>) : i32 {{
        %read = ttg.memdesc_index %tile[%now] : !ttg.memdesc<{slots}x64xbf16> -> !ttg.memdesc<64xbf16>
        %dot = ttng.warp_group_dot %other, %read, %acc {{isAsync = true}} : tensor<64x64xbf16> * !ttg.memdesc<64xbf16>
        %out:2 = ttng.warp_group_dot_wait %dot, %read {{pendings = {left} : i32}} : tensor<64x64xf32>
        {copy}
        scf.yield %out#0 : tensor<64x64xf32>
      }}"""
    assert overwritten_tiles(ttgir) == (["%tile"] if is_told else [])


def test_the_small_kernels_move_sixteen_bytes_at_a_time(some):
    reads, writes = "ld.global.v4.b32", "st.global.v4.b32"
    wanted = {"decode merge": {reads}, "decode merge with starts": {reads}}
    for name, facts in some("decode ", 2, 8).items():
        assert wanted.get(name, {"cp.async.cg"}) <= set(facts["instructions"]), name  # of keys and values, ahead
    # A cell of a plane leaves as one write, and what encoding reads of a block comes in one read.
    wanted = {"curve decode 2": {"st.global.v2.b64"}, "curve decode 3": set()}
    for name, facts in some("curve ", 2, 4).items():
        assert wanted.get(name, {reads}) <= set(facts["instructions"]), name
    for name, facts in some("copies ", 2, 4).items():
        assert {reads, writes} <= set(facts["instructions"]), name
    for name, facts in some("scale", 1, 1).items():
        assert {reads, writes} <= set(facts["instructions"]), name
    rows = [some(f"rows {name} ", 1, 2) for name in ("merge", "add", "zeros")]
    for name, facts in (each for found in rows for each in found.items()):
        assert {reads, writes} <= set(facts["instructions"]), name
        # A merged lse enters the backward: it must not lose digits to a GPU's approximations of exp and log.
        assert not {"ex2.approx", "lg2.approx"} & set(facts["instructions"]), name


@pytest.mark.parametrize(("dtype", "rate", "columns"), [(torch.bfloat16, 6, 64), (torch.float32, 1, 32)])
def test_a_descriptor_is_what_triton_makes_of_the_tensor(dtype, rate, columns):
    for x in torch.zeros(2, 2, 41, 3, 64, dtype=dtype):  # the second has the first one's shape
        made = hopper_tiles.descriptor(x, rate, 64, columns)
        assert made.base is x
        shape, strides = [2, 41 // rate, rate + 41 % rate, 3, 64], [41 * 192, rate * 192, 192, 64, 1]
        wanted = type(made)(x, shape, strides, [1, 64, 1, 1, columns], made.layout)  # which Triton checks
        assert {**vars(made), "base": None} == {**vars(wanted), "base": None}
        assert made.layout.element_bitwidth == 8 * dtype.itemsize


def test_a_stride_of_which_no_row_is_taken_may_be_anything():
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
def test_a_first_call_compiles_its_kernels_at_once_and_a_second_none(
    told_by_copy, head_dim, causal, forwards, backwards
):
    found = told_by_copy("first_call.py", head_dim, causal)
    backward = ["delta_kernel", *["backward_kernel"] * backwards, "scale_kernel"]
    for name, kernels in (("forward", ["forward_kernel"] * forwards), ("backward", backward)):
        first, second = found[f"first {name}"], found[f"second {name}"]
        assert first["compiled"] == sorted(kernels)
        assert first["at once"] == len(kernels)
        assert first["before any starts"]
        assert second["compiled"] == []
        assert first["started"] == second["started"] == kernels
    assert found["devices"] == ["cpu"], "a thread that compiles kernels has the tensors' device"
    assert found["loaded at once"] == 1, "Triton 3.6 gives a kernel another's launcher where two are loaded at once"
    assert found["collected"] == {"inside": False, "after": True}


@pytest.mark.skipif(WITHOUT_INTERNALS, reason="a start is kept by private parts of Triton's launch")
def test_a_call_of_a_kind_that_came_twice_starts_what_triton_would_and_binds_nothing(told_by_copy):
    assert_kept(told_by_copy("kept_starts.py"))


@pytest.fixture(scope="module")
def failing(told_by_copy):
    """What calls say of a kernel that does not compile."""
    return told_by_copy("failing_kernels.py")


@pytest.mark.parametrize(
    ("name", "kernel", "backend", "following"),
    [
        ("sequence forward", "forward.forward_kernel", "triton", "sdpa"),
        ("sequence backward", "backward.backward_kernel", "triton", "sdpa"),
        ("sequence on hopper forward", "hopper.forward.forward_kernel", "hopper", "sdpa"),
        ("sequence on hopper backward", "hopper.backward.backward_kernel", "hopper", "sdpa"),
        ("grid forward", "hopper.grid_forward.forward_kernel", "hopper", "triton"),
        ("grid backward", "hopper.grid_backward.backward_kernel", "hopper", "triton"),
    ],
)
def test_a_kernel_that_does_not_compile_is_said_once_and_passed_over_by_auto(failing, name, kernel, backend, following):
    first, second, by_name, again = failing[name]
    said = f"kernel {kernel.rpartition('.')[2]} does not compile with triton {version_of('triton')}: Refused: "
    said += "no 'tile.view' in this release; install a pair of torch and triton that `hilbert doctor` lists, or ask for"
    for each in (by_name, again):
        assert each["raised"].startswith(f"KernelError: {said}")
        assert each["warned"] == []
        assert each["chosen"] == backend
        assert said in each["reasons"][backend]
    assert (by_name["cause"], kernel in by_name["asked"], again["asked"]) == ("Refused", True, [])
    assert kernel in first["asked"]
    if name.endswith("forward"):
        assert first["raised"] == ""
        (warned,) = first["warned"]
        assert warned.startswith(f"RuntimeWarning: backend='auto' passes over {backend!r}: {said}")
        assert first["files"] == ["failing_kernels.py"]
    else:  # the forward was this backend's: nothing else can have its gradient
        assert first["raised"].startswith(f"KernelError: {said}")
    assert (second["raised"], second["warned"]) == ("", [])
    assert kernel not in second["asked"]
    for each in (first, second):
        assert each["chosen"] == following
        assert each["reasons"][backend].startswith(f"passed over: {said}")
    if following == "sdpa":  # which computes here, as what stands in for a compiled kernel does not
        assert second["error"] < 0.02


def assert_kept(told: dict) -> None:
    """Calls of a kind that came twice are started as Triton starts them, and bound by nobody."""
    assert told.pop("held") == 0, "a kept start holds a tensor of its call"
    assert told.pop("maps") == 0, "maps of descriptors are made anew"
    assert told.pop("capture"), "a CUDA graph would not keep its tables"
    assert told.pop("heard") == 12, "hooks hear of every start, ours and Triton's, 3 each"
    assert [bound for _, bound, _ in told.pop("copies")] == [3] * 3, "each call has a copy of its own"
    assert {each for calls in told.values() for *_, each in calls} == {"equal"}
    kept = {name: [bound == 0 for _, bound, _ in calls] for name, calls in told.items()}
    kinds = "sequence", "several", "all options", "grid", "kept"
    repeated = [name for name, calls in kept.items() if name.startswith(kinds) and len(calls) == 3]
    assert [kept.pop(name) for name in repeated] == [[False, False, True]] * 37
    assert kept.pop("one tensor as q, k and v") == [False, False, True, True], "the last has three, as calls before"
    assert kept.pop("at the same addresses") == [False] * 2 + [True] * 8
    assert kept.pop("precision") == [False, False, True, False], "the last is in tf32"
    assert kept.pop("tables that are gone") == [False, True]
    assert not any(any(each) for each in kept.values()), f"served by the starts of another kind: {kept}"
    assert len(kept) == 25
