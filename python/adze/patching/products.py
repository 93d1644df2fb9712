"""Products of few rows by gemm: a norm before them, an activation, a gate and a residual after them, in one call.
Where that is faster, the norm is in the same launch. The weights are read where they are. This is for
numerics="fast": a sum is added in another order than torch's, and what is fused is rounded once.

A module that can do this has a second function beside its patched forward (`with_products`): it gets an input that is
not normed yet, and adds its result to that input. A block calls it where the products of all its Linears would be
gemm's (`few_rows`), and runs its usual forward otherwise."""

import torch
import torch.nn.functional as F
from torch import nn

from ..graphs.constant import gemm
from ..quantization.linear import ROWS as QUANTIZED_ROWS
from ..quantization.linear import QuantizedLinear
from .forwards import is_adze
from .frame import DEVICES, parameter, plain, plain_weight, usable


def _on_the_cpu():
    """Half precision on an x86-64 CPU that has no instructions for its products: there gemm was measured to be faster
    than torch for every shape. In float32 it is not."""
    support = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx2", "avx512_bf16", "amx_tile")]
    if None in support:
        return {}
    avx2, *products = (supported() for supported in support)
    return {torch.bfloat16: 64, torch.float16: 64} if avx2 and not any(products) else {}


# By device and dtype, up to how many rows gemm was measured to be faster than torch's product with a weight that is
# not quantised: on an H200 for CUDA, with weights of 4096 to 128256 rows. A dtype that is missing is left to torch.
FASTER = {"cuda": {torch.float16: 8, torch.bfloat16: 8}, "cpu": _on_the_cpu()}


def rows_by_gemm(device, dtype):
    """Up to how many rows gemm has the products; 0 where it has none."""
    return FASTER.get(device.type, {}).get(dtype, 0) if device.type in DEVICES else 0


def _norm_arguments(norm, child, x, weight):
    options = norm.options(child, x, weight)
    if options.pop("out_dtype") != x.dtype:
        return None
    return {"norm": "rms" if norm.op == "rms_norm" else "layer", **options}


def _plain_operands(linears):
    """Weights and biases as gemm's arguments, or None."""
    made = {}
    for number, linear in zip(("", "2", "3"), linears, strict=False):
        if not plain(linear, nn.Linear):
            return None
        weight, bias = parameter(linear, "weight"), parameter(linear, "bias")
        if weight is None or not plain_weight(weight) or not plain_weight(bias):
            return None
        made[f"w{number}"], made[f"bias{number}"] = weight, bias
    return made


def _quantized_operands(linears):
    groups, made = linears[0].groups, {}
    for number, linear in zip(("", "2", "3"), linears, strict=False):
        if not plain(linear, QuantizedLinear) or linear.groups != groups or linear.weight_order is not None:
            return None
        if linear.activations:
            return None
        q, scale, zero, _ = linear.stored
        if q.dtype != made.get("w", q).dtype:
            return None
        made |= {f"w{number}": q, f"w{number}_scale": scale, f"w{number}_zero": zero, f"bias{number}": linear.bias}
    return {**made, "group": groups.group, "group_rows": groups.group_rows, "format": groups.format}


def _operands(linears):
    """The Linears as arguments of one gemm, or None where it cannot take them."""
    return (_quantized_operands if isinstance(linears[0], QuantizedLinear) else _plain_operands)(linears)


def _rows(x):
    return x.numel() // max(x.shape[-1], 1)


def few_rows(x, *linears):
    """Whether gemm is to have the products of x with these Linears. In a compiled graph it is not: there the graph's
    own products are fused with what is around them."""
    if not linears or torch.compiler.is_compiling() or not usable(x):
        return False
    for linear in linears:
        if isinstance(linear, QuantizedLinear):
            if _rows(x) > QUANTIZED_ROWS or linear.device != x.device or linear.weight_order is not None:
                return False
            if linear.activations:  # its input is quantised first
                return False
            continue
        if type(linear) is not nn.Linear or _rows(x) > rows_by_gemm(x.device, x.dtype):
            return False
        weight = parameter(linear, "weight")
        if not usable(x, weight, parameter(linear, "bias")) or weight.dtype != x.dtype:
            return False
    return True


def normed_linears(x, child, norm, linears):
    """linear(child(x)) of each Linear, in one call; None where gemm cannot take them."""
    made = _normed(x, child, norm, linears)
    if made is None or len(linears) == 1:
        return made and (gemm(x, **made),)
    return gemm(x, **made, separate=True)


def normed_glu(x, child, norm, gate, value, act):
    """act(gate(child(x))) * value(child(x)), in one call; None where gemm cannot take them."""
    made = _normed(x, child, norm, (gate, value))
    return made and gemm(x, **made, act=act, glu=True)


def _normed(x, child, norm, linears):
    made = _operands(linears)
    if made is None or not plain(child, norm.cls):
        return None
    parts = norm.taken(child, x)
    options = parts and _norm_arguments(norm, child, x, parts[0])
    if not options:
        return None
    return {**made, **options, "norm_weight": parts[0], "norm_bias": parts[1]}


def linear_add(linear, x, residual):
    """residual + linear(x), in one launch where gemm has the product."""
    if few_rows(x, linear) and residual.dtype == x.dtype and usable(residual):
        made = _operands((linear,))
        if made is not None:
            return gemm(x, **made, residual=residual)
    return residual + linear(x)


def linear_alone(linear, x):
    """linear(x), where linear is patched itself."""
    made = _operands((linear,)) if few_rows(x, linear) else None
    return F.linear(x, linear.weight, linear.bias) if made is None else gemm(x, **made)


def products_note(*linears):
    """What a report says of a block whose products may be gemm's; None where they are torch's."""
    if all(isinstance(linear, QuantizedLinear) for linear in linears):
        if any(linear.activations for linear in linears):
            return None
        return f"+ products of up to {QUANTIZED_ROWS} rows by gemm"
    weight = parameter(linears[0], "weight")
    rows = rows_by_gemm(weight.device, weight.dtype) if type(linears[0]) is nn.Linear else 0
    return f"+ products of up to {rows} rows by gemm" if rows else None


def with_products(forward, products):
    """The forward, and beside it `products(self, x, child, norm, ...)`, which returns x + forward(child(x)), and what
    else the forward returns."""
    forward.adze_products = products
    return forward


def products_of(child):
    """The function that with_products() has put beside the forward of a module, or None where its call would run
    something else as well."""
    forward = child.__dict__.get("forward")
    if forward is None or not is_adze(forward) or not plain(child, type(child)):
        return None
    return getattr(forward.__func__, "adze_products", None)
