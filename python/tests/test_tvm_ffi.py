"""The functions called through TVM FFI, with NumPy arrays and torch tensors: values, views, outputs, refusals."""

import ctypes

import numpy as np
import pytest

tvm_ffi = pytest.importorskip("tvm_ffi")
import ml_dtypes  # noqa: E402

import adze.tvm_ffi  # noqa: E402
from adze.operators import description  # noqa: E402
from calls import CALLS, IDS, arguments, bits, expected, torch_of  # noqa: E402

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
X = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_same_bits_as_torch(call, dtype):
    pytest.importorskip("torch")
    import torch

    function = getattr(adze.tvm_ffi, call[0])
    for array, device in ((lambda a: a), "cpu"), (torch_of, torch.get_default_device()):
        with torch.device(device):
            want = expected(call, dtype)
            args, kwargs = arguments(call, dtype, array)
        got = function(*args, **kwargs)
        for result in got if isinstance(got, tuple) else [got]:
            assert type(result) is type(args[0])
        assert bits(got) == want


def test_value():
    """Against the formula in double: a sum of six squares, a root, a division and two products, each rounded once."""
    x, w = X.astype(np.float64), np.linspace(0.5, 2, 6, dtype=np.float32)
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w
    assert (np.abs(adze.tvm_ffi.rms_norm(X, w) - want) <= 8 * 2**-24 * np.abs(want)).all()


def test_wide_positions():
    cos, _ = adze.tvm_ffi.rope_table(np.arange(5)[:, None], np.array([1.0, 0.1]), double_angle=True)
    want = np.cos(np.arange(5)[:, None] * np.array([1.0, 0.1])).astype(np.float32)
    assert np.abs(cos - want).max() <= 2**-24


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_is_changed_in_place(dtype):
    k, lengths = np.arange(1, 13, dtype=np.float32).reshape(1, 1, 2, 6).astype(dtype), np.array([1], np.int32)
    caches = np.zeros((1, 1, 5, 6), dtype), np.zeros((1, 1, 5, 6), dtype)
    assert adze.tvm_ffi.kv_append(k, k, *caches, lengths=lengths) is None
    for cache in caches:
        assert (cache[:, :, 1:3] == k).all() and not cache[:, :, ::3].any() and not cache[:, :, 4].any()
    caches[1].flags.writeable = False
    with pytest.raises(ValueError, match="kv_append: v_cache is read-only, and the call writes it"):
        adze.tvm_ffi.kv_append(k, k, *caches, lengths=lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views(dtype):
    wide = np.zeros((4, 3, 8), dtype)
    wide[:, 1, 1:7] = X
    view, plain = wide[::-1, 1, 1:7], X[::-1].astype(dtype)
    assert bits(adze.tvm_ffi.softmax(view)) == bits(adze.tvm_ffi.softmax(plain))
    out = np.zeros_like(wide)
    assert adze.tvm_ffi.softmax(view, out=out[:, 2, 2:]) is not None
    assert bits(out[:, 2, 2:].copy()) == bits(adze.tvm_ffi.softmax(plain))
    out[:, 2, 2:] = 0
    assert not out.any()
    frozen = X.astype(dtype)
    frozen.flags.writeable = False
    assert bits(adze.tvm_ffi.softmax(frozen)) == bits(adze.tvm_ffi.softmax(X.astype(dtype)))


def test_outputs_of_the_caller():
    w, out, total = np.ones(6, np.float32), np.empty_like(X), np.empty_like(X)
    want = bits(adze.tvm_ffi.rms_norm(X, w, residual=X))
    got = adze.tvm_ffi.rms_norm(X, w, residual=X, out=out, sum_out=total)
    assert got[0] is out and got[1] is total and bits(got) == want
    assert adze.tvm_ffi.rms_norm(X, w, residual=X, out=out) is out and bits(out) == want[:1]
    x = X.copy()
    assert adze.tvm_ffi.activation(x, "silu", out=x) is x and bits(x) == bits(adze.tvm_ffi.activation(X, "silu"))


@pytest.mark.parametrize(
    "error, call, sentence",
    [
        (ValueError, lambda f: f.rms_norm(X, X[0, :5].copy()), "rms_norm: weight has 5 elements, it must have 6"),
        (ValueError, lambda f: f.softmax(X.T), "softmax: x has stride 6 in its last dimension, it must be 1"),
        (ValueError, lambda f: f.softmax(X, out=X[:2].copy()), "softmax: out has 2 in dimension 0, it must have 4"),
        (
            ValueError,
            lambda f: f.softmax(X.reshape(1, 1, 1, 1, 4, 6)),
            "softmax: x has rank 6, at most 5 is possible",
        ),
        (ValueError, lambda f: f.softmax(X.astype(complex)), "softmax: x is complex128, a dtype that adze does not"),
        (ValueError, lambda f: f.activation(X, "tanhish"), "adze: act is 'tanhish', it must be one of silu, "),
        (ValueError, lambda f: f.rms_norm(X, out_dtype="int16"), "adze: out_dtype is int16, it must be one of "),
        (ValueError, lambda f: f.rms_norm(X, residual=X, sum_out=X), "adze: sum_out is given without out"),
        (ValueError, lambda f: f.rope(X, X, X, X, k_out=X), "adze: k_out is given without q_out"),
        (ValueError, lambda f: f.softmax(X, scale=0), "adze: softmax: scale is 0"),
        (TypeError, lambda f: f.rms_norm([1.0]), "rms_norm: x is a list, it must be a NumPy array or a torch tensor"),
    ],
)
def test_refused(error, call, sentence):
    with pytest.raises(error) as raised:
        call(adze.tvm_ffi)
    assert str(raised.value).startswith(sentence)


OUT = np.empty_like(X)


@pytest.mark.parametrize(
    "op, args, sentence",
    [
        ("softmax", (OUT, X, None, 1.0, 0), "softmax: 5 arguments are given, it has 4"),
        ("softmax", (), "softmax: x is absent"),
        ("softmax", (None, X), "softmax: out is absent"),
        ("softmax", (OUT, 3), "softmax: x is not a tensor"),
        ("softmax", (OUT, X, None, "large"), "softmax: scale is not a number"),
        ("softmax", (OUT, X.astype(np.int16)), "softmax: x has a dtype that adze does not have"),
        ("softmax", (OUT[:, :4], OUT[:, 2:]), "softmax: out overlaps x and is not the same view"),
        ("activation", (OUT, X, 1.5), "activation: act is not an integer"),
        ("activation", (OUT, X, 2**40), "activation: act is 1099511627776, it must fit in 32 bits"),
        ("activation", (OUT, X, 99), "activation: act is 99"),
    ],
)
def test_function_refuses(op, args, sentence):
    with pytest.raises(ValueError) as raised:
        tvm_ffi.load_module(description.PATH).get_function(op)(*args)
    assert str(raised.value).startswith(sentence)


def test_function_takes_what_ends_early():
    tvm_ffi.load_module(description.PATH).get_function("activation")(OUT, tvm_ffi.from_dlpack(X), True)
    assert bits(OUT) == bits(adze.tvm_ffi.activation(X, "silu"))
    tvm_ffi.load_module(description.PATH).get_function("softmax")(OUT, X)
    assert bits(OUT) == bits(adze.tvm_ffi.softmax(X))


def test_no_gradients():
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="adze has no gradients"):
        adze.tvm_ffi.softmax(x)
    with torch.no_grad():
        assert not adze.tvm_ffi.softmax(x).requires_grad


