"""`adze new op` outside the tree: a project that builds against an installed adze, and its own program."""

import ast
import os
import pathlib
import platform
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ADZE = ROOT / "build/adze"
ENV = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
OPS = sorted(path.stem for path in (ROOT / "src/ops").glob("*.c") if (ROOT / "check" / path.name).exists())


def run(*command, folder, status=0):
    done = subprocess.run([*map(str, command)], cwd=folder, env=ENV, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    if not shutil.which("make") or not shutil.which("cc"):
        pytest.skip("make or cc is not here")
    prefix = tmp_path_factory.mktemp("installed") / "adze"
    run("make", "install", f"PREFIX={prefix}", folder=ROOT)
    return prefix


@pytest.fixture(scope="module")
def project(prefix, tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    said = run(prefix / "bin/adze", "new", "op", "my_add", folder=folder)
    assert "src/ops/my_add.c" in said and "1. my_add.h" in said and "make check" in said
    said = run(prefix / "bin/adze", "new", "op", "my_norm", "--like=l2_norm", folder=folder / "my_add")
    assert "changed  ops.h" in said
    run("make", "-j2", "CUDA=0", folder=folder / "my_add")
    return folder / "my_add"


def test_a_prefix_that_is_a_path_from_here(prefix, tmp_path):
    """pkg-config would look for the header and the library from wherever it is called."""
    said = run("make", "-f", ROOT / "Makefile", "-C", ROOT, "install", "PREFIX=here", folder=tmp_path, status=2)
    assert "install: PREFIX is 'here', it must begin with /" in said and not (ROOT / "here").exists()


def test_headers_say_that_they_may_change(prefix):
    headers = [path for path in (prefix / "include/adze").rglob("*") if path.is_file()]
    assert {"kernel.h", "suite.h", "launch.cuh", "row.h"} <= {path.name for path in headers}
    for path in headers:
        assert "may change with each release" in path.read_text().splitlines()[0], path


def test_the_project_checks_its_ops_and_no_others(project):
    said = run("build/my_add", "check", "--device", "cpu", folder=project)
    assert re.search(r"^[1-9]\d+ passed, 0 failed", said.splitlines()[-1])
    assert "my_add" in said and "my_norm" in said and "rms_norm" not in said
    assert re.search(r"^my_norm .*cpu", run("build/my_add", "info", folder=project), re.M)


def test_its_check_finds_a_wrong_kernel(project, tmp_path):
    wrong = tmp_path / "wrong"
    shutil.copytree(project, wrong)
    source = wrong / "src/cpu/my_add.c"
    source.write_text(source.read_text().replace("+ y.part[p]", "- y.part[p]"))
    run("make", "-j2", "CUDA=0", folder=wrong)
    said = run("build/my_add", "check", "my_add", "--device", "cpu", folder=wrong, status=1)
    assert re.search(r"[1-9]\d* failed", said.splitlines()[-1])


def test_its_program_times_and_repeats_calls(project):
    said = run("build/my_add", "run", "my_add x=bf16[8,64] y=bf16[8,64] a=2", "--device", "cpu", folder=project)
    assert re.search(r"right: .* ulp.*GB/s", said)


def test_a_makefile_from_another_folder(project):
    said = run("make", "-f", project / "Makefile", "CUDA=0", folder=project.parent, status=2)
    assert "No rule to make target 'ops.h'" in said


def test_a_project_without_an_installation(project, tmp_path):
    said = run("make", f"ADZE={tmp_path}", "CUDA=0", folder=project, status=2)
    assert re.search(rf"{tmp_path}/share/adze/project\.mk: No such file", said)


def test_a_table_with_a_row_that_no_file_has(project, prefix, tmp_path):
    """What the linker misses where src/cuda/NAME.cu has no CUDA_ENTRIES."""
    paths = [f"-I{prefix / 'include'}", f"-I{prefix / 'include/adze'}", "-I."]
    compiled = ["cc", "-std=c11", "-D_GNU_SOURCE", "-DADZE_CUDA=1", "-include", "ops.h", *paths, "-c"]
    run(*compiled, "src/ops/my_add.c", "-o", tmp_path / "my_add.o", folder=project)
    assert "U adze_my_add_cuda" in run("nm", "-u", tmp_path / "my_add.o", folder=project)


@pytest.mark.parametrize("like", OPS)
def test_every_op_can_be_what_a_new_one_is_like(prefix, tmp_path, like):
    """Compiled without code, so that it takes no time: the sources are those of the library by another name."""
    run(prefix / "bin/adze", "new", "op", "other", "--like", like, folder=tmp_path)
    folder, include = tmp_path / "other", prefix / "include"
    paths = [f"-I{include}", *(f"-I{include / 'adze' / name}" for name in ("", "cuda", "check"))]
    sources = sorted(path.relative_to(folder) for path in folder.rglob("*.c"))
    isa_files = [path for path in (ROOT / "src/cpu").glob(f"{like}_*.c") if path.stem not in OPS]
    assert len(sources) == 3 + len(isa_files)
    arm = platform.machine() == "aarch64"
    foreign = ("_amx.c", "_amx_int8.c", "_vnni.c") if arm else ("_bf16.c",)
    sources = [path for path in sources if not path.name.endswith(foreign)]
    x86 = ["-march=x86-64-v4", "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mavx512vnni"]
    native = ["-march=armv8.2-a+bf16"] if arm else x86
    flags = [
        *native,
        "-std=c11",
        "-D_GNU_SOURCE",
        "-DADZE_ISA=",
        "-DADZE_CUDA=1",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
        "-Werror",
    ]
    run("cc", "-fsyntax-only", *flags, "-include", "ops.h", "-I.", *paths, *sources, folder=folder)
    texts = [path.read_text() for path in (folder / "src").rglob("other.c*")]
    mentioned = re.findall(rf"\badze_(?:op_|suite_)?{like}(?:_cuda|_cpu\w*)?\b", "".join(texts))
    assert not mentioned, f"names of {like} are left: {mentioned}"
    tree = ast.parse((folder / "functions.py").read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.startswith("_")}
    assert "other" in defined and used <= defined, "a function that it calls is not in functions.py"


@pytest.mark.parametrize("op", ["scale_add", "l2_norm", "rms_norm_i8"])
def test_templates_compile_for_gpus(prefix, tmp_path, op):
    if not NVCC:
        pytest.skip("nvcc is not here")
    run(prefix / "bin/adze", "new", "op", "other", "--like", op, folder=tmp_path)
    include = prefix / "include"
    paths = [f"-I{include}", *(f"-I{include / 'adze' / name}" for name in ("", "cuda"))]
    flags = ["-std=c++17", "-Werror", "all-warnings", "-include", "ops.h", "-DADZE_CUDA=1", "-arch=sm_90a"]
    run(NVCC, *flags, "-I.", *paths, "-cubin", "src/cuda/other.cu", "-o", "other.cubin", folder=tmp_path / "other")


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["Other"], "'Other' is no name for an op"),
        (["2d"], "is no name"),
        (["int"], "is no name"),
        (["while"], "is no name"),
        (["template"], "is no name"),
        (["pass"], "is no name"),
        (["ops"], "is no name"),
        (["my_bf16"], "'my_bf16' is no name for an op: files that end in _bf16 have kernels"),
        (["my_sm90"], "files that end in _sm90"),
        (["tensor"], "'tensor' is no name for an op: adze.h has adze_tensor already"),
        (["like"], "'like' is no name for an op: kernel.h has adze_like already"),
        (["rms_norm"], "'rms_norm' is no name for an op: adze.h has adze_rms_norm already"),
        (["other", "--like", "nosuch"], "--like is 'nosuch', it must be one of"),
        ([], "a name is missing"),
        (["other", "more"], "is a second word"),
    ],
)
def test_refusals(tmp_path, arguments, why):
    assert why in run(ADZE, "new", "op", *arguments, folder=tmp_path, status=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["class", "torch", "transformers", "model"])
def test_projects_that_python_could_not_import(tmp_path, name):
    said = run(ADZE, "new", "project", name, "--model=llama", "--op=rms_norm", folder=tmp_path, status=2)
    assert f"'{name}' is no name for a project" in said and not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "other/src/ops").mkdir(parents=True)
    (tmp_path / "other/src/ops/other.c").write_text("mine")
    assert "exists; nothing was written" in run(ADZE, "new", "op", "other", folder=tmp_path, status=1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "other/src/ops/other.c"]
