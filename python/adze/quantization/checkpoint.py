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
from .weight import ACTIVATIONS, Weight, groups_of


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
                return found.get("quant_method", "gptq" if key is None else None), found
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
        """The shape of a tensor, which is not read."""
        return list(self._read(name, "get_slice").get_shape())

    def _read(self, name, method):
        from safetensors import SafetensorError

        path, name = self.files[name]
        if path not in self.opened:
            self.opened[path] = _opened(path)
        try:
            return getattr(self.opened[path], method)(name)
        except SafetensorError as error:
            raise ValueError(f"adze.load_quantized: {path} cannot be read: {error}") from None


def scheme_of(config, path):
    """The part of compressed-tensors' config that is for a layer: by its path, else by its class."""
    by_class = None
    for group in (config.get("config_groups") or {}).values():
        for target in group.get("targets", ()):
            if path == target or (target.startswith("re:") and re.match(target[3:], path)):
                return {"format": config.get("format"), **group}
            if target == "Linear":
                by_class = by_class or {"format": config.get("format"), **group}
    if by_class is None:
        raise ValueError(f"compressed-tensors: no group of the config is for {path}")
    return by_class


def misfit(weight, n, k):
    """Why a weight of a checkpoint is not one of [n, k], or None."""
    packed = weight.q.dtype == torch.uint8
    stored = [weight.q.shape[0], weight.q.shape[1] * (2 if packed else 1)]
    if stored[0] != n or stored[1] not in ((k, k + k % 2) if packed else (k,)):
        return f"is {[n, k]} in the model, {stored} in the checkpoint"
    scale = list(weight.scale.shape)
    if groups_of(weight.q, weight.scale, k).group == 0 and len(scale) == 2 and scale[1] > 1:
        return f"has a scale of {scale} in the checkpoint, for a weight of {[n, k]}"
    return None


def _layer(path, module, format, tensors, config):
    """The layer of a checkpoint's tensors, in the place of a module."""
    why = unfit(module)
    if why is not None:
        raise ValueError(f"adze.load_quantized: {path} {why}")
    n, k = matrix_of(module).shape
    if format.convert is formats.compressed_tensors:
        config = scheme_of(config, path)
    try:
        weight = format.convert(tensors, config)
    except ValueError as error:
        raise ValueError(f"adze.load_quantized: {path}: {error}") from None
    why = misfit(weight, n, k)
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
        own, stored = list(getattr(owner, _kind_of(owner, name))[name].shape), reader.shape(tensor)
        if own != stored:
            raise ValueError(f"adze.load_quantized: {tensor} is {own} in the model, {stored} in the checkpoint")
    for path, module in _modules_of(model, made):
        for name, buffer in module._buffers.items():
            tensor = f"{path}.{name}" if path else name
            if buffer is not None and buffer.device.type == "meta" and tensor not in names:
                raise ValueError(
                    f"adze.load_quantized: {tensor} is on the meta device and not in the checkpoint: build the model"
                    " with accelerate's init_empty_weights(), which leaves buffers as they are"
                )
    return rest
