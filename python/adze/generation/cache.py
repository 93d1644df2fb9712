"""adze.Cache: keys and values of a model's layers, in memory that is allocated once.

Tokens are appended by kv_append at the slots from `lengths` on, a tensor on the device with the number of tokens of
each sequence. Attention "adze" reads the memory where it is, in pages or in fewer bits. Any other attention gets a
tensor of the model's dtype."""

import contextlib
import copy
import threading
import weakref

import torch
import transformers
from transformers.cache_utils import CacheLayerMixin

from ..operators import ops
from ..operators.fake import refuse_gradients
from . import in_torch
from .register import NAME, chosen

KINDS = {None: None, "i8": torch.int8, "f8e4m3": torch.float8_e4m3fn}
_SLIDING, _FULL = ("sliding_attention",), ("full_attention",)
_lengths = threading.local()


def lengths_decide():
    """Whether this thread runs a model in Cache.at(): no mask of later tokens and windows is needed then."""
    return getattr(_lengths, "decide", False)


def slots_seen():
    """The mask of padding that Cache.at() was given, or None."""
    return getattr(_lengths, "seen", None)


class Stored(torch.Tensor):
    """Stands for the keys or the values of a layer, which stay in the cache. Attention "adze" reads them there. For
    any other operator they become a tensor, unless only the lengths on the device say which of them are there."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, layer, which, shape):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=layer.dtype, device=layer.device)
        made.layer, made.which = layer, which  # 0 for keys, 1 for values
        return made

    def __repr__(self):
        return f"Stored({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        found, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        layers = [x.layer for x in found if isinstance(x, cls)]
        if lengths_decide() or any(layer.cache.page for layer in layers):
            raise RuntimeError(
                f'adze.Cache: this model calls {function} on keys that only attention "adze" can read; call '
                'model.set_attn_implementation("sdpa"), or take a cache of transformers; of adze.generate, take '
                "the model's own generate()"
            )
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda x: x.layer.read()[x.which], (args, kwargs or {}))
        return function(*args, **kwargs)


class _Layer(CacheLayerMixin):
    """The memory of one layer, and how many tokens it has seen."""

    is_compileable = False
    is_sliding = False  # a window hides keys, and none is dropped
    is_croppable = True

    def __init__(self, cache, window):
        super().__init__()
        self._cache = weakref.ref(cache)  # no cycle: memory is free as soon as nobody has the cache
        self.window, self.count, self.width = window, 0, 0
        self.k_scale = self.v_scale = self.after = None

    @property
    def cache(self):
        return self._cache()

    def __getstate__(self):
        """What is pickled and copied. pickle does not have every dtype of 8 bits that torch has, so it gets bytes."""
        state = {key: value for key, value in vars(self).items() if key != "_cache"}
        if self.is_initialized:
            state |= {name: in_torch.bits(state[name]) for name in ("keys", "values")}
        return state

    def __setstate__(self, state):
        vars(self).update(state)
        if self.is_initialized:
            self.keys, self.values = (x.view(self.stored) for x in (self.keys, self.values))

    def lazy_initialization(self, key_states, value_states):
        cache, (batch, heads, _, dim) = self.cache, key_states.shape
        self.dtype, self.device, self.batch_size = key_states.dtype, key_states.device, batch
        with torch.inference_mode(False):
            cache.start(batch, self.device)
            rows = (cache.pages, heads, cache.page) if cache.page else (batch, heads, cache.capacity)
            self.keys, self.values = cache.memory_of(self, (*rows, dim), (*rows, value_states.shape[-1]))
            if cache.kind:
                scales = (torch.zeros(rows, dtype=torch.float32, device=self.device) for _ in range(2))
                self.k_scale, self.v_scale = scales
        self.is_initialized = True

    def empty(self, shape):
        """Zeros: attention in torch multiplies what no key has been written to by 0."""
        self.stored = KINDS[self.cache.kind] or self.dtype
        if self.stored.itemsize == 1:
            return torch.zeros(shape, dtype=torch.uint8, device=self.device).view(self.stored)
        return torch.zeros(shape, dtype=self.stored, device=self.device)

    def tensors(self):
        return [x for x in (self.keys, self.values, self.k_scale, self.v_scale) if x is not None]

    def append(self, k, v, before, after, width, **turn):
        """Writes tokens after those of `before`, and is then read up to `width`, of which `after` are there. turn: q,
        q_out, and how kv_append, which must have a kernel, is to norm and rotate q and k."""
        refuse_gradients(k, v)
        if (k.dtype, k.device) != (self.dtype, self.device):
            raise ValueError(
                f"adze.Cache: a layer got keys of {k.dtype} on {k.device}, its memory is for {self.dtype} on "
                f"{self.device}: take a new adze.Cache"
            )
        if k.shape[0] != self.batch_size:
            raise ValueError(f"adze.Cache: the batch is {k.shape[0]}, this cache has {self.batch_size}")
        v = v.to(k.dtype)  # under autocast only what is rotated has another dtype
        self.after, self.width = after.to(self.device), width
        before, table = before.to(self.device), self._table()
        if in_torch.has_kernel("kv_append", self.device):
            scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
            k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
            ops.kv_append(k, v, self.keys, self.values, lengths=before, block_table=table, **scales, **turn)
        else:
            in_torch.append(k, self.keys, self.k_scale, before, table)
            in_torch.append(v, self.values, self.v_scale, before, table)

    def _table(self):
        return self.cache.table if self.cache.table is None else self.cache.table.to(self.device)

    def operands(self):
        """The memory as arguments of attention: k, v, and what else it needs."""
        more = {"lengths": self.after, "k_scale": self.k_scale, "v_scale": self.v_scale}
        if self.cache.page:
            table = self._table()[:, : self.width // self.cache.page]
            return self.keys, self.values, {**more, "block_table": table}
        if self.cache.kind:
            more |= {"k_scale": self.k_scale[:, :, : self.width], "v_scale": self.v_scale[:, :, : self.width]}
        return self.keys[:, :, : self.width], self.values[:, :, : self.width], more

    def _dense(self, x):
        if not self.cache.page:
            return x[:, :, : self.width]
        table = self._table()[:, : -(-self.width // self.cache.page)].long()
        found = in_torch.bits(x)[table].transpose(1, 2)  # [batch, heads, pages, page, ...]
        return found.flatten(2, 3)[:, :, : self.width].view(x.dtype)

    def read(self):
        """Keys and values in the model's dtype, as a tensor each."""
        if not self.cache.kind:
            return self._dense(self.keys), self._dense(self.values)
        pairs = (self.keys, self.k_scale), (self.values, self.v_scale)
        return tuple((self._dense(x).float() * self._dense(scale)[..., None]).to(self.dtype) for x, scale in pairs)

    def update(self, key_states, value_states, *args, **kwargs):
        return self.cache.update(key_states, value_states, self.cache.layers.index(self))

    def get_seq_length(self):
        return self.count

    def get_mask_sizes(self, query_length):
        self.cache.refuse_others(query_length)
        return self.cache.read_up_to(self.count + query_length), 0

    def get_max_length(self):
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in older versions