class Edited:
    """An array whose DLTensor says something else: {offset of a field: its type and value}."""

    def __init__(self, array, fields):
        self.array, self.fields = array, fields

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self):
        capsule = self.array.__dlpack__()
        tensor = adze.tvm_ffi._capsule_pointer(capsule, b"dltensor")
        for offset, (kind, value) in self.fields.items():
            kind.from_address(tensor + offset).value = value
        return capsule


def on(array, device, index=0):
    return Edited(array, {8: (ctypes.c_int32, device), 12: (ctypes.c_int32, index)})


@pytest.mark.parametrize(
    "error, out, x, sentence",
    [
        (ValueError, on(OUT, 7), X, "softmax: out is on a device of another kind (7)"),
        (ValueError, OUT, on(X, 2), "softmax: x and out are on different devices"),
        (ValueError, on(OUT, 2, 62), on(X, 2, 63), "softmax: x and out are on different devices"),
        (RuntimeError, on(OUT, 2, 63), on(X, 2, 63), "prepare: there is no CUDA device 63"),
        (ValueError, OUT, Edited(X, {22: (ctypes.c_uint16, 2)}), "softmax: x has a dtype that adze does not have"),
    ],
)
def test_devices(error, out, x, sentence):
    """Device 63 of CUDA is one that is not there."""
    with pytest.raises(error) as raised:
        tvm_ffi.load_module(description.PATH).get_function("softmax")(out, x)
    assert str(raised.value).startswith(sentence)


def test_dense_and_offset():
    """No strides means dense; host memory that CUDA knows is the CPU's; data may start after its pointer."""
    want = bits(adze.tvm_ffi.softmax(X[1:]))
    out = np.empty_like(X[1:])
    fields = {0: (ctypes.c_size_t, X.ctypes.data), 32: (ctypes.c_size_t, 0), 40: (ctypes.c_uint64, 24)}
    tvm_ffi.load_module(description.PATH).get_function("softmax")(on(out, 3), Edited(X[1:], fields))
    assert bits(out) == want
