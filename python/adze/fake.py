"""What each operator returns, for tensors that have a shape and no data: torch.compile and torch.export ask here."""

import torch

from ._ops import add_op_namespace_prefix

DTYPES = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16}


def dense(like, shape=None, dtype=None):
    """Outputs are contiguous, whatever the strides of the inputs."""
    refuse_gradients(like)
    return like.new_empty(like.shape if shape is None else shape, dtype=dtype or like.dtype)


def refuse_gradients(*tensors):
    """There are no backward kernels: an error now, instead of gradients that are silently missing."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            "adze has no gradients: call under torch.no_grad() or torch.inference_mode(), or detach the inputs"
        )


def norm(x, residual=None, weight=None, bias=None, gate=None, gate_table=None, scale=None, scale_table=None,
         shift=None, shift_table=None, eps=0.0, weight_offset=0.0, rounding=0, out_dtype=0):  # fmt: skip
    return dense(x, dtype=DTYPES.get(out_dtype))


def norm_sum(x, *args, **kwargs):
    return norm(x, *args, **kwargs), dense(x)


def like_x(x, *args, **kwargs):
    return dense(x)


def glu(x, value=None, *args, **kwargs):
    return dense(x, x.shape if value is not None else (*x.shape[:-1], x.shape[-1] // 2))


def like_q(q, *args, **kwargs):
    return dense(q)


def like_q_and_k(q, k, *args, **kwargs):
    return dense(q), dense(k)


def rope_table(pos, freq, axis=None, scale=0.0, columns=0, double_angle=0, out_dtype=0):
    shape = (*pos.shape[:-1], freq.shape[0] * (2 if columns else 1))
    dtype = DTYPES.get(out_dtype, torch.float32)
    return dense(pos, shape, dtype), dense(pos, shape, dtype)


def nothing(*args, **kwargs):
    """The form that writes the caller's outputs."""


torch.library.register_fake(add_op_namespace_prefix("rms_norm"), norm)
torch.library.register_fake(add_op_namespace_prefix("rms_norm.sum"), norm_sum)
torch.library.register_fake(add_op_namespace_prefix("layer_norm"), norm)
torch.library.register_fake(add_op_namespace_prefix("layer_norm.sum"), norm_sum)
torch.library.register_fake(add_op_namespace_prefix("group_norm"), like_x)
torch.library.register_fake(add_op_namespace_prefix("gated_add"), like_x)
torch.library.register_fake(add_op_namespace_prefix("activation"), like_x)
torch.library.register_fake(add_op_namespace_prefix("softmax"), like_x)
torch.library.register_fake(add_op_namespace_prefix("glu"), glu)
torch.library.register_fake(add_op_namespace_prefix("rope"), like_q)
torch.library.register_fake(add_op_namespace_prefix("rope.k_out"), like_q_and_k)
torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope"), like_q)
torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope.k_out"), like_q_and_k)
torch.library.register_fake(add_op_namespace_prefix("rope_table"), rope_table)
for name in ("rms_norm", "layer_norm", "group_norm", "gated_add", "activation", "softmax", "glu", "rope",
             "qk_norm_rope", "rope_table"):  # fmt: skip
    torch.library.register_fake(add_op_namespace_prefix(f"{name}.out"), nothing)
