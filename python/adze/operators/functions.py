"""The ops, one function each: adze.h says what each one computes, and in which order it rounds.

Every host (PyTorch, JAX, TVM FFI) has these functions. A function brings its arguments into the order of the op's
fields and hands them to the host's own call of the op. take_functions() says what a host defines for it.
"""

import inspect
import types

from .description import OPS
from .header import DTYPES, ROUNDING
from .header import OPS as COMMENTS

ops = dtype_code = None  # of a host: see take_functions()


def _words(number):
    """The names that a number's values have, in whichever op has it; a project may have none (`adze new op`)."""
    return next((op.words[number] for op in OPS.values() if op.words.get(number)), {})


ACTS, COLUMNS, NORMS, FORMATS = map(_words, ("act", "columns", "norm", "format"))
WHOLES = {name: DTYPES[name] for name in ("int32", "int64")}
BYTES = {name: DTYPES[name] for name in ("int8", "float8_e4m3fn")}
KINDS = {"i8": DTYPES["int8"], "f8e4m3": DTYPES["float8_e4m3fn"], "u4": DTYPES["uint8"]}


def word(words, name, what):
    """The number that a name stands for, such as 1 for act="silu"."""
    if name not in words:
        raise ValueError(f"adze: {what} is {name!r}, it must be one of {', '.join(words)}")
    return words[name]


def returns(shape=None, dtype=None):
    """For ops whose outputs are not like their first input: functions of the op's arguments by name, whose sizes may
    be symbolic, and of `output`, the name of the output that is asked for. shape gives its shape. dtype gives the
    number of its dtype in adze.h, as DTYPES has it, or None: that of the input, or out_dtype."""

    def with_rule(function):
        function.shape, function.dtype = shape, dtype
        return function

    return with_rule


def _norm_shape(x, residual, output, **_):
    if output == "out_scale":
        return x.shape[:-1] or (1,)
    return (0,) if output == "sum" and residual is None else x.shape


def _norm_dtype(residual, output, **_):
    empty = output == "sum" and residual is None
    return DTYPES["float32"] if output == "out_scale" or empty else None


@returns(shape=_norm_shape, dtype=_norm_dtype)
def rms_norm(x, weight=None, *, residual=None, bias=None, gate=None, gate_table=None, scale=None, scale_table=None,
             shift=None, shift_table=None, eps=1e-6, weight_offset=0.0, rounding=0, out_dtype=None, need_sum=True,
             out=None, sum_out=None, out_scale=None):  # fmt: skip
    """h = residual + gate * x; out = h / rms(h) * (weight + weight_offset) * (1 + scale) + shift.

    With a residual the result is (out, h), unless need_sum is False. With out_dtype int8 or float8_e4m3fn, out is
    quantised by rows, and the last of the result is its scale."""
    code = 0
    if out_dtype is not None and out_dtype is not getattr(x, "dtype", None):
        name = getattr(out_dtype, "__name__", str(out_dtype)).rpartition(".")[2]
        code = BYTES.get(name) or dtype_code("out_dtype", out_dtype, x)
    args = (x, residual, weight, bias, gate, gate_table, scale, scale_table, shift, shift_table, eps, weight_offset,
            rounding, code)  # fmt: skip
    if code not in BYTES.values():
        return ops.rms_norm(args, out, sum_out, need_sum and residual is not None)
    made = ops.rms_norm(args, out, sum_out, 2, out_scale)
    return made if need_sum and residual is not None else (made[0], made[-1])


