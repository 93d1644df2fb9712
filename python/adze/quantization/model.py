"""adze.quantize: the Linears of a model with weights in fewer bits, in place, and back."""

import dataclasses
import fnmatch
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..operators import ops
from ..operators.header import OPS as COMMENTS
from ..patching.frame import strange_weight
from .linear import QuantizedLinear
from .weight import ACTIVATIONS, KINDS, check_kind, dequantized, quantized

_SAMPLE = 32  # rows of an input that the error of a layer is measured with
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


# ---- Which layers ----


def _is_conv1d(module):
    """transformers' Conv1D, as in GPT-2: a Linear whose weight is [k, n]."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def matrix_of(module):
    """The weight [n, k] of a layer that adze.quantize replaces; None for any other module."""
    if type(module) is nn.Linear:
        return module.weight
    return module.weight.t() if _is_conv1d(module) else None


def _looks_linear(module):
    if isinstance(module, (nn.Linear, QuantizedLinear)) or _is_conv1d(module):
        return True
    return type(module).__name__.endswith("Linear") and hasattr(module, "in_features")


def _roots(model):
    if isinstance(model, nn.Module):
        return {"": model}
    parts = getattr(model, "components", None)
    if isinstance(parts, Mapping):
        return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    raise TypeError(f"adze.quantize: x is a {type(model).__name__}, it must be a tensor, a module or a pipeline")


def patterns_of(exclude):
    """The patterns of `exclude`, which may be one or None."""
    found = [exclude] if isinstance(exclude, str) else exclude or ()
    if not isinstance(found, (list, tuple, set, frozenset)) or not all(isinstance(one, str) for one in found):
        raise TypeError(f"adze.quantize: exclude is {exclude!r}, it must be a pattern of paths or several")
    return list(found)


def is_excluded(path, patterns):
    """Whether a pattern is for a path, for what is above it, or for one of its names."""
    names = path.split(".")
    above = [".".join(names[: i + 1]) for i in range(len(names))]
    return any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns for part in (*above, *names))


def _adapted(roots):
    """The modules inside layers of peft's adapters."""
    found = set()
    for root in roots.values():
        for module in root.modules():
            if type(module).__module__.startswith("peft.tuners.") and "base_layer" in module._modules:
                found.update(id(child) for child in module.modules())
    return found


def _owners(roots):
    """The paths of the parameters that use each piece of memory."""
    owners = {}
    for prefix, root in roots.items():
        for path, parameter in root.named_parameters(prefix=prefix, remove_duplicate=False):
            if parameter.device.type != "meta":
                owners.setdefault((parameter.device, parameter.data_ptr()), set()).add(path)
    return owners


def _fp32_names(root):
    """Names of the modules that a model of transformers keeps in float32, as T5 does."""
    found = set()
    for module in root.modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            found.update(getattr(module, attribute, None) or ())
    return found


def unfit(module):
    """Why a layer cannot be replaced, by itself, or None."""
    cls = type(module).__name__
    if isinstance(module, QuantizedLinear):
        return f"is quantised already, as {module.kind}"
    if hasattr(module, "parametrizations"):
        return "its weight is parametrised: torch.nn.utils.parametrize.remove_parametrizations() first"
    if matrix_of(module) is None:
        return f"is a {cls}, not a plain Linear"
    if "weight" not in module._parameters:
        return "its weight is computed by a hook, as by weight_norm: remove that first"
    if "_hf_hook" in module.__dict__ or "_diffusers_hook" in module.__dict__:
        return "a hook of accelerate or diffusers moves its weight: quantise first, then offload"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    weight = module.weight
    strange = strange_weight(module)
    if strange is not None:
        return strange
    if weight.dtype not in (*ops.DTYPES, torch.float64):
        return f"its weight is {weight.dtype}"
    if weight.numel() == 0:
        return f"its weight is empty, {list(weight.shape)}"
    return None


@dataclasses.dataclass
class Row:
    """One layer in the report. Errors are relative: |quantised - original| / |original|, in the 2-norm."""

    path: str
    cls: str
    kind: str | None  # None: it was left as it is
    reason: str = ""  # why
    before: int = 0  # bytes of the weight
    after: int = 0
    on_random: float | None = None  # error of the product with random inputs
    on_inputs: float | None = None  # and with the given ones


