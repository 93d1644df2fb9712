"""transformers' generate() of a patched model: a cache of adze's, and a graph that is replayed for each token.

A plain call gets a GrowingCache in place of transformers' DynamicCache. The prompt runs as before. A step of one
token is captured once for the memory of a cache, by adze.graph. That memory is lent: when nobody has the cache any
more, the next call gets the memory, and with it the graph. Every call that is not a plain one runs the model."""

import contextlib
import functools
import inspect
import sys
import threading
import weakref

import torch
from torch.nn.modules import module as _every_module
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..graphs.cuda_graph import GraphHandle
from ..patching.forwards import is_adze
from . import decode, in_torch
from .cache import Cache, keeps_latents
from .register import NAME

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_THEIRS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")  # a step relies on what they do
_OPTIONS = ("cache_implementation", "prefill_chunk_size", "compile_config", "disable_compile", "is_assistant",
            "output_attentions", "output_hidden_states")  # fmt: skip
_TAKEN = {"input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache", "logits_to_keep",
          "return_dict"}  # fmt: skip
_PROMPT = _TAKEN | {"inputs_embeds"}  # of the prompt alone
_INACTIVE = "transformers.utils.output_capturing"  # its hooks do nothing unless outputs are asked for
_GRAPHS = 8  # of a memory, before all are dropped
_WINDOWS = 8192  # tokens: up to here layers with a window may keep what is before it, as an adze.Cache does
_MORE = 1024  # tokens after the prompt, at least, for which there is memory at first
_WASTE = 4  # memory of more times the tokens that a call begins with, and of more than its most, is not lent to it


# ---- Which models ----


def _hooked(module):
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", None) != _INACTIVE for hook in hooks)


def _strange(module):
    """Why a module's call must not be replayed, or None."""
    own, name = module.__dict__, type(module).__name__
    if _hooked(module) or "_hf_hook" in own:
        return f"a {name} has a hook"
    if "forward" in own and not is_adze(own["forward"]):
        return f"a {name} has a forward of its own"
    if own.get("_compiled_call_impl") is not None:
        return f"a {name} is compiled"
    return None


def _device(modules):
    """Where all weights of some modules are; None if they are at several places, or of another class."""
    devices = set()
    for module in modules:
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None:
                devices.add(x.device if type(x) in (torch.Tensor, torch.nn.Parameter) else None)
    return devices.pop() if len(devices) == 1 else None


def _other_steps(model):
    """The method of a model that is not the one that a step relies on, or None."""
    for name in _THEIRS:
        if name in model.__dict__ or getattr(type(model), name) is not getattr(GenerationMixin, name):
            return name
    return None


def refusal(model):
    """Why generate() of this model replays no graph now, or None."""
    config = model.config
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        return "it is not a decoder alone"
    if config._attn_implementation != NAME:
        return f'its attention is "{config._attn_implementation}"'
    if config.output_attentions or config.output_hidden_states:
        return "its config asks for attentions or hidden states"
    if model.training:
        return "it is in training mode"
    modules = list(model.modules())
    device = _device(modules)
    if device is None or not decode._graphs(device) or not in_torch.has_kernel("kv_append", device):
        return "its weights are not plain tensors on one GPU"
    if (other := _other_steps(model)) is not None:
        return f"it has its own {other}"
    if _every_module._global_forward_hooks or _every_module._global_forward_pre_hooks:
        return "there are hooks for all modules"
    strange = next(filter(None, map(_strange, modules)), None)
    if strange is not None:
        return strange
    try:
        Cache(model, 1)
    except ValueError as error:
        return str(error)
    return "its cache keeps latents" if keeps_latents(config) else None


# ---- Memory, and who has it ----


