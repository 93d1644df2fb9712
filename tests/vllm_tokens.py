"""Greedy tokens of tiny models with random weights in the vLLM that is installed, as one line of JSON.

`python tests/vllm_tokens.py FOLDER --eager|--compiled [--norms=adze]`; FOLDER is where the models are, or are made.
"""

import json
import pathlib
import sys

import torch

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
PROMPTS = [[1, 17, 300, 42, 5], list(range(7, 60)), [400]]


def models(folder):
    """Llama, Qwen3 (norms of queries and keys) and Gemma (gelu, norms with weight + 1)."""
    import transformers

    for name, dtype in ("Llama", "bfloat16"), ("Qwen3", "float32"), ("Gemma", "bfloat16"):
        path = pathlib.Path(folder, name.lower())
        if not path.exists():
            torch.manual_seed(0)
            config = getattr(transformers, f"{name}Config")(**SIZES, tie_word_embeddings=False)
            # Weights of this size give logits that are far from even, so that the next token is not a matter of ulps.
            config.initializer_range = 0.1
            getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().save_pretrained(path)
        yield name, path, dtype


def main(folder, *options):
    from vllm import LLM, SamplingParams

    chosen = {"enforce_eager": "--eager" in options}
    if "--norms=adze" in options:
        from vllm import ir

        names = [name for name in ("rms_norm", "fused_add_rms_norm") if hasattr(ir.ops, name)]
        chosen["ir_op_priority"] = {name: ["adze"] for name in names}
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    tokens = {}
    for name, path, dtype in models(folder):
        llm = LLM(str(path), dtype=dtype, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4, **chosen)
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
        tokens[name] = [list(answer.outputs[0].token_ids) for answer in answers]
        del llm
    print(json.dumps(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
