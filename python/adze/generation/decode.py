"""adze.generate: tokens of a causal language model, one after the other.

A batch is kept with each sequence at the beginning of its row, whatever side it was padded on, and the cache knows
the length of each: no mask is made. What a step reads and writes (the token, the lengths, the cache) is on the
device, so one captured graph serves every step, and the next step starts before the host has seen the token. Parts of
prompts whose size comes again are graphs too."""

import ctypes
import inspect
import math
import operator
import weakref

import torch
from transformers import PreTrainedModel

from ..graphs.cuda_graph import graph
from ..operators import ops
from . import in_torch
from .cache import Cache, keeps_latents, windows_of
from .register import attention_of

_LISTS = (list, tuple)
_MOST = torch.finfo(torch.float32).max
_COLDEST = 1e-30  # a temperature below it would make infinities of scores: the likeliest token alone, as at 0
_LEAST = 16  # tokens: the smallest size to which the last part of a prompt is rounded up


# ---- What is asked for ----


def _whole(name, number):
    try:
        return operator.index(number)
    except TypeError:
        raise ValueError(f"adze.generate: {name} is {number!r}, it must be a whole number") from None


def _list(x):
    """A list of what a tensor, an array or a list has."""
    return x.tolist() if hasattr(x, "tolist") else x


def _sequences(ids, mask):
    """The prompts as lists of token ids, and whether there is only one, not in a batch."""
    dims = len(ids.shape) if hasattr(ids, "shape") else None
    if dims not in (None, 1, 2):
        raise ValueError(f"adze.generate: ids has {dims} dimensions, it must have 1 or 2")
    rows = _list(ids)
    if not isinstance(rows, _LISTS):
        raise ValueError(
            f"adze.generate: ids is a {type(ids).__name__}, it must be a list, a list of lists or a tensor; of a "
            'tokenizer\'s result, pass its "input_ids" and its "attention_mask"'
        )
    rows = [_list(row) for row in rows]
    single = not (rows and isinstance(rows[0], _LISTS))
    rows = [rows] if single else rows
    if not all(isinstance(row, _LISTS) for row in rows):
        raise ValueError("adze.generate: ids has tokens beside lists of tokens")
    rows = [[_whole("a token of ids", token) for token in row] for row in rows]
    if mask is not None:
        given, mask = mask, _list(mask)
        if not isinstance(mask, _LISTS):
            raise ValueError(f"adze.generate: attention_mask is a {type(given).__name__}, it must be like ids")
        mask = [mask] if mask and not isinstance(_list(mask[0]), _LISTS) else [_list(row) for row in mask]
        if not all(isinstance(row, _LISTS) for row in mask):
            raise ValueError("adze.generate: attention_mask has numbers beside lists of numbers")
        sizes, own = [len(row) for row in mask], [len(row) for row in rows]
        if sizes != own:
            raise ValueError(f"adze.generate: attention_mask has rows of {sizes} tokens, ids has {own}")
        rows = [
            [token for token, there in zip(row, own, strict=True) if there]
            for row, own in zip(rows, mask, strict=True)
        ]
    if not rows or not all(rows):
        raise ValueError("adze.generate: ids has a sequence without tokens")
    return rows, single


def _stop_tokens(model, stop):
    if stop is None:
        stop = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if stop is None:
        return frozenset()
    stop = _list(stop)
    stop = stop if isinstance(stop, (*_LISTS, set, frozenset)) else [stop]
    return frozenset(_whole("a token of stop", token) for token in stop)


def _number(name, number, most=None):
    """A number of 0 to `most`, or finite, as the float32 that the op has."""
    try:
        found = float(number)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if most is None or 0 <= found <= most:
        found = ctypes.c_float(found).value
    if not 0 <= found <= (_MOST if most is None else most):
        limits = "0 or more, and finite in float32" if most is None else f"0 to {most}"
        raise ValueError(f"adze.generate: {name} is {number!r}, it must be {limits}")
    return found