@returns(shape=_norm_shape, dtype=_norm_dtype)
def layer_norm(x, weight=None, bias=None, *, residual=None, gate=None, gate_table=None, scale=None, scale_table=None,
               shift=None, shift_table=None, eps=1e-5, weight_offset=0.0, rounding=0, out_dtype=None, need_sum=True,
               out=None, sum_out=None, out_scale=None):  # fmt: skip
    """As rms_norm, with the mean subtracted first."""
    code = 0
    if out_dtype is not None and out_dtype is not getattr(x, "dtype", None):
        name = getattr(out_dtype, "__name__", str(out_dtype)).rpartition(".")[2]
        code = BYTES.get(name) or dtype_code("out_dtype", out_dtype, x)
    args = (x, residual, weight, bias, gate, gate_table, scale, scale_table, shift, shift_table, eps, weight_offset,
            rounding, code)  # fmt: skip
    if code not in BYTES.values():
        return ops.layer_norm(args, out, sum_out, need_sum and residual is not None)
    made = ops.layer_norm(args, out, sum_out, 2, out_scale)
    return made if need_sum and residual is not None else (made[0], made[-1])


def group_norm(x, groups, weight=None, bias=None, *, eps=1e-5, act=None, channels_last=False, rounding=0, out=None):
    """act(group_norm(x)) of [batch, channels, ...], or [batch, ..., channels] when channels_last."""
    code = 0 if act is None else word(ACTS, act, "act")
    return ops.group_norm((x, weight, bias, eps, groups, int(channels_last), code, rounding), out)


def gated_add(x, residual, gate, *, gate_table=None, rounding=0, out=None):
    """residual + (gate + gate_table) * x; out may be x, residual or gate."""
    return ops.gated_add((x, residual, gate, gate_table, rounding), out)


def activation(x, act, *, out=None):
    """act(x), by any of the names that Hugging Face uses."""
    return ops.activation((x, word(ACTS, act, "act")), out)


