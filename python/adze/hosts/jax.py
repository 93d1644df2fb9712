"""The ops as functions of JAX arrays, under jit and outside: adze.h says what each one computes.

On CPUs and CUDA GPUs. There are no gradients: jax.grad says so. jax.vmap makes one call per entry; a batch costs less
as a dimension of the arrays, of which every op takes several.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ..operators import description
from ..operators.description import FLOAT_SUM, ROUND_NORM, ROUND_STEPS, ROUND_VALUE, word

__all__ = [
    "rms_norm", "layer_norm", "group_norm", "gated_add", "activation", "glu", "softmax", "rope", "qk_norm_rope",
    "rope_table",
    "ROUND_NORM", "ROUND_STEPS", "ROUND_VALUE", "FLOAT_SUM",
]  # fmt: skip


@functools.cache
def _register():
    """On CUDA each execution also has a first stage, in which kernels are loaded before a graph is captured."""
    for op in description.OPS:
        cpu = jax.ffi.pycapsule(getattr(description.library, f"adze_xla_{op}"))
        cuda = jax.ffi.pycapsule(getattr(description.library, f"adze_xla_{op}_cuda"))
        jax.ffi.register_ffi_target(f"adze_{op}", cpu, platform="cpu")
        jax.ffi.register_ffi_target(f"adze_{op}", {"initialize": cuda, "execute": cuda}, platform="CUDA")


def _call(op, tensors, numbers, unwanted=()):
    """The outputs of an op, without those that nobody wants. Scratch is an output of its own, also where none is
    used: what is traced does not know where it will run."""
    _register()
    numbers = description.numbers_of(op, numbers)
    arrays = {name: jnp.asarray(array) for name, array in tensors.items() if array is not None}
    given = tuple(description.Tensor(name, a.dtype.name, a.shape) for name, a in arrays.items())
    outputs, scratch = description.returns(op, given, tuple(numbers.items()))
    outputs = [output for output in outputs if output.name not in unwanted]
    count = len(outputs)
    if scratch:
        outputs.append(description.Tensor("scratch", "uint8", (scratch,)))
    call = jax.ffi.ffi_call(
        f"adze_{op}",
        [jax.ShapeDtypeStruct(output.shape, jnp.dtype(output.dtype)) for output in outputs],
        vmap_method="sequential",
    )
    results = call(
        *arrays.values(),
        inputs=" ".join(arrays),
        outputs=" ".join(output.name for output in outputs),
        **{name: (np.float32 if isinstance(value, float) else np.int32)(value) for name, value in numbers.items()},
    )
    return results[0] if count == 1 else tuple(results[:count])


def _norm(op, x, tensors, eps, weight_offset, rounding, out_dtype, need_sum):
    x = jnp.asarray(x)
    wanted = x.dtype if out_dtype is None else jnp.dtype(out_dtype)
    numbers = {
        "eps": eps,
        "weight_offset": weight_offset,
        "rounding": rounding,
        "out_dtype": 0 if wanted == x.dtype else description.dtype_code(wanted.name),
    }
    return _call(op, {"x": x, **tensors}, numbers, () if need_sum else ("sum",))


def rms_norm(x, weight=None, *, residual=None, bias=None, gate=None, gate_table=None, scale=None, scale_table=None,
             shift=None, shift_table=None, eps=1e-6, weight_offset=0.0, rounding=0, out_dtype=None,
             need_sum=True):  # fmt: skip
    """h = residual + gate * x; out = h / rms(h) * (weight + weight_offset) * (1 + scale) + shift.

    With a residual the result is (out, h), unless need_sum is False."""
    tensors = {
        "residual": residual, "weight": weight, "bias": bias, "gate": gate, "gate_table": gate_table, "scale": scale,
        "scale_table": scale_table, "shift": shift, "shift_table": shift_table,
    }  # fmt: skip
    return _norm("rms_norm", x, tensors, eps, weight_offset, rounding, out_dtype, need_sum)


def layer_norm(x, weight=None, bias=None, *, residual=None, gate=None, gate_table=None, scale=None, scale_table=None,
               shift=None, shift_table=None, eps=1e-5, weight_offset=0.0, rounding=0, out_dtype=None,
               need_sum=True):  # fmt: skip
    """The same as rms_norm, with the mean taken away first."""
    tensors = {
        "residual": residual, "weight": weight, "bias": bias, "gate": gate, "gate_table": gate_table, "scale": scale,
        "scale_table": scale_table, "shift": shift, "shift_table": shift_table,
    }  # fmt: skip
    return _norm("layer_norm", x, tensors, eps, weight_offset, rounding, out_dtype, need_sum)


def group_norm(x, groups, weight=None, bias=None, *, eps=1e-5, act=None, channels_last=False, rounding=0):
    """act(group_norm(x)) of [batch, channels, ...], or [batch, ..., channels] when channels_last."""
    code = 0 if act is None else word("group_norm", "act", act)
    numbers = {
        "eps": eps, "groups": groups, "channels_last": int(channels_last), "act": code, "rounding": rounding,
    }  # fmt: skip
    return _call("group_norm", {"x": x, "weight": weight, "bias": bias}, numbers)


def gated_add(x, residual, gate, *, gate_table=None, rounding=0):
    """residual + (gate + gate_table) * x."""
    tensors = {"x": x, "residual": residual, "gate": gate, "gate_table": gate_table}
    return _call("gated_add", tensors, {"rounding": rounding})


def activation(x, act):
    """act(x), by any of the names that Hugging Face uses."""
    return _call("activation", {"x": x}, {"act": word("activation", "act", act)})


def glu(x, value=None, *, act="silu", value_first=False, rounding=0):
    """act(x) * value; without value, x holds the gate and the value (or the value first) in each row."""
    numbers = {"act": word("glu", "act", act), "value_first": int(value_first), "rounding": rounding}
    return _call("glu", {"x": x, "value": value}, numbers)


def softmax(x, mask=None, *, scale=1.0):
    """softmax(x * scale + mask) over the last dimension."""
    if not scale:
        raise ValueError("adze: softmax's scale is 0")
    return _call("softmax", {"x": x, "mask": mask}, {"scale": scale})


def rope(q, k, cos, sin, *, interleaved=False, rotary_dim=0, heads_first=False, rounding=0):
    """q and k rotated by the angles of cos and sin; q alone when k is None."""
    numbers = {
        "pairs": int(interleaved), "rotary_dim": rotary_dim, "heads_first": int(heads_first), "rounding": rounding,
    }  # fmt: skip
    return _call("rope", {"q": q, "k": k, "cos": cos, "sin": sin}, numbers)


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, *, eps=1e-6, weight_offset=0.0, across_heads=False,
                 interleaved=False, rotary_dim=0, heads_first=False, rounding=0):  # fmt: skip
    """rope of rms_norm(q) and rms_norm(k), per head or across all heads."""
    tensors = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    numbers = {
        "eps": eps, "weight_offset": weight_offset, "across_heads": int(across_heads), "pairs": int(interleaved),
        "rotary_dim": rotary_dim, "heads_first": int(heads_first), "rounding": rounding,
    }  # fmt: skip
    return _call("qk_norm_rope", tensors, numbers)


def rope_table(pos, freq, axis=None, *, scale=1.0, columns="once", double_angle=False, dtype=jnp.float32):
    """cos and sin of pos[..., axis[i]] * freq[i], times scale."""
    if not scale:
        raise ValueError("adze: rope_table's scale is 0")
    numbers = {
        "scale": scale, "columns": word("rope_table", "columns", columns), "double_angle": int(double_angle),
        "out_dtype": description.dtype_code(jnp.dtype(dtype).name),
    }  # fmt: skip
    return _call("rope_table", {"pos": pos, "freq": freq, "axis": axis}, numbers)