def _options(temperature, top_k, top_p, min_p, penalty):
    """What _pick() takes, as numbers."""
    found = {
        "temperature": _number("temperature", temperature),
        "top_k": _whole("top_k", top_k),
        "top_p": _number("top_p", top_p, 1),
        "min_p": _number("min_p", min_p, 1),
        "penalty": _number("repetition_penalty", penalty),
    }
    if found["top_k"] < 0:
        raise ValueError(f"adze.generate: top_k is {top_k}, it must be 0 or more")
    if not found["penalty"]:
        raise ValueError(f"adze.generate: repetition_penalty is {penalty}, it must be more than 0")
    found["top_k"] = min(found["top_k"], 2**31 - 1)
    # As in transformers, top_p of 0 is the likeliest token alone; the op has all of them then.
    if not found["top_p"] or found["temperature"] < _COLDEST:
        found["temperature"] = 0.0
    return found


def _own(model):
    """The model of transformers in what peft or torch.compile has put around it."""
    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None or not hasattr(model, "get_input_embeddings"):
        raise ValueError(
            f"adze.generate: model is a {type(model).__name__}, it must be a language model of transformers"
        )
    peft = getattr(model, "active_peft_config", None)
    if getattr(peft, "is_prompt_learning", False):
        kind = peft.peft_type.value
        raise ValueError(f"adze.generate: model has virtual tokens of peft ({kind}); use its own generate()")
    return found


def _check(model, cache, rows, new, chunk):
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"adze.generate: a {config.model_type} has an encoder, it must be a decoder alone")
    if not _has_interface(model) and (config.model_type != "falcon" or config.alibi):
        raise ValueError(
            f"adze.generate: the attention of a {config.model_type} cannot be chosen; use its generate()"
        )
    if keeps_latents(cache.config):
        raise ValueError(f"adze.generate: a {config.model_type} keeps latents in its cache; use its own generate()")
    if getattr(cache.config, "cross_attention_layers", None):
        raise ValueError(f"adze.generate: a {config.model_type} has layers for images; use its own generate()")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"adze.generate: a {config.model_type} takes no position_ids; use its own generate()")
    windows = [layer.window for layer in cache.layers]
    if windows != windows_of(config):
        raise ValueError(
            f"adze.generate: the cache is for a {cache.config.model_type} of {len(windows)} layers, the model is a "
            f"{config.model_type} of {config.get_text_config(decoder=True).num_hidden_layers} or has other windows"
        )
    if new < 1 or chunk < 1:
        raise ValueError(f"adze.generate: max_new_tokens is {new} and chunk {chunk}, both must be 1 or more")
    most = model.get_input_embeddings().weight.shape[0]
    wrong = next((token for row in rows for token in row if not 0 <= token < most), None)
    if wrong is not None:  # on a GPU it would stop the process's context
        raise ValueError(f"adze.generate: ids has {wrong}, the model has tokens 0 to {most - 1}")
    before = cache.numbers()
    if before is not None and len(before) != len(rows):
        raise ValueError(f"adze.generate: ids has {len(rows)} sequences, the cache has {len(before)}")


def _check_positions(model, last):
    """Whether a model that has an embedding for each position has one for `last` tokens."""
    text = model.config.get_text_config(decoder=True)
    most, tokens = getattr(text, "max_position_embeddings", None), model.get_input_embeddings()
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if module is tokens or not isinstance(module, torch.nn.Embedding) or not ("pos" in name or name == "wpe"):
            continue
        if module.num_embeddings in (most, (most or 0) + 2) and last > most:  # OPT has two more
            raise ValueError(
                f"adze.generate: the text has {last} tokens at last, a {text.model_type} has positions for {most}"
            )