def _candidates(roots, exclude):
    """(row, module) of every layer that looks like a Linear; a row with a reason is left as it is."""
    adapted, owners, seen = _adapted(roots), _owners(roots), set()
    for prefix, root in roots.items():
        fp32, places = _fp32_names(root), {}
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            places.setdefault(module, set()).add(f"{path}.weight" if path else "weight")
        for path, module in root.named_modules(memo=seen, prefix=prefix):
            if not _looks_linear(module):
                continue
            row = Row(path, type(module).__name__, None)
            if id(module) in adapted:
                row.reason = "is part of an adapter of peft: merge_and_unload() first"
            elif is_excluded(path, exclude):
                row.reason = "excluded"
            elif fp32.intersection(path.split(".")):
                row.reason = "the model keeps it in float32"
            else:
                row.reason = unfit(module) or ""
            if not row.reason:
                weight = module.weight
                if weight.device.type == "meta":
                    raise ValueError(
                        f"adze.quantize: {path}.weight is on the meta device, it has no values: load the weights"
                        " first"
                    )
                others = owners[weight.device, weight.data_ptr()] - places[module]
                if others:
                    row.reason = f"its weight is also {min(others)}"
                elif not torch.isfinite(weight).all():
                    row.reason = "its weight has an infinity or a NaN"
            yield row, module


# ---- The handle ----


def bytes_of(*tensors):
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class _Swap:
    """A layer, what has taken its place, and where."""

    def __init__(self, places, made, original):
        self.places, self.made, self.original = places, made, original

    def put(self, quantized):
        for parent, name in self.places:
            parent._modules[name] = self.made if quantized else self.original
        if not quantized:  # the model may have been moved or cast meanwhile
            self.original.to(self.made.device, self.made.dtype).train(self.made.training)
        else:
            self.made.train(self.original.training)


class QuantizeHandle:
    """The result of adze.quantize: what has fewer bits now, at which error, and how to undo it.

    As a context manager it undoes the change at the end of the block."""

    def __init__(self, roots, kind):
        self.roots, self.kind = roots, kind
        self.rows = []
        self.swaps = []
        self.enabled = True
        self.reversible = True
        self.outputs = None  # (relative error, share of equal argmax) on the given inputs

    @property
    def quantized(self):
        """Paths of the layers that were replaced."""
        return [row.path for row in self.rows if row.kind]

    @property
    def bytes_before(self):
        return sum(row.before for row in self.rows if row.kind)

    @property
    def bytes_after(self):
        return sum(row.after for row in self.rows if row.kind)

    def disable(self):
        """Gives the model its own layers back, until enable()."""
        self._put(False)

    def enable(self):
        self._put(True)

    def remove(self):
        """Gives the model its own layers back, for good; the quantised weights are freed."""
        if self.enabled:
            self._put(False)
        self.swaps, self.enabled = [], False

    def free(self):
        """Frees the original weights: the change cannot be undone any more."""
        if not self.enabled:
            raise RuntimeError(
                "adze.quantize: the handle is disabled, so the original weights are in use: enable() first"
            )
        self.swaps, self.reversible = [], False

    def _put(self, quantized):
        if not self.reversible:
            raise RuntimeError("adze.quantize: the original weights were not kept (keep=False): load the model again")
        for swap in self.swaps:
            swap.put(quantized)
        self.enabled = quantized
        self.mark()

    def mark(self):
        """Says in the config of a model of transformers how it is to be loaded."""
        if "transformers" in sys.modules:
            importlib.import_module(".transformers", __package__).mark(self.roots.values())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()

    def report(self):
        """A table: layers, bytes, errors; and what was left as it is."""
        with_inputs = any(row.on_inputs is not None for row in self.rows)
        lines = [("layer", "kind", "MB", "as", "error, random", "given" if with_inputs else "")]
        for row in self.rows:
            if row.kind:
                errors = [f"{e:.2e}" if e is not None else "" for e in (row.on_random, row.on_inputs)]
                lines.append((row.path, row.kind, f"{row.before / 1e6:.2f}", f"{row.after / 1e6:.2f}", *errors))
            else:
                lines.append((row.path, "-", row.reason, "", "", ""))
        widths = [max([len(line[i]) for line in lines if i < 2 or line[1] != "-"]) for i in range(6)]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        ratio = self.bytes_before / max(self.bytes_after, 1)
        text.append(
            f"{len(self.quantized)} layers as {self.kind}: {self.bytes_before / 1e6:.2f} MB of weights are"
            f" {self.bytes_after / 1e6:.2f} MB now, {ratio:.2f} times less;"
            f" {len(self.rows) - len(self.quantized)} left as they are"
        )
        if self.outputs is not None:
            error, equal = self.outputs
            text.append(f"outputs on the given inputs: error {error:.2e}, {equal:.2%} of rows have the same argmax")
        if not self.reversible:
            text.append("the original weights are not kept")
        elif self.swaps:
            text.append("the original weights are kept: free() frees them")
        if not self.enabled:
            text.append("not in use now")
        return "\n".join(text)

    __str__ = report