def _glu_shape(x, value, output, **_):
    if output == "out_scale":
        return x.shape[:-1] or (1,)
    return x.shape if value is not None else (*x.shape[:-1], x.shape[-1] // 2)


@returns(shape=_glu_shape, dtype=lambda output, **_: DTYPES["float32"] if output == "out_scale" else None)
def glu(x, value=None, *, act="silu", value_first=False, rounding=0, out_dtype=None, out=None, out_scale=None):
    """act(x) * value; without value, x holds the gate and the value (or the value first) in each row.

    With out_dtype int8 or float8_e4m3fn the result is (out, its scales), quantised by rows."""
    code = 0
    if out_dtype is not None and out_dtype is not getattr(x, "dtype", None):
        code = word(BYTES, getattr(out_dtype, "__name__", str(out_dtype)).rpartition(".")[2], "out_dtype")
    args = (x, value, word(ACTS, act, "act"), int(value_first), rounding, code)
    return ops.glu(args, out, out_scale, int(code != 0))


def softmax(x, mask=None, *, scale=1.0, out=None):
    """softmax(x * scale + mask) over the last dimension."""
    if not scale:
        raise ValueError("adze: softmax: scale is 0, it must not be 0")
    return ops.softmax((x, mask, scale), out)


def _gemm_shape(x, w, w2, w3, glu, separate, output, **_):
    rows = [weight.shape[-2] for weight in (w, w2, w3) if weight is not None]
    own = rows[("out", "out2", "out3").index(output)] if separate else rows[0] if glu else sum(rows)
    return (*x.shape[:-1], own)


def _gemm_dtype(x_scale, out_dtype, **_):
    return DTYPES["float32"] if x_scale is not None and not out_dtype else None


@returns(shape=_gemm_shape, dtype=_gemm_dtype)
def gemm(x, w, bias=None, *, w2=None, w3=None, bias2=None, bias3=None, norm=None, norm_weight=None, norm_bias=None,
         eps=1e-6, weight_offset=0.0, act=None, glu=False, residual=None, gate=None, separate=False, rounding=0,
         out_dtype=None, w_scale=None, w2_scale=None, w3_scale=None, w_zero=None, w2_zero=None, w3_zero=None, group=0,
         group_rows=0, format=None, x_scale=None, out=None, out2=None, out3=None):  # fmt: skip
    """residual + gate * act(norm(x) @ w.T + bias); also called linear.

    w2 and w3 read the same x: their columns follow those of w, or with separate the result is a tuple of one output
    for each weight; with glu it is act(x @ w.T + bias) * (x @ w2.T + bias2). norm is "rms" or "layer". Quantised
    weights have scales, and perhaps zeros; format is "u4" for those of 4 bits. x may be quantised too, "i8" or
    "f8e4m3" by rows as quantize makes it, with weights of the same dtype; the result is float32, or out_dtype."""
    code = 0 if out_dtype is None or out_dtype is getattr(x, "dtype", None) else dtype_code("out_dtype", out_dtype, x)
    args = (x, w, w2, w3, bias, bias2, bias3, norm_weight, norm_bias, residual, gate, eps, weight_offset,
            0 if norm is None else word(NORMS, norm, "norm"), 0 if act is None else word(ACTS, act, "act"), int(glu),
            int(separate), rounding, code, w_scale, w2_scale, w3_scale, w_zero, w2_zero, w3_zero, group, group_rows,
            0 if format is None else word(FORMATS, format, "format"), x_scale)  # fmt: skip
    return ops.gemm(args, out, out2, (w3 is not None) + 1 if separate else 0, out3)


def _quantize_shape(x, format, group, group_rows, output, **_):
    *rows, k = x.shape
    if output == "out":
        return (*rows, (k + 1) // 2 if format else k)
    if group:
        rows = [(rows[0] + 127) // 128] if group_rows == 128 else rows
        return (*rows, (k + group - 1) // group)
    return (1,) if group_rows == -1 or not rows else rows


def _quantize_dtype(dtype, scale_dtype, output, **_):
    return {"out": dtype, "scale": scale_dtype or DTYPES["float32"], "zero": DTYPES["uint8"]}[output]


@returns(shape=_quantize_shape, dtype=_quantize_dtype)
def quantize(x, kind, *, group=0, group_rows=0, zero_points=False, scale_dtype=None, out=None, scale_out=None,
             zero_out=None):  # fmt: skip
    """The numbers of x in fewer bits, their scales, and with zero_points their zeros: "i8", "f8e4m3", or "u4", of
    which two are in a byte. gemm takes them as weights."""
    code = 0 if scale_dtype is None else dtype_code("scale_dtype", scale_dtype)
    args = (x, word(KINDS, kind, "kind"), FORMATS.get(kind, 0), group, group_rows, int(zero_points), code)
    return ops.quantize(args, out, scale_out, int(zero_points), zero_out)


@returns(
    shape=lambda w, format, k, **_: (w.shape[0], k or w.shape[1] * (2 if format else 1)),
    dtype=lambda out_dtype, **_: out_dtype or DTYPES["float32"],
)
def dequantize(w, scale, zero=None, *, group=0, group_rows=0, format=None, k=0, dtype=None, out=None):
    """The numbers [n, k] that a quantised weight of gemm stands for, of float32 or another dtype.

    format is "u4" for those of 4 bits; k is given where their rows have an odd number."""
    code = 0 if dtype is None else dtype_code("dtype", dtype)
    args = (w, scale, zero, group, group_rows, 0 if format is None else word(FORMATS, format, "format"), k, code)
    return ops.dequantize(args, out)


def _lse_dtype(output, **_):
    return DTYPES["float32"] if output == "lse" else None


@returns(
    shape=lambda q, v, output, **_: q.shape[:-1] if output == "lse" else (*q.shape[:-1], v.shape[-1]),
    dtype=_lse_dtype,
)
def attention(q, k, v, mask=None, *, scale=None, causal=False, window=0, softcap=0.0, sinks=None, lengths=None,
              block_table=None, q_offsets=None, k_offsets=None, k_scale=None, v_scale=None, need_lse=False, out=None,
              lse_out=None):  # fmt: skip
    """softmax(q @ k.mT * scale + mask) @ v, for q [batch, heads, m, d] and k, v [batch, kv_heads, n, d].

    scale is 1 / sqrt(d) where it is None. causal counts from the last key: query i of m sees keys up to n - m + i.
    torch counts from the first. window hides keys that are as far away or farther. mask is boolean, where True is
    seen, or it is added. lengths has the number of keys of each sequence, block_table the pages of a paged k and v,
    q_offsets and k_offsets where each sequence begins in a packed q or k. With need_lse the result is (out, lse)."""
    if scale is not None and not scale:
        raise ValueError("adze: attention: scale is 0, it must not be 0")
    args = (q, k, v, mask, sinks, lengths, block_table, q_offsets, k_offsets, k_scale, v_scale, scale or 0.0, softcap,
            int(causal), window)  # fmt: skip
    return ops.attention(args, out, lse_out, int(need_lse))


@returns(shape=lambda x, output, **_: x.shape[:-1] if output == "lse" else x.shape, dtype=_lse_dtype)
def attention_merge(x, x_lse, y, y_lse, *, need_lse=False, out=None, lse_out=None):
    """Two results of attention and their lse, of the same queries and different keys, as one.

    With need_lse the result is (out, lse)."""
    return ops.attention_merge((x, x_lse, y, y_lse), out, lse_out, int(need_lse))


def rope(q, k, cos, sin, *, interleaved=False, rotary_dim=0, heads_first=False, rounding=0, q_out=None, k_out=None):
    """q and k rotated by the angles of cos and sin; only q when k is None."""
    args = (q, k, cos, sin, int(interleaved), rotary_dim, int(heads_first), rounding)
    return ops.rope(args, q_out, k_out, k is not None)


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, *, eps=1e-6, weight_offset=0.0, across_heads=False,
                 interleaved=False, rotary_dim=0, heads_first=False, rounding=0, q_out=None, k_out=None):  # fmt: skip
    """rope of rms_norm(q) and rms_norm(k), per head or across all heads."""
    args = (q, k, q_weight, k_weight, cos, sin, eps, weight_offset, int(across_heads), int(interleaved), rotary_dim,
            int(heads_first), rounding)  # fmt: skip
    return ops.qk_norm_rope(args, q_out, k_out, k is not None)


@returns(
    shape=lambda pos, freq, columns, **_: (*pos.shape[:-1], freq.shape[0] * (2 if columns else 1)),
    dtype=lambda out_dtype, **_: out_dtype or DTYPES["float32"],
)
def rope_table(pos, freq, axis=None, *, scale=1.0, columns="once", double_angle=False, dtype=None):
    """cos and sin of pos[..., axis[i]] * freq[i], times scale; of float32, or another dtype."""
    if not scale:
        raise ValueError("adze: rope_table: scale is 0, it must not be 0")
    code = 0 if dtype is None else dtype_code("dtype", dtype)
    return ops.rope_table((pos, freq, axis, scale, word(COLUMNS, columns, "columns"), int(double_angle), code))


# ---- A decode step ----


@returns(shape=lambda table, ids, **_: (*ids.shape, table.shape[-1]))
def embed(table, ids, *, scale=1.0, out=None):
    """table[ids] * scale, the scale in table's dtype."""
    if not scale:
        raise ValueError("adze: embed: scale is 0, it must not be 0")
    return ops.embed((table, ids, 0.0 if scale == 1 else scale), out)


def kv_append(k, v, k_cache, v_cache, *, q=None, lengths=None, positions=None, block_table=None, k_scale=None,
              v_scale=None, cos=None, sin=None, table_by_slot=False, interleaved=False, rotary_dim=0, norm=False,
              q_weight=None, k_weight=None, eps=1e-6, weight_offset=0.0, across_heads=False, rounding=0,
              q_out=None):  # fmt: skip
    """Writes k and v into the caches, k after its norm and rope; the result is q after the same, or None without q.

    Tokens go to the slots from lengths[b] on, or to positions. With a block_table the caches are pages."""
    args = (k_cache, v_cache, k_scale, v_scale, q, k, v, lengths, positions, block_table, q_weight, k_weight, cos,
            sin, eps, weight_offset, int(norm), int(across_heads), int(interleaved), rotary_dim, int(table_by_slot),
            rounding)  # fmt: skip
    return ops.kv_append(args, q_out, None, q is not None)


@returns(
    shape=lambda logits, **_: logits.shape[:1],
    dtype=lambda out_dtype, output, **_: DTYPES["float32"] if output == "logprob" else out_dtype or DTYPES["int32"],
)
def sample(logits, *, temperature=0.0, seed=None, counter=None, top_k=0, top_p=1.0, min_p=0.0, penalty=1.0,
           previous=None, previous_count=None, dtype=None, logprob=False, out=None, logprob_out=None):  # fmt: skip
    """A token for each row of logits: the largest at temperature 0, else drawn by the tensors seed and counter.

    penalty is that of repetition, for the ids in previous. The ids are of int32, or int64 as dtype. With logprob the
    result is (ids, log-probabilities)."""
    drawn, penalised = temperature != 0, penalty != 1
    name = "int32" if dtype is None else getattr(dtype, "__name__", str(dtype).removeprefix("torch."))
    args = (logits, seed if drawn else None, counter if drawn else None, previous if penalised else None,
            previous_count if penalised else None, temperature, 0.0 if top_p == 1 else top_p, min_p,
            penalty if penalised else 0.0, top_k, word(WHOLES, name, "dtype"))  # fmt: skip
    return ops.sample(args, out, logprob_out, int(logprob))


# ---- For hosts ----


def parameter(output):
    """The parameter of a function that an output is given by."""
    return output if "out" in output else f"{output}_out"


def given_outputs(op, *outs):
    """The caller's outputs by name. Raises where one is given without the first."""
    given = {name: out for name, out in zip(op.outputs, outs, strict=False) if out is not None}
    if given and op.outputs[0] not in given:
        raise ValueError(f"adze: {parameter(next(iter(given)))} is given without {parameter(op.outputs[0])}")
    return given


def take_functions(host, call, outputs=True):
    """Adds the functions and the bits of rounding to a host's globals, and makes them its __all__.

    call(op) gives the host's call of an op: a function (args, out=None, second=None, more=0, third=None) of the op's
    inputs and numbers, the caller's outputs, and how many of its optional outputs are asked for. The host has a
    function dtype_code(what, dtype, x=None), too: the number of a dtype in adze.h, 0 for that of x; what is the
    argument's name. outputs: whether the host can write the caller's outputs. The code of a function stays as it is
    here, and finds these names in the host."""
    names = [name for name in OPS if name in globals()]
    made = types.SimpleNamespace(**{name: call(OPS[name]) for name in names})
    words = {"ACTS": ACTS, "COLUMNS": COLUMNS, "NORMS": NORMS, "FORMATS": FORMATS, "KINDS": KINDS, "WHOLES": WHOLES,
             "BYTES": BYTES}  # fmt: skip
    host.update(ops=made, word=word, **words, **ROUNDING)
    aliases = {"linear": "gemm"} if "gemm" in names else {}
    host["__all__"] = [*names, *aliases, *ROUNDING]
    for name in names:
        source = globals()[name]
        function = types.FunctionType(source.__code__, host, name, source.__defaults__)
        function.__kwdefaults__, function.__module__ = source.__kwdefaults__, host["__name__"]
        function.__doc__ = f"{source.__doc__}\n\n{COMMENTS.get(name, '')}".rstrip()
        if not outputs:
            unused = set(map(parameter, OPS[name].outputs))
            signature = inspect.signature(source)
            function.__signature__ = signature.replace(
                parameters=[p for p in signature.parameters.values() if p.name not in unused]
            )
        host[name] = function
    host.update({alias: host[name] for alias, name in aliases.items()})
