"""The Hub package, loaded by the real kernels library in a process with an installed adze: layout, values, layers,
sources."""

import ast
import base64
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
kernels = pytest.importorskip("kernels")
tomllib = pytest.importorskip("tomllib")
from kernels._rust import Build, Digest, DigestAlgorithm, DigestValidationError, Metadata  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from calls import CALLS, IDS, bits, torch_call  # noqa: E402
from device import default_device, here  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
ENV = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
BACKEND = "cuda" if torch.cuda.is_available() else "cpu"  # the one that kernels selects, wherever tensors are


def make(*command):
    done = subprocess.run(["make", *command], cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def architecture():
    """The GPU's, as nvcc spells it."""
    found = "{}{}".format(*torch.cuda.get_device_capability())
    return "90a" if found == "90" else found


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    tools, backend = ["make", "cc"], ["B=build/hub-cpu", "K=build", "CUDA=0"]
    if BACKEND == "cuda":
        tools.append("nvcc" if shutil.which("nvcc") else "/usr/local/cuda/bin/nvcc")  # where the Makefile looks
        backend = ["B=build/hub-cuda", "K=build", "CUDA=1", f"CUDA_ARCHS={architecture()}", "CUDA_PTX="]
    for tool in tools:
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not here")
    folder = tmp_path_factory.mktemp("hub") / "adze"
    make(*backend, f"HUB={folder}", f"HUB_PY={sys.executable}", "hub-backend")
    return folder


@pytest.fixture(scope="session")
def variants(repository):
    found = sorted((repository / "build").iterdir())
    backend = r"cu1\d\d" if BACKEND == "cuda" else "cpu"
    for variant, framework in zip(found, ("torch-stable-abi210", "tvm-ffi01"), strict=True):
        assert re.fullmatch(rf"{framework}-{backend}-(x86_64|aarch64)-linux", variant.name)
    return found


@pytest.fixture(scope="session")
def kernel(repository):
    return kernels.get_local_kernel(repository)


def randn(*shape, dtype=torch.float32, seed=0):
    """The same values on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(here(), dtype)


def close(got, want):
    """The tolerance of one rounding after float arithmetic of at most 64 steps, on terms as large as the row's
    largest value. A swapped or dropped argument exceeds it by far. `adze check` verifies exact bounds."""
    assert got.shape == want.shape
    row = want.abs().amax(-1, keepdim=True).clamp_min(1) if want.dim() else want.abs().clamp_min(1)
    limit = 0.5 * torch.finfo(got.dtype).eps * want.abs() + 64 * 2**-24 * row
    assert ((got.double() - want.double()).abs() <= limit + torch.finfo(got.dtype).tiny).all()


class Recorded(TorchDispatchMode):
    """The operators of one namespace that were called."""

    def __init__(self, namespace):
        super().__init__()
        self.namespace, self.called = namespace, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == self.namespace:
            self.called.append(op._opname)
        return op(*args, **(kwargs or {}))


# ---- Layout ----


def test_metadata(variants):
    for variant, depends in zip(variants, ([], ["tvm-ffi"]), strict=True):
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert re.fullmatch(rf"_adze_{BACKEND}_[0-9a-f]{{7}}(_dirty)?", metadata.id) and str(metadata.name) == "adze"
        assert (metadata.version, metadata.license, metadata.python_depends) == (1, "Apache-2.0", depends)
        suffix = ".so" if depends else ".abi3.so"
        assert [p.name for p in variant.glob("*.so")] == [metadata.id + suffix]
        text = json.loads((variant / "metadata.json").read_text())
        gpu = {"archs": [re.sub(r"(\d[af]?)$", r".\1", architecture())]} if BACKEND == "cuda" else {}
        assert text["backend"] == {"type": BACKEND, **gpu}
        for key in ("name", "id", "version", "license", "python-depends", "backend"):
            less = {name: value for name, value in text.items() if name != key}
            with pytest.raises(ValueError):
                Metadata.from_bytes(json.dumps(less).encode())


def test_digest(variants, tmp_path):
    for variant in variants:
        digest = Metadata.read_from_file(variant / "metadata.json").digest
        digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
        init = hashlib.sha256((variant / "__init__.py").read_bytes()).digest()
        assert digest.files["__init__.py"] == base64.b64encode(init).decode()
        changed = shutil.copytree(variant, tmp_path / variant.name)
        (changed / "__init__.py").write_text("")
        with pytest.raises(DigestValidationError):
            digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, changed))


def test_glibc(variants):
    if not importlib.util.find_spec("ziglang"):
        pytest.skip("ziglang is not here")
    for variant in variants:
        (native,) = variant.glob("*.so")
        versions = {tuple(map(int, v)) for v in re.findall(rb"GLIBC_(\d+)\.(\d+)", native.read_bytes())}
        assert versions and max(versions) <= (2, 28)


def test_card(repository):
    """kernel-builder fills in the card; the page of a folder is filled in already."""
    card, page = ((repository / name).read_text() for name in ("CARD.md", "README.md"))
    assert set(re.findall(r"{{ *(\w+) *}}", card)) == {"repo_id", "version"}
    assert "{{" not in page and 'get_kernel("ORGANISATION/adze", version=1' in page


def test_gpu_architectures():
    spec = importlib.util.spec_from_file_location("pack", ROOT / "hub/pack.py")
    pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)

    class options:
        archs, ptx = "75 80 90a 100 120", "80 120"

    assert pack.archs(options) == ["7.5", "8.0+PTX", "9.0a", "10.0", "12.0+PTX"]


def test_loads_from_each_level(repository, variants, kernel):
    assert kernels.get_local_kernel(repository / "build") is kernel
    assert kernels.get_local_kernel(variants[0]) is kernel
    (loaded,) = [k for k in kernels.get_loaded_kernels() if k.module is kernel]
    assert loaded.metadata.id == kernel.__name__


def test_names_can_be_read_without_import(variants):
    for variant in variants:
        module = ast.parse((variant / "__init__.py").read_text())
        (names,) = [
            ast.literal_eval(s.value)
            for s in module.body
            if isinstance(s, ast.Assign) and s.targets[0].id == "__all__"
        ]
        imported = [a.name for s in module.body if isinstance(s, ast.ImportFrom) for a in s.names]
        assert sorted(imported) == names


# ---- Functions ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_same_bits_as_installed(kernel, call, dtype):
    installed, args, kwargs = torch_call(call, dtype)
    with Recorded(kernel.__name__) as recorded:
        got = getattr(kernel, call[0])(*args, **kwargs)
    assert recorded.called == [call[0]]
    assert bits(got) == bits(installed(*args, **kwargs))


def halves(x):
    return x.double().chunk(2, -1)


FUNCTIONS = {
    "silu": lambda x: F.silu(x.double()),
    "gelu": lambda x: F.gelu(x.double()),
    "gelu_tanh": lambda x: F.gelu(x.double(), approximate="tanh"),
    "gelu_new": lambda x: F.gelu(x.double(), approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x.double(), approximate="tanh"),
    "gelu_quick": lambda x: x.double() * torch.sigmoid(1.702 * x.double()),
    "silu_and_mul": lambda x: F.silu(halves(x)[0]) * halves(x)[1],
    "mul_and_silu": lambda x: halves(x)[0] * F.silu(halves(x)[1]),
    "gelu_and_mul": lambda x: F.gelu(halves(x)[0]) * halves(x)[1],
    "gelu_tanh_and_mul": lambda x: F.gelu(halves(x)[0], approximate="tanh") * halves(x)[1],
    "fatrelu_and_mul": lambda x: F.relu(halves(x)[0]) * halves(x)[1],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_write(kernel, name):
    function, want = getattr(kernel, name), FUNCTIONS[name]
    wide = randn(6, 5, 64)
    for x in (
        wide,
        wide[::2, 1],
        wide[..., 16:48],
        wide.transpose(0, 2),
        wide[..., ::2],
        wide.view(1, 2, 3, 1, 5, 64),
        wide[:0],
        wide[0, 0],
    ):
        for out in (torch.empty(want(x).shape), torch.empty(*want(x).shape, 2)[..., 1]):
            assert function(out, x) is out
            close(out, want(x))
    with pytest.raises(RuntimeError, match="adze has no gradients"):
        function(torch.empty(want(wide).shape), wide.clone().requires_grad_())


def test_threshold(kernel):
    for dtype in (torch.float32, torch.bfloat16):
        x = randn(7, 64, dtype=dtype)
        gate, value = x.chunk(2, -1)
        out = torch.empty_like(gate)
        assert kernel.fatrelu_and_mul(out, x, threshold=0.5) is out
        assert torch.equal(out, torch.where(gate > 0.5, gate, 0) * value)


def test_opcheck(kernel):
    op, x, weight, out = getattr(torch.ops, kernel.__name__).rms_norm, randn(3, 8), randn(8), torch.empty(3, 8)
    with default_device(None):
        torch.library.opcheck(op.default, (x, None, weight), {"eps": 1e-6})
        torch.library.opcheck(op.out, (x, None, weight), {"eps": 1e-6, "out": out})


# ---- Layers ----


def modules():
    """A module of transformers for each layer of ours, with arguments of its forward."""
    from transformers import activations as act
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    return {
        "RMSNorm": LlamaRMSNorm(64),
        "RMSNormOnce": torch.nn.Sequential(Olmo2RMSNorm(64), GptOssRMSNorm(64)),
        "RMSNormZeroCentered": Qwen3_5RMSNorm(64),
        "SiLU": act.SiLUActivation(),
        "Silu": act.SiLUActivation(),
        "GeLU": act.GELUActivation(),
        "Gelu": act.GELUActivation(),
        "GeluTanh": act.GELUTanh(),
        "NewGELU": act.NewGELUActivation(),
        "FastGELU": act.FastGELUActivation(),
        "QuickGELU": act.QuickGELUActivation(),
    }


LAYERS = [
    "RMSNorm", "RMSNormOnce", "RMSNormZeroCentered", "SiLU", "Silu", "GeLU", "Gelu", "GeluTanh", "NewGELU",
    "FastGELU", "QuickGELU",
]  # fmt: skip
MODE = kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE


def kernelized(repository, module, **layers):
    """The module with our layers; layers: transformers' name = ours."""
    mapping = {
        name: {here().type: {MODE: kernels.LocalLayerRepository(repository, layer_name=layer)}}
        for name, layer in layers.items()
    }
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        return kernels.kernelize(module.eval(), mode=MODE, device=here().type, use_fallback=False)


def module_of(layer):
    module = modules()[layer]
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    leaf = module[0] if isinstance(module, torch.nn.Sequential) else module
    return module, type(leaf).kernel_layer_name


@pytest.fixture
def transformers():
    """Its modules have names for kernels only where it takes the kernels that is here."""
    library = pytest.importorskip("transformers")
    if not library.utils.is_kernels_available():
        pytest.skip(f"transformers {library.__version__} does not take kernels {kernels.__version__}")
    return library


@pytest.mark.parametrize("layer", LAYERS)
def test_layer(repository, kernel, layer, transformers):
    module, name = module_of(layer)
    x = randn(2, 3, 64) * 3
    with torch.no_grad():
        want = module(x)
        kernelized(repository, module, **{name: layer})
        with Recorded(kernel.__name__) as recorded:
            got = module(x)
        assert set(recorded.called) == {"rms_norm" if "Norm" in layer else "activation"}
        close(got, want.double())
        with default_device(None):
            compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(x), got)


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_come_from_the_formula(repository, kernel, layer, transformers):
    """In eval mode without no_grad: the model's own gradients, to the bit."""
    results = []
    for ours in False, True:
        module, name = module_of(layer)
        if ours:
            kernelized(repository, module, **{name: layer})
        x = randn(2, 3, 64).requires_grad_()
        with Recorded(kernel.__name__) as recorded:
            y = module(x)
            y.backward(randn(2, 3, 64, seed=1))
        assert recorded.called == []
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    assert all(map(torch.equal, *results))
    assert results[0][1].abs().sum() > 0


