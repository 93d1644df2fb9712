"""`adze new project` and `adze pack`: a project of kernels for a model, packed for the Hub and loaded by kernels."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

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


def quick(project):
    """What compiles sooner: no CUDA, and own kernels that are optimised less."""
    makefile = project / "Makefile"
    makefile.write_text("CUDA := 0\n" + makefile.read_text() + "CPU_CFLAGS += -O1\n")
    return makefile


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
    os.utime(quick(project), (0, 0))
    for op in ops:
        os.utime(project / f"src/cpu/{op}.c", (0, 0))
    (project / "said").write_text(run(adze, "pack", "--push", "org/q-kernels", "--dry-run", folder=project, status=1))
    return project


def test_every_check_passes(project):
    said = (project / "said").read_text()
    found = {name: word for word, name in re.findall(r"^  (ok|no push|FAIL|skipped) +(\w+)", said, re.M)}
    assert set(found) == {"layout", "metadata", "digest", "symbols", "glibc", "cuda", "commit", "loads"}, said
    glibc = "ok" if importlib.util.find_spec("ziglang") else "no push"
    assert found.pop("glibc") in ("ok", glibc)
    assert found.pop("cuda") == "no push"  # the project is built with CUDA=0
    assert set(found.values()) == {"ok"}


def test_the_models_calls_are_timed_first(project):
    """Each is a call, and an own op has them too."""
    lines = re.findall(r'^    "(.*)",$', (project / "check/my_norm.c").read_text(), re.M)
    assert lines[:2] == [
        "x=$[128,4096] weight=$[4096] eps=1e-6 rounding=1",
        "x=$[1,128,32,128] weight=$[128] eps=1e-6 rounding=1",
    ]
    table = (ROOT / "cli/new_project.c").read_text()
    found = re.findall(r'^    \{"[\w-]+", "(\w+)", "(.*)"\},$', table, re.M)
    for op, line in found:
        few = re.sub(r"\[(1,)?(128|2688|4608),", r"[\g<1>2,", line.replace("$", "f32"))
        run(ROOT / "build/adze", "run", f"{op} {few}", "--device=cpu", folder=ROOT)
    assert len(found) > 10


def test_a_dry_run_says_what_would_be_uploaded(project):
    said = (project / "said").read_text()
    assert re.search(r"\d+ files, .* MB, to org/q-kernels, branch v1:", said)
    assert "build/torch-stable-abi210-cpu" in said and "build.toml" in said
    assert "hf upload org/q-kernels package . --type kernel --revision v1" in said
    assert 'get_kernel("org/q-kernels", version=1' in (project / "package/README.md").read_text()
    assert "hf auth whoami" in said


def test_a_dry_run_says_why_a_push_would_be_refused(project):
    said = (project / "said").read_text()
    assert re.search(r"no push +cuda +no variant has \w+\.cu: pack on a machine with nvcc, without CUDA=0", said)
    assert said.splitlines()[-1].startswith("adze pack: the push would be refused: it is not yet for others"), said


def test_what_must_not_be_pushed(project, tmp_path, monkeypatch):
    """Files that no commit has, and kernels that nvcc did not optimise."""
    checks = load(ROOT / "hub/project.py", "hub_project")
    package = tmp_path / "package"
    shutil.copytree(project / "package", package)
    variant = next((package / "build").glob("torch*"))
    metadata = json.loads((variant / "metadata.json").read_text())
    for dirty, why in (True, "files differ from commit 0123456789ab: commit them"), (False, None):
        metadata["provenance"]["kernel"] = {"commit": "0123456789abcdef", "dirty": dirty}
        for each in (package / "build").iterdir():
            (each / "metadata.json").write_text(json.dumps(metadata))
        if why:
            with pytest.raises(checks.NotForOthers, match=why):
                checks.check_commit(package)
    assert checks.check_commit(package) == "0123456789ab"
    variant.rename(variant.with_name(variant.name.replace("-cpu-", "-cu130-")))
    monkeypatch.setattr(checks, "BUILD_MK", tmp_path / "build.mk")
    assert checks.check_cuda(package) == "optimised"
    for optimised in (1, 0):
        checks.BUILD_MK.write_text(f"ARCH := x86_64\nADZE_OPTIMISED := {optimised}\n")
        if optimised:
            assert checks.check_cuda(package) == "optimised"
    with pytest.raises(checks.NotForOthers, match="built with CUDA_OPT=0"):
        checks.check_cuda(package)


def test_flags_of_projects_are_optimised():
    """make CUDA_OPT=0 is for the tests of the library: a project's kernels are not built so."""
    flags = (ROOT / "build/build.mk").read_text()
    assert "--Ofast-compile" not in flags and re.search(r"^ADZE_OPTIMISED := [01]$", flags, re.M)


