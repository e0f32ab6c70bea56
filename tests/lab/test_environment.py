"""The facts beside a measurement are true, complete and nobody's secret; a GPU is never ignored in silence."""

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest
import torch
from own_processes import PATIENCE

from hilbert_lib import machine as module
from hilbert_lib.lab import environment as lab
from hilbert_lib.lab.environment import code_version, describe_environment, environment
from hilbert_lib.machine import ATTENTION_PACKAGES, check_gpu, code_hash, kernel_mode, prepare_kernels


@pytest.fixture
def machine(monkeypatch):
    """Pretend: is there a device, what is torch built for, can it start CUDA, is triton there."""

    def pretend(*, device, cuda=None, available=False, triton=True, builds=(), gpus=()):
        monkeypatch.setenv("TRITON_INTERPRET", "0")  # so that it is put back whatever a test does
        monkeypatch.delenv("TRITON_INTERPRET")
        monkeypatch.delitem(sys.modules, "triton", raising=False)
        monkeypatch.setattr(module, "_has_nvidia_device", lambda: device)
        monkeypatch.setattr(module, "driver_version", lambda: "470.42" if device else None)
        monkeypatch.setattr(module, "gpu_properties", lambda: list(gpus))
        monkeypatch.setattr(lab, "sm_clocks_mhz", lambda: [1600] * len(gpus))
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object() if triton else None)
        monkeypatch.setattr(module, "version", lambda name: "3.7.1")
        monkeypatch.setattr(torch, "__version__", "2.13.0+test")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(builds))

    return pretend


PASCAL = SimpleNamespace(name="GTX 1080", major=6, minor=1, total_memory=8 * 2**30)
WORKING = {"device": True, "cuda": "13.0", "available": True, "builds": ["sm_61"], "gpus": [PASCAL]}


def test_environment_is_json_and_names_neither_host_nor_user_nor_folder():
    text = json.dumps(environment(), allow_nan=False)
    words = set(re.findall(r"[\w.-]+", text))
    assert not words & {socket.gethostname(), getpass.getuser()}
    assert str(Path.home()) + "/" not in text
    assert str(module.PACKAGE) not in text
    facts = environment()
    assert (facts["torch"], facts["python"]) == (torch.__version__, ".".join(map(str, sys.version_info[:3])))