# ---- Errors ----


def _relative(x, difference, weight, made):
    """|x @ difference.T| / |x @ weight.T|, with what quantised inputs add to it."""
    exact = torch.linalg.vector_norm(x @ weight.t())
    off = x @ difference.t()
    if made.activations:
        q, scale = ops.quantize(x, KINDS[made.kind][0])
        off += (q.to(torch.float32) * scale[:, None] - x) @ (weight + difference).t()
    error = torch.linalg.vector_norm(off)
    return float(error / exact) if float(exact) else float(error)


def _measure(row, original, made, given):
    weight = original.detach().to(torch.float32)
    difference = dequantized(made.stored, made.in_features, torch.float32) - weight
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(_SAMPLE, made.in_features, generator=generator, dtype=torch.float32, device="cpu").to(
        weight.device
    )
    row.on_random = _relative(x, difference, weight, made)
    if given is not None:
        row.on_inputs = _relative(given.to(weight.device, torch.float32), difference, weight, made)


def _run(roots, inputs):
    if isinstance(inputs, Callable) and not isinstance(inputs, nn.Module):
        return inputs()
    model = next(iter(roots.values()))
    if list(roots) != [""]:
        raise TypeError("adze.quantize: inputs must be a function that runs the pipeline")
    if not isinstance(inputs, (Mapping, tuple, list)):
        raise TypeError(
            f"adze.quantize: inputs is a {type(inputs).__name__}, it must be a dict, a tuple or a function that runs "
            "the model"
        )
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def _main_tensor(output):
    """The tensor of an output that is compared: logits, a sample, the first one."""
    for name in ("logits", "sample", "last_hidden_state"):
        if isinstance(getattr(output, name, None), torch.Tensor):
            return getattr(output, name).detach()
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output.detach() if isinstance(output, torch.Tensor) else None