def test_the_cards_example_runs(project):
    text = (project / "package/README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)[1]
    code = re.sub(r"get_kernel\(.*\)", "get_local_kernel(package)", code)
    code = code.replace("import get_kernel", "import get_local_kernel")
    called = [line for line in code.splitlines() if "= kernel." in line]
    assert [re.search(r"kernel\.(\w+)", line)[1] for line in called] == [
        *("activation", "gemm", "quantize", "attention", "my_norm")
    ]
    values = {"package": project / "package"}
    with torch.no_grad():
        exec(code, values)
    assert values["y"].shape == (8, 4096) and values["numbers"].dtype == torch.int8


@pytest.mark.parametrize("op", ["rms_norm", "glu", "gemm", "attention"])
def test_sources_are_those_that_the_op_needs(tmp_path, op):
    """Everything that they include is there, all functions that they call are, and nothing of other ops is."""
    run(ROOT / "build/adze", "new", "project", "x-y", "--model=qwen3", f"--op={op}", folder=tmp_path)
    package = load(ROOT / "hub/pack.py", "hub_pack").Package(tmp_path / "x-y", "x-y")
    sources = dict(package.sources())
    for own, path in sources.items():
        for name in re.findall(r'^\s*#\s*include "([^"]+)"', path.read_text(), re.M):
            folders = [str(pathlib.PurePath(own).parent), ".", "src/cuda", "include", "src", "bind"]
            assert any(os.path.normpath(f"{folder}/{name}") in sources for folder in folders), f"{own}: {name}"
    assert "src/cuda/gemm_bulk.cu" not in sources or op == "gemm"
    assert ("src/cuda/norm_any.cu" in sources) == (op in ("rms_norm", "gemm"))
    assert not [own for own in sources if re.search(r"rope|sample|softmax", own) and own.count("/") > 1]
    # The objects of this build, as many as it has, have no other's names left undefined.
    objects = [ROOT / "build" / re.sub(r"(\.c)?$", ".o", own, count=1) for own in sources if own.startswith("src/")]
    objects = [path for path in objects if path.exists() and path.name != "op_list.o"]
    names = {}
    for kind in ("--undefined-only", "--defined-only"):
        said = run("nm", "-P", kind, *objects, folder=ROOT)
        names[kind] = {line.split()[0] for line in said.splitlines() if len(line.split()) > 1}
    missing = {n for n in names["--undefined-only"] - names["--defined-only"] if re.match(r"adze_|gemm_|_Z", n)}
    isas = re.compile(r"adze_\w+_cpu_(avx2|avx512|sve|bf16)|adze_ops?|_Z(n|d|St).*|_ZTV.*")
    assert not [name for name in missing if not isas.fullmatch(name)]


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


def test_a_changed_file_is_found(project, tmp_path, monkeypatch):
    package = tmp_path / "package"
    shutil.copytree(project / "package", package)
    checks = load(ROOT / "hub/project.py", "hub_project")
    monkeypatch.delitem(checks.CHECKS, "loads")  # it imports torch twice, and has passed
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
    """Of the project, and as it is published: the same file, which times the model once."""
    pytest.importorskip("transformers")
    published = ["--skip-model"] if folder != "." else []
    said = run(sys.executable, "benchmark.py", "--tiny", "--json", "out.json", *published, folder=project / folder)
    found = json.loads((project / folder / "out.json").read_text())
    assert [row["op"] for row in found["rows"]] == [
        *("my_norm", "my_norm", "my_norm", "activation", "gemm", "quantize", "attention", "attention")
    ]
    assert found["rows"][1]["case"] == "q_norm, 3 x 32 x 128"
    assert set(found["rows"][0]["us"]) == {"eager", "kernel"} and "torch" in found["rows"][-1]["us"]
    assert found["rows"][0]["copy_gbps"] > 0 and found["rows"][-2]["tflops"] > 0
    assert found["adze_project"] == "q-kernels" and found["date"] and found["commit"]
    if published:
        return
    whole = found["end_to_end"]
    assert whole["taken"] == {"activation": 0, "gemm": 15, "quantize": 0, "attention": 2, "my_norm": 9}
    assert list(whole["ms"]) == ["eager", "kernel", "compile", "kernel + compile"] and "qwen3:  compile" in said


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


def test_a_wrong_kernel_is_not_packed(adze, tmp_path):
    run(adze, "new", "project", "q-kernels", "--model=qwen3", "--op=my_norm=rms_norm", folder=tmp_path)
    wrong = tmp_path / "q-kernels"
    quick(wrong)
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
    assert list(ways) == ["generate()", "generate(), kernel"]
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


@pytest.mark.parametrize("model", MODELS)
def test_calls_of_the_models(model):
    """The test that each project has, with adze's own functions as the kernels."""
    pytest.importorskip(MODELS[model])
    import adze as kernel

    tests = load(ROOT / "templates/model/test_kernels.py", "test_kernels")
    tests.test_calls_of_the_model(kernel, load(ROOT / f"templates/model/{model}.py", "model"))


def test_a_model_that_rounds_elsewhere_is_found():
    """A norm that rounds once is not the model's, though its error is smaller."""
    pytest.importorskip("transformers")
    import adze as kernel

    tests = load(ROOT / "templates/model/test_kernels.py", "test_kernels")
    place = load(ROOT / "templates/model/qwen3.py", "model")
    once = dict(vars(kernel), ROUND_NORM=0)
    with pytest.raises(AssertionError, match="norm of hidden states"):
        tests.test_calls_of_the_model(types.SimpleNamespace(**once), place)


def test_a_worked_example(tmp_path):
    """bench/example.py: the project of the README's command, packed and timed."""
    pytest.importorskip("transformers")
    words = ["qwen3_8b", "--tiny", "--skip-model", "--json", tmp_path / "out.json", "--commit", "0123456"]
    said = run(sys.executable, ROOT / "bench/example.py", *words, folder=tmp_path)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["adze_project"] == "qwen3-8b-kernels" and found["kernels"] == "package/", said
    assert found["commit"] == "0123456" and {row["op"] for row in found["rows"]} == {
        *("rms_norm", "glu", "gemm", "attention")
    }


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
