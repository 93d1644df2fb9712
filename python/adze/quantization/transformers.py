"""transformers' own way to quantise: from_pretrained(..., quantization_config=AdzeConfig("int4-g128")), and
save_pretrained and from_pretrained of a model that is quantised. Importing it registers both with transformers."""

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .checkpoint import FORMATS, bad_order, misfit
from .linear import QuantizedLinear
from .model import is_excluded, matrix_of, patterns_of, quantized_layer, unfit
from .weight import ACTIVATIONS, KINDS, Weight, check_kind

_BYTES = {"i8": 1.0, "u4": 0.5, "f8e4m3": 1.0}


@register_quantization_config("adze")
class AdzeConfig(QuantizationConfigMixin):
    """How from_pretrained quantises a model's Linears. kind, exclude, zero_points and search are those of
    adze.quantize.

    In a checkpoint kind is None where layers are of several kinds, or of another format's. Then activations are the
    paths of the layers whose inputs are quantised too."""

    def __init__(
        self, kind="int4-g128", exclude=("lm_head",), zero_points=False, activations=(), search=False, **more
    ):
        wrong = [name for name in more if name != "quant_method"]  # which from_pretrained gives
        if wrong:
            raise TypeError(f"AdzeConfig has no {wrong[0]}: kind, exclude, zero_points, activations and search")
        if kind is not None:
            check_kind(kind, zero_points)
        self.quant_method = "adze"
        self.kind, self.zero_points, self.search = kind, zero_points, search
        self.exclude = patterns_of(exclude)
        self.activations = list(activations)


class _Quantize(ConversionOps):
    """Replaces a Linear when its weight has been read: the whole model is never there in its own dtype."""

    def __init__(self, quantizer):
        self.quantizer = quantizer

    def convert(self, input_dict, full_layer_name=None, model=None, missing_keys=None, **_):
        made = {}  # of several layers, where a checkpoint has their weights as one
        for name, value in input_dict.items():
            name = full_layer_name if len(input_dict) == 1 else name
            value = value[0] if isinstance(value, list) else value
            path = name.rpartition(".")[0]
            if path not in self.quantizer.paths or not torch.isfinite(value).all():
                made[name] = value
                continue
            made |= self._stored(model, path, value)
            if missing_keys is not None:
                missing_keys.discard(name)
        return made

    def _stored(self, model, path, value):
        module = model.get_submodule(path)
        module.weight = torch.nn.Parameter(value, requires_grad=False)
        config = self.quantizer.quantization_config
        made = quantized_layer(module, config.kind, config.zero_points, config.search)
        model.set_submodule(path, made)
        return {f"{path}.{name}": part for name, part in made._buffers.items() if part is not None}


