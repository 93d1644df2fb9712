"""The ops, as functions of torch tensors: adze.h says what each one computes, and in which order it rounds.

Outputs are new and contiguous, or the caller's. Tensors may be any view whose last dimension is contiguous.
"""

import types

import torch
from torch import is_grad_enabled

from . import fake
from ._ops import ops as operators

# An attribute of torch.ops takes longer than a call of a function: each operator is taken once.
ops = types.SimpleNamespace(**{name: getattr(operators, name) for name in fake.NAMES})
ROUND_NORM, ROUND_STEPS, ROUND_VALUE, FLOAT_SUM = 1, 2, 4, 8
ACTS = {
    "silu": 1, "swish": 1, "gelu": 2, "gelu_python": 2, "gelu_tanh": 3, "gelu_new": 3, "gelu_fast": 3,
    "gelu_accurate": 3, "gelu_pytorch_tanh": 3, "gelu_python_tanh": 3, "gelu_quick": 4, "quick_gelu": 4,
    "relu": 5, "relu2": 6, "relu_squared": 6, "sigmoid": 7,
}  # fmt: skip
COLUMNS = {"once": 0, "halves": 1, "pairs": 2}
DTYPES = {None: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


def _word(words, name, what):
    if name not in words:
        raise ValueError(f"adze: {what} is {name!r}, known are {', '.join(map(str, words))}")
    return words[name]


def _norm(op, x, weight, residual, bias, gate, gate_table, scale, scale_table, shift, shift_table, eps, weight_offset,
          rounding, out_dtype, need_sum, out, sum_out):  # fmt: skip
    if is_grad_enabled():
        fake.refuse_gradients(x, residual, weight, bias, gate, gate_table, scale, scale_table, shift, shift_table)
    code = 0 if out_dtype is None or out_dtype == x.dtype else _word(DTYPES, out_dtype, "out_dtype")
    args = (x, residual, weight, bias, gate, gate_table, scale, scale_table, shift, shift_table, eps, weight_offset,
            rounding, code)  # fmt: skip
    if out is not None:
        op.out(*args, out=out, sum=sum_out)
        return out if sum_out is None else (out, sum_out)
    if sum_out is not None:
        raise ValueError("adze: sum_out is given without out")
    return op.sum(*args) if residual is not None and need_sum else op.default(*args)


def rms_norm(x, weight=None, *, residual=None, bias=None, gate=None, gate_table=None, scale=None, scale_table=None,
             shift=None, shift_table=None, eps=1e-6, weight_offset=0.0, rounding=0, out_dtype=None, need_sum=True,
             out=None, sum_out=None):  # fmt: skip
    """h = residual + gate * x; out = h / rms(h) * (weight + weight_offset) * (1 + scale) + shift.

    With a residual the result is (out, h), unless need_sum is False."""
    return _norm(ops.rms_norm, x, weight, residual, bias, gate, gate_table, scale, scale_table, shift, shift_table,
                 eps, weight_offset, rounding, out_dtype, need_sum, out, sum_out)  # fmt: skip


def layer_norm(x, weight=None, bias=None, *, residual=None, gate=None, gate_table=None, scale=None, scale_table=None,
               shift=None, shift_table=None, eps=1e-5, weight_offset=0.0, rounding=0, out_dtype=None, need_sum=True,
               out=None, sum_out=None):  # fmt: skip
    """The same as rms_norm, with the mean taken away first."""
    return _norm(ops.layer_norm, x, weight, residual, bias, gate, gate_table, scale, scale_table, shift, shift_table,
                 eps, weight_offset, rounding, out_dtype, need_sum, out, sum_out)  # fmt: skip


def group_norm(x, groups, weight=None, bias=None, *, eps=1e-5, act=None, channels_last=False, rounding=0, out=None):
    """act(group_norm(x)) of [batch, channels, ...], or [batch, ..., channels] when channels_last."""
    if is_grad_enabled():
        fake.refuse_gradients(x, weight, bias)
    code = 0 if act is None else _word(ACTS, act, "act")
    args = (x, weight, bias, eps, groups, int(channels_last), code, rounding)
    return ops.group_norm.default(*args) if out is None else ops.group_norm.out(*args, out=out) or out


def gated_add(x, residual, gate, *, gate_table=None, rounding=0, out=None):
    """residual + (gate + gate_table) * x; out may be x or residual."""
    if is_grad_enabled():
        fake.refuse_gradients(x, residual, gate, gate_table)
    args = (x, residual, gate, gate_table, rounding)
    return ops.gated_add.default(*args) if out is None else ops.gated_add.out(*args, out=out) or out


def activation(x, act, *, out=None):
    """act(x), by any of the names that Hugging Face uses."""
    if is_grad_enabled():
        fake.refuse_gradients(x)
    args = (x, _word(ACTS, act, "act"))
    return ops.activation.default(*args) if out is None else ops.activation.out(*args, out=out) or out


def glu(x, value=None, *, act="silu", value_first=False, rounding=0, out=None):
    """act(x) * value; without value, x holds the gate and the value (or the value first) in each row."""
    if is_grad_enabled():
        fake.refuse_gradients(x, value)
    args = (x, value, _word(ACTS, act, "act"), int(value_first), rounding)
    return ops.glu.default(*args) if out is None else ops.glu.out(*args, out=out) or out


def softmax(x, mask=None, *, scale=1.0, out=None):
    """softmax(x * scale + mask) over the last dimension."""
    if is_grad_enabled():
        fake.refuse_gradients(x, mask)
    if not scale:
        raise ValueError("adze: softmax's scale is 0")
    args = (x, mask, scale)
    return ops.softmax.default(*args) if out is None else ops.softmax.out(*args, out=out) or out


def _rotated(op, args, k, q_out, k_out):
    if q_out is not None:
        op.out(*args, q_out=q_out, k_out=k_out)
        return q_out if k_out is None else (q_out, k_out)
    if k_out is not None:
        raise ValueError("adze: k_out is given without q_out")
    return op.default(*args) if k is None else op.k_out(*args)


def rope(q, k, cos, sin, *, interleaved=False, rotary_dim=0, heads_first=False, rounding=0, q_out=None, k_out=None):
    """q and k rotated by the angles of cos and sin; q alone when k is None."""
    if is_grad_enabled():
        fake.refuse_gradients(q, k, cos, sin)
    args = (q, k, cos, sin, int(interleaved), rotary_dim, int(heads_first), rounding)
    return _rotated(ops.rope, args, k, q_out, k_out)


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, *, eps=1e-6, weight_offset=0.0, across_heads=False,
                 interleaved=False, rotary_dim=0, heads_first=False, rounding=0, q_out=None, k_out=None):  # fmt: skip
    """rope of rms_norm(q) and rms_norm(k), per head or across all heads."""
    if is_grad_enabled():
        fake.refuse_gradients(q, k, q_weight, k_weight, cos, sin)
    args = (q, k, q_weight, k_weight, cos, sin, eps, weight_offset, int(across_heads), int(interleaved), rotary_dim,
            int(heads_first), rounding)  # fmt: skip
    return _rotated(ops.qk_norm_rope, args, k, q_out, k_out)


def rope_table(pos, freq, axis=None, *, scale=1.0, columns="once", double_angle=False, dtype=torch.float32):
    """cos and sin of pos[..., axis[i]] * freq[i], times scale."""
    if is_grad_enabled():
        fake.refuse_gradients(pos, freq)
    if not scale:
        raise ValueError("adze: rope_table's scale is 0")
    return ops.rope_table.default(pos, freq, axis, scale, _word(COLUMNS, columns, "columns"), int(double_angle),
                                  _word(DTYPES, dtype, "dtype"))  # fmt: skip
