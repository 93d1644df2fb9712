"""Puts adze's kernels into a transformers model, compares tokens and speed, and takes them out again.

    python examples/transformers_injection.py [model name or folder] [prompt]

Without a name, a small Llama with random weights is made.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import adze


def small_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config), torch.randint(1, 1000, (1, 16))


def from_hub(name, prompt):
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return model, tokenizer(prompt, return_tensors="pt").input_ids


def generate(model, ids):
    begin = time.perf_counter()
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return tokens, time.perf_counter() - begin


def main(name=None, prompt="The adze is a tool that"):
    model, ids = from_hub(name, prompt) if name else small_llama()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = model.to(device).eval(), ids.to(device)

    generate(model, ids)  # the first call loads what is loaded once
    expected, before = generate(model, ids)

    handle = adze.patch(model)
    print(handle.report())

    generate(model, ids)
    tokens, after = generate(model, ids)
    print(f"the same tokens: {'yes' if torch.equal(tokens, expected) else 'no'}")
    print(f"{before * 1e3:.1f} ms before, {after * 1e3:.1f} ms with adze")

    with torch.no_grad():
        print(adze.verify(model, ids))
    handle.remove()


if __name__ == "__main__":
    main(*sys.argv[1:])