def _recorded(roots, inputs, modules):
    """What each module reads when the model runs on the inputs, some rows of it; and the model's output."""
    read, hooks = {}, []

    def record(module, args, kwargs):
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, torch.Tensor) and module not in read:
            read[module] = x.detach().reshape(-1, x.shape[-1])[:_SAMPLE].clone()

    try:
        hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
        with torch.no_grad():
            output = _main_tensor(_run(roots, inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return read, output


def _compared(before, after):
    if before is None or after is None or before.shape != after.shape:
        return None
    a, b = before.to(torch.float32), after.to(torch.float32)
    error = float(torch.linalg.vector_norm(b - a) / torch.linalg.vector_norm(a).clamp_min(1e-30))
    return error, float((a.argmax(-1) == b.argmax(-1)).to(torch.float32).mean())


# ---- adze.quantize ----


def quantized_layer(module, kind, zero_points=False, search=False):
    """The layer that takes the place of a Linear or a Conv1D. It shares the bias and the hooks."""
    matrix = matrix_of(module)
    weight = quantized(matrix, kind, zero_points, search)
    made = QuantizedLinear(weight, matrix.shape[1], module.bias, matrix.dtype, kind in ACTIVATIONS)
    for name in _HOOKS:
        made.__dict__[name] = module.__dict__[name]
    return made.train(module.training)


def _progress(items, shown):
    """The items, with a bar of tqdm; shown None: in a terminal only."""
    if shown is False:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc="adze.quantize", unit="layer", disable=None if shown is None else False)


def _places(roots, module):
    return [
        (parent, name)
        for root in roots.values()
        for parent in root.modules()
        for name, child in parent._modules.items()
        if child is module
    ]


def quantize_model(
    model, kind, *, exclude=("lm_head",), keep=True, inputs=None, zero_points=False, search=False, progress=None
):
    check_kind(kind, zero_points)
    roots = _roots(model)
    exclude = patterns_of(exclude)
    handle, todo = QuantizeHandle(roots, kind), []
    for row, module in _candidates(roots, exclude):
        handle.rows.append(row)
        if not row.reason:
            todo.append((row, module))
    if not todo:
        reasons = "; ".join(dict.fromkeys(f"{row.path} {row.reason}" for row in handle.rows[:3]))
        raise ValueError(f"adze.quantize: no layer of the model can be quantised: {reasons or 'it has no Linear'}")
    if any(module is root for root in roots.values() for _, module in todo):
        raise ValueError("adze.quantize: the model is a Linear itself: put it into a module, such as nn.Sequential")
    read, before = {}, None
    if inputs is not None:
        read, before = _recorded(roots, inputs, [module for _, module in todo])
    try:
        _replace(handle, todo, kind, keep, zero_points, search, progress, read)
        if inputs is not None:
            with torch.no_grad():
                handle.outputs = _compared(before, _main_tensor(_run(roots, inputs)))
        handle.mark()
    except BaseException:  # Ctrl-C too
        handle.remove()  # nothing was returned that could undo it
        raise
    handle.reversible = bool(keep)
    return handle


def _replace(handle, todo, kind, keep, zero_points, search, progress, read):
    for i in _progress(range(len(todo)), progress):
        (row, module), todo[i] = todo[i], None  # the list must not keep a layer that is freed
        made = quantized_layer(module, kind, zero_points, search)
        _measure(row, matrix_of(module), made, read.pop(module, None))
        row.kind, row.before, row.after = made.kind, bytes_of(module.weight), bytes_of(*made.stored)
        swap = _Swap(_places(handle.roots, module), made, module)
        if keep:
            handle.swaps.append(swap)
        swap.put(True)


def quantize(x, kind, **options):
    """Fewer bits: of a tensor's numbers, or of the weights of a model.

    With a tensor it is the op, and returns numbers, scales and perhaps zeros, as docs/ops.md has it.
    kind is "i8", "f8e4m3" or "u4"; options are group, group_rows, zero_points, scale_dtype, out, scale_out, zero_out.

    With a module or a pipeline it replaces the Linears, in place, and returns a handle with report(), disable(),
    enable(), remove() and free(). kind is one of "int8", "int4-g32", "int4-g64", "int4-g128", "fp8", "fp8-block",
    "w8a8", "w8a8-fp8"; of the last two the inputs of the Linears are quantised too, by rows, in each call.
      exclude: patterns of module paths or names; the default leaves "lm_head" as it is.
      keep: whether the original weights are kept, so that the handle can undo the change. False frees each one when
        its layer is done.
      inputs: what to call the model with (a dict or a tuple), or a function that runs it. Then the report has the
        error of each layer and of the output on these inputs too.
      zero_points: whether groups of 4 bits have a zero of their own.
      search: whether each scale is the one of several that has the least squared error, which takes longer.
      progress: whether tqdm shows a bar; by default it does in a terminal.

    The numbers are rounded to nearest, where the weight is, or on the CPU where its device has no kernel."""
    if isinstance(x, torch.Tensor):
        return ops.quantize(x, kind, **options)
    return quantize_model(x, kind, **options)


def _both():
    """The parameters of the op, and those for models."""
    op, model = inspect.signature(ops.quantize), inspect.signature(quantize_model)
    more = [p for name, p in model.parameters.items() if p.kind is p.KEYWORD_ONLY and name not in op.parameters]
    return op.replace(parameters=[*op.parameters.values(), *more])


quantize.__signature__ = _both()
quantize.__doc__ = f"{quantize.__doc__}\n\n{COMMENTS['quantize']}"