def _windows(config):
    """The window of each layer, 0 where it sees all tokens. Raises for layers that are no such attention."""
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if types is None:
        if getattr(config, "num_hidden_layers", None) is None:  # as of BLT, which is several models
            raise ValueError(f"adze.Cache: the config of a {config.model_type} does not say how many layers it has")
        types = [_SLIDING[0] if window else _FULL[0]] * config.num_hidden_layers
    other = [kind for kind in types if kind not in (*_SLIDING, *_FULL)]
    if other or getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"adze.Cache: a {config.model_type} has layers of {other[0] if other else 'shared keys'}, it must have "
            f"layers of {_FULL[0]} and {_SLIDING[0]} only"
        )
    return [window if kind in _SLIDING else 0 for kind in types]


def windows_of(config):
    """Those of a model that may have a cache, for comparison with those of a cache; None for another model."""
    try:
        return _windows(config.get_text_config(decoder=True))
    except ValueError:
        return None


def keeps_latents(config):
    """Whether a model makes its keys and values of what the cache returns, as DeepSeek's does: attention "adze" does
    not get the cache's memory then."""
    return bool(getattr(config, "kv_lora_rank", None))


class Cache(transformers.Cache):
    """Keys and values of up to `capacity` tokens of each sequence, for a model or its config.

    kind: None for the model's dtype, or "i8" or "f8e4m3", with a scale for each token and head.
    page: 0 for memory that is contiguous, or the tokens in a page. pages: how many there are, by default as many as
      all sequences need; a sequence takes them as it grows.

    It is past_key_values of generate(), of a model's forward, and cache of adze.generate. The batch is that of the
    first call. Layers with a sliding window keep all tokens."""

    def __init__(self, model, capacity, *, kind=None, page=0, pages=None):
        if kind not in KINDS:
            raise ValueError(f"adze.Cache: kind is {kind!r}, it must be None, 'i8' or 'f8e4m3'")
        numbers = capacity, page, 0 if pages is None else pages
        whole = all(hasattr(number, "__index__") for number in numbers)
        if not whole or capacity < 1 or page < 0 or (pages is not None and not page):
            raise ValueError(
                f"adze.Cache: capacity is {capacity!r}, page {page!r} and pages {pages!r}; capacity must be 1 or "
                "more, page 0 or more, and pages needs a page; all are whole numbers"
            )
        config = getattr(model, "config", model)
        if not hasattr(config, "get_text_config"):
            raise ValueError(f"adze.Cache: model is a {type(model).__name__}, it must be a model or its config")
        self.config = config.get_text_config(decoder=True)
        self.kind, self.page, self.pages = kind, page, pages
        self.capacity = capacity
        self.capacity = self.whole_pages(capacity)
        self.table = None  # of pages, [batch, pages of a sequence], int32
        self._lengths = self._numbers = None  # the lengths on the device and on the host, where they are known
        self.count = 0  # tokens that were appended to each sequence, or most to one
        self.ragged = False  # sequences have different lengths
        self.free, self.taken, self.reserved = [], 0, 0  # pages: numbers, how many each sequence has, slots it needs
        self._at = self._before = self._after = None
        self._in_place = False  # during at(): whether attention "adze" reads the memory
        super().__init__(layers=[_Layer(self, window) for window in _windows(self.config)])

    def __setstate__(self, state):
        vars(self).update(state)
        for layer in self.layers:
            if "_cache" not in vars(layer):  # of a deep copy or a pickle
                layer._cache = weakref.ref(self)

    def __copy__(self):
        raise TypeError("adze.Cache: a shallow copy would write into the same memory: use copy.deepcopy()")

    def __deepcopy__(self, memo):
        """A copy is for the same model, whose config says which attention it has."""
        made = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.config)] = self.config
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self):
        return vars(self).copy()

    def __repr__(self):
        shape = f"pages of {self.page}" if self.page else "contiguous"
        return f"adze.Cache({self.count} of {self.capacity} tokens, {shape}, {self.kind or 'dtype of the model'})"

    @property
    def lengths(self):
        """The number of tokens of each sequence, int32 on the device; None before the first call."""
        if self._lengths is None and self._numbers is not None:
            with torch.inference_mode(False):
                self._lengths = torch.tensor(self._numbers, dtype=torch.int32).to(self._device)
        return self._lengths

    @lengths.setter
    def lengths(self, lengths):
        self._lengths, self._numbers = lengths, None
        self._device = None if lengths is None else lengths.device

    def numbers(self):
        """The lengths as a list, which is another one after each change; None before the first call."""
        if self._numbers is None and self._lengths is not None:
            self._numbers = self._lengths.tolist()
        return self._numbers

    def set_lengths(self, lengths):
        """The number of tokens of each sequence: numbers of the host, which go to the device when asked for."""
        self._lengths, self._numbers = None, list(lengths)
        self.count, self.ragged = max(lengths), len(set(lengths)) > 1
        for layer in self.layers:
            layer.count = self.count

    def refuse_others(self, m):
        """Raises where a forward pass of m tokens, other than that of at(), cannot go on with this cache."""
        if self._at is not None:
            return
        if self.ragged:
            shortest, longest = min(self.numbers()), max(self.numbers())
            raise ValueError(
                f"adze.Cache: its sequences have {shortest} to {longest} tokens, which are "
                "different lengths; go on with adze.generate, or call reset()"
            )
        if m == 0:
            raise ValueError(
                f"adze.Cache: the input has no tokens after the {self.count} that the cache has; call reset() for "
                "another text"
            )

    def whole_pages(self, slots):
        return slots if not self.page else -(-slots // self.page) * self.page

    @property
    def is_read_in_place(self):
        if self._at is not None:
            in_place = self._in_place
        elif torch.compiler.is_compiling():
            in_place = self.config._attn_implementation == NAME
        else:
            in_place = chosen(self.config) == NAME
        return in_place and not keeps_latents(self.config)

    def read_up_to(self, slots):
        """How many keys attention gets: in place whole pages, and the lengths say what is in the last one."""
        return self.whole_pages(slots) if self.is_read_in_place else slots

    def memory_of(self, layer, keys, values):
        """Memory for the keys and the values of a layer, of these shapes."""
        return layer.empty(keys), layer.empty(values)

    def start(self, batch, device):
        """The batch and its lengths, with the first layer that is used."""
        if self.lengths is not None:
            if self.lengths.shape[0] != batch:
                raise ValueError(f"adze.Cache: the batch is {batch}, this cache has {self.lengths.shape[0]}")
            return
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        if self.page:
            most = self.capacity // self.page
            self.pages = batch * most if self.pages is None else self.pages
            self.free = list(range(self.pages))
            self.table = torch.zeros(batch, most, dtype=torch.int32, device=device)
            try:
                self._take_pages()
            except ValueError:
                self.lengths = self.table = None  # as before the call
                raise

    def reserve(self, slots):
        """Makes sure that each sequence has memory for so many tokens."""
        if slots > self.capacity:
            raise ValueError(f"adze.Cache: {slots} tokens were asked for, its capacity is {self.capacity}")
        self.reserved = max(self.reserved, slots)
        self._take_pages()

    def _take_pages(self):
        if self.table is None:
            return
        batch, due = self.table.shape[0], self.whole_pages(self.reserved) // self.page
        if (due - self.taken) * batch > len(self.free):
            slots, self.reserved = self.reserved, self.taken * self.page  # a call for fewer tokens may follow
            raise ValueError(
                f"adze.Cache: {slots} tokens of {batch} sequences need {due * batch} pages of {self.page}, "
                f"it has {self.pages}"
            )
        while self.taken < due:
            mine, self.free = self.free[:batch], self.free[batch:]
            self.table[:, self.taken] = torch.tensor(mine, dtype=torch.int32)
            self.taken += 1

    @contextlib.contextmanager
    def at(self, lengths, seen=None, after=None, in_place=True):
        """A forward pass whose tokens go to the slots from `lengths` on, int32 of each sequence. It leaves the
        cache's own lengths as they are, and can be captured in a graph: no number of the host is used. seen: the
        slots that are no padding, as a mask [batch, 1, 1, capacity]. after: the lengths with the tokens, or None.
        in_place: whether the model's attention is "adze", which reads the memory."""
        self._at, self._after, self._in_place = lengths, after, in_place
        _lengths.decide, _lengths.seen = True, seen
        try:
            yield
        finally:
            self._at = self._after = None
            _lengths.decide, _lengths.seen = False, None

    def _begin(self, layer, m):
        """Counts the tokens of a forward pass, once: its first layer does."""
        self.refuse_others(m)
        if layer.count == self.count:
            self.reserve(self.count + m)
            self._before, self._after = self.lengths, self.lengths + m
            self.lengths = self._after
            self.count += m
        elif layer.count + m != self.count:
            least = min(layer.count for layer in self.layers)
            raise RuntimeError(
                f"adze.Cache: a layer that has {layer.count} tokens got {m}, other layers have {self.count}; after a "
                f"call that failed, crop({least}) or reset()"
            )
        layer.count += m
        return self._before, self._after, self.read_up_to(layer.count)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return self._update(key_states, value_states, layer_idx)

    def can_turn(self, query):
        """Whether turn_and_update() takes such queries. A class with an update of its own must see keys as they are
        to be stored."""
        own = type(self).update is Cache.update and not torch.compiler.is_compiling()
        return own and in_torch.has_kernel("kv_append", query.device)

    def turn_and_update(self, query, key, value, layer_idx, **turn):
        """update() of keys that are not rotated yet, in one launch with their rotation and that of the queries. turn:
        cos, sin, and how kv_append is to rotate, and to norm before. Returns the queries in the layout that they
        have, and what update() returns."""
        turned = torch.empty_like(query)
        return turned, *self._update(key, value, layer_idx, q=query, q_out=turned, **turn)

    def _update(self, key_states, value_states, layer_idx, **turn):
        layer, m = self.layers[layer_idx], key_states.shape[2]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        if self._at is None:
            place = self._begin(layer, m)
        else:
            self._after = self._at + m if self._after is None else self._after
            place = self._at, self._after, self.capacity
        layer.append(key_states, value_states, *place, **turn)
        if not self.is_read_in_place:
            return layer.read()
        rows = (*key_states.shape[:2], layer.width)
        return tuple(Stored(layer, i, (*rows, x.shape[-1])) for i, x in enumerate((key_states, value_states)))

    def reset(self):
        """Empties the cache. The memory stays."""
        self.count, self.ragged, self.reserved = 0, False, 0
        if self.table is not None:
            self.free, self.taken = list(range(self.pages)), 0
        if self.lengths is not None:
            self.lengths = torch.zeros_like(self.lengths)
        for layer in self.layers:
            layer.count = 0

    def crop(self, tokens):
        """Forgets the last -tokens tokens of each sequence; a positive number is how many stay."""
        tokens = int(tokens)  # assisted generation of older versions has a tensor
        gone = -tokens if tokens <= 0 else max(self.count - tokens, 0)
        if gone > self.count:
            raise ValueError(f"adze.Cache: crop({tokens}) of {self.count} tokens")
        if self.ragged:
            self.set_lengths([min(n, tokens) if tokens > 0 else max(n - gone, 0) for n in self.numbers()])
            return
        if self.lengths is not None:
            self.lengths = self.lengths - gone
        self.count -= gone
        for layer in self.layers:
            layer.count = min(layer.count, self.count)

    def reorder_cache(self, beam_idx):
        """Sequence i gets the tokens of sequence beam_idx[i], by a copy."""
        if self.lengths is None:
            return
        self._select_lengths(beam_idx)
        for layer in filter(lambda layer: layer.is_initialized, self.layers):
            index = beam_idx.to(layer.device)
            for x in map(in_torch.bits, layer.tensors()):
                if self.page:
                    table = layer._table()[:, : self.taken].long()
                    x[table] = x[table[index]]
                else:
                    x[:, :, : self.count] = x[:, :, : self.count].index_select(0, index)

    def _select_lengths(self, index):
        if self.ragged:
            numbers = self.numbers()
            self.set_lengths([numbers[i] for i in index.tolist()])
        else:
            self.lengths = self.lengths.index_select(0, index.to(self.lengths.device))

    def _select(self, index):
        if self.page:
            raise NotImplementedError("adze.Cache: the batch of a cache in pages is that of its first call")
        if self.lengths is None:
            return
        self._select_lengths(index)
        for layer in filter(lambda layer: layer.is_initialized, self.layers):
            layer.batch_size = len(index)
            for name in ("keys", "values", "k_scale", "v_scale"):
                x = getattr(layer, name)
                if x is not None:
                    setattr(layer, name, in_torch.bits(x).index_select(0, index.to(x.device)).view(x.dtype))

    def batch_repeat_interleave(self, repeats):
        if self.lengths is not None:
            self._select(torch.arange(len(self.lengths), device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices):
        if self.lengths is not None:
            self._select(torch.arange(len(self.lengths), device="cpu")[indices.cpu()])