class _Memory:
    """Keys and values of each layer, and which slots are no padding. A graph has their addresses."""

    def __init__(self, capacity, place):
        self.capacity, self.place = capacity, place
        self.tensors, self.seen, self.cache, self.changes = {}, None, None, 0

    def of(self, index, layer, keys, values):
        """The memory of a layer, made where there is none of these shapes."""
        found = self.tensors.get(index)
        wanted = (keys, values, layer.dtype, layer.device)
        if found is None or wanted != (*(tuple(x.shape) for x in found), found[0].dtype, found[0].device):
            self.put(index, (layer.empty(keys), layer.empty(values)))
        return self.tensors[index]

    def put(self, index, tensors):
        self.tensors[index] = tensors
        self.changes += 1

    def see(self, mask):
        """Records the padding of a prompt, by its mask [batch, tokens]; what follows is none."""
        shape = (mask.shape[0], 1, 1, self.capacity)
        with torch.inference_mode(False):
            if self.seen is None or self.seen.shape != shape:
                self.seen = torch.ones(shape, dtype=torch.bool, device=mask.device)
                self.changes += 1
            self.seen.fill_(True)[:, 0, 0, : mask.shape[1]] = mask.bool()

    def grow(self, capacity):
        self.capacity = capacity
        if self.seen is not None:
            with torch.inference_mode(False):
                self.seen = torch.nn.functional.pad(self.seen, (0, capacity - self.seen.shape[-1]), value=True)

    def is_held(self):
        """Whether somebody has a tensor of it, or a view of one, though nobody has the cache any more."""
        for pair in self.tensors.values():
            for x in pair:
                # `pair`, `x` and the argument are three; the tensor and the storage that is asked are two.
                if sys.getrefcount(x) > 3 or torch._C._storage_Use_Count(x.untyped_storage()._cdata) > 2:
                    return True
        return False

    def clear(self):
        """As if it were new: attention in torch multiplies what no key has been written to by 0."""
        if self.tensors:
            torch._foreach_zero_([x for pair in self.tensors.values() for x in pair])


class GrowingCache(Cache):
    """What a plain call of generate() gets: an adze.Cache whose memory grows when it is full."""

    def __init__(self, model, memory, most):
        super().__init__(model, memory.capacity)
        self.memory, self.most = memory, most
        self.padded, self.replayed = False, True

    def __getstate__(self):
        """A copy has no graph."""
        return super().__getstate__() | {"memory": None, "replayed": False}

    def memory_of(self, layer, keys, values):
        if self.memory is None:
            return super().memory_of(layer, keys, values)
        return self.memory.of(self.layers.index(layer), layer, keys, values)

    def reserve(self, slots):
        if slots > self.capacity:
            self._grow(max(slots, min(2 * self.capacity, self.most)))
        super().reserve(slots)

    def _grow(self, capacity):
        with torch.inference_mode(False):
            for index, layer in enumerate(self.layers):
                if not layer.is_initialized:
                    continue
                grown = []
                for x in (layer.keys, layer.values):
                    grown.append(layer.empty((*x.shape[:2], capacity, x.shape[3])))
                    grown[-1][:, :, : self.count] = x[:, :, : self.count]
                layer.keys, layer.values = grown
                if self.memory is not None:
                    self.memory.put(index, tuple(grown))
        self.capacity = capacity
        if self.memory is not None:
            self.memory.grow(capacity)

    def has_its_memory(self):
        """Whether the layers have the memory that was lent. A cache whose batch was changed has other memory."""
        pairs = self.memory.tensors
        return len(pairs) == len(self.layers) and all(pairs[i][0] is x.keys for i, x in enumerate(self.layers))

    def advance(self):
        """Counts a token that a graph has appended."""
        self.lengths = self.lengths + 1
        self.count += 1
        for layer in self.layers:
            layer.count += 1


# ---- A step ----


class _Step(torch.nn.Module):
    """The logits of one token of each sequence. To repeat it changes nothing, as in adze.generate."""

    random = False  # in a capture adze.graph leaves the random numbers to other threads

    def __init__(self, model, memory):
        super().__init__()
        held = weakref.ref(memory)
        self.model, self.apart = model, lambda: held().cache()  # adze.graph compares all attributes but the cache's

    def forward(self, lengths, padded, **inputs):
        cache = self.apart()
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            reason = refusal(self.model)
            if reason is not None:
                raise RuntimeError(reason)
        seen = cache.memory.seen if padded else None
        with torch.no_grad(), cache.at(lengths, seen):
            made = self.model(
                **inputs, attention_mask=None, past_key_values=cache, use_cache=True, return_dict=True
            )  # fmt: skip
        if {name for name, value in made.items() if value is not None} - {"logits", "past_key_values"}:
            raise RuntimeError(f"it returns a {type(made).__name__} with more than logits")
        return made.logits


