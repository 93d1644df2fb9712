"""Calls of every op, for any binding that has its functions: inputs are NumPy arrays, results compare by bits."""

import numpy as np


def _calls():
    random = np.random.default_rng(0)

    def randn(*shape):
        return random.standard_normal(shape, np.float32)

    x, r, w, b = randn(2, 3, 65), randn(2, 3, 65), randn(65), randn(65)
    rows, row = [randn(2, 1, 65) for _ in range(3)], [randn(65) for _ in range(3)]
    q, k, q_weight, k_weight = randn(2, 5, 4, 16), randn(2, 5, 2, 16), randn(16), randn(16)
    angle = np.arange(5)[:, None] * np.float32(1000) ** -(np.arange(8, dtype=np.float32) / 8)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    heads, keys, values = randn(2, 4, 5, 16), randn(2, 2, 7, 16), randn(2, 2, 7, 20)
    image, large = randn(2, 8, 5, 4), randn(1, 4, 128, 128)
    channels, bias = randn(8), randn(8)
    weights = [randn(n, 65) for n in (20, 20, 7)]
    pos, freq = np.arange(12, dtype=np.int32).reshape(3, 2, 2), np.linspace(1, 0.01, 6, dtype=np.float32)
    axis = np.array([0, 0, 1, 1, 0, 1], np.int32)
    modulated = dict(
        zip(("gate", "scale", "shift", "gate_table", "scale_table", "shift_table"), rows + row, strict=True)
    )
    stored = random.integers(-128, 128, (20, 65), np.int8)
    fours, zeros = stored.view(np.uint8), random.integers(0, 16, (20, 5), np.uint8)
    ids = np.array([[3, 0, 19], [7, 3, 1]], np.int32)
    seed, lengths = np.array([5], np.int32), np.array([0, 2], np.int32)
    cache = {"q": randn(2, 4, 3, 16), "lengths": lengths, "norm": True, "table_by_slot": True}
    return [
        ("rms_norm", (x,), {}),
        ("rms_norm", (x, w), {"eps": 1e-3, "weight_offset": 1.0, "rounding": 1}),
        ("rms_norm", (x, w), {"residual": r}),
        ("rms_norm", (x, w), {"residual": r, "need_sum": False, "rounding": 8}),
        ("rms_norm", (x, w), {"residual": r, "bias": b, "rounding": 2, **modulated}),
        ("rms_norm", (x, w), {"out_dtype": "float32"}),
        ("rms_norm", (x[:0], w), {"residual": r[:0]}),
        ("layer_norm", (x, w, b), {}),
        ("layer_norm", (x,), {"residual": r, "eps": 1e-6}),
        ("layer_norm", (x,), {"scale": rows[0], "shift": rows[1]}),
        ("group_norm", (image, 4, channels, bias), {"act": "silu"}),
        ("group_norm", (image.transpose(0, 2, 3, 1).copy(), 2), {"channels_last": True, "eps": 1e-3}),
        ("group_norm", (large, 1), {}),
        ("gated_add", (x, r, rows[0]), {}),
        ("gated_add", (x, r, rows[0]), {"gate_table": row[0], "rounding": 2}),
        ("gated_add", (x, r, randn(2, 3, 65)), {"gate_table": rows[1]}),
        ("gated_add", (x[:0], r[:0], row[0]), {}),
        ("activation", (x, "gelu_new"), {}),
        ("activation", (x, "relu2"), {}),
        ("glu", (x[..., :64].copy(),), {"value_first": True, "act": "gelu"}),
        ("glu", (x, r), {"rounding": 2}),
        ("softmax", (x,), {}),
        ("softmax", (x, r[:1]), {"scale": 0.125}),
        ("gemm", (x, weights[0]), {}),
        ("gemm", (x[0], weights[0], randn(20)), {"act": "silu", "out_dtype": "float32"}),
        ("gemm", (x, weights[0]), {"w2": weights[1], "w3": weights[2], "bias2": randn(20)}),
        ("gemm", (x, weights[0]), {"w2": weights[1], "separate": True, "norm": "layer", "eps": 1e-5}),
        ("gemm", (x, weights[0]), {"w2": weights[1], "w3": weights[2], "separate": True, "norm": "rms"}),
        ("gemm", (x, weights[0]), {"w2": weights[1], "glu": True, "norm": "rms", "norm_weight": w, "rounding": 3}),
        ("gemm", (x, weights[0]), {"residual": randn(2, 3, 20), "gate": randn(20), "rounding": 2}),
        ("gemm", (x, randn(2, 11, 65)), {}),
        ("gemm", (x[:0], weights[0]), {}),
        ("quantize", (x, "i8"), {}),
        ("quantize", (x, "u4"), {"group": 32, "zero_points": True, "scale_dtype": "float16"}),
        ("quantize", (x[0], "f8e4m3"), {"group": 128, "group_rows": 128, "scale_dtype": "bfloat16"}),
        ("quantize", (x, "f8e4m3"), {"group_rows": -1}),
        ("dequantize", (stored, np.array([0.03], np.float32)), {}),
        ("dequantize", (fours, randn(20, 5), zeros), {"group": 32, "format": "u4", "dtype": "bfloat16"}),
        ("dequantize", (fours, randn(20)), {"format": "u4", "k": 129, "dtype": "float16"}),
        ("attention", (heads, keys, values), {"causal": True, "window": 4, "need_lse": True}),
        ("attention", (heads, keys, values, randn(1, 1, 5, 7)), {"scale": 0.3, "softcap": 5.0, "sinks": randn(4)}),
        ("attention", (heads[:0], keys[:0], values[:0]), {}),
        ("attention_merge", (x, r[..., 0].copy(), r, x[..., 0].copy()), {"need_lse": True}),
        ("rope", (q, None, cos, sin), {}),
        ("rope", (q, k, cos, sin), {"interleaved": True, "rounding": 2}),
        ("rope", (q, k, cos[:, :4].copy(), sin[:, :4].copy()), {"rotary_dim": 8}),
        ("rope", (q.transpose(0, 2, 1, 3).copy(), None, cos, sin), {"heads_first": True}),
        ("qk_norm_rope", (q, None, None, None, cos, sin), {"eps": 1e-3}),
        ("qk_norm_rope", (q, k, q_weight, k_weight, cos, sin), {"weight_offset": 1.0, "rounding": 1}),
        ("qk_norm_rope", (q, k, randn(64), randn(32), cos, sin), {"across_heads": True}),
        ("rope_table", (pos[..., :1].copy(), freq), {}),
        ("rope_table", (pos, freq, axis), {"columns": "pairs", "scale": 0.5, "dtype": "bfloat16"}),
        ("rope_table", (pos, freq, axis), {"columns": "halves", "double_angle": True, "dtype": "float16"}),
        ("embed", (weights[0], ids), {}),
        ("embed", (weights[0], ids), {"scale": 8.06}),
        (
            "kv_append",
            (randn(2, 2, 3, 16), randn(2, 2, 3, 9), randn(2, 2, 8, 16), randn(2, 2, 8, 9)),
            {**cache, "cos": cos, "sin": sin},
        ),
        ("sample", (randn(4, 300),), {}),
        (
            "sample",
            (randn(4, 300),),
            {
                "temperature": 0.7,
                "seed": seed,
                "counter": lengths[1:],
                "top_p": 0.9,
                "previous": np.arange(8, dtype=np.int32).reshape(4, 2),
                "penalty": 1.1,
                "logprob": True,
            },
        ),
    ]