def test_rounding_is_the_models(repository, kernel, transformers):
    """bf16: one bit differs where the sum of squares, added in another order, is on the other side of a midpoint."""
    x = randn(64, 64, dtype=torch.bfloat16)
    for layer, other in ("RMSNorm", "RMSNormOnce"), ("RMSNormOnce", "RMSNorm"):
        module, name = module_of(layer)
        with torch.no_grad():
            want = module.to(torch.bfloat16)(x)
            got = kernelized(repository, module, **{name: layer})(x)
            wrong = kernelized(repository, module, **{name: other})(x)
        assert (got != want).float().mean() < 0.005 < 0.05 < (wrong != want).float().mean()
    wide = module_of("RMSNorm")[0]  # a weight in float makes the result float
    with torch.no_grad():
        want = wide(x)
        got = kernelized(repository, wide, RMSNorm="RMSNorm")(x)
    assert got.dtype == want.dtype == torch.float32 and (got != want).float().mean() < 0.005


@pytest.mark.parametrize("layer", ["RotaryPosEmb", "RotaryPosEmbOnce", "apply_rotary_transformers"])
def test_rotation(kernel, layer):
    pytest.importorskip("transformers")
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.llama import modeling_llama
    from transformers.models.olmo2 import modeling_olmo2

    rotate = getattr(kernel.layers, layer)()
    once = layer == "RotaryPosEmbOnce"
    models = [modeling_olmo2] if once else [modeling_llama, modeling_gpt_oss]
    for model in models:
        for dtype in (torch.float32, torch.bfloat16):
            q, k = randn(2, 4, 5, 16, dtype=dtype), randn(2, 2, 5, 16, dtype=dtype, seed=1)
            angle = randn(2, 5, 8, seed=2)
            angle = angle if model is modeling_gpt_oss else torch.cat([angle] * 2, -1)
            cos, sin = (t if once else t.to(dtype) for t in (angle.cos(), angle.sin()))
            want = model.apply_rotary_pos_emb(q, k, cos, sin)
            exact = model.apply_rotary_pos_emb(*(t.double() for t in (q, k, cos, sin)))
            with Recorded(kernel.__name__) as recorded:
                got = rotate(q, k, cos, sin)
                last = rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
            assert recorded.called == ["rope", "rope"]
            for a, b, c, d in zip(got, want, exact, last, strict=True):
                if dtype == torch.bfloat16 and not once:
                    assert torch.equal(a, b)
                else:
                    close(a, c)
                assert torch.equal(a, d.transpose(1, 2))
            with Recorded(kernel.__name__) as recorded:
                plain = rotate(q.requires_grad_(), k, cos, sin)
            assert recorded.called == [] and all(map(torch.equal, plain, want)) and plain[0].requires_grad


