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
    """Packed once. The CPU's kernels are those of this build: their sources are the same."""
    folder = tmp_path_factory.mktemp("work")
    ops = ("activation", "gemm", "quantize", "attention")
    said = run(adze, "new", "project", "ltx-kernels", "--model", "ltx-video", "--op", ",".join(ops), folder=folder)
    assert "src/cuda/activation.cu" in said and "python benchmark.py" in said
    project = folder / "ltx-kernels"
    (project / "build/src/cpu").mkdir(parents=True)
    for kernel in [path for op in ops for path in (ROOT / "build/src/cpu").glob(f"{op}*.o")]:
        shutil.copy(kernel, project / "build/src/cpu")
    makefile = project / "Makefile"
    makefile.write_text("CUDA := 0\n" + makefile.read_text())
    os.utime(makefile, (0, 0))
    for op in ops:
        os.utime(project / f"src/cpu/{op}.c", (0, 0))
    (project / "said").write_text(run(adze, "pack", "--push", "org/ltx-kernels", "--dry-run", folder=project))
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
    assert re.search(r"\d+ files, .* MB, to org/ltx-kernels, branch v1:", said)
    assert "build/torch-stable-abi210-cpu" in said and "build.toml" in said
    assert "hf upload org/ltx-kernels package . --type kernel --revision v1" in said
    assert 'get_kernel("org/ltx-kernels", version=1' in (project / "package/README.md").read_text()


def test_metadata(project):
    from kernels._rust import Metadata

    for path in (project / "package/build").glob("*/metadata.json"):
        metadata = json.loads(path.read_text())
        assert metadata["name"] == "ltx-kernels" and metadata["id"].startswith("_ltx_kernels_cpu_")
        assert metadata["provenance"]["kernel-builder"]["version"].startswith("adze ")
        Metadata.read_from_file(path)


def test_it_has_the_ops_of_the_project_alone(project):
    kernel = kernels.get_local_kernel(project / "package")
    assert [name for name in kernel.__all__ if name.islower()] == ["activation", "attention", "gemm", "quantize"]
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
    local = f"org/ltx-kernels={(project / 'package').resolve()}"
    said = run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "kernels_ci", "package/tests",
        folder=project, LOCAL_KERNELS=local,
    )  # fmt: skip
    assert re.search(r"\d+ passed, \d+ skipped", said)


def test_benchmark(project):
    pytest.importorskip("diffusers")
    said = run(sys.executable, "benchmark.py", "--tiny", "--json", "out.json", folder=project)
    found = json.loads((project / "out.json").read_text())
    assert [row["op"] for row in found["rows"]] == ["activation", "gemm", "quantize", "attention", "attention"]
    assert set(found["rows"][0]["us"]) == {"eager", "kernel"} and "torch" in found["rows"][-1]["us"]
    taken = {"activation": 2, "gemm": 0, "quantize": 0, "attention": 0}
    assert found["end_to_end"]["taken"] == taken and "ltx-video:  eager" in said
    assert found["adze_project"] == "ltx-kernels" and found["date"] and found["commit"]


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
