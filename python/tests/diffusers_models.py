"""Small diffusers models without downloads, and their inputs: as their own tests have them, and a size up."""

import diffusers
import torch

from device import here


def randn(*shape):
    return torch.randn(shape)


def _ltx(wide):
    heads, head_dim, cross = (4, 64, 256) if wide else (2, 8, 16)
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        cross_attention_dim=cross,
        caption_channels=cross,
        num_layers=2,
    )
    return model, {
        "hidden_states": randn(2, 2 * 4 * 4, 4),
        "encoder_hidden_states": randn(2, 16, cross),
        "timestep": torch.tensor([100, 700]),
        "encoder_attention_mask": torch.arange(16)[None] < torch.tensor([[16], [9]]),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


def _flux(wide):
    head_dim, axes = (128, (16, 56, 56)) if wide else (16, (4, 4, 8))
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=head_dim,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=axes,
    )
    return model, {
        "hidden_states": randn(2, 16, 4),
        "encoder_hidden_states": randn(2, 12, 32),
        "pooled_projections": randn(2, 32),
        "img_ids": torch.rand(16, 3) * 40,
        "txt_ids": torch.zeros(12, 3),
        "timestep": torch.tensor([1.0, 0.3]),
    }


def _sd3(wide, dual=(0,), qk_norm="rms_norm"):
    head_dim = 64 if wide else 8
    model = diffusers.SD3Transformer2DModel(
        sample_size=4,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=head_dim,
        num_attention_heads=4,
        caption_projection_dim=4 * head_dim,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=16,
        dual_attention_layers=dual,
        qk_norm=qk_norm,
    )
    return model, {
        "hidden_states": randn(2, 4, 4, 4),
        "encoder_hidden_states": randn(2, 7, 32),
        "pooled_projections": randn(2, 64),
        "timestep": torch.tensor([100, 700]),
    }


def _wan(wide):
    head_dim, ffn = (128, 512) if wide else (12, 32)
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=head_dim,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=256,
        ffn_dim=ffn,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": randn(2, 12, 16),
        "timestep": torch.tensor([100, 700]),
    }


def _hunyuan(wide, condition=None):
    head_dim, axes = (128, (16, 56, 56)) if wide else (10, (2, 4, 4))
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=head_dim,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=axes,
        image_condition_type=condition,
    )
    return model, {
        "hidden_states": randn(2, 4, 2, 4, 4),
        "timestep": torch.tensor([1.0, 300.0]),
        "encoder_hidden_states": randn(2, 12, 16),
        "pooled_projections": randn(2, 8),
        "encoder_attention_mask": (torch.arange(12)[None] < torch.tensor([[12], [7]])).long(),
        "guidance": torch.tensor([1.0, 2.0]),
    }


def _qwen_image(wide):
    head_dim, heads, axes = (128, 2, (16, 56, 56)) if wide else (16, 4, (8, 4, 4))
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=axes,
    )
    return model, {
        "hidden_states": randn(2, 16, 16),
        "encoder_hidden_states": randn(2, 8, 16),
        "encoder_hidden_states_mask": (torch.arange(8)[None] < torch.tensor([[8], [5]])).long(),
        "timestep": torch.tensor([1.0, 0.4]),
        "img_shapes": [(1, 4, 4)],
    }


def _dit(wide):
    model = diffusers.DiTTransformer2DModel(
        in_channels=4,
        out_channels=8,
        activation_fn="gelu-approximate",
        num_attention_heads=2,
        attention_head_dim=72 if wide else 4,
        attention_bias=True,
        num_layers=2,
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=8,
        patch_size=2,
        sample_size=8,
    )
    return model, {
        "hidden_states": randn(2, 4, 8, 8),
        "timestep": torch.tensor([100, 700]),
        "class_labels": torch.tensor([0, 3]),
    }


def _sd15(wide):
    channels, groups, cross = ((80, 160), 8, 96) if wide else ((4, 8), 4, 8)
    model = diffusers.UNet2DConditionModel(
        block_out_channels=channels,
        norm_num_groups=groups,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=cross,
        attention_head_dim=2,
        out_channels=4,
        in_channels=4,
        layers_per_block=1,
        sample_size=16,
    )
    return model, {
        "sample": randn(2, 4, 4, 4),
        "timestep": torch.tensor([10]),
        "encoder_hidden_states": randn(2, 7, cross),
    }


def _sdxl(wide):
    channels, groups, cross = ((64, 128), 8, 64) if wide else ((16, 32), 4, 16)
    model = diffusers.UNet2DConditionModel(
        block_out_channels=channels,
        norm_num_groups=groups,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        sample_size=16,
        attention_head_dim=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=cross,
    )
    return model, {
        "sample": randn(2, 4, 4, 4),
        "timestep": torch.tensor([10]),
        "encoder_hidden_states": randn(2, 7, cross),
        "added_cond_kwargs": {"text_embeds": randn(2, 32), "time_ids": randn(2, 6)},
    }


MODELS = {
    "ltx": _ltx,
    "flux": _flux,
    "sd15": _sd15,
    "sdxl": _sdxl,
    "sd3": lambda wide: _sd3(wide, (), None),
    "sd35": _sd3,
    "dit": _dit,
    "wan": _wan,
    "wan_cast": _wan,
    "hunyuan_video": _hunyuan,
    "hunyuan_video_token_replace": lambda wide: _hunyuan(wide, "token_replace"),
    "qwen_image": _qwen_image,
}


def cast(value, dtype):
    """Floating tensors of a nest of inputs in dtype; timesteps, positions and masks stay what they are."""
    if isinstance(value, dict):
        kept = ("timestep", "img_ids", "txt_ids", "guidance", "time_ids")
        return {k: v if k in kept else cast(v, dtype) for k, v in value.items()}
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def make(name, wide=True, dtype=torch.float32, seed=0):
    """The model in eval mode with random weights, those of norms too, and its inputs. What from_pretrained keeps in
    float stays so; in wan_cast everything is cast."""
    torch.manual_seed(seed)
    model, inputs = MODELS[name](wide)
    model.to(here()).eval().requires_grad_(False)
    kept = () if name == "wan_cast" else model._keep_in_fp32_modules or ()
    for tensor in model.parameters():
        if tensor.ndim == 1:
            tensor.add_(torch.randn_like(tensor) * 0.2)
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not any(part in kept for part in path.split(".")):
            tensor.data = tensor.to(dtype)
    return model, cast(inputs, dtype)
