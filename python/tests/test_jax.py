"""The JAX functions: values, jit, vmap, refusals, the handlers themselves, and the example."""

import ctypes
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402

import adze.jax  # noqa: E402
from adze.operators import description  # noqa: E402
from calls import CALLS, IDS, arguments, bits, expected  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
try:
    DEVICE = jax.devices(os.environ.get("ADZE_TEST_DEVICE", "cpu"))[0]
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)
jax.config.update("jax_default_device", DEVICE)
X = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)


def put(array):
    return jax.device_put(array, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_same_bits_as_torch(call, dtype):
    pytest.importorskip("torch")
    args, kwargs = arguments(call, dtype, put)
    if description.OPS[call[0]].changed:
        with pytest.raises(ValueError, match="kv_append changes k_cache in place, and JAX arrays are immutable"):
            getattr(adze.jax, call[0])(*args, **kwargs)
        return
    assert bits(getattr(adze.jax, call[0])(*args, **kwargs)) == expected(call, dtype)


def test_value():
    """Against the formula in double: a sum of six squares, a root, a division and two products, each rounded once."""
    x, w = X.astype(np.float64), np.linspace(0.5, 2, 6, dtype=np.float32)
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w
    got = np.asarray(adze.jax.rms_norm(put(X), put(w)), np.float64)
    assert (np.abs(got - want) <= 8 * 2**-24 * np.abs(want)).all()


def test_jit_is_one_call_each():
    def block(x, r, w):
        out, total = adze.jax.rms_norm(x, w, residual=r)
        return adze.jax.glu(out) + 1, total

    x = put(X)
    w = put(np.ones(6, np.float32))
    text = jax.jit(block).lower(x, x, w).as_text()
    assert text.count("@adze_rms_norm") == 1 and text.count("@adze_glu") == 1
    assert bits(jax.jit(block)(x, x, w)) == bits(block(x, x, w))
    shapes = jax.eval_shape(block, x, x, w)
    assert [s.shape for s in shapes] == [(4, 3), (4, 6)]


def test_numpy_arguments_and_static_numbers():
    want = bits(adze.jax.softmax(put(X), scale=0.5))
    assert bits(jax.jit(lambda x: adze.jax.softmax(x, scale=0.5))(X)) == want
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lambda x, eps: adze.jax.rms_norm(x, eps=eps))(X, 0.5)
    with pytest.raises(TypeError):
        adze.jax.rms_norm(X, rounding=1.5)


def test_wide_positions():
    with jax.enable_x64(True):
        pos, freq = jnp.arange(5, dtype=jnp.int64)[:, None], jnp.array([1.0, 0.1], jnp.float64)
        cos, _ = adze.jax.rope_table(pos, freq, double_angle=True)
    want = np.cos(np.arange(5)[:, None] * np.array([1.0, 0.1])).astype(np.float32)
    assert np.abs(np.asarray(cos) - want).max() <= 2**-24


def test_vmap():
    x, w = put(X.reshape(2, 2, 6)), put(np.linspace(1, 2, 12, dtype=np.float32).reshape(2, 6))
    one = jax.vmap(adze.jax.rms_norm, in_axes=(0, None))(x, w[0])
    assert bits(one) == bits(adze.jax.rms_norm(x, w[0]))
    both = jax.vmap(adze.jax.rms_norm)(x, w)
    assert bits(both) == bits(jnp.stack([adze.jax.rms_norm(x[i], w[i]) for i in range(2)]))


def test_symbolic_sizes():
    shape = jax.export.symbolic_shape("n, 6")
    with pytest.raises(ValueError, match=r"adze: softmax: x is \(n, 6\), its sizes must be numbers"):
        jax.export.export(jax.jit(adze.jax.softmax))(jax.ShapeDtypeStruct(shape, jnp.float32))


def test_no_gradients():
    with pytest.raises(ValueError, match="adze_softmax.*cannot be differentiated"):
        jax.grad(lambda x: adze.jax.softmax(x).sum())(put(X))


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: adze.jax.rms_norm(X, np.ones(5, np.float32)), "rms_norm: weight has 5 elements, it must have 6"),
        (lambda: adze.jax.rms_norm(X.reshape(1, 1, 1, 1, 4, 6)), "rms_norm: x has rank 6, at most 5 is possible"),
        (
            lambda: adze.jax.softmax(X.astype(np.complex64)),
            "softmax: x is complex64, a dtype that adze does not have",
        ),
        (lambda: adze.jax.softmax(X.astype(np.int32)), "softmax: x is i32"),
        (lambda: adze.jax.activation(X, "tanhish"), "adze: act is 'tanhish', it must be one of silu, "),
        (lambda: adze.jax.group_norm(X, 4), "group_norm: groups is 4, it must divide the 6 channels"),
        (lambda: adze.jax.rms_norm(X, out_dtype="int16"), "adze: out_dtype is int16, it must be one of "),
        (lambda: adze.jax.rms_norm(X, rounding=2**40), "rms_norm: rounding is 1099511627776, it must fit in 32 bits"),
        (lambda: adze.jax.softmax(X, scale=0), "adze: softmax: scale is 0"),
        (
            lambda: adze.jax.softmax(X, out=X),
            "adze: softmax cannot write given outputs, since JAX arrays are immutable",
        ),
    ],
)
def test_refused_when_traced(call, sentence):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value).startswith(sentence)
    with pytest.raises(ValueError):
        jax.eval_shape(call)


