"""A Linear whose weight is in fewer bits: the layer that takes the place of nn.Linear in a quantised model."""

import torch
from torch import nn
from torch.nn import functional as F

from ..operators import ops
from ..operators.fake import needs_tangents
from .weight import NAMES, Weight, dequantized, groups_of

# Up to this many rows, gemm reads the weight in fewer bits. With more it would read it many times, and torch has the
# product with a weight that is dequantised for the call.
ROWS = 64
_PARTS = ("weight_q", "weight_scale", "weight_zero", "weight_order")


class QuantizedLinear(nn.Module):
    """y = x @ weight.T + bias, where the weight is stored in fewer bits, as adze.h documents it. It has no gradient;
    x and the bias may have one. `weight` is the dequantised weight, made in each access. activations: x is quantised
    to the weight's dtype, by rows, and gemm has products of any number of rows."""

    activations = False

    def __init__(self, weight, in_features, bias=None, dtype=torch.float32, activations=False):
        super().__init__()
        if activations:
            self.activations = True
        self.in_features, self.out_features = in_features, weight.q.shape[0]
        self.dtype = dtype  # of `weight`; model.to(dtype) changes it, and leaves what is stored as it is
        for name, part in zip(_PARTS, weight, strict=True):
            self.register_buffer(name, part)
        self.register_parameter("bias", bias)
        self.groups = groups_of(weight.q, weight.scale, in_features)

    @property
    def stored(self):
        return Weight(self.weight_q, self.weight_scale, self.weight_zero, self.weight_order)

    @property
    def weight(self):
        made = dequantized(self.stored, self.in_features, self.dtype)
        return made if self.weight_order is None else made[:, self.weight_order.argsort()]

    @property
    def device(self):
        return self.weight_q.device

    @property
    def kind(self):
        group, rows, _ = self.groups
        name = NAMES[self.weight_q.dtype]
        if self.activations:
            return "w8a8" if name == "int8" else f"w8a8-{name}"
        return f"{name}-block" if rows else f"{name}-g{group}" if group else name

    def gathered(self, x):
        """x with its columns in the order of the weight's."""
        return x if self.weight_order is None else x.index_select(-1, self.weight_order)

    def taken(self, x):
        """Whether gemm has the product with x: few rows, unless they are quantised too, a dtype that it has, and no
        gradient is needed."""
        if x.dtype not in ops.DTYPES or x.device.type not in ("cpu", "cuda") or not 1 <= x.dim() <= 5:
            return False
        if needs_tangents():
            return False
        if torch.is_grad_enabled() and (x.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            return False
        return self.activations or x.numel() <= ROWS * self.in_features

    def forward(self, input):
        where = input.device.type
        if where != "meta" and torch.is_autocast_enabled(where):  # the meta device has no autocast
            input = input.to(torch.get_autocast_dtype(where))
        if not input.dtype.is_floating_point:
            raise RuntimeError(f"adze: a layer of {self.kind} got {input.dtype}, its input must be of floating point")
        if input.dim() == 0 or input.shape[-1] != self.in_features:  # bytes of 4 bits may have place for one more
            raise RuntimeError(f"adze: a layer of {self.in_features} columns got an input of {list(input.shape)}")
        x, bias = self.gathered(input), self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if not self.taken(x):
            return F.linear(x, dequantized(self.stored, self.in_features, x.dtype), bias)
        x = x if x.stride(-1) == 1 else x.contiguous()
        if self.activations:
            q, scale = ops.quantize(x, "i8" if self.weight_q.dtype == torch.int8 else "f8e4m3")
            scales = {"w_scale": self.weight_scale, "x_scale": scale}
            return ops.gemm(q, self.weight_q, bias, **scales, out_dtype=x.dtype)
        group, rows, packed = self.groups
        return ops.gemm(
            x,
            self.weight_q,
            bias,
            w_scale=self.weight_scale,
            w_zero=self.weight_zero,
            group=group,
            group_rows=rows,
            format=packed,
        )

    def _apply(self, fn, recurse=True):
        """Moves to a device what is stored, and changes no dtype of it: a scale in half precision could overflow, and
        numbers of 8 bits would be cast to the model's dtype. So fn gets bytes."""
        parts = {name: part for name, part in self._buffers.items() if part is not None}
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        self._buffers.update(dict.fromkeys(parts))
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(parts)
        for name, part in parts.items():
            dense = part.contiguous()
            moved = fn(dense.view(torch.uint8))
            if moved.dtype != torch.uint8:  # model.type(dtype) casts integers too
                moved = dense.view(torch.uint8).to(moved.device)
            self._buffers[name] = moved.view(part.dtype)
        if probe.dtype.is_floating_point:
            self.dtype = probe.dtype
        return self

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        """Numbers of another kind would be cast, and are others then."""
        for name in _PARTS:
            own, given = self._buffers[name], state.get(prefix + name)
            if name != "weight_scale" and own is not None and given is not None and own.dtype != given.dtype:
                errors.append(f"{prefix}{name} is {own.dtype} in the layer, {given.dtype} in the state_dict")
                return
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)

    def __getstate__(self):
        """What is pickled and copied. pickle does not have every dtype of 8 bits that torch has, so it gets bytes."""
        q = self.weight_q
        return {**self.__dict__, "_buffers": {**self._buffers, "weight_q": q.view(torch.uint8)}, "q_dtype": q.dtype}

    def __setstate__(self, state):
        own = {**state}
        dtype = own.pop("q_dtype")
        super().__setstate__(own)
        self._buffers["weight_q"] = self._buffers["weight_q"].view(dtype)

    def extra_repr(self):
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{text}, kind={self.kind}"
