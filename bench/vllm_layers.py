"""vLLM's gated activations on the CPU: its own forward compared with adze's, in the vLLM that is installed.

`python bench/vllm_layers.py [THREADS]` prints microseconds: the best of many calls, the two in turn.
"""

import itertools
import sys
import time

import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import activation

import adze.vllm


def best(functions, x, seconds=0.3):
    least = [float("inf")] * len(functions)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function(x)
            least[i] = min(least[i], time.perf_counter() - start)
    return [1e6 * t for t in least]


def main(threads="1"):
    torch.set_num_threads(int(threads))
    adze.vllm.register()
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
    with torch.inference_mode(), set_current_vllm_config(config):
        layers = {"silu": activation.SiluAndMul(), "gelu tanh": activation.GeluAndMul(approximate="tanh")}
        print(f"{'act':10}{'dtype':10}{'columns':>8}{'tokens':>8}{'vLLM us':>10}{'adze us':>10}{'ratio':>7}")
        cases = itertools.product(layers.items(), ("bfloat16", "float32"), (1024, 6144, 14336), (1, 4, 16, 64, 512))
        for (name, layer), dtype, columns, tokens in cases:
            x = torch.randn(tokens, 2 * columns).to(getattr(torch, dtype))
            own, ours = best((layer._own_forward, layer), x)
            print(f"{name:10}{dtype:10}{columns:8}{tokens:8}{own:10.1f}{ours:10.1f}{own / ours:7.2f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
