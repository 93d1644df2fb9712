"""What the program says of the GPU code it has, and of GPUs it cannot use."""

import pathlib
import re
import shutil
import struct
import subprocess

import pytest

BUILD = pathlib.Path(__file__).resolve().parent.parent / "build"


def adze(build, *words):
    return subprocess.run([BUILD / build / "adze", *words], capture_output=True, text=True)


def gpu_code(build):
    """(SMs, architectures of PTX), or None without CUDA."""
    said = adze(build, "info").stdout.splitlines()[0]
    if re.fullmatch(r"adze \d+\.\d+\.\d+, built without CUDA", said):
        return None
    said = said.removesuffix("(not optimised)")
    code = re.fullmatch(
        r"adze \d+\.\d+\.\d+, built for ((?:sm_\d+[af]? ?)+)(?:and PTX of ((?:compute_\d+ ?)+))?", said
    )
    assert code, said
    return set(code[1].split()), set((code[2] or "").split())


# clang's build never has CUDA; the other has it where nvcc is.
@pytest.mark.parametrize("build", [".", "clang"])
@pytest.mark.parametrize(
    "words", [["run", "softmax x=f32[2,8]"], ["bench", "softmax", "--quick"], ["check", "softmax"]]
)
def test_a_gpu_that_cannot_be_used(build, words):
    if build == "clang" and not shutil.which("clang"):
        pytest.skip("clang is not here")
    # 1000: there is no such device, with CUDA or without.
    done = adze(build, *words, "--device", "1000")
    assert done.returncode != 0
    assert "prepare: there is no CUDA device 1000" in done.stdout + done.stderr
    assert ("this adze was built without CUDA" in done.stdout + done.stderr) == (gpu_code(build) is None)


def entries(library):
    """(kind, SM) of all that the library's fat binaries hold. Kind 1 is PTX, 2 is machine code."""
    data, magic = library.read_bytes(), b"\x50\xed\x55\xba\x01\x00\x10\x00"
    at = data.find(magic)
    while at >= 0:
        entry, end = at + 16, at + 16 + struct.unpack_from("<Q", data, at + 8)[0]
        while entry < end:
            kind, header, size = struct.unpack_from("<HxxIQ", data, entry)
            yield kind, struct.unpack_from("<I", data, entry + 28)[0]
            entry += header + size
        at = data.find(magic, end)


def test_info_names_the_code_in_the_library():
    sms, ptx = gpu_code(".") or (set(), set())
    found = set(entries(BUILD / "libadze.so"))
    assert {sm for kind, sm in found if kind == 2} == {int(re.search(r"\d+", name)[0]) for name in sms}
    assert {sm for kind, sm in found if kind == 1} == {int(re.search(r"\d+", name)[0]) for name in ptx}