def test_packages_whose_kernels_may_run_are_told_by_version(tmp_path, monkeypatch):
    known = environment()["packages"]
    assert known.keys() <= set(ATTENTION_PACKAGES)
    monkeypatch.syspath_prepend(tmp_path)
    metadata = tmp_path / "flash_attn_4-4.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    rival = tmp_path / "natten-0.21.dist-info" / "METADATA"
    rival.parent.mkdir()
    rival.write_text("Metadata-Version: 2.1\nName: natten\nVersion: 0.21\n")
    known["natten"] = "0.21"
    for found in ("4.0.0b36", "4.0.0b37"):
        metadata.write_text(f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {found}\n")
        assert environment()["packages"] == {**known, "flash-attn-4": found}
        assert f"flash-attn-4 {found}" in describe_environment()


def test_the_rivals_of_torch_are_told_with_their_options():
    facts = environment()
    assert facts["cudnn"] == torch.backends.cudnn.version()
    assert facts["flex_attention"]["block"] == 128
    assert set(facts["flex_attention"]["narrow"]) == {"fwd_BLOCK_N", "fwd_num_warps"}


@pytest.mark.parametrize(
    ("has_triton", "why"), [(True, "no GPU, and Triton's interpreter was not"), (False, "triton is")]
)
def test_why_there_are_no_kernels_is_said_as_it_is(machine, monkeypatch, has_triton, why):
    machine(device=False, triton=has_triton)
    monkeypatch.setattr(module, "version", Mock(side_effect=None if has_triton else module.PackageNotFoundError))
    facts = {**environment(), "triton": "3.7.1" if has_triton else None, "kernel_mode": "absent"}
    assert why in describe_environment(facts)


def test_the_table_names_the_gpu_its_driver_and_its_clock(machine):
    machine(**WORKING)
    table = describe_environment()
    for fact in ("GTX 1080", "470.42", "1600 MHz", "compiled"):
        assert fact in table
    machine(device=False)
    assert "absent" in describe_environment()
    prepare_kernels()
    assert "Triton kernels, where used, are interpreted" in describe_environment()


def test_importing_the_library_imports_no_package_of_kernels(tmp_path):
    modules = ("flash_attn", "flash_attn_interface", "flash_attn_3", "flash_attn_2_cuda", "xformers", "triton")
    for name in modules:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')\n")
    script = """
import importlib, os, pkgutil, sys, torch, hilbert_lib
for found in pkgutil.walk_packages(hilbert_lib.__path__, "hilbert_lib."):
    kernels = "curves.kernels", "inside.kernels", "point_kernels", "seed_kernel", "exponentials", "__main__"
    if not found.name.endswith(kernels) and ".triton" not in found.name:
        importlib.import_module(found.name)
q = torch.ones(1, 8, 2, 4)
hilbert_lib.explain_backend(q, q, q, hilbert_lib.DilatedPattern((4, 8), (1, 2)))
print(sorted({name.split(".")[0] for name in sys.modules} & set(sys.argv[1:])), os.environ.get("TRITON_INTERPRET"))
"""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = str(tmp_path), str(module.PACKAGE.parent), os.environ["PYTHONPATH"]
    variables |= {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", script, *modules], env=variables, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (0, "[] None\n"), done.stderr


@pytest.mark.parametrize(
    ("facts", "interpret", "mode"),
    [
        (WORKING, None, "compiled"),
        (WORKING, "1", "interpreted"),
        ({"device": False}, None, "absent"),
        ({"device": False}, "1", "interpreted"),
        ({"device": False}, "0", "absent"),
        ({**WORKING, "triton": False}, "1", "absent"),
    ],
)
def test_kernel_mode_tells_how_kernels_would_run(machine, monkeypatch, facts, interpret, mode):
    machine(**facts)
    if interpret is not None:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert kernel_mode() == mode


def test_preparing_kernels_after_triton_was_imported_is_refused(machine, monkeypatch):
    machine(device=False)
    monkeypatch.setitem(sys.modules, "triton", object())
    with pytest.raises(RuntimeError, match=r"imported before prepare_kernels\(\)"):
        prepare_kernels()


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"cuda": None}, r"install torch's CUDA build"),
        ({"cuda": "13.0", "available": False}, r"cannot start CUDA.*CUDA 13\.0"),
        ({**WORKING, "builds": ["sm_75", "sm_90"]}, r"no kernels for GTX 1080, capability 6\.1.*sm_75, sm_90"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_refused_naming_both_versions(machine, facts, reason):
    machine(**{"device": True, **facts})
    for refusing in (check_gpu, environment, prepare_kernels):
        with pytest.raises(RuntimeError, match=r"torch 2\.13\.0\+test.*driver 470\.42") as refusal:
            refusing()
        assert re.search(reason, str(refusal.value))
    assert "TRITON_INTERPRET" not in os.environ


SEEN = {None: True, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: True}  # by how the driver fails
SEEN |= dict.fromkeys((pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED), None)


@pytest.mark.parametrize(("failure", "seen"), SEEN.items())
def test_a_device_is_seen_where_the_driver_shows_one_or_fails(monkeypatch, failure, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=failure and pynvml.NVMLError(failure)))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    assert module._has_nvidia_device() is (seen or Path("/dev/nvidia0").exists())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert module._has_nvidia_device() is False


HIDING = ("", " ", ",0", "-1", "-1,0", "NoDevFiles", "none", "void", "2", "9" * 99, "0,0", "1,0,1x")
HIDING += ("GPU-c", "GPU-", "GPU-a,GPU-ab", "gpu-a")
SHOWING = (None, "0", " 1", "+1", "1,-1,1", "0,2", "1gpu", "GPU-a", "GPU-ba,0", "MIG-a")


UNKNOWN = ("7", "GPU-z", "MIG-z")  # any may be meant where the driver does not tell its GPUs


@pytest.mark.parametrize("text", [*HIDING, *SHOWING, *UNKNOWN], ids=lambda text: str(text)[:9])
def test_gpus_that_cuda_shows_must_serve_and_no_others(machine_of_two, monkeypatch, text):
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    if text in (*UNKNOWN, "NoDevFiles"):
        mismatch = pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", Mock(side_effect=mismatch))
    with pytest.raises(RuntimeError, match="install a build") if text in SHOWING + UNKNOWN else nullcontext():
        check_gpu()


