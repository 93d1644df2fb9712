"""`adze new project` and `adze pack`: a project of kernels for a model, packed for the Hub and loaded by kernels."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
kernels = pytest.importorskip("kernels")
ROOT = pathlib.Path(__file__).parents[2]
ENV = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
ENV |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHON": sys.executable}
MODELS = {"llama": "transformers", "qwen3": "transformers", "ltx-video": "diffusers", "flux": "diffusers"}


def run(*command, folder, status=0, **env):
    done = subprocess.run([*map(str, command)], cwd=folder, env={**ENV, **env}, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def adze(tmp_path_factory):
    """The program of an installation."""
    if not shutil.which("make") or not shutil.which("cc"):
        pytest.skip("make or cc is not here")
    prefix = tmp_path_factory.mktemp("installed") / "adze"
    run("make", "install", f"PREFIX={prefix}", folder=ROOT)
    return prefix / "bin/adze"


@pytest.fixture(scope="module")
def project(adze, tmp_path_factory):
    """Packed once. The CPU's kernels are those of this build, whose sources are the same, but for an own op."""
    folder = tmp_path_factory.mktemp("work")
    ops = ("activation", "gemm", "quantize", "attention")
    named = ",".join([*ops, "my_norm=rms_norm"])
    said = run(adze, "new", "project", "q-kernels", "--model", "qwen3", "--op", named, folder=folder)
    assert "src/cuda/activation.cu" in said and "src/cuda/my_norm.cu" in said and "python benchmark.py" in said
    project = folder / "q-kernels"
    (project / "build/src/cpu").mkdir(parents=True)
    for kernel in [path for op in ops for path in (ROOT / "build/src/cpu").glob(f"{op}*.o")]:
        shutil.copy(kernel, project / "build/src/cpu")
    makefile = project / "Makefile"
    makefile.write_text("CUDA := 0\n" + makefile.read_text())
    os.utime(makefile, (0, 0))
    for op in ops:
        os.utime(project / f"src/cpu/{op}.c", (0, 0))
    (project / "said").write_text(run(adze, "pack", "--push", "org/q-kernels", "--dry-run", folder=project))
    return project


def test_every_check_passes(project):
    said = (project / "said").read_text()
    found = {name: word for word, name in re.findall(r"^  (ok|HERE|FAIL|skipped) +(\w+)", said, re.M)}
    assert set(found) == {"layout", "metadata", "digest", "symbols", "glibc", "loads"}, said
    glibc = "ok" if importlib.util.find_spec("ziglang") else "HERE"
    assert found.pop("glibc") in ("ok", glibc)
    assert set(found.values()) == {"ok"}


def test_a_dry_run_says_what_would_be_uploaded(project):
    said = (project / "said").read_text()
    assert re.search(r"\d+ files, .* MB, to org/q-kernels, branch v1:", said)
    assert "build/torch-stable-abi210-cpu" in said and "build.toml" in said
    assert "hf upload org/q-kernels package . --type kernel --revision v1" in said
    assert 'get_kernel("org/q-kernels", version=1' in (project / "package/README.md").read_text()


def test_metadata(project):
    from kernels._rust import Metadata

    for path in (project / "package/build").glob("*/metadata.json"):
        metadata = json.loads(path.read_text())
        assert metadata["name"] == "q-kernels" and metadata["id"].startswith("_q_kernels_cpu_")
        assert metadata["provenance"]["kernel-builder"]["version"].startswith("adze ")
        Metadata.read_from_file(path)


def test_it_has_the_ops_of_the_project_alone(project):
    kernel = kernels.get_local_kernel(project / "package")
    assert [name for name in kernel.__all__ if name.islower()] == [
        *("activation", "attention", "gemm", "layers", "my_norm", "quantize")
    ]
    x = torch.randn(3, 100)
    with torch.no_grad():
        torch.testing.assert_close(kernel.activation(x, "silu"), torch.nn.functional.silu(x))
        namespace = getattr(torch.ops, json.loads(next(
            (project / "package/build").glob("torch*/metadata.json")).read_text())["id"])  # fmt: skip
        torch.library.opcheck(namespace.activation.default, (x, 1))
        numbers, scale = kernel.quantize(torch.randn(64, 100), "i8")
        product = kernel.gemm(x, numbers, w_scale=scale)
        torch.testing.assert_close(product, x @ (numbers * scale[:, None]).T, rtol=1e-4, atol=1e-4)
        out, lse = kernel.attention(*(torch.randn(1, 2, 3, 8) for _ in range(3)), need_lse=True)
        assert out.shape == (1, 2, 3, 8) and lse.shape == (1, 2, 3) and lse.dtype == torch.float32


