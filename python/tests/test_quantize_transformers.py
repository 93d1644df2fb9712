"""transformers' quantizer: from_pretrained with AdzeConfig, save_pretrained and from_pretrained of what came out."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import adze
import models
from device import here

TIED = hf.LlamaConfig(vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
                      num_attention_heads=2, tie_word_embeddings=True)  # fmt: skip


def load(folder, **options):
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=here(), **options)
    return model.eval()


def layers(model):
    return {path: module for path, module in model.named_modules() if isinstance(module, adze.QuantizedLinear)}


@pytest.mark.parametrize("name, kind", [("qwen2", "int4-g64"), ("gpt2", "fp8"), ("qwen2", "w8a8")])
def test_round_trip(name, kind, tmp_path):
    """qwen2 has Linears with a bias, gpt2 Conv1Ds and a head that is tied to the embedding."""
    models.build(name).save_pretrained(tmp_path / "plain")
    model, inputs = load(tmp_path / "plain"), models.inputs(name)
    handle = adze.quantize(model, kind)
    want = models.output(model, inputs)
    made = load(tmp_path / "plain", quantization_config=adze.AdzeConfig(kind=kind))
    assert list(layers(made)) == handle.quantized and torch.equal(models.output(made, inputs), want)
    for number, one in enumerate((made, model)):  # quantised while it was loaded, and by adze.quantize
        folder = tmp_path / str(number)
        one.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert config["quant_method"] == "adze" and config["kind"] == kind
        assert [path.suffix for path in folder.glob("*model*")] == [".safetensors"]
        again = load(folder)
        assert torch.equal(models.output(again, inputs), want) and list(layers(again)) == handle.quantized
        stored = [layer.weight_scale.dtype for layer in layers(again).values()]
        assert stored == [layer.weight_scale.dtype for layer in layers(model).values()]
    handle.remove()
    assert not hasattr(model.config, "quantization_config")
    plain = load(tmp_path / "plain")
    assert adze.load_quantized(plain, tmp_path / "1").format == "adze"
    assert torch.equal(models.output(plain, inputs), want)
    again = again.dequantize()
    assert not layers(again) and (models.output(again, inputs) - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("name", ["gpt_neox", "paligemma", "vit"])
def test_names_that_transformers_changes(name, tmp_path):
    """In a checkpoint modules have the names that they had when the first one was published."""
    plain = models.build(name)
    plain.save_pretrained(tmp_path / "plain")
    inputs = models.inputs(name)
    for kind in ("int8", "w8a8"):
        model = type(plain).from_pretrained(tmp_path / "plain", device_map=here()).eval()
        adze.quantize(model, kind, exclude=("*.0.*",))
        if kind == "int8":
            adze.quantize(model, "w8a8", exclude=())  # activations are known by the model's names
        want = models.output(model, inputs)
        model.save_pretrained(tmp_path / kind)
        names = {key for file in (tmp_path / kind).glob("*.safetensors") for key in load_file(file)}
        assert not names >= set(model.state_dict())
        again = type(plain).from_pretrained(tmp_path / kind, device_map=here()).eval()
        read = models.build(name)
        adze.load_quantized(read, tmp_path / kind)
        for one in (again, read):
            assert torch.equal(models.output(one, inputs), want)


@pytest.mark.skipif(not hasattr(hf, "HrmTextConfig"), reason="this version of transformers has no HrmText")
@pytest.mark.parametrize("exclude", [(), ("up_proj", "k_proj")])
def test_weights_that_a_checkpoint_has_as_one(exclude, tmp_path):
    """Four Linears of HRM-Text's attention, and two of its MLP."""
    config = hf.HrmTextConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                              num_attention_heads=4, num_key_value_heads=4, head_dim=16, pad_token_id=0)  # fmt: skip
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert any("gqkv_proj" in key for file in tmp_path.glob("*.safetensors") for key in load_file(file))
    model, inputs = load(tmp_path), models.inputs("llama")
    handle = adze.quantize(model, "int8", exclude=exclude)
    made = load(tmp_path, quantization_config=adze.AdzeConfig("int8", exclude=exclude))
    assert list(layers(made)) == handle.quantized
    assert torch.equal(models.output(made, inputs), models.output(model, inputs))


def test_layers_of_several_kinds(tmp_path):
    """The config says of which layers the inputs are quantised too."""
    model, inputs = models.build("llama"), models.inputs("llama")
    handle = adze.quantize(model, "w8a8", exclude=("lm_head", "mlp"))
    adze.quantize(model, "int8", exclude=("lm_head", "self_attn"))
    want = models.output(model, inputs)
    model.save_pretrained(tmp_path / "made")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "made", device_map=here()).eval()
    read = models.build("llama")
    adze.load_quantized(read, tmp_path / "made")
    for one in (again, read):
        assert [layer.kind for layer in layers(one).values()] == [layer.kind for layer in layers(model).values()]
        assert torch.equal(models.output(one, inputs), want)
    handle.remove()
    model.save_pretrained(tmp_path / "one")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "one", device_map=here()).eval()
    assert torch.equal(models.output(again, inputs), models.output(model, inputs))
    assert again.config.quantization_config.kind == "int8"


def test_tied_head(tmp_path):
    torch.manual_seed(0)
    hf.LlamaForCausalLM(TIED).save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=adze.AdzeConfig("int8", exclude=()))
    assert model.lm_head.weight is model.model.embed_tokens.weight and len(layers(model)) == 7
    model.save_pretrained(tmp_path / "made")
    again = load(tmp_path / "made")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    inputs = models.inputs("llama")
    assert torch.equal(models.output(again, inputs), models.output(model, inputs))