class Lender:
    """The memory of a model that no cache has, and the graphs of its steps. One such memory is kept: the last."""

    def __init__(self):
        self.free, self.lock = None, threading.RLock()
        self.steps = weakref.WeakKeyDictionary()  # of a memory, (its changes, what runs a step)

    def lend(self, model, positions, most, mask):
        """A cache for a prompt with these positions, and at most so many tokens with those that follow."""
        device, prompt = positions.device, positions.shape[1]
        place = device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        needed = max(min(most, prompt + max(prompt, _MORE)), prompt, 1)
        with self.lock:
            memory, self.free = self.free, None
        fits = memory is not None and needed <= memory.capacity <= max(_WASTE * needed, most)
        if not fits or memory.place != place or memory.is_held():
            memory = _Memory(needed, place)
        memory.clear()
        cache = GrowingCache(model, memory, most)
        memory.cache = weakref.ref(cache)
        weakref.finalize(cache, _give_back, weakref.ref(self), memory).atexit = False
        if mask is not None and not bool(mask.all()):
            cache.padded = True
            memory.see(mask)
        return cache

    def _runner(self, model, memory):
        changes, runner = self.steps.get(memory, (None, None))
        if changes != memory.changes:
            runner = GraphHandle(_Step(model, memory), _GRAPHS, ahead=True)
            self.steps[memory] = memory.changes, runner
        return runner

    def step(self, model, *args, **kwargs):
        """What transformers calls for each token: the model's outputs, by a graph where there is one."""
        made = None if args else self._replayed(model, kwargs)
        return model(*args, **kwargs) if made is None else made

    def _replayed(self, model, kwargs):
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, GrowingCache) or not cache.replayed:
            return None
        inputs = _inputs(cache, kwargs)
        if inputs is None:
            return None
        cache.reserve(cache.count + 1)
        if cache.has_its_memory():
            runner, device = self._runner(model, cache.memory), cache.lengths.device
            inputs |= {"lengths": cache.lengths, "padded": cache.padded}
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                found = runner.replay(**inputs)
                if found is None and len(runner.captured) == _GRAPHS:  # most are of weights that have moved since
                    runner.reset()
                    found = runner.replay(**inputs)
            if found is not None:
                cache.advance()
                return CausalLMOutputWithPast(logits=found[0], past_key_values=cache)
        cache.replayed = False  # for the rest of the call, which would ask in vain for every token
        return None


def _give_back(lender, memory):
    lender = lender()
    if lender is not None:
        with lender.lock:
            lender.free = memory


def _given(kwargs):
    return {name: value for name, value in kwargs.items() if value is not None}


def _inputs(cache, kwargs):
    """The inputs of a step that a graph takes; None where the model must run."""
    given = _given(kwargs)
    ids, positions, mask = map(given.get, ("input_ids", "position_ids", "attention_mask"))
    if given.keys() - _TAKEN or not given.get("use_cache") or not given.get("return_dict") or cache.lengths is None:
        return None
    if torch.is_grad_enabled() or torch.is_autocast_enabled(cache.lengths.device.type):
        return None
    batch = cache.lengths.shape[0]
    if ids is None or positions is None or ids.shape != (batch, 1) or positions.shape not in ((batch, 1), (1, 1)):
        return None
    if mask is not None and mask.shape != (batch, cache.count + 1):
        return None
    keep = {"logits_to_keep": given["logits_to_keep"]} if "logits_to_keep" in given else {}
    return {"input_ids": ids, "position_ids": positions, **keep}


# ---- What generate() asks its model for ----


def _drops_tokens(config, most):
    """Whether transformers' cache would need much less memory, because layers with a window drop tokens."""
    window = getattr(config, "sliding_window", None)
    return bool(window) and most > max(_WASTE * window, _WINDOWS)


def prepare_cache(lender, model, own, args, kwargs):
    """_prepare_cache_for_generation of transformers, with a GrowingCache for a plain call."""
    given = inspect.signature(own).bind(model, *args, **kwargs).arguments
    asked, options, mode, most = map(
        given.get, ("model_kwargs", "generation_config", "generation_mode", "max_cache_length")
    )
    before = None if asked is None else asked.get("past_key_values")
    found = own(model, *args, **kwargs)
    if asked is None or before is not None or type(asked.get("past_key_values")) is not DynamicCache:
        return found
    if mode not in _MODES or not isinstance(most, int) or any(getattr(options, name, None) for name in _OPTIONS):
        return found
    mask, positions = asked.get("attention_mask"), asked.get("position_ids")
    if _given(asked).keys() - _PROMPT or _drops_tokens(model.config, most):
        return found
    if positions is None or positions.dim() != 2 or not (mask is None or mask.shape[1:] == positions.shape[1:]):
        return found
    if torch.is_grad_enabled() or torch.is_autocast_enabled(positions.device.type):
        return found
    if positions.device == model.device and refusal(model) is None:
        asked["past_key_values"] = lender.lend(model, positions, most, mask)
    return found


_asked = threading.local()


def will_replay(lender, model, model_kwargs):
    """Whether generate() is to take a step of adze's, which it then gets by get_compiled_call()."""
    cache = model_kwargs.get("past_key_values")
    own = isinstance(cache, GrowingCache) and cache.count == 0 and cache.memory is not None
    _asked.step = functools.partial(lender.step, model) if own else None
    return own


def step_of(model):
    """What runs a step of this model, where will_replay() was asked just before; else None."""
    step, _asked.step = getattr(_asked, "step", None), None
    return step if step is not None and step.args[0] is model else None