def test_a_changed_file_is_found(project, tmp_path):
    package = tmp_path / "package"
    shutil.copytree(project / "package", package)
    checks = load(ROOT / "hub/project.py", "hub_project")
    assert checks.check(package)[0] == 0
    variant = next((package / "build").glob("torch*"))
    (variant / "functions.py").write_text("")
    with pytest.raises(checks.Wrong, match=r"functions.py is not the file of the digest"):
        checks.check_digest(package)
    (variant / "metadata.json").write_text("{}")
    with pytest.raises(checks.Wrong, match="lacks name, id, version"):
        checks.check_metadata(package)
    shutil.rmtree(package / "tests")
    with pytest.raises(checks.Wrong, match="kernels_ci"):
        checks.check_layout(package)


def test_what_hugging_faces_ci_runs(project):
    local = f"org/q-kernels={(project / 'package').resolve()}"
    said = run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "kernels_ci", "package/tests",
        folder=project, LOCAL_KERNELS=local,
    )  # fmt: skip
    assert re.search(r"\d+ passed, \d+ skipped", said)


def test_tests_of_the_project(project):
    """From its folder they find package/."""
    said = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", folder=project)
    assert re.search(r"\d+ passed, \d+ skipped", said)


@pytest.mark.parametrize("folder", [".", "package/benchmarks"])
def test_benchmark(project, folder):
    """Of the project, and as it is published."""
    pytest.importorskip("transformers")
    said = run(sys.executable, "benchmark.py", "--tiny", "--json", "out.json", folder=project / folder)
    found = json.loads((project / folder / "out.json").read_text())
    assert [row["op"] for row in found["rows"]] == [
        *("my_norm", "my_norm", "activation", "gemm", "quantize", "attention", "attention")
    ]
    assert set(found["rows"][0]["us"]) == {"eager", "kernel"} and "torch" in found["rows"][-1]["us"]
    assert found["rows"][0]["copy_gbps"] > 0 and found["rows"][-2]["tflops"] > 0
    whole = found["end_to_end"]
    assert whole["taken"] == {"activation": 0, "gemm": 15, "quantize": 0, "attention": 2, "my_norm": 9}
    assert list(whole["ms"]) == ["compile", "eager", "kernel", "kernel + compile"] and "qwen3:  compile" in said
    assert found["adze_project"] == "q-kernels" and found["date"] and found["commit"]


def test_layers(project):
    """kernelize finds the layer of an own op."""
    repository = kernels.LocalLayerRepository(project / "package", layer_name="RMSNorm")
    layer = repository.load()
    module = torch.nn.Module()
    module.weight, module.variance_epsilon = torch.rand(64), 1e-6
    x = torch.randn(3, 64)
    expected = module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    with torch.no_grad():
        torch.testing.assert_close(layer.forward(module, x), expected)
    asked = module.weight.requires_grad_()
    layer.forward(module, x).sum().backward()
    assert asked.grad is not None


def test_a_wrong_kernel_is_not_packed(adze, project, tmp_path):
    wrong = tmp_path / "wrong"
    shutil.copytree(project, wrong, ignore=shutil.ignore_patterns("package"))
    source = wrong / "src/cpu/my_norm.c"
    rms, layer = "norm_range(context, begin, end, 0)", "norm_range(context, begin, end, 1)"
    assert rms in source.read_text()
    source.write_text(source.read_text().replace(rms, layer))
    said = run(adze, "pack", folder=wrong, status=1)
    assert "a kernel is wrong" in said and re.search(r"^     build/q-kernels run 'my_norm ", said, re.M)
    assert not (wrong / "package").exists()