def _ropes(config):
    """What a config says of its rope, of each kind of layers, where the frequencies depend on a text's length."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in (found, *found.values()) if isinstance(part, dict)]
    return [part for part in parts if part.get("rope_type", part.get("type")) in ("dynamic", "longrope")]


def _check_ropes(config, ropes, first, last):
    """Of longrope, whether the keys of `first` tokens are those of a text of `last` tokens."""
    for part in ropes:
        limit = part.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", 0)
        if part.get("rope_type", part.get("type")) == "longrope" and first <= limit < last:
            raise ValueError(
                f"adze.generate: the rope of a {config.model_type} has other frequencies from {limit + 1} tokens on, "
                f"and the text has {first} tokens at first and {last} at last; use its own generate(), or a longer "
                "prompt, or fewer new tokens"
            )


def _device(model):
    """Where a model takes tokens; accelerate's hook knows it when it keeps the weights elsewhere."""
    embeddings = model.get_input_embeddings()
    where = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    device = embeddings.weight.device if where is None else torch.device(where)
    if device.type == "meta":
        raise ValueError("adze.generate: the model is on the meta device, it has no values: load the weights first")
    return device


def _has_interface(model):
    return type(model)._can_set_attn_implementation()


# ---- A forward pass ----


def _added_mask(dtype, lengths, m, n):
    """For a model that does not ask for its attention by name: what may be seen, as a mask that is added."""
    seen = in_torch.seen(lengths + m, m, n, 0)
    return torch.zeros((), dtype=dtype, device=seen.device).where(seen, torch.finfo(dtype).min)


def _forward(model, cache):
    """A function logits(ids, lengths, keep, after, last): ids, [batch, m], go to the slots from lengths on. The
    logits are those of the tokens `keep`. after: lengths + m, where the caller has it. last: the position of each
    sequence's last token; the model may have no position for what comes after it, which nothing sees."""
    by_name, held = _has_interface(_own(model)), weakref.ref(cache)
    configs = [module.config for module in model.modules() if by_name and hasattr(module, "config")]
    configs = list({id(config): config for config in configs}.values())

    def logits(ids, lengths, keep, after=None, last=None):
        m, cache = ids.shape[1], held()
        positions = lengths[:, None].long()
        if m > 1:
            positions = positions + torch.arange(m, device=ids.device)
        if last is not None:
            positions = positions.minimum(last[:, None])
        mask = None if by_name else _added_mask(model.dtype, lengths, m, cache.capacity)
        with torch.no_grad(), cache.at(lengths, after=after, in_place=by_name), attention_of(configs):
            made = model(
                input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True,
                logits_to_keep=keep,
            )  # fmt: skip
        if made.past_key_values is not cache:  # BLT puts it beside another one, which the next call must have too
            theirs = type(made.past_key_values).__name__
            raise ValueError(
                f"adze.generate: a {type(model).__name__} returns a {theirs} in place of the cache that it was "
                "given; use its own generate()"
            )
        if not hasattr(made, "logits"):
            raise ValueError(f"adze.generate: a {type(model).__name__} has no logits: load it with its head")
        return made.logits

    return logits


def _pick(logits, lengths, seed, previous, out, temperature, top_k, top_p, min_p, penalty):
    """A token for each sequence into out, int64. The random number is that of the seed and of the token's place."""
    count = None if previous is None else lengths
    if in_torch.has_kernel("sample", logits.device):
        ops.sample(
            logits, temperature=temperature, seed=seed, counter=lengths, top_k=top_k, top_p=top_p, min_p=min_p,
            penalty=penalty, previous=previous, previous_count=count, dtype=torch.int64, out=out,
        )  # fmt: skip
    else:
        out.copy_(in_torch.sample(logits, temperature, seed, lengths, top_k, top_p, min_p, penalty, previous, count))