def raw(*arrays, out=X, **attributes):
    spec = jax.ShapeDtypeStruct(out.shape, out.dtype)
    return jax.ffi.ffi_call("adze_rms_norm", spec)(*map(put, arrays), **attributes).block_until_ready()


def test_handler_takes_any_number():
    adze.jax.rms_norm(X)
    want = bits(adze.jax.rms_norm(X, eps=0.5, weight_offset=1.0, rounding=1))
    for eps, rounding in [(0.5, 1), (np.float32(0.5), np.int32(1)), (np.float64(0.5), np.int64(1)), (0.5, True)]:
        got = raw(X, inputs="x", outputs="out", eps=eps, rounding=rounding, weight_offset=1)
        assert bits(got) == want


@pytest.mark.parametrize(
    "arrays, out, attributes, sentence",
    [
        ([X], X, {"inputs": "x", "outputs": "out", "epsi": 1.0}, "the attribute epsi is not one of its numbers"),
        ([X], X, {"inputs": "x", "outputs": "out", "eps": "small"}, "the attribute eps is not one of its numbers"),
        ([X], X, {"inputs": "x", "outputs": "out", "rounding": 1.5}, "the attribute rounding is not an integer"),
        ([X], X, {"inputs": "x weight", "outputs": "out"}, "inputs names 2 buffers, there are 1"),
        ([X], X, {"inputs": "x", "outputs": ""}, "outputs names 0 buffers, there are 1"),
        ([X], X, {}, "inputs names 0 buffers, there are 1"),
        ([X], X, {"inputs": "y", "outputs": "out"}, "y is not one of its inputs"),
        ([X], X, {"inputs": "out", "outputs": "x"}, "out is not one of its inputs"),
        ([X], X, {"inputs": "weight", "outputs": "out"}, "x is absent"),
        ([X], X[:2], {"inputs": "x", "outputs": "out"}, "out has 2 in dimension 0, it must have 4"),
        ([X.astype(np.uint16)], X, {"inputs": "x", "outputs": "out"}, "x has a dtype that adze does not have"),
        ([X.reshape(4, 1, 1, 1, 1, 6)], X, {"inputs": "x", "outputs": "out"}, "x has rank 6, at most 5 is possible"),
    ],
)
def test_handler_refuses(arrays, out, attributes, sentence):
    adze.jax.rms_norm(X)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: rms_norm: {sentence}"):
        raw(*arrays, out=out, **attributes)


def test_handlers_say_what_they_are():
    """XLA asks with an extension of the call; only CUDA handlers may be captured."""

    class Version(ctypes.Structure):
        _fields_ = [
            ("size", ctypes.c_size_t),
            ("next", ctypes.c_void_p),
            ("major", ctypes.c_int),
            ("minor", ctypes.c_int),
        ]

    class Metadata(ctypes.Structure):
        _fields_ = [("size", ctypes.c_size_t), ("version", Version), ("traits", ctypes.c_uint32)]

    class Extension(ctypes.Structure):
        _fields_ = [
            ("size", ctypes.c_size_t),
            ("type", ctypes.c_int),
            ("next", ctypes.c_void_p),
            ("metadata", ctypes.c_void_p),
        ]

    class Frame(ctypes.Structure):
        _fields_ = [("size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("rest", ctypes.c_void_p * 64)]

    for op in description.OPS:
        for suffix, traits in ("", 0), ("_cuda", 1):
            metadata = Metadata(size=ctypes.sizeof(Metadata), traits=7)
            asked = Extension(ctypes.sizeof(Extension), 1, None, ctypes.addressof(metadata))
            unknown = Extension(ctypes.sizeof(Extension), 99, ctypes.addressof(asked), None)
            frame = Frame(size=ctypes.sizeof(Frame), extensions=ctypes.addressof(unknown))
            handler = getattr(description.library, f"adze_xla_{op}{suffix}")
            handler.restype = ctypes.c_void_p
            assert handler(ctypes.byref(frame)) is None
            assert (metadata.version.major, metadata.version.minor, metadata.traits) == (0, 1, traits)


def test_threads():
    x = put(np.random.default_rng(0).standard_normal((64, 512), np.float32))
    want, wrong = bits(adze.jax.softmax(x)), []

    def work():
        wrong.extend(1 for _ in range(20) if bits(adze.jax.softmax(x)) != want)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_torch_is_not_loaded():
    code = "import sys, adze.jax; adze.jax.softmax([[1.0, 2.0]]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "python").returncode == 0


def test_example():
    result = subprocess.run(
        [sys.executable, ROOT / "examples/jax_rms_norm.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "rms_norm of bfloat16[8, 4096]" in result.stdout and "equal to jax.numpy: " in result.stdout