@register_quantizer("adze")
class AdzeQuantizer(HfQuantizer):
    requires_calibration = False

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **_):
        if self.pre_quantized:
            _make_room(model, checkpoint_files, self.quantization_config)
            return
        config = self.quantization_config
        check_kind(config.kind, config.zero_points)
        fp32 = {*(model._keep_in_fp32_modules or ()), *(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
        pairs = getattr(model, "all_tied_weights_keys", {}).items()
        tied = {name.removesuffix(".weight") for pair in pairs for name in pair}
        self.paths = {
            path
            for path, module in model.named_modules()
            if matrix_of(module) is not None
            and unfit(module) is None
            and path not in tied
            and not is_excluded(path, config.exclude)
            and not fp32.intersection(path.split("."))
        }
        if not self.paths:
            raise ValueError("AdzeConfig: no layer of the model can be quantised")

    def _process_model_after_weight_loading(self, model, **_):
        for path, module in model.named_modules() if self.pre_quantized else ():
            why = bad_order(module.stored) if isinstance(module, QuantizedLinear) else None
            if why:
                raise ValueError(f"AdzeConfig: {path} {why}")

    def param_needs_quantization(self, model, param_name, **_):
        path, _, name = param_name.rpartition(".")
        return not self.pre_quantized and name == "weight" and path in self.paths

    @property
    def quantized_element_size(self):
        return _BYTES[KINDS[self.quantization_config.kind][0]] if self.quantization_config.kind else None

    def get_quantize_ops(self):
        return _Quantize(self)

    def get_new_dtype(self, converter, param, dtype):
        """Numbers and scales stay as they are stored; the rest gets the model's dtype."""
        name = converter.target_patterns[0].rpartition(".")[2]
        return None if name in FORMATS["adze"].names else dtype

    def is_serializable(self, *_, **__):
        return True

    @property
    def is_trainable(self):
        return False

    @property
    def is_compileable(self):
        return True

    def dequantize(self, model, dtype=None):
        """Each layer gets the dtype in which it computes, or the whole model gets the one given. The config's is
        neither: the model may have been cast, and save_pretrained leaves a string there."""
        for path, module in list(model.named_modules()):
            if isinstance(module, QuantizedLinear):
                weight = module.weight
                linear = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta", dtype=weight.dtype)
                linear.weight, linear.bias = torch.nn.Parameter(weight, requires_grad=False), module.bias
                model.set_submodule(path, linear)
        self.remove_quantization_config(model)
        return model if dtype is None else model.to(dtype)


def _shapes(files):
    """{name of a tensor: an empty one of its shape and dtype} of the layers in checkpoint files."""
    from safetensors import safe_open

    found = {}
    for path in files or ():
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if name.rpartition(".")[2] in FORMATS["adze"].names:
                    part = file.get_slice(name)
                    dtype = part.get_dtype()
                    if dtype not in _DTYPES:
                        raise ValueError(f"AdzeConfig: {name} is {dtype} in the checkpoint: {', '.join(_DTYPES)}")
                    found[name] = torch.empty(part.get_shape(), dtype=_DTYPES[dtype], device="meta")
    return found


_DTYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I64": torch.int64,
}


def is_theirs(model):
    return isinstance(model, PreTrainedModel)


def renamed(model, names):
    """{name of a tensor in a checkpoint: its name in the model}. transformers has given modules other names since
    their checkpoints were published, and saves them under the names that they had."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # a version without other names
        return {name: name for name in names}
    changes = [change for change in get_model_conversion_mapping(model) if isinstance(change, WeightRenaming)]
    found = {}
    for name in sorted(names):  # some changes begin with a name that comes first
        found[name] = name
        for change in changes:
            found[name] = change.rename_source_key(found[name])[0]
    return found


def _make_room(model, files, config):
    """Replaces the Linears that a checkpoint of adze has quantised by layers without data."""
    stored = _shapes(files)
    shapes = {own: stored[name] for name, own in renamed(model, stored).items()}
    prefix = f"{model.base_model_prefix}."  # a checkpoint of the base model, or one with a head
    of_base = any(name.startswith(prefix) for name in shapes)
    for name in shapes:
        path = name.rpartition(".")[0]
        if (
            f"{path}.weight_q" not in shapes
            and _has(model, path)
            and matrix_of(model.get_submodule(path)) is not None
        ):
            raise ValueError(f"AdzeConfig: the checkpoint has {name} and no {path}.weight_q")
    for name in shapes:
        path, _, last = name.rpartition(".")
        if last != "weight_q":
            continue
        at = next((p for p in (path, path.removeprefix(prefix), prefix + path) if _has(model, p)), None)
        if at is None and of_base and not path.startswith(prefix):
            continue  # of a head that this model does not have
        if at is None:
            raise ValueError(f"AdzeConfig: the checkpoint has {name}, the model has no {path}")
        module = model.get_submodule(at)
        weight = Weight(*(shapes.get(f"{path}.{part}") for part in FORMATS["adze"].names))
        why = unfit(module) or misfit(weight, *matrix_of(module).shape)
        if why:
            raise ValueError(f"AdzeConfig: {at} {why}")
        activations = config.kind in ACTIVATIONS or not {path, at}.isdisjoint(config.activations)
        made = QuantizedLinear(weight, matrix_of(module).shape[1], module.bias, module.weight.dtype, activations)
        model.set_submodule(at, made)
    if not shapes:
        raise ValueError("AdzeConfig: the checkpoint has no layer that adze has quantised")


def _has(model, path):
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _config_of(layers):
    """How to load QuantizedLinears: {path: layer}."""
    kinds = {layer.kind for layer in layers.values()}
    if len(kinds) == 1 and kinds <= set(KINDS):
        return {"kind": kinds.pop(), "activations": []}
    return {"kind": None, "activations": [path for path, layer in layers.items() if layer.activations]}


def mark(models):
    """Gives models a config that says how they are to be loaded, if they are quantised by adze; else removes it."""
    for model in models:
        if not is_theirs(model):
            continue
        layers = {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}
        quantizer = getattr(model, "hf_quantizer", None)
        ours = isinstance(quantizer, AdzeQuantizer)
        if layers and ours:
            vars(quantizer.quantization_config).update(_config_of(layers))
        elif layers and quantizer is None:
            config = AdzeConfig(**_config_of(layers))
            model.hf_quantizer = AdzeQuantizer(config, pre_quantized=True)
            model.config.quantization_config = config
        elif ours and not layers:
            quantizer.remove_quantization_config(model)
