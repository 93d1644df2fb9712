"""How adze calls cuBLASLt: against a library of the same functions for the host, and without one."""

import os
import pathlib
import re
import shlex
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
NAME = "libcublasLt.so.13"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of the program, and that of the library."""
    if "built without CUDA" in subprocess.run([BUILD / "adze", "info"], capture_output=True, text=True).stdout:
        pytest.skip("this build has no CUDA")
    folder = tmp_path_factory.mktemp("cublaslt")
    cc = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
    private = re.search(r"^Libs.private: (.*)", (BUILD / "adze.pc").read_text(), re.M)[1]
    (folder / "lib").mkdir()
    subprocess.run(
        [*cc, "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{NAME}", ROOT / "tests/cublaslt/fake.c"]
        + ["-o", folder / "lib" / NAME, "-lm"],
        check=True,
    )
    subprocess.run(
        [*cc, "-I", ROOT / "include", "-I", ROOT / "src", ROOT / "tests/cublaslt/products.c", "-L", BUILD]
        + ["-l:libadze.a", *shlex.split(private), "-o", folder / "products"],
        check=True,
    )
    return folder


def run(programs, library, **environment):
    path = {"LD_LIBRARY_PATH": str(programs / library), **environment}
    done = subprocess.run([programs / "products"], capture_output=True, text=True, env={**os.environ, **path})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_products(programs):
    said = run(programs, "lib")
    assert said[-1].endswith(" 0 failed, 0 skipped") and "no library" not in said
    asked = [line for line in said if line.startswith("ask 5 7 11")]
    # f32 with and without workspace, with bias and residual, of another address, in batches, scaled
    assert len(asked) == 6
    assert all(line.endswith("reductions 2") for line in asked)
    assert [line.split()[-1] for line in said if line.startswith("run 5 7 11")][:3] == ["1000", "1000", "0"]
    assert sum(line.startswith("ask 3 9 16") for line in said) == 1


def test_alignments(programs):
    said = run(programs, "lib")
    first = next(line for line in said if line.startswith("ask 5 7 11"))
    assert all(int(number) >= 4 for number in first.split()[5:9])
    batches = [line.split()[5:9] for line in said if line.startswith("ask 5 7 11")][4]
    # x's batches are 400 bytes apart, those of the residual 240, those of out 256
    assert int(batches[1]) <= 16 and int(batches[2]) <= 16


@pytest.mark.parametrize(
    ("library", "environment"), [("", {}), ("lib", {"FAKE_CUBLASLT_OLD_DRIVER": "1"})], ids=["absent", "refuses"]
)
def test_without_the_library(programs, library, environment):
    if not library and subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout.count("cublasLt"):
        pytest.skip("this machine has the library")
    said = run(programs, library, **environment)
    assert said[0] == "no library" and said[-1] == "2 passed, 0 failed, 0 skipped"


def test_it_is_not_linked():
    for file in ("libadze.so", "adze"):
        said = subprocess.run(["readelf", "-d", BUILD / file], capture_output=True, text=True, check=True).stdout
        assert "NEEDED" in said and "cublas" not in said