def test_a_variant_for_another_torch_is_not_loaded(project, tmp_path):
    checks = load(ROOT / "hub/project.py", "hub_project")
    for name, backend in ("torch-stable-abi210-cu130-x86_64-linux", "cu132"), ("tvm-ffi01-cpu-x86_64-linux", "cpu"):
        (tmp_path / "build" / name).mkdir(parents=True)
        assert checks.serves(tmp_path, backend) and not checks.serves(tmp_path, "cu126")
        assert checks.serves(tmp_path, "cpu") == (backend == "cpu")
    shutil.rmtree(tmp_path / "build")
    (tmp_path / "build/torch-stable-abi210-cu90-x86_64-linux").mkdir(parents=True)
    with pytest.raises(checks.Skipped, match=r"torch of this machine is for \w+, and no variant is"):
        checks.check_loads(tmp_path)


def test_a_language_model_generates(adze, tmp_path):
    """With the functions of the Python package, so that nothing is built."""
    pytest.importorskip("transformers")
    made = run(adze, "new", "project", "q-kernels", "--model=qwen3", "--op=rms_norm,attention", folder=tmp_path)
    assert "attention.py" in made
    words = ["benchmark.py", "--tiny", "--installed", "adze", "--json", "out.json"]
    run(sys.executable, *words, folder=tmp_path / "q-kernels", PYTHONPATH=str(ROOT / "python"))
    found = json.loads((tmp_path / "q-kernels/out.json").read_text())
    assert found["kernels"] == "adze" and found["end_to_end"]["taken"] == {"rms_norm": 9, "attention": 2}
    ways = found["end_to_end"]["generate"]["ways"]
    assert list(ways) == ["generate()", "generate(), kernel", "adze.generate"]
    assert all(way["equal"] == 1 and way["prompt"] > 0 < way["token"] for way in ways.values())


@pytest.mark.parametrize("model", MODELS)
def test_places_of_the_kernels(model, monkeypatch):
    """Each model's forwards, with adze's own functions as the kernels."""
    pytest.importorskip(MODELS[model])
    import adze as kernel

    place = load(ROOT / f"templates/model/{model}.py", "model")
    inject = load(ROOT / "templates/model/inject.py", "inject")
    module, step = place.build(True, "cpu", torch.float32)
    ops = list(place.forwards(kernel))
    if hasattr(place, "ATTENTION"):
        ops.append("attention")
        called = load(ROOT / "templates/model/attention.py", "attention").NAME
    with torch.no_grad():
        expected = step()
        taken = inject.inject(module, kernel, ops)
        assert all(taken.values()), taken
        torch.testing.assert_close(step(), expected, rtol=1e-4, atol=1e-4)
        assert "attention" not in ops or module.config._attn_implementation == called
        inject.remove(module)
        assert torch.equal(step(), expected)


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["x-y", "--model", "llama", "--op", "embed"], "--op has 'embed', it must be of"),
        (["x-y", "--model", "llama", "--op", "mine=embed"], "--op has 'embed', it must be of"),
        (["x-y", "--model", "llama", "--op", "glu=rms_norm"], "glu is an op of adze, yours needs another name"),
        (["x-y", "--model", "llama", "--op", "rms_norm,mine=rms_norm"], "--op has rms_norm twice"),
        (["x-y", "--model", "llama", "--op", "Mine=rms_norm"], "'Mine' is no name for an op"),
        (["x-y", "--model", "gpt", "--op", "glu"], "--model is 'gpt', it must be llama|qwen3"),
        (["x_y", "--model", "llama", "--op", "glu"], "is no name for a project"),
        (["x-y", "--op", "glu"], "--model is missing"),
    ],
)
def test_refusals(tmp_path, arguments, why):
    assert why in run(ROOT / "build/adze", "new", "project", *arguments, folder=tmp_path, status=2)
    assert not list(tmp_path.iterdir())


def test_only_a_project_is_packed(adze, tmp_path):
    assert "is no project" in run(adze, "pack", folder=tmp_path, status=2)
    run(adze, "new", "op", "mine", folder=tmp_path)
    assert "`adze new project NAME --model M --op OWN=OP`" in run(adze, "pack", folder=tmp_path / "mine", status=2)


def test_a_new_op_in_a_project_is_told_its_places(adze, tmp_path):
    run(adze, "new", "project", "x-y", "--model", "llama", "--op", "glu", folder=tmp_path)
    said = run(adze, "new", "op", "mine", "--like", "l2_norm", folder=tmp_path / "x-y")
    assert all(place in said for place in ("model.py", "benchmark.py", "tests/test_kernels.py", "layers.py"))
    assert "model.py" not in run(adze, "new", "op", "mine", folder=tmp_path)