def test_gated_layers(kernel):
    x = randn(5, 64)
    for name in ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul", "fatrelu_and_mul"):
        layer = getattr(kernel.layers, "".join(word.capitalize() for word in name.split("_")))()
        with Recorded(kernel.__name__) as recorded:
            close(layer(x), FUNCTIONS[name](x))
        assert recorded.called == ["glu"]
        with Recorded(kernel.__name__) as recorded:
            plain = layer(x.clone().requires_grad_())
        assert recorded.called == [] and plain.requires_grad
        close(plain.detach(), FUNCTIONS[name](x))


def test_every_layer_is_one_the_library_takes(kernel):
    layers = [c for c in vars(kernel.layers).values() if isinstance(c, type) and c.__name__[0] != "_"]
    layers = [c for c in layers if issubclass(c, torch.nn.Module) and c.__module__ == f"{kernel.__name__}.layers"]
    assert len(layers) == 19
    more = {"has_backward", "can_torch_compile"}
    for layer in layers:
        assert layer.__init__ is torch.nn.Module.__init__
        assert set(dir(layer)) - set(dir(torch.nn.Module)) == more
        assert layer.has_backward is False and layer.can_torch_compile is True


def test_llama(repository, kernel, transformers):
    """By the library itself, with tokens compared; and by transformers' set_use_kernels, which takes no CPU."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from models import build, generate, inputs, output

    model, batch = build("llama"), inputs("llama")
    config = transformers.KernelConfig({"RMSNorm": f"{repository}:RMSNorm"}, use_local_kernel=True)
    if here().type == "cpu":
        with pytest.raises(ValueError, match="Only devices in"):
            model.set_use_kernels(True, config)
    else:
        other = build("llama")
        other.set_use_kernels(True, config)
        with Recorded(kernel.__name__) as recorded:
            got = output(other, batch)
        assert set(recorded.called) == {"rms_norm"}
        torch.testing.assert_close(got, output(model, batch))
    want = generate(model, batch)
    try:
        kernelized(repository, model, RMSNorm="RMSNorm", SiLU="SiLU", rotary_pos_emb="RotaryPosEmb")
        with Recorded(kernel.__name__) as recorded:
            got = generate(model, batch)
    finally:
        vars(apply_rotary_pos_emb).pop("forward", None)  # one object for all models
    assert torch.equal(got, want)
    assert set(recorded.called) == {"rms_norm", "activation", "rope"}


# ---- Other variants, sources, the example ----


def python(*command, **more):
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT / "python/tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, command)], env={**ENV, "PYTHONPATH": path}, capture_output=True, text=True, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tvm_ffi(variants):
    pytest.importorskip("tvm_ffi")
    code = """