def _state(lengths):
    """What a step takes and returns, in one tensor, so that one copy takes it from a step to the next: a token of
    each sequence, int64, and how many it has in the cache, int32."""
    batch = lengths.shape[0]
    state = torch.zeros(batch + (batch + 1) // 2, dtype=torch.int64, device=lengths.device)
    _parts(state)[1].copy_(lengths)
    return state


def _parts(state):
    """The tokens and the lengths of a state, which are views of it: it has batch + ceil(batch / 2) words."""
    batch = state.shape[0] * 2 // 3
    return state[:batch], state[batch:].view(torch.int32)[:batch]


class _Step(torch.nn.Module):
    """One token of each sequence. It returns the state with the next one, and keeps nothing but what it writes into
    the cache and into `previous`, at a place that lengths names: to repeat it changes nothing, as a capture does."""

    lends = True  # adze.graph returns its own buffer, which the next step writes

    def __init__(self, model, cache, previous, seed):
        super().__init__()
        self.model, self.apart = model, weakref.ref(cache)  # adze.graph compares all attributes but the cache's
        self.logits = _forward(model, cache)
        self.register_buffer("previous", previous, persistent=False)
        with torch.inference_mode(False):  # a later call may write into it in another mode
            self.register_buffer("seed", seed.clone(), persistent=False)

    def forward(self, state, **options):
        following = torch.empty_like(state)
        (ids, lengths), (token, after) = _parts(state), _parts(following)
        torch.add(lengths, 1, out=after)
        logits = self.logits(ids[:, None], lengths, 1, after)[:, -1]
        if self.previous is not None:
            self.previous.scatter_(1, lengths[:, None].long(), ids[:, None])
        _pick(logits, after, self.seed, self.previous, token, **options)
        return following


class _Prompt(torch.nn.Module):
    """A part of each prompt. To repeat it changes nothing either."""

    def __init__(self, model, cache):
        super().__init__()
        self.model, self.apart = model, weakref.ref(cache)
        self.logits = _forward(model, cache)

    def forward(self, ids, lengths, keep, last):
        return self.logits(ids, lengths, keep, last=last)


_runners = weakref.WeakKeyDictionary()  # of a cache, {what a module depends on: what runs it}
_parts_run = weakref.WeakKeyDictionary()  # of a cache, the parts of prompts that have run


def _graphs(device):
    """Whether modules run as CUDA graphs on this device."""
    return device.type == "cuda"


def _runner(model, cache, device, kind, make):
    """What runs the module that make() returns, as a graph on a GPU: one for each kind, model and cache memory."""
    key = kind, id(model), *(layer.keys.data_ptr() for layer in cache.layers)
    known = _runners.setdefault(cache, {})
    if key not in known:
        known[key] = graph(make()) if _graphs(device) else make()
    return known[key]


def _step(model, cache, previous, seed, device):
    """What runs a step."""
    found = _runner(model, cache, device, previous is not None, lambda: _Step(model, cache, previous, seed))
    found.seed.copy_(seed)
    if previous is not None:
        found.previous.copy_(previous)
    return found


def _sizes(count, chunk, room):
    """The parts in which `count` tokens go through the model. The last one is rounded up, so that few graphs serve
    all prompts, where there are `room` slots for that."""
    whole, rest = divmod(count, chunk)
    rounded = min(max(1 << (rest - 1).bit_length(), _LEAST), chunk) if rest else 0
    return [chunk] * whole + [rounded if whole * chunk + rounded <= room else rest] * (rest > 0)


class _OnHost:
    """Tokens on their way to the host; the copy does not wait for the step that follows."""

    def __init__(self, state):
        tokens, _ = _parts(state)
        if tokens.device.type != "cuda":
            self.tokens, self.event = tokens.clone(), None
            return
        self.tokens, self.event = torch.empty_like(tokens, device="cpu", pin_memory=True), torch.cuda.Event()
        self.tokens.copy_(tokens, non_blocking=True)
        self.stream = torch.cuda.current_stream(tokens.device)
        self.event.record(self.stream)

    def before_a_step(self):
        """A step writes where the one before it left its tokens. On another stream it waits for their copy."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.stream.device)
            if stream != self.stream:
                stream.wait_event(self.event)

    def wait(self):
        if self.event is not None:
            self.event.synchronize()
        return self.tokens.tolist()


# ---- The loop ----


class _Batch:
    """The sequences, where they are in the cache, and which have ended."""

    def __init__(self, model, cache, rows, device):
        self.model, self.cache, self.device = model, cache, device
        self.rows, self.held = rows, cache.numbers()
        self.begin = self.held or [0] * len(rows)
        self.made = [0] * len(rows)  # tokens that were handed out
        self.ended = [False] * len(rows)

    def prompt(self, chunk):
        """Runs the prompts, and returns the logits of the last token of each. A row that is shorter than others goes
        on with tokens that nothing sees: later ones are written over them."""
        longest, rounded = max(map(len, self.rows)), _graphs(self.device) and not self.cache.page
        sizes = _sizes(longest, chunk, self.cache.capacity - max(self.begin) if rounded else longest)
        ids = torch.zeros(len(self.rows), sum(sizes), dtype=torch.int64)
        for row, tokens in enumerate(self.rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        ids, start, last_places = ids.to(self.device), self._tensor(self.begin), self.lengths() - 1
        self.cache.reserve(max(self.begin) + longest)
        last, at, part = [None] * len(self.rows), 0, _Prompt(self.model, self.cache)
        known, ran = _parts_run.setdefault(self.cache, set()), set()
        for size in sizes:
            ends = {row: len(tokens) - 1 - at for row, tokens in enumerate(self.rows)}
            ends = {row: end for row, end in ends.items() if 0 <= end < size}
            keep = sorted(set(ends.values())) or [size - 1]
            wanted = torch.tensor(keep, device=self.device)
            # A graph is captured for a size that an earlier prompt of this cache had.
            this = id(self.model), size, len(keep)
            ran.add(this)
            run = _runner(self.model, self.cache, self.device, _Prompt, lambda: part) if this in known else part
            logits = run(ids[:, at : at + size], start + at, wanted, last_places)
            for row, end in ends.items():
                last[row] = logits[row, keep.index(end)]
            at += size
        known |= ran
        return torch.stack(last), ids

    def _tensor(self, numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def lengths(self):
        return self._tensor([begin + len(row) for begin, row in zip(self.begin, self.rows, strict=True)])

    def take(self, tokens, stop):
        """Tokens as they are handed out: None for a sequence that has ended. A stop token is its last one."""
        given = [None if ended else token for ended, token in zip(self.ended, tokens, strict=True)]
        for row, token in enumerate(given):
            self.made[row] += token is not None
            self.ended[row] |= token in stop
        return given

    def settle(self):
        """The cache then has the prompt and the tokens that were handed out but the last, as transformers' has. It is
        so before each token is handed out: a caller may stop there, and use the cache for something else."""
        parts = zip(self.begin, self.rows, self.made, strict=True)
        self.cache.set_lengths([begin + len(row) + made - 1 for begin, row, made in parts])
        self.held = self.cache.numbers()

    def check(self):
        """Raises where the cache was used or changed since this call last did."""
        if self.cache.numbers() is not self.held:
            raise RuntimeError(
                "adze.generate: the cache has changed since the last token, by another call or by its methods; a "
                "call must have its cache alone until its last token"
            )


def _previous(batch, ids):
    """The ids at each slot of the cache; -1, which no logit has, where they are not known."""
    with torch.inference_mode(False):  # a later call may write into it in another mode
        found = torch.full((len(batch.rows), batch.cache.capacity), -1, dtype=torch.int64, device=batch.device)
    for row, begin in enumerate(batch.begin):
        found[row, begin : begin + len(batch.rows[row])] = ids[row, : len(batch.rows[row])]
    return found


def _tokens(batch, new, stop, seed, chunk, options, single):
    batch.check()
    with torch.no_grad():
        logits, ids = batch.prompt(chunk)
        previous = None if options["penalty"] == 1 else _previous(batch, ids)
        state = _state(batch.lengths())
        token, lengths = _parts(state)
        _pick(logits, lengths, seed, previous, token, **options)
    step = _step(batch.model, batch.cache, previous, seed, batch.device)
    most = max(begin + len(row) for begin, row in zip(batch.begin, batch.rows, strict=True))
    arriving = _OnHost(state)
    for made in range(1, new + 1):
        if made < new:
            batch.cache.reserve(most + made)
            arriving.before_a_step()
            with torch.no_grad():
                state = step(state, **options)
            following = _OnHost(state)
        given = batch.take(arriving.wait(), stop)
        batch.settle()
        yield given[0] if single else given
        if made == new or all(batch.ended):
            return
        batch.check()
        arriving = following


def generate(
    model, ids, max_new_tokens, *, attention_mask=None, stop=None, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0,
    repetition_penalty=1.0, seed=0, cache=None, chunk=512,
):  # fmt: skip
    """A generator of up to max_new_tokens tokens: of ints for one prompt, of lists for a batch, with None for a
    sequence that has ended.

    model: a causal language model of transformers. It runs with attention "adze", whichever it has itself.
    ids: a list or a tensor of one or two dimensions. Prompts of a batch may have different lengths, as lists, or with
      an attention_mask, padded on any side.
    stop: token ids that end a sequence; None for those of the model's generation_config, () for none. They are looked
      at while the next step runs, and what that step makes is dropped.
    temperature: 0 takes the likeliest token. Else a token is drawn, after top_k, top_p and min_p, by `seed`.
    cache: an adze.Cache, which may have earlier tokens of the same sequences; None makes one.
    chunk: how many tokens of a prompt go through the model at once; all of them, where the frequencies of its rope
      depend on the length ("dynamic", "longrope")."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"adze.generate: model is a {type(model).__name__}, it must be a language model")
    own = _own(model)
    rows, single = _sequences(ids, attention_mask)
    max_new_tokens, chunk = _whole("max_new_tokens", max_new_tokens), _whole("chunk", chunk)
    seed, stop = _whole("seed", seed), _stop_tokens(model, stop)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"adze.generate: seed is {seed}, it must fit in 64 bits")
    options = _options(temperature, top_k, top_p, min_p, repetition_penalty)
    if not isinstance(cache, Cache | None):
        raise ValueError(f"adze.generate: cache is a {type(cache).__name__}, it must be an adze.Cache")
    if cache is None:
        cache = Cache(own, max(map(len, rows)) + max(max_new_tokens, 1))
    _check(own, cache, rows, max_new_tokens, chunk)
    device = _device(model)
    batch = _Batch(model, cache, rows, device)
    longest = max(begin + len(row) for begin, row in zip(batch.begin, rows, strict=True))
    if longest + max_new_tokens - 1 > cache.capacity:
        raise ValueError(
            f"adze.generate: a prompt of {longest} tokens and {max_new_tokens} new ones do not fit into the cache, "
            f"whose capacity is {cache.capacity}"
        )
    before, most = max(batch.begin), max(map(len, rows))
    if before + most > cache.capacity:  # all rows are appended together, each after what it has
        raise ValueError(
            f"adze.generate: {most} more tokens do not fit into the cache after the {before} that one of its "
            f"sequences has; its capacity is {cache.capacity}"
        )
    _check_positions(own, longest + max_new_tokens - 1)
    ropes = _ropes(cache.config)
    if ropes:
        _check_ropes(cache.config, ropes, before or longest, longest + max_new_tokens - 1)
        chunk = most  # the length is that of the last token of a call of the model
    seeds = torch.tensor([seed], dtype=torch.int64, device=device)
    return _tokens(batch, max_new_tokens, stop, seeds, chunk, options, single)
