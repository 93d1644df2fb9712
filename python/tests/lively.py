"""Tiny language models whose tokens depend on all tokens before, and prompts for them."""

import os

import pytest
import torch

import adze
import models
from adze.generation.attention import sdpa_is_faster
from adze.generation.in_torch import has_kernel
from adze.graphs.cuda_graph import WARMUP
from device import here

TOKENS = int(os.environ.get("ADZE_TEST_TOKENS", "40"))  # 256 before a release, which takes half an hour
_TABLES = ("embed", "wte", "wpe")


def lively(name, attention=None, layers=2):
    """The model of this name with larger matrices: with those of models.py attention is a small part of the sum, and
    most models repeat one token."""
    model = models.build(name, attention=attention, layers=layers)
    for path, parameter in model.named_parameters():
        if parameter.dim() > 1 and not any(word in path for word in _TABLES):
            parameter.data.mul_(8)
    for module in model.modules():
        if getattr(module, "attn_logit_softcapping", None):
            module.attn_logit_softcapping = 0.5  # or scores are far below it
    return model


def as_exact(own, theirs, exact):
    """Whether a result is as near to that in float64 as the model's own is: a sum in another order has another error,
    which is not larger."""
    errors = [(x.double() - exact.double()).square().mean().sqrt() for x in (own, theirs)]
    return bool(errors[0] <= 1.5 * errors[1])


def counted(calls, op="attention"):
    """How many calls of an op there are: none where it has no kernel, and torch computes the same."""
    return calls if has_kernel(op, here()) else 0


def attended(calls, dtype=torch.float32, more=None):
    """The same of attention "adze" without an adze.Cache: none where sdpa is faster. `more` is a softcap or sinks."""
    return 0 if sdpa_is_faster(here(), dtype, None, more) else counted(calls)


def passes(tokens):
    """How often the model's code runs while adze.generate makes so many tokens. On a GPU only the prompt, the calls
    before a capture and the capture run it: then the graph is replayed."""
    return 1 + WARMUP + 1 if here().type == "cuda" else tokens


needs_kernels = pytest.mark.skipif(
    not all(counted(1, op) for op in ("attention", "kv_append", "sample")),
    reason="an op has no kernel for this device",
)


def prompt(batch=2, seq=24):
    """Token ids, the same on every device; in a batch the first rows are padded on the left."""
    ids = torch.randint(3, 99, (batch, seq), generator=torch.Generator("cpu").manual_seed(2), device="cpu").to(here())
    mask = torch.ones_like(ids)
    for row in range(batch - 1):
        mask[row, : seq // 3 + row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model, arguments, tokens=TOKENS, **options):
    with torch.no_grad():
        found = model.generate(
            **arguments, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0, **options
        )
    return found[:, -tokens:].tolist()


def own(model, arguments, tokens=TOKENS, **options):
    """The sequences of a batch, without the places after their ends."""
    mask = arguments["attention_mask"]
    made = adze.generate(model, arguments["input_ids"], tokens, **{"attention_mask": mask, "stop": ()} | options)
    return [[token for token in row if token is not None] for row in zip(*made, strict=True)]
