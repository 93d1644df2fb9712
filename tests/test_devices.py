"""What the program says of the GPU code it has, and of GPUs it cannot use."""

import pathlib
import re
import shutil
import subprocess

import pytest

BUILD = pathlib.Path(__file__).resolve().parent.parent / "build"
CUOBJDUMP = shutil.which("cuobjdump", path="/usr/local/cuda/bin") or shutil.which("cuobjdump")


def adze(build, *words):
    return subprocess.run([BUILD / build / "adze", *words], capture_output=True, text=True)


def gpu_code(build):
    """(SMs, architectures of PTX), or None without CUDA."""
    said = adze(build, "info").stdout.splitlines()[0]
    if re.fullmatch(r"adze \d+\.\d+\.\d+, built without CUDA", said):
        return None
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


@pytest.mark.skipif(gpu_code(".") is None or not CUOBJDUMP, reason="built without CUDA, or cuobjdump is not here")
def test_info_names_the_code_in_the_library():
    def listed(what, pattern):
        text = subprocess.run(
            [CUOBJDUMP, what, BUILD / "libadze.so"], capture_output=True, text=True, check=True
        ).stdout
        return set(re.findall(pattern, text))

    sms, ptx = gpu_code(".")
    assert listed("--list-elf", r"\.(sm_\d+[af]?)\.cubin") == sms
    assert listed("--list-ptx", r"\.(sm_\d+[af]?)\.ptx") == {name.replace("compute", "sm") for name in ptx}