import pathlib, sys, kernels, numpy as np, torch, adze.tvm_ffi
from calls import CALLS, arguments, bits, torch_of
torch.set_default_device(sys.argv[2])
kernel = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))
for array in [lambda a: a, torch_of]:
    for call in CALLS:
        args, kwargs = arguments(call, np.dtype(np.float32), array)
        ours, theirs = (getattr(module, call[0])(*args, **kwargs) for module in (kernel, adze.tvm_ffi))
        assert bits(ours) == bits(theirs), call[0]
print(len(CALLS), kernel.__name__)
"""
    count, name = python("-c", code, variants[1], here().type).split()
    assert int(count) == len(CALLS) and name.startswith(f"_adze_{BACKEND}_")


def test_example(repository):
    assert "equal to torch: " in python(ROOT / "examples/hub_kernel.py", repository)


def test_benchmark(repository, kernel):
    spec = importlib.util.spec_from_file_location("benchmark", repository / "benchmarks/benchmark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for workload in ("rms_norm", "silu_and_mul", "rope"):
        benchmark = module.Llama()
        benchmark.kernel, benchmark.device = kernel, here().type
        torch.manual_seed(benchmark.seed)  # as `kernels benchmark` does
        getattr(benchmark, f"setup_{workload}")()
        benchmark.out.zero_()
        getattr(benchmark, f"benchmark_{workload}")()
        assert torch.allclose(benchmark.out, getattr(benchmark, f"verify_{workload}")(), atol=1e-2)


def test_sources_are_listed(repository):
    build = tomllib.loads((repository / "build.toml").read_text())
    assert [str(b) for b in Build.open(repository).general.backends] == ["cpu", "cuda"]
    components = [build["torch"], *build["kernel"].values()]
    listed = {source for component in components for source in component["src"]}
    there = {
        str(p.relative_to(repository))
        for folder in ("include", "src", "bind")
        for p in (repository / folder).rglob("*.*")
    }
    assert listed == there
    tracked = subprocess.run(
        ["git", "ls-files", "src", "bind"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    wanted = {re.sub(r"\.c$", ".cpp", path) for path in tracked if path.endswith((".c", ".cu"))}
    assert wanted <= listed


def test_sources_build(repository, tmp_path):
    """As kernel-builder compiles and links them: its name for the extension is the namespace. One of the kernels
    is compiled for each ISA; the others are only parsed, and come from the library."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not here")
    build = tomllib.loads((repository / "build.toml").read_text())

    def compiled(component, source):
        kernel = source.startswith("src/cpu/") and not source.startswith("src/cpu/rms_norm")
        target = tmp_path / (source.replace("/", "_") + ".o")
        flags = ["-std=c++17", "-fPIC", "-DTORCH_EXTENSION_NAME=_adze_sources", *component["cxx-flags"]]
        flags = ["-O0" if flag == "-O2" else flag for flag in flags]  # sooner, and the same sources
        flags += [f"-I{repository / folder}" for folder in component["include"]]
        flags += ["-fsyntax-only"] if kernel else ["-c", "-o", target]
        done = subprocess.run(["g++", *flags, repository / source], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [] if kernel else [target]

    components = [build["torch"], *(c for c in build["kernel"].values() if c["backend"] == "cpu")]
    jobs = [(c, source) for c in components for source in c["src"] if source.endswith(".cpp")]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = sum(threads.map(lambda job: compiled(*job), jobs), [])
    make("B=build/hub-cpu", "K=build", "CUDA=0", "build/hub-cpu/libadze.a")
    library = ROOT / "build/hub-cpu/libadze.a"
    module = tmp_path / "_adze_sources.abi3.so"
    subprocess.run(["g++", "-shared", *objects, library, "-o", module, "-ldl", "-lm"], check=True)
    code = "import torch, _adze_sources; print(torch.ops._adze_sources.rms_norm(torch.ones(1, 4)).tolist())"
    assert python("-c", code, cwd=tmp_path) == "[[1.0, 1.0, 1.0, 1.0]]\n"
