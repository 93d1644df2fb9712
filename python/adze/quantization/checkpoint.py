"""adze.load_quantized: a model with the weights of a checkpoint that is quantised: AWQ, GPTQ, compressed-tensors, fp8
with blocks, or adze's own."""

import json
import pathlib
import re
import sys
from typing import NamedTuple

import torch
from torch import nn

from . import formats
from .linear import QuantizedLinear
from .model import bytes_of, matrix_of, unfit
from .weight import ACTIVATIONS, GROUPS, NAMES, Weight


def _own(tensors, config):
    """adze's own: the buffers of QuantizedLinear."""
    return Weight(*(tensors.get(name) for name in ("weight_q", "weight_scale", "weight_zero", "weight_order")))


class Format(NamedTuple):
    marks: tuple  # a tensor of such a name says that a layer is quantised
    names: tuple  # of its tensors, without the bias
    convert: object


_CT_NAMES = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
FORMATS = {
    "adze": Format(("weight_q",), ("weight_q", "weight_scale", "weight_zero", "weight_order"), _own),
    "awq": Format(("qweight",), ("qweight", "qzeros", "scales"), formats.awq),
    "gptq": Format(("qweight",), ("qweight", "qzeros", "scales", "g_idx"), formats.gptq),
    "fp8": Format(("weight_scale_inv",), ("weight", "weight_scale_inv"), formats.fp8),
    "compressed-tensors": Format(("weight_scale",), _CT_NAMES, formats.compressed_tensors),
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Scales of activations and of the cache: gemm takes activations as they are.
_UNUSED = ("input_scale", "input_zero_point", "activation_scale", "k_scale", "v_scale", "output_scale")


class Loaded(NamedTuple):
    """What adze.load_quantized has done."""

    format: str
    layers: dict  # path: kind
    unused: list  # names of the checkpoint's tensors that the model has no place for
    bytes: int  # of the quantised weights


def _json(path):
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"adze.load_quantized: {path} is not JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def read_config(folder):
    """(name of the format, its config) of a checkpoint's folder."""
    for name, key in (("config.json", "quantization_config"), ("config.json", "compression_config"),
                      ("quantize_config.json", None)):  # fmt: skip
        path = folder / name
        if path.is_file():
            found = _json(path)
            found = found if key is None else found.get(key)
            if found and isinstance(found, dict):
                return found.get("quant_method", found.get("method", "gptq" if key is None else None)), found
    raise ValueError(f"adze.load_quantized: {folder} has no quantization_config in config.json")


def _opened(path):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"adze.load_quantized: {path} cannot be read: {error}") from None


def _files(folder):
    """{name of a tensor: the file that has it}."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = _json(index).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"adze.load_quantized: {index} has no weight_map")
        if not all(isinstance(file, str) for file in places.values()):
            raise ValueError(f"adze.load_quantized: {index} has a weight_map with other places than names of files")
        return {name: folder / file for name, file in places.items()}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _opened(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    if not found:
        raise ValueError(f"adze.load_quantized: {folder} has no file *.safetensors")
    return found


def _renamed(model, names):
    if "transformers" in sys.modules:
        from . import transformers

        if transformers.is_theirs(model):
            return transformers.renamed(model, names)
    return {name: name for name in names}


class _Reader:
    """The tensors of a checkpoint, by their names in the model; files are opened once."""

    def __init__(self, folder, model):
        files, self.opened = _files(folder), {}
        self.files = {own: (files[name], name) for name, own in _renamed(model, files).items()}

    def __getitem__(self, name):
        return self._read(name, "get_tensor")

    def shape(self, name):
        """The shape of a tensor, which is not read, and its dtype as Safetensors name it."""
        part = self._read(name, "get_slice")
        return list(part.get_shape()), part.get_dtype()

    def _read(self, name, method):
        from safetensors import SafetensorError

        path, name = self.files[name]
        if path not in self.opened:
            self.opened[path] = _opened(path)
        try:
            return getattr(self.opened[path], method)(name)
        except SafetensorError as error:
            raise ValueError(f"adze.load_quantized: {path} cannot be read: {error}") from None


def _matches(pattern, path):
    """Whether a regular expression of a config is for a path: for its beginning."""
    try:
        return re.match(pattern, path)
    except re.error as error:
        raise ValueError(f"the config has {pattern!r}, which is no regular expression: {error}") from None


def scheme_of(config, path):
    """The part of compressed-tensors' config that is for a layer: by its path, else by an expression, else by its
    class."""
    groups, found = config.get("config_groups") or {}, []
    if config.get("transform_config") not in (None, {}) and config["transform_config"] != {"config_groups": {}}:
        raise ValueError("compressed-tensors: transform_config has rotations, which adze does not compute")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError("compressed-tensors: config_groups must have an object for each group")
    for group in groups.values():
        for target in group.get("targets") or ():
            if path == target:
                found.append((0, group))
            elif target.startswith("re:") and _matches(target[3:], path):
                found.append((1, group))
            elif target == "Linear":
                found.append((2, group))
    if not found:
        raise ValueError(f"compressed-tensors: no group of the config is for {path}")
    return {"format": config.get("format"), **min(found, key=lambda pair: pair[0])[1]}


def config_of(config, path):
    """GPTQ's config for a layer: "dynamic" has other settings for the paths that an expression is for."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(more or {}, dict) for more in dynamic.values()):
        raise ValueError("gptq: dynamic must have an object for each expression")
    for pattern, more in dynamic.items():
        if _matches(pattern.removeprefix("-:").removeprefix("+:"), path):
            return config if pattern.startswith("-:") else {**config, **(more or {})}  # "-:": it is not quantised
    return config


