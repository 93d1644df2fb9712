"""The guide "Adding an op" of docs/architecture.md, followed in a copy of the tree by `adze new op`: its templates
become ops of the library, and are then in the program, PyTorch, JAX, TVM FFI and the Hub package."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OPS = ("scale_add", "l2_norm", "rms_norm_i8")
NEW = {f"{folder}/{op}.{end}" for op in OPS for folder, end in
       (("src/ops", "c"), ("src/cpu", "c"), ("src/cuda", "cu"), ("check", "c"))}  # fmt: skip
CHANGED = ("include/adze.h", "src/kernel.h", "python/adze/operators/functions.py")
WRITTEN = ("docs/ops.md", "python/adze/operators/header.py")
ENV = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
VALUES = "x, y, want = [[1.0, 2.0, 3.0]], [[0.5, 0.5, 0.5]], [[2.5, 4.5, 6.5]]\n"


def run(*command, folder, path=""):
    env = {**ENV, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make(tree, *targets):
    """Kernels of other ops are those of the build that is there: they do not use what the new op has changed."""
    old = [word for header in ("include/adze.h", "src/kernel.h") for word in ("-o", header)]
    run("make", "-j2", *old, "CUDA=0", "B=build/new", "K=build", f"HUB_PY={sys.executable}", *targets, folder=tree)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    for tool in ("make", "cc"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not here")
    tree = tmp_path_factory.mktemp("new_op") / "adze"
    unwanted = shutil.ignore_patterns("build", "dist", ".git", "__pycache__", "*.so", "*.egg-info", "results")
    shutil.copytree(ROOT, tree, ignore=unwanted)
    (tree / "build/src").mkdir(parents=True)
    if (ROOT / "build/kernel_flags").exists():
        shutil.copy2(ROOT / "build/kernel_flags", tree / "build")
        shutil.copytree(ROOT / "build/src/cpu", tree / "build/src/cpu")
    for op in OPS:
        said = run(ROOT / "build/adze", "new", "op", op, "--like", op, folder=tree)
        assert f"src/ops/{op}.c" in said and f"build/adze check {op}" in said
    make(tree, "docs", "python")
    make(tree, f"HUB={tree / 'hub-package'}", "hub-backend")
    return tree


def test_the_guide_names_what_is_touched(tree):
    touched = set()
    for path in tree.rglob("*"):
        own = path.relative_to(tree)
        built = own.parts[0] in ("build", "hub-package") or path.suffix in (".so", ".pyc") or own.name == "bundle"
        if path.is_file() and not built:
            if not (ROOT / own).exists() or (ROOT / own).read_bytes() != path.read_bytes():
                touched.add(str(own))
    assert touched == {*NEW, *CHANGED, *WRITTEN}
    guide = re.search(r"## Adding an op\n(.*?)\n## ", (ROOT / "docs/architecture.md").read_text(), re.S)[1]
    for path in touched:
        assert path in guide or f"{pathlib.Path(path).parent}/" in guide, path


def in_order(tree):
    """The ops as ADZE_OPS of src/kernel.h lists them, and as adze.h declares them."""
    listed = re.search(r"define ADZE_OPS\(X\)((?:.*\\\n)+.*)", (tree / "src/kernel.h").read_text())[1]
    declared = r"^ADZE_API adze_status adze_(\w+)\(adze_stream \w+, const adze_\1_args \*args\);"
    return re.findall(r"X\((\w+)\)", listed), re.findall(declared, (tree / "include/adze.h").read_text(), re.M)


def test_the_list_of_ops_has_the_order_of_the_header(tree):
    for place in (ROOT, tree):
        listed, declared = in_order(place)
        assert listed == declared
    assert listed[-len(OPS) :] == list(OPS)


@pytest.mark.parametrize("op", OPS)
def test_program(tree, op):
    assert re.search(rf"^{op} +cpu|^{op} .* cpu", run("build/new/adze", "info", folder=tree), re.M)
    checked = run("build/new/adze", "check", op, "--device", "cpu", folder=tree)
    assert re.search(r"^[1-9]\d* passed, 0 failed", checked.splitlines()[-1])
    assert f"## {op}" in (tree / "docs/ops.md").read_text()


def test_nothing_is_overwritten(tree):
    for name, why in (
        ("scale_add", "there is an op scale_add already"),
        ("rms_norm", "an op rms_norm already"),
        ("tensor", "adze.h has adze_tensor already"),
        ("patch", "the Python package has adze.patch already"),
    ):
        done = subprocess.run([ROOT / "build/adze", "new", "op", name], cwd=tree, capture_output=True, text=True)
        assert done.returncode == 2 and why in done.stderr, done.stderr


TORCH = (
    VALUES
    + """
import torch, adze
x, y = torch.tensor(x), torch.tensor(y)
with torch.no_grad():
    assert adze.scale_add(x, y, a=2.0).tolist() == want
    assert torch.ops.adze.scale_add(x, y, 2.0).tolist() == want
    assert adze.scale_add(x, y, a=2.0, out=y) is y and y.tolist() == want
    torch.library.opcheck(torch.ops.adze.scale_add.default, (x, y, 2.0))
assert adze.scale_add.__doc__.endswith("scale_add: out = a * x + y")
x = torch.randn(3, 5, 100)
with torch.no_grad():
    out, norm = adze.l2_norm(x, eps=0.0, need_norm=True)
    torch.testing.assert_close(norm, x.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(out, x / norm)
    assert torch.equal(adze.l2_norm(x, eps=0.0), out)
    torch.library.opcheck(torch.ops.adze.l2_norm.norm, (x.to(torch.bfloat16), 1e-6))
    out, scale = adze.rms_norm_i8(x, eps=1e-6)
    assert out.dtype == torch.int8 and out.abs().amax(-1).min() == 127 and scale.shape == (3, 5, 1)
    torch.testing.assert_close(out * scale, adze.rms_norm(x, eps=1e-6), rtol=0, atol=scale.max().item() / 2 + 1e-6)
    torch.library.opcheck(torch.ops.adze.rms_norm_i8.default, (x, None, 1e-6))
"""
)
JAX = VALUES + "import adze.jax; assert adze.jax.scale_add(x, y, a=2.0).tolist() == want"
TVM_FFI = (
    VALUES
    + """
import adze.tvm_ffi, numpy as np
assert adze.tvm_ffi.scale_add(np.array(x, "f4"), np.array(y, "f4"), a=2.0).tolist() == want
"""
)
HUB = (
    VALUES
    + """
import pathlib, kernels, torch
kernel = kernels.get_local_kernel(pathlib.Path("hub-package"))
with torch.no_grad():
    assert kernel.scale_add(torch.tensor(x), torch.tensor(y), a=2.0).tolist() == want
assert "scale_add" in kernel.__all__
assert "`scale_add`" in pathlib.Path("hub-package/README.md").read_text()
"""
)


@pytest.mark.parametrize(
    "module, code",
    [("torch", TORCH), ("jax", JAX), ("tvm_ffi", TVM_FFI), ("kernels", HUB)],
    ids=("torch", "jax", "tvm_ffi", "hub"),
)
def test_host(tree, module, code):
    if importlib.util.find_spec(module) is None or (module == "kernels" and not importlib.util.find_spec("torch")):
        pytest.skip(f"{module} is not here")
    run(sys.executable, "-c", code, folder=tree, path=tree / "python")