CALLS = _calls()
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(CALLS)]
# Arguments that keep their dtype.
TABLES = {"attention_merge": (1, 3), "rope": (2, 3), "qk_norm_rope": (4, 5), "rope_table": (0, 1, 2)}


def arguments(call, dtype, array):
    """The arguments of a call, its floats rounded to a dtype (NumPy's, or torch's), each array as another library has
    it."""
    name, args, kwargs = call

    def convert(value, keep=False):
        if not isinstance(value, np.ndarray):
            return value
        if keep or value.dtype.kind != "f":
            return array(value)
        return array(value.astype(dtype)) if isinstance(dtype, np.dtype) else array(value).to(dtype)

    args = [convert(value, i in TABLES.get(name, ())) for i, value in enumerate(args)]
    return args, {key: convert(value) for key, value in kwargs.items()}


def bits(result):
    """The results as a list of dtype, shape and bytes."""
    arrays = result if isinstance(result, (tuple, list)) else [result]
    return [_bits(array) for array in arrays]


def _bits(array):
    if type(array).__module__ != "torch":
        array = np.asarray(array)
        return array.dtype.name, array.shape, array.tobytes()
    import torch

    plain = array.contiguous().cpu().flatten().view(torch.uint8)
    return str(array.dtype).removeprefix("torch."), tuple(array.shape), plain.numpy().tobytes()


def torch_of(array):
    """A tensor on torch's default device. An empty array's strides are zero in torch, which the last one may not be:
    it is made again."""
    import torch

    if array.size == 0:
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
    if array.dtype.name == "bfloat16":
        return torch_of(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array).to(torch.get_default_device())


def torch_call(call, dtype):
    """The function of adze.ops and its arguments."""
    import torch

    from adze.operators import ops

    args, kwargs = arguments(call, dtype, torch_of)
    for key in ("dtype", "out_dtype", "scale_dtype"):
        if key in kwargs:
            kwargs[key] = getattr(torch, kwargs[key])
    return getattr(ops, call[0]), args, kwargs


def expected(call, dtype):
    """The results of adze.ops on torch's default device, whose values test_ops.py checks."""
    function, args, kwargs = torch_call(call, dtype)
    return bits(function(*args, **kwargs))