@pytest.fixture
def machine_of_two(monkeypatch):
    """GPUs "GPU-ab" and "GPU-ba"; CUDA starts on none of them."""
    uuids = ("GPU-ab", "GPU-ba")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.65")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", uuids.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", str)


@pytest.mark.parametrize(
    ("capability", "builds", "served"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80"], True),  # code for 8.0 runs on 8.x
        ((6, 1), ["sm_75", "sm_80"], False),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # PTX is compiled for what comes later
        ((12, 0), ["sm_90"], False),
        ((9, 0), ["sm_90a"], True),
    ],
)
def test_builds_serve_their_own_generation_and_ptx_every_later_one(capability, builds, served):
    assert module._is_built_for(capability, builds) is served


def test_code_hash_follows_names_and_contents_and_nothing_else(tmp_path):
    def write(folder, files):
        for name, content in files.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_bytes(content)
        return code_hash(tmp_path / folder)

    base = {"a.py": b"x = 1\ny = 2\n", "sub/b.py": b""}
    expected = write("here", base)
    assert write("there", {**base, "a.py": b"x = 1\r\ny = 2\r\n", "notes.txt": b"not code"}) == expected
    assert write("changed", {**base, "a.py": b"x = 1\ny = 3\n"}) != expected
    assert write("moved", {"a.py": base["a.py"], "b.py": b""}) != expected
    assert write("split", {"a.py": b"x = 1\n", "sub/b.py": b"y = 2\n"}) != expected
    assert re.fullmatch("[0-9a-f]{12}", code_hash())
    (tmp_path / "compiled").mkdir()
    with pytest.raises(RuntimeError, match="the library's Python files are not there"):
        write("compiled", {"a.pyc": b""})


def test_code_hash_of_a_library_in_a_zip_is_that_of_its_files(tmp_path):
    root = Path(module.__file__).parent
    with zipfile.ZipFile(tmp_path / "library.zip", "w") as archive:
        for path in root.rglob("*.py"):
            archive.write(path, path.relative_to(root.parent).as_posix())
    script = "import hilbert_lib.machine as m; print(m.__file__, m.code_hash())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "library.zip")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    file, found = done.stdout.split()
    assert "library.zip" in file
    assert found == code_hash()


def test_commit_and_dirt_come_from_our_own_repository_else_from_variables(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def version(package):
        monkeypatch.setattr(module, "PACKAGE", package)
        return code_version.__wrapped__()

    ours, enclosed = tmp_path / "hilbert_lib", tmp_path / "site-packages" / "hilbert_lib"
    for folder in (ours, enclosed, tmp_path / "reports"):
        folder.mkdir(parents=True)
        (folder / "a.py").write_text("x = 1\n")
    for words in (["init"], ["add", "."], ["commit", "-m", "one"]):
        git(*words)
    for variable in ("HILBERT_COMMIT", "HILBERT_DIRTY"):
        monkeypatch.delenv(variable, raising=False)
    assert version(enclosed) == (None, None)  # the enclosing repository's commit is not its own
    monkeypatch.setenv("HILBERT_COMMIT", "abc")
    monkeypatch.setenv("HILBERT_DIRTY", "1")
    assert version(enclosed) == ("abc", True)
    (tmp_path / "reports" / "results.jsonl").touch()  # of the run before
    assert version(ours) == (git("rev-parse", "HEAD"), False)
    head = git("rev-parse", "HEAD")
    (ours / "a.py").write_text("x = 2\n")
    assert version(ours) == (head, True)
    # A hook of another repository calls: git hands its own down.
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
        assert version(ours) == (head, True), name
    shutil.rmtree(tmp_path / ".git")
    monkeypatch.setenv("HILBERT_DIRTY", "perhaps")
    with pytest.raises(ValueError, match="HILBERT_DIRTY must be 0 or 1, got 'perhaps'"):
        version(ours)


@pytest.mark.gpu
def test_the_gpu_is_described_in_full():
    facts = environment()
    assert (facts["kernel_mode"], facts["cuda"]) == ("compiled", torch.version.cuda)
    assert facts["hardware"].startswith(torch.cuda.get_device_name(0))
    assert facts["driver"]
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["gpus"][0]["memory_gib"] > 1
    assert facts["gpus"][0]["sm_clock_mhz"] > 0
