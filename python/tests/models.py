"""Tiny transformers models with random weights, built without a network, and inputs for them."""

import torch
import transformers as hf

from device import default_device, generator, here

_LM = dict(
    vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=128,
)  # fmt: skip
_HEAD = dict(_LM, head_dim=64)
_FALCON = dict(vocab_size=128, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, bias=False)
_NEOX = dict(vocab_size=128, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
_TOWER = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
_VISION = dict(_TOWER, image_size=32, patch_size=8)
_T5 = dict(vocab_size=128, d_model=128, d_kv=64, d_ff=256, num_layers=2, num_heads=2)

LANGUAGE = {
    "llama": lambda: hf.LlamaConfig(**_LM),
    "mistral": lambda: hf.MistralConfig(**_HEAD, sliding_window=16),
    "qwen2": lambda: hf.Qwen2Config(**_LM),
    "qwen3": lambda: hf.Qwen3Config(**_HEAD),
    "gemma": lambda: hf.GemmaConfig(**_HEAD),
    "gemma2": lambda: hf.Gemma2Config(**_HEAD, sliding_window=16, query_pre_attn_scalar=64),
    "gemma3": lambda: hf.Gemma3TextConfig(**_HEAD, sliding_window=16),
    "phi3": lambda: hf.Phi3Config(**_LM, pad_token_id=0),
    "phi": lambda: hf.PhiConfig(**{**_LM, "num_key_value_heads": 2}),
    "gpt2": lambda: hf.GPT2Config(vocab_size=128, n_positions=512, n_embd=128, n_layer=2, n_head=2),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_NEOX),
    "gpt_neox_sequential": lambda: hf.GPTNeoXConfig(**_NEOX, use_parallel_residual=False),
    "falcon": lambda: hf.FalconConfig(**_FALCON, multi_query=True, parallel_attn=True, alibi=False),
    "falcon_two_norms": lambda: hf.FalconConfig(
        **_FALCON, num_kv_heads=1, new_decoder_architecture=True, alibi=False
    ),
    "falcon_sequential": lambda: hf.FalconConfig(**_FALCON, multi_query=False, parallel_attn=False, alibi=False),
    "olmo2": lambda: hf.Olmo2Config(**_LM, pad_token_id=0),
    "gpt_oss": lambda: hf.GptOssConfig(**_HEAD, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    "mixtral": lambda: hf.MixtralConfig(**_LM, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip

OTHER = {
    "clip": lambda: hf.CLIPModel(
        hf.CLIPConfig(
            text_config=dict(
                _TOWER, vocab_size=128, max_position_embeddings=32, bos_token_id=0, eos_token_id=2, pad_token_id=1
            ),
            vision_config=_VISION,
            projection_dim=64,
        )
    ),
    "siglip": lambda: hf.SiglipModel(
        hf.SiglipConfig(
            text_config=dict(_TOWER, vocab_size=128, max_position_embeddings=16), vision_config=_VISION
        )
    ),
    "paligemma": lambda: hf.PaliGemmaForConditionalGeneration(
        hf.PaliGemmaConfig(
            vision_config=dict(_VISION, model_type="siglip_vision_model"),
            text_config=dict(_HEAD, model_type="gemma"),
            projection_dim=128,
            image_token_index=100,
            hidden_size=128,
        )
    ),
    "bert": lambda: hf.BertModel(hf.BertConfig(**_TOWER, vocab_size=128, max_position_embeddings=32)),
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**_VISION)),
    "cohere": lambda: hf.AutoModelForCausalLM.from_config(hf.CohereConfig(**_LM, pad_token_id=0, eos_token_id=1)),
    "glm": lambda: hf.AutoModelForCausalLM.from_config(hf.GlmConfig(**_HEAD, pad_token_id=0, eos_token_id=1)),
    "helium": lambda: hf.AutoModelForCausalLM.from_config(hf.HeliumConfig(**_HEAD, pad_token_id=0, eos_token_id=1)),
    "t5": lambda: hf.T5EncoderModel(hf.T5Config(**_T5, feed_forward_proj="gated-gelu")),
    "umt5": lambda: hf.UMT5EncoderModel(hf.UMT5Config(**_T5)),
}  # fmt: skip


def build(name, dtype=torch.float32, attention=None, layers=2):
    """The model of this name, the same weights every time and on every device, in eval mode; vectors among them are
    not constant. Dynamo traces a model of one layer in half the time."""
    with default_device(None):
        torch.manual_seed(0)
        if name in LANGUAGE:
            more, config = {"attn_implementation": attention} if attention else {}, LANGUAGE[name]()
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
            model = hf.AutoModelForCausalLM.from_config(config, **more)
        else:
            model = OTHER[name]()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.to(here(), dtype).eval()


def latent():
    """A model of DeepSeek, whose cache has latents; the second layer has experts, the first none."""
    config = hf.DeepseekV3Config(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=64, kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16,
        qk_nope_head_dim=32, v_head_dim=32, first_k_dense_replace=1, pad_token_id=0,
    )  # fmt: skip
    with default_device(None):
        torch.manual_seed(0)
        return hf.AutoModelForCausalLM.from_config(config).to(here()).eval()


def inputs(name, batch=2, seq=20, dtype=torch.float32):
    """Arguments for a call; language models get a batch padded on the left."""
    random = generator(1)
    ids = torch.randint(3, 99, (batch, seq), generator=random)
    if name in ("clip", "siglip"):
        return {"input_ids": ids[:, :8], "pixel_values": torch.randn(batch, 3, 32, 32, generator=random).to(dtype)}
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=random).to(dtype)}
    mask = torch.ones_like(ids)
    if name == "paligemma":
        ids[:, :16] = 100
        pixels = torch.randn(batch, 3, 32, 32, generator=random).to(dtype)
        return {"input_ids": ids, "pixel_values": pixels, "attention_mask": mask}
    if batch > 1:
        mask[0, : seq // 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, arguments, tokens=16, cache=None):
    """Greedy tokens."""
    with torch.no_grad():
        return model.generate(
            **arguments, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None,
            pad_token_id=0, cache_implementation=cache, **({"disable_compile": True} if cache else {}),
        )  # fmt: skip


def output(model, arguments):
    """What a call returns, as one tensor."""
    with torch.no_grad():
        result = model(**arguments)
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if getattr(result, name, None) is not None:
            return getattr(result, name)
    raise ValueError(f"no tensor in {type(result).__name__}")