def test_search(tmp_path):
    models.build("llama").save_pretrained(tmp_path)
    model, inputs = load(tmp_path), models.inputs("llama")
    plain = models.output(load(tmp_path, quantization_config=adze.AdzeConfig("int4-g32")), inputs)
    adze.quantize(model, "int4-g32", search=True)
    want = models.output(model, inputs)
    made = load(tmp_path, quantization_config=adze.AdzeConfig("int4-g32", search=True))
    assert torch.equal(models.output(made, inputs), want) and not torch.equal(want, plain)


def test_a_model_without_the_head_of_its_checkpoint(tmp_path):
    """As of other checkpoints, what the model does not have is left."""
    config = hf.BertConfig(vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                           num_attention_heads=2, max_position_embeddings=32)  # fmt: skip
    model, inputs = hf.BertForMaskedLM(config).to(here()).eval(), models.inputs("bert")
    handle = adze.quantize(model, "int8", exclude=())
    model.save_pretrained(tmp_path)
    base = hf.BertModel.from_pretrained(tmp_path, device_map=here()).eval()
    assert "cls.predictions.transform.dense" in handle.quantized and len(layers(base)) == len(layers(model.bert))
    assert torch.equal(models.output(base, inputs), models.output(model.bert, inputs))


def test_a_checkpoint_of_other_sizes(tmp_path):
    model = models.build("llama")
    adze.quantize(model, "int4-g32")
    model.save_pretrained(tmp_path)
    for changed, wanted in (
        ({"intermediate_size": 512}, r"mlp.down_proj is \[128, 512\] in the model, \[128, 256\] in the checkpoint"),
        ({"num_hidden_layers": 1}, "the checkpoint has model.layers.1.* the model has no model.layers.1"),
    ):
        config = hf.AutoConfig.from_pretrained(tmp_path)
        for name, value in changed.items():
            setattr(config, name, value)
        with pytest.raises(ValueError, match=f"AdzeConfig: .*{wanted}"):
            hf.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)


def test_damaged_checkpoints(tmp_path):
    model, path = models.build("llama"), "model.layers.0.mlp.up_proj"
    adze.quantize(model, "int4-g32", zero_points=True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    q, scale = (good[f"{path}.weight_{name}"] for name in ("q", "scale"))
    k = q.shape[1] * 2
    for wanted, change in (
        ("up_proj has no scale", {"scale": None}),
        (f"has {path}.weight_scale and no {path}.weight_q", {"q": None, "zero": None}),
        ("weight_scale is F64", {"scale": scale.double()}),
        ("up_proj has a scale of torch.int32", {"scale": scale.int()}),
        (r"up_proj has a scale of \[9, ", {"scale": scale[:9]}),
        ("up_proj has zeros of torch.float32", {"zero": torch.zeros(scale.shape)}),
        (rf"up_proj has an order of torch.int64 and \[9\], it must be int64 and \[{k}\]", {"order": torch.arange(9)}),
        ("up_proj has an order of its columns in which not each", {"order": torch.arange(k) + 1}),
    ):
        made = good | {f"{path}.weight_{name}": part for name, part in change.items()}
        save_file({name: part for name, part in made.items() if part is not None}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"AdzeConfig: .*{wanted}"):
            hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    order = torch.arange(k, dtype=torch.int32)
    save_file(good | {f"{path}.weight_order": order}, file, metadata={"format": "pt"})
    again, inputs = (
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=here()).eval(),
        models.inputs("llama"),
    )
    assert torch.equal(models.output(again, inputs), models.output(model, inputs))


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_dequantize_after_saving_and_casting(dtype, tmp_path):
    model, inputs = models.build("llama").to(torch.bfloat16), models.inputs("llama")
    adze.quantize(model, "int8")
    model.save_pretrained(tmp_path)  # leaves a string as the config's dtype
    model.to(torch.float16)
    plain = model.dequantize(dtype)
    assert not layers(plain) and not hasattr(plain.config, "quantization_config")
    assert {p.dtype for p in plain.parameters()} == {dtype or torch.float16}
    assert models.output(plain, inputs).dtype == (dtype or torch.float16)


def test_a_weight_that_is_not_finite(tmp_path):
    """It is left as it is, as by adze.quantize: its largest number would be the scale of a row."""
    model, name = models.build("llama"), "model.layers.0.mlp.up_proj"
    model.get_submodule(name).weight.data[0, 0] = float("inf")
    model.save_pretrained(tmp_path)
    handle = adze.quantize(model, "int8")
    made = hf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=adze.AdzeConfig("int8")).eval()
    assert list(layers(made)) == handle.quantized and name not in handle.quantized
    made.save_pretrained(tmp_path / "made")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert list(layers(again)) == handle.quantized
    assert torch.equal(again.get_submodule(name).weight, model.get_submodule(name).weight.cpu())


def test_refused(tmp_path):
    for exclude in (5, ("lm_head", 5)):
        with pytest.raises(TypeError, match="exclude is .*5.*, it must be a pattern of paths or several"):
            adze.AdzeConfig("int8", exclude=exclude)
    with pytest.raises(TypeError, match="AdzeConfig has no group_size: kind, exclude"):
        adze.AdzeConfig("int8", group_size=32)
    with pytest.raises(ValueError, match="kind is 'int5', it must be one of"):
        adze.AdzeConfig("int5")
    with pytest.raises(ValueError, match=r"kind is \['int8'\], it must be one of"):
        adze.AdzeConfig(["int8"])
    hf.LlamaForCausalLM(TIED).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="kind is None, it must be one of"):
        load(tmp_path, quantization_config=adze.AdzeConfig(None))
    with pytest.raises(ValueError, match="AdzeConfig: no layer of the model can be quantised"):
        load(tmp_path, quantization_config=adze.AdzeConfig("int8", exclude="*"))