def misfit(weight, n, k):
    """Why what a checkpoint has is not a weight [n, k] in the layout that adze.h documents, or None. The values of
    `order` are looked at by bad_order()."""
    q, scale, zero, order = weight
    if q.dtype not in NAMES or q.dim() != 2:
        return f"has numbers of {q.dtype} and {q.dim()} dimensions, they must be int8, uint8 or float8_e4m3fn, and 2"
    packed = q.dtype == torch.uint8
    stored = [q.shape[0], q.shape[1] * (2 if packed else 1)]
    if stored[0] != n or stored[1] != (k + k % 2 if packed else k):
        return f"is {[n, k]} in the model, {stored} in the checkpoint"
    if scale is None:
        return "has no scale in the checkpoint"
    if scale.dtype not in formats.SCALES:
        return f"has a scale of {scale.dtype}, it must be float32, float16 or bfloat16"
    shapes = [[1], [n], [n, 1], *([n, -(-k // group)] for group in GROUPS)]
    shapes += [[-(-n // 128), -(-k // 128)]] if q.dtype == torch.float8_e4m3fn else []
    if list(scale.shape) not in shapes:
        return f"has a scale of {list(scale.shape)} in the checkpoint, for a weight of {[n, k]}"
    if zero is not None and (not packed or zero.dtype != torch.uint8 or zero.shape != scale.shape):
        return (
            f"has zeros of {zero.dtype} and {list(zero.shape)}, only 4 bits have them, as uint8 and the scale's shape"
        )
    if order is not None and (order.dtype not in (torch.int32, torch.int64) or list(order.shape) != [k]):
        return f"has an order of {order.dtype} and {list(order.shape)}, it must be int64 and {[k]}"
    return None


def bad_order(weight):
    """Why columns cannot be in the order of a weight, or None."""
    order = weight.order
    if order is None or order.device.type == "meta":
        return None
    if torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
        return None
    return f"has an order of its columns in which not each of 0 to {len(order) - 1} is once"


def _columns(format, tensors):
    """How many columns a weight has, where its bytes may have place for one more."""
    if format.convert is formats.awq:
        return tensors["qweight"].shape[0]
    return int(tensors["weight_shape"].flatten()[1]) if "weight_shape" in tensors else None


def _layer(path, module, format, tensors, config):
    """The layer of a checkpoint's tensors, in the place of a module."""
    why = unfit(module)
    if why is not None:
        raise ValueError(f"adze.load_quantized: {path} {why}")
    n, k = matrix_of(module).shape
    try:
        if format.convert is formats.compressed_tensors:
            config = scheme_of(config, path)
        elif format.convert is formats.gptq:
            config = config_of(config, path)
        weight = format.convert(tensors, config)
    except ValueError as error:
        raise ValueError(f"adze.load_quantized: {path}: {error}") from None
    columns = _columns(format, tensors)
    if columns not in (None, k):
        raise ValueError(
            f"adze.load_quantized: {path} is {[n, k]} in the model, {[weight.q.shape[0], columns]} in the checkpoint"
        )
    why = misfit(weight, n, k) or bad_order(weight)
    if why is not None:
        raise ValueError(f"adze.load_quantized: {path} {why}")
    device = module.weight.device if module.weight.device.type != "meta" else torch.device("cpu")
    weight = Weight(*(None if part is None else part.to(device) for part in weight))
    own = format.convert is _own
    activations = own and (config.get("kind") in ACTIVATIONS or path in (config.get("activations") or ()))
    return QuantizedLinear(weight, k, module.bias, module.weight.dtype, activations).train(module.training)


def _put(model, path, made):
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = made


def _kind_of(owner, name):
    return "_parameters" if name in owner._parameters else "_buffers"


def _fill(places, value):
    """Gives a parameter or a buffer its values, at all its places: a meta tensor is replaced."""
    owner, name = places[0]
    kind = _kind_of(owner, name)
    current = getattr(owner, kind)[name]
    if current.device.type != "meta":
        with torch.no_grad():
            current.copy_(value)
        return
    value = value.to(current.dtype)
    if kind == "_parameters":
        value = nn.Parameter(value, requires_grad=current.requires_grad)
    for owner, name in places:
        getattr(owner, kind)[name] = value


def _modules_of(model, made):
    """(path, module), also where a module comes again; `made` are in the places of those that they replace."""
    for path, module in model.named_modules(remove_duplicate=False):
        yield path, made.get(path, module)


def _tensors_of(model, made):
    """{name: [(module, name in it), ...]}: tied tensors have all their places."""
    by_id, names = {}, {}
    for path, module in _modules_of(model, made):
        kept = {n: t for n, t in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *kept.items()):
            if tensor is not None:
                places = by_id.setdefault(id(tensor), [])
                places.append((module, name))
                names[f"{path}.{name}" if path else name] = places
    return names


def load_quantized(model, folder):
    """Loads a quantised checkpoint into a model, in place. Its Linears that are quantised there are replaced.

    model: a module with the checkpoint's architecture, such as AutoModelForCausalLM.from_config(config). Its weights
      may be on the meta device (accelerate's init_empty_weights()); then nothing is allocated twice.
    folder: config.json with a quantization_config, and Safetensors. Formats: AWQ ("gemm"), GPTQ (both versions, also
      with desc_act), compressed-tensors (pack-quantized, int-quantized, float-quantized), fp8 with blocks of
      128 x 128, adze's own.

    The weights are those of the format, bit for bit. A checkpoint that cannot be loaded leaves the model as it was.
    What a config says of activations is applied where it is adze's
    own ("w8a8")."""
    folder = pathlib.Path(folder)
    name, config = read_config(folder)
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"adze.load_quantized: quant_method is {name!r}, it must be one of {', '.join(FORMATS)}")
    format, reader = FORMATS[name], _Reader(folder, model)
    left, made = set(reader.files), {}
    for mark in sorted(left):
        path, _, last = mark.rpartition(".")
        if last not in format.marks:
            continue
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise ValueError(f"adze.load_quantized: the checkpoint has {mark}, the model has no {path}") from None
        tensors = {n: reader[f"{path}.{n}"] for n in format.names if f"{path}.{n}" in left}
        made[path] = _layer(path, module, format, tensors, config)
        left -= {f"{path}.{n}" for n in (*format.names, *_UNUSED)}
    if not made:
        raise ValueError(f"adze.load_quantized: {folder} has no quantised layer of format {name}")
    rest = _rest(model, reader, left, made)
    # All that can be wrong is known by now: until here the model is as it was.
    for path, layer in made.items():
        _put(model, path, layer)
    for tensor, places in rest.items():
        _fill(places, reader[tensor])
    if "transformers" in sys.modules:
        from . import transformers

        transformers.mark([model])
    layers = {path: layer.kind for path, layer in made.items()}
    return Loaded(name, layers, sorted(left - set(rest)), sum(bytes_of(*layer.stored) for layer in made.values()))


def _rest(model, reader, left, made):
    """What is not quantised, as {name: its places in the model}; raises where it cannot be loaded."""
    names = _tensors_of(model, made)
    rest = {name: names[name] for name in sorted(left & set(names))}
    filled = {id(names[f"{path}.{n}"]) for path in made for n in FORMATS["adze"].names if f"{path}.{n}" in names}
    filled.update(map(id, rest.values()))
    missing = sorted(name for name, places in names.items() if id(places) not in filled)
    if missing:
        raise ValueError(f"adze.load_quantized: the checkpoint has no {', '.join(missing[:3])}")
    for tensor, ((owner, name), *_) in rest.items():
        own, (shape, dtype) = getattr(owner, _kind_of(owner, name))[name], reader.shape(tensor)
        if list(own.shape) != shape:
            raise ValueError(
                f"adze.load_quantized: {tensor} is {list(own.shape)} in the model, {shape} in the checkpoint"
            )
        # Numbers of 8 bits without their scale, or packed ones, are not what the model computes with.
        if own.dtype in FLOATS and dtype not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(f"adze.load_quantized: {tensor} is {own.dtype} in the model, {dtype} in the checkpoint")
    for path, module in _modules_of(model, made):
        for name, buffer in module._buffers.items():
            tensor = f"{path}.{name}" if path else name
            if buffer is not None and buffer.device.type == "meta" and tensor not in names:
                raise ValueError(
                    f"adze.load_quantized: {tensor} is on the meta device and not in the checkpoint: build the model"
                    " with accelerate's init_empty_weights(), which leaves buffers as they are"
                )
    return rest
