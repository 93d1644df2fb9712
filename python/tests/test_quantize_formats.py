"""Weights of other formats: the numbers are those that each format defines, bit for bit. The references here unpack
with loops over words, as the formats' documents have it."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import adze
from adze.operators import ops
from adze.quantization import formats
from adze.quantization.checkpoint import config_of, scheme_of
from adze.quantization.weight import KINDS, dequantized, quantized
from device import here

N, K, G = 24, 256, 64


@pytest.fixture(autouse=True)
def on_the_cpu():
    torch.manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        yield


def words(*shape):
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def scales(*shape):
    return (torch.rand(shape) * 0.02 + 0.001).half()


def field(word, bits, i):
    return (int(word) >> (bits * i)) & ((1 << bits) - 1)


def values(weight, k=K):
    """What a Weight stands for, in double, with the columns of the layer's input."""
    made = dequantized(weight, k, torch.float64)
    return made if weight.order is None else made[:, weight.order.argsort()]


def product(q, zero, scale):
    """(q - zero) * scale in float32, which is exact for f16 scales."""
    return ((q.float() - zero.float()) * scale.float()).double()


def by_columns(t, group):
    """[groups, n] as [n, k]."""
    return t.repeat_interleave(group, 0)[:K].t()


def awq_reference(tensors):
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    q, zero = torch.empty(K, N, dtype=torch.int64), torch.empty(K // G, N, dtype=torch.int64)
    for unpacked, packed in ((q, tensors["qweight"]), (zero, tensors["qzeros"])):
        for r in range(unpacked.shape[0]):
            for c in range(N // 8):
                for i in range(8):
                    unpacked[r, c * 8 + order[i]] = field(packed[r, c], 4, i)
    return product(q.t(), by_columns(zero, G), by_columns(tensors["scales"], G))


def awq_tensors():
    return {"qweight": words(K, N // 8), "qzeros": words(K // G, N // 8), "scales": scales(K // G, N)}


def test_awq():
    tensors = awq_tensors()
    weight = formats.awq(tensors, {"bits": 4, "group_size": G, "version": "gemm"})
    assert torch.equal(values(weight), awq_reference(tensors)) and weight.scale.dtype == torch.float16
    with pytest.raises(ValueError, match="version is 'gemv', it must be \"gemm\""):
        formats.awq(tensors, {"bits": 4, "version": "gemv"})


def gptq_tensors(bits, groups, g_idx):
    each = 32 // bits
    return {
        "qweight": words(K // each, N),
        "qzeros": words(groups, N // each),
        "scales": scales(groups, N),
        "g_idx": g_idx.to(torch.int32),
    }


def gptq_reference(tensors, bits, add):
    each, g_idx = 32 // bits, tensors["g_idx"].long()
    q = torch.tensor([[field(tensors["qweight"][r // each, c], bits, r % each) for c in range(N)] for r in range(K)])
    zeros = tensors["qzeros"]
    zero = torch.tensor([[field(row[c // each], bits, c % each) + add for c in range(N)] for row in zeros])
    return product(q.t(), zero[g_idx].t(), tensors["scales"][g_idx].t())


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(version, act_order):
    g_idx = torch.arange(K) // G
    g_idx = g_idx[torch.randperm(K)] if act_order else g_idx
    tensors = gptq_tensors(4, K // G, g_idx)
    weight = formats.gptq(tensors, {"bits": 4, "group_size": G, "checkpoint_format": version})
    assert (weight.order is not None) == act_order
    want = gptq_reference(tensors, 4, version == "gptq")
    assert torch.equal(values(weight), want)
    layer = adze.QuantizedLinear(weight, K, dtype=torch.bfloat16)  # f16 scales under bf16 activations
    x = torch.randn(3, K).bfloat16()
    assert torch.allclose(layer(x).double(), F.linear(x.double(), want), rtol=2**-8, atol=1e-4)
    assert torch.equal(layer.weight, want.bfloat16())


def test_names_of_a_layout():
    """transformers and GPTQModel have it as "format", and older programs as "checkpoint_format" or "version"."""
    tensors = gptq_tensors(4, K // G, torch.arange(K) // G)
    for name in ("format", "checkpoint_format"):
        weight = formats.gptq(tensors, {"bits": 4, "group_size": G, name: "gptq_v2"})
        assert torch.equal(values(weight), gptq_reference(tensors, 4, 0))
    with pytest.raises(ValueError, match="gptq: format is 'marlin', it must be"):
        formats.gptq(tensors, {"bits": 4, "group_size": G, "format": "marlin"})
    tensors = awq_tensors()
    weight = formats.awq(tensors, {"w_bit": 4, "q_group_size": G, "format": "gemm"})
    assert torch.equal(values(weight), awq_reference(tensors))
    with pytest.raises(ValueError, match="awq: format is 'gemv_fast', it must be"):
        formats.awq(tensors, {"bits": 4, "group_size": G, "format": "gemv_fast"})
    packed = {"weight_packed": words(N, K // 8), "weight_scale": scales(N, K // G)}
    packed["weight_shape"] = torch.tensor([N, K])
    with pytest.raises(ValueError, match="a format: the checkpoint has no weight_g_idx"):
        formats.compressed_tensors(packed, scheme(num_bits=4, strategy="group", group_size=G, actorder="dynamic"))


def test_gptq_of_8_bits():
    tensors = gptq_tensors(8, 1, torch.zeros(K))
    tensors["qzeros"] = torch.full((1, N // 4), 0x7F7F7F7F, dtype=torch.int32)  # 127 + 1 is the middle
    weight = formats.gptq(tensors, {"bits": 8, "group_size": -1})
    assert weight.q.dtype == torch.int8 and torch.equal(values(weight), gptq_reference(tensors, 8, 1))
    tensors["qzeros"] = torch.zeros(1, N // 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="less their zeros do not fit into int8"):
        formats.gptq(tensors, {"bits": 8, "group_size": -1})


def test_gptq_refused():
    g_idx = torch.arange(K) // G
    g_idx[0] = 1
    with pytest.raises(ValueError, match="g_idx gives group 0 63 columns, and 64 are in a group"):
        formats.gptq(gptq_tensors(4, K // G, g_idx), {"bits": 4, "group_size": G})
    with pytest.raises(ValueError, match="bits is 3, it must be 4 or 8"):
        formats.gptq({}, {"bits": 3})
    with pytest.raises(ValueError, match="group_size is 16, it must be -1, 32, 64 or a multiple of 128"):
        formats.gptq(gptq_tensors(4, K // 16, torch.arange(K) // 16), {"bits": 4, "group_size": 16})


def test_large_groups_are_split():
    n, k = 8, 600
    tensors = {"qweight": words(k, 1), "qzeros": words(3, 1), "scales": scales(3, n)}
    weight = formats.awq(tensors, {"group_size": 256})
    assert weight.scale.shape == (n, 5)
    assert torch.equal(weight.scale, tensors["scales"].t()[:, [0, 0, 1, 1, 2]])


def packed_reference(tensors, bits, group, zero):
    each, offset = 32 // bits, 1 << (bits - 1)
    q = [[field(row[c // each], bits, c % each) - offset for c in range(K)] for row in tensors["weight_packed"]]
    scale = tensors["weight_scale"].repeat_interleave(group, 1)
    if zero is None:
        return product(torch.tensor(q), torch.zeros(N, K), scale)
    zeros = [[field(zero[r // each, g], bits, r % each) - offset for g in range(K // group)] for r in range(N)]
    return product(torch.tensor(q), torch.tensor(zeros).repeat_interleave(group, 1), scale)


def scheme(**weights):
    return {"format": "a format", "weights": weights}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_pack_quantized(bits, symmetric):
    each = 32 // bits
    tensors = {
        "weight_packed": words(N, K // each),
        "weight_scale": scales(N, K // G),
        "weight_shape": torch.tensor([N, K]),
    }
    zero = None
    if not symmetric:  # of 8 bits the difference must fit into int8, so zeros are 0 there
        zero = words(N // each, K // G) if bits == 4 else torch.full((N // 4, K // G), -0x7F7F7F80, dtype=torch.int32)
        tensors["weight_zero_point"] = zero
    config = scheme(num_bits=bits, strategy="group", group_size=G, symmetric=symmetric, type="int")
    weight = formats.compressed_tensors(tensors, config)
    assert torch.equal(values(weight), packed_reference(tensors, bits, G, zero))
    if bits == 4 and symmetric:  # with an order of columns
        order = torch.randperm(K)
        tensors["weight_g_idx"] = (torch.arange(K) // G)[order.argsort()].to(torch.int32)
        weight = formats.compressed_tensors(tensors, config)
        ones = {**tensors, "weight_scale": torch.ones(N, K // G), "weight_g_idx": torch.arange(K) // G}
        numbers = values(formats.compressed_tensors(ones, config))
        scale = tensors["weight_scale"].double()[:, tensors["weight_g_idx"].long()]
        assert torch.equal(values(weight), numbers * scale)


def fp8(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


def test_bytes_of_compressed_tensors():
    q = torch.randint(-128, 128, (N, K)).to(torch.int8)
    for scale in (scales(N, 1), scales(1)):
        config = scheme(num_bits=8, strategy="channel" if scale.dim() == 2 else "tensor", type="int", symmetric=True)
        weight = formats.compressed_tensors({"weight": q, "weight_scale": scale}, config)
        assert torch.equal(values(weight), product(q, torch.zeros(1), scale))
    q, scale = fp8(N, K), torch.rand(N, 1)
    weight = formats.compressed_tensors(
        {"weight": q, "weight_scale": scale}, scheme(strategy="channel", type="float")
    )
    assert torch.equal(values(weight), (q.float() * scale).double())
    with pytest.raises(ValueError, match="weight is torch.int8 with 2 dimensions, it must be torch.float8"):
        formats.compressed_tensors({"weight": q.to(torch.int8), "weight_scale": scale}, scheme(type="float"))


def test_fp8_blocks():
    q, scale = fp8(200, 300), torch.rand(2, 3)
    weight = formats.fp8({"weight": q, "weight_scale_inv": scale}, {"weight_block_size": [128, 128]})
    spread = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(values(weight, 300), (q.float() * spread).double())
    layer = adze.QuantizedLinear(weight, 300)
    x = torch.randn(2, 300)
    assert torch.allclose(layer(x), F.linear(x, q.float() * spread), atol=1e-3) and layer.kind == "fp8-block"
    with pytest.raises(ValueError, match=r"blocks are \[64, 64\], they must be \[128, 128\]"):
        formats.fp8({"weight": q, "weight_scale_inv": scale}, {"weight_block_size": [64, 64]})


def test_tensors_that_the_config_does_not_fit():
    """Scales of another shape would be read as those of other groups, what is missing as if it were not needed."""
    groups = r"a weight \[24, 256\] in groups of"
    awq, gptq = awq_tensors(), gptq_tensors(4, K // G, torch.arange(K) // G)
    packed = {"weight_packed": words(N, K // 8), "weight_scale": scales(N, K // G)}
    packed["weight_shape"] = torch.tensor([N, K])
    weights = {"num_bits": 4, "strategy": "group", "group_size": G}
    q, scale = fp8(N, K), torch.rand(2, 2)

    def compressed(tensors, **more):
        return formats.compressed_tensors(tensors, scheme(**weights | more))

    def without(name, tensors):
        return {key: value for key, value in tensors.items() if key != name}

    for wanted, make, *given in (
        (rf"awq: {groups} 128 columns has scales \[24, 2\]", formats.awq, awq, {"group_size": 128}),
        (rf"awq: {groups} 64 columns", formats.awq, awq | {"scales": awq["scales"][:1]}, {"group_size": G}),
        ("awq: group_size is 0", formats.awq, awq, {"group_size": 0}),
        ("awq: group_size is '64'", formats.awq, awq, {"group_size": "64"}),
        ("awq: the checkpoint has no qzeros", formats.awq, without("qzeros", awq), {"group_size": G}),
        ("awq: qweight is torch.float32", formats.awq, awq | {"qweight": awq["qweight"].float()}, {"group_size": G}),
        ("gptq: the checkpoint has no scales", formats.gptq, without("scales", gptq), {"group_size": G}),
        (
            "gptq: the checkpoint has no g_idx",
            formats.gptq,
            without("g_idx", gptq),
            {"group_size": G, "desc_act": True},
        ),
        (rf"gptq: {groups} 64", formats.gptq, gptq | {"qzeros": gptq["qzeros"][:, :1]}, {"group_size": G}),
        ("a format: the checkpoint has no weight_zero_point", lambda t: compressed(t, symmetric=False), packed),
        ("a format: the checkpoint has no weight_g_idx", lambda t: compressed(t, actorder="group"), packed),
        (r"weight_shape is \[24, 264\]", compressed, packed | {"weight_shape": torch.tensor([N, K + 8])}),
        (f"a format: {groups} 256", lambda t: compressed(t, strategy="channel"), packed),
        ("strategy is 'token'", lambda t: compressed(t, strategy="token"), packed),
        ("fp8: blocks are 128", formats.fp8, {"weight": q, "weight_scale_inv": scale}, {"weight_block_size": 128}),
        ("it must be \\[1\\]", formats.fp8, {"weight": q, "weight_scale_inv": scale}, {"weight_block_size": None}),
        ("scales are torch.int32", formats.fp8, {"weight": q, "weight_scale_inv": scale.int()}, {}),
        (
            "scales has 3|scales is torch.float16 with 3",
            formats.awq,
            awq | {"scales": awq["scales"][None]},
            {"group_size": G},
        ),
        ("gptq: scales is .* with 3", formats.gptq, gptq | {"scales": gptq["scales"][None]}, {"group_size": G}),
        (
            "gptq: a weight .24, 0.|gptq: a weight .0, 256.",
            formats.gptq,
            gptq | {"qweight": words(K // 8, 0)},
            {"group_size": G},
        ),
        ("gptq: bits is 4.0", formats.gptq, gptq, {"group_size": G, "bits": 4.0}),
        ("gptq: g_idx is torch.float32", formats.gptq, gptq | {"g_idx": gptq["g_idx"].float()}, {"group_size": G}),
        ("weight_shape is torch.float32", compressed, packed | {"weight_shape": torch.tensor([24.0, 256.0])}),
        (
            r"weight_shape is \[24, 256, 24\]",
            compressed,
            packed | {"weight_shape": torch.tensor([[24], [256], [24]])},
        ),
        ("scales are torch.int8", compressed, packed | {"weight_scale": packed["weight_scale"].to(torch.int8)}),
        ("weight_zero_point is not 0", compressed, packed | {"weight_zero_point": words(N // 8, K // G)}),
        (
            f"a format: {groups} 256",
            lambda t: compressed(t, strategy="channel", group_size=None),
            packed | {"weight_scale": torch.ones(1)},
        ),
    ):
        with pytest.raises(ValueError, match=wanted):
            make(*given)
    assert torch.equal(compressed(packed, strategy=None).scale, packed["weight_scale"])


def test_settings_of_single_layers():
    """GPTQ's "dynamic" and the groups of compressed-tensors are for layers by their paths."""
    config = {
        "bits": 4,
        "dynamic": {"-:lm_head": {}, r"+:.*\.down": {"bits": 8}, r".*\.up": {"group_size": 32}, "x": None},
    }
    for path, want in (
        ("lm_head", {}),
        ("layers.0.down", {"bits": 8}),
        ("layers.0.up", {"group_size": 32}),
        ("x", {}),
        ("layers.0.gate", {}),
    ):
        assert config_of(config, path) == {**config, **want}
    groups = {
        "0": {"targets": ["Linear"], "weights": 0},
        "1": {"targets": ["re:.*up"], "weights": 1},
        "2": {"targets": ["layers.0.up"], "weights": 2},
    }
    found = [scheme_of({"config_groups": groups}, path)["weights"] for path in ("layers.0.up", "layers.1.up", "head")]
    assert found == [2, 1, 0]
    for wanted, function, config in (
        ("no regular expression", config_of, {"dynamic": {"[": {}}}),
        ("dynamic must have", config_of, {"dynamic": ["up"]}),
        ("no regular expression", scheme_of, {"config_groups": {"0": {"targets": ["re:["]}}}),
        ("config_groups must have an object", scheme_of, {"config_groups": {"W4A16": ["Linear"]}}),
        ("no group of the config is for up", scheme_of, {"config_groups": {"0": {"targets": None}}}),
        ("rotations", scheme_of, {"config_groups": groups, "transform_config": {"config_groups": {"v": {}}}}),
    ):
        with pytest.raises(ValueError, match=wanted):
            function(config, "up")


# ---- Whole checkpoints ----


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, K)
        self.proj = nn.Linear(K, N)
        self.norm = nn.LayerNorm(N)
        self.head = nn.Linear(K, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.norm(self.proj(self.embed(ids)))


def checkpoints():
    """(config, tensors of proj, its weight) in each format."""
    tensors = awq_tensors()
    yield {"quant_method": "awq", "bits": 4, "group_size": G}, tensors, awq_reference(tensors)
    tensors = gptq_tensors(4, K // G, (torch.arange(K) // G)[torch.randperm(K)])
    yield (
        {"quant_method": "gptq", "bits": 4, "group_size": G, "desc_act": True},
        tensors,
        gptq_reference(tensors, 4, 1),
    )
    q, scale = fp8(N, K), torch.rand(1, 2)
    yield (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"weight": q, "weight_scale_inv": scale, "activation_scale": torch.ones(1)},
        (q.float() * scale.repeat_interleave(128, 1)).double(),
    )
    tensors = {
        "weight_packed": words(N, K // 8),
        "weight_scale": scales(N, K // G),
        "weight_shape": torch.tensor([N, K]),
    }
    group = {"targets": ["Linear"], "weights": scheme(num_bits=4, strategy="group", group_size=G)["weights"]}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    yield config, tensors, packed_reference(tensors, 4, G, None)


def write(folder, config, tensors, rest):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    named = {f"proj.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file({**named, **rest}, folder / "model.safetensors")


def test_checkpoints(tmp_path):
    rest = {name: torch.randn_like(p) for name, p in Net().named_parameters() if name != "proj.weight"}
    for i, (config, tensors, want) in enumerate(checkpoints()):
        write(tmp_path / str(i), config, tensors, rest)
        for device in ("cpu", "meta"):
            with torch.device(device):
                net = Net()
            loaded = adze.load_quantized(net, tmp_path / str(i))
            assert loaded.format == config["quant_method"] and list(loaded.layers) == ["proj"] and not loaded.unused
            assert torch.equal(net.proj.weight, want.float())
            assert net.head.weight is net.embed.weight and torch.equal(net.embed.weight, rest["embed.weight"])
            assert torch.equal(net.proj.bias, rest["proj.bias"]) and net(torch.tensor([1, 2])).shape == (2, N)


def test_checkpoints_refused(tmp_path):
    config, tensors, _ = next(checkpoints())
    rest = {name: torch.randn_like(p) for name, p in Net().named_parameters() if name != "proj.weight"}
    with pytest.raises(ValueError, match="has no quantization_config in config.json"):
        adze.load_quantized(Net(), tmp_path)
    write(tmp_path, {"quant_method": "hqq"}, tensors, rest)
    with pytest.raises(ValueError, match="quant_method is 'hqq', it must be one of adze, awq, gptq, fp8"):
        adze.load_quantized(Net(), tmp_path)
    write(tmp_path, config, tensors, {"proj.bias": rest["proj.bias"]})
    with pytest.raises(ValueError, match="the checkpoint has no embed.weight, head.weight, norm.bias"):
        adze.load_quantized(Net(), tmp_path)
    net = Net()
    net.proj = nn.Linear(K, 2 * N)
    with pytest.raises(ValueError, match=r"proj is \[48, 256\] in the model, \[24, 256\] in the checkpoint"):
        adze.load_quantized(net, tmp_path)
    del net.proj
    with pytest.raises(ValueError, match="the checkpoint has proj.qweight, the model has no proj"):
        adze.load_quantized(net, tmp_path)


def test_numbers_without_their_scale(tmp_path):
    """What is not a float would be taken as the model's own numbers."""
    *_, (config, tensors, _), _ = checkpoints()
    rest = {name: torch.randn_like(p) for name, p in Net().named_parameters() if name != "proj.weight"}
    write(tmp_path, config, tensors, rest | {"twin.weight": fp8(N, K)})
    net = Net()
    net.twin = nn.Linear(K, N, bias=False)
    with pytest.raises(ValueError, match="twin.weight is torch.float32 in the model, F8_E4M3 in the checkpoint"):
        adze.load_quantized(net, tmp_path)
    write(tmp_path, config, tensors, rest | {"norm.weight": torch.ones(N, dtype=torch.int32)})
    with pytest.raises(ValueError, match="norm.weight is torch.float32 in the model, I32 in the checkpoint"):
        adze.load_quantized(Net(), tmp_path)


def test_one_column_less(tmp_path):
    """Two numbers of 4 bits are in a byte, which a weight with one column less fills too."""
    config, tensors, _ = next(checkpoints())
    rest = {name: torch.randn_like(p) for name, p in Net().named_parameters() if name != "proj.weight"}
    write(tmp_path, config, tensors | {"qweight": tensors["qweight"][:-1]}, rest)
    with pytest.raises(ValueError, match=r"proj is \[24, 256\] in the model, \[24, 255\] in the checkpoint"):
        adze.load_quantized(Net(), tmp_path)


def damaged():
    """(what is wrong, the tensors of proj) of a layer in adze's own format."""
    q, scale, zero, _ = quantized(torch.randn(N, K), "int4-g64", zero_points=True)
    good = {"weight_q": q, "weight_scale": scale, "weight_zero": zero, "weight_order": torch.randperm(K)}
    for wanted, change in (
        ("has no scale", {"weight_scale": None}),
        ("has numbers of torch.float32", {"weight_q": q.float()}),
        ("has numbers of torch.uint8 and 1 dimensions", {"weight_q": q.flatten()}),
        (r"is \[24, 256\] in the model, \[24, 128\]", {"weight_q": q.view(torch.int8)}),
        ("has a scale of torch.int32", {"weight_scale": scale.int()}),
        (r"has a scale of \[7\]", {"weight_scale": scale[:7, 0]}),
        (r"has a scale of \[9, 4\]", {"weight_scale": scale[:9]}),
        (r"has a scale of \[\]", {"weight_scale": scale[0, 0]}),
        (r"has a scale of \[24, 4, 1\]", {"weight_scale": scale[..., None]}),
        (r"has zeros of torch.uint8 and \[24, 2\]", {"weight_zero": zero[:, :2]}),
        ("has zeros of torch.float32", {"weight_zero": zero.float()}),
        ("has an order of torch.float32", {"weight_order": torch.arange(K).float()}),
        (r"has an order of torch.int64 and \[9\]", {"weight_order": torch.arange(9)}),
        ("has an order of its columns in which not each of 0 to 255 is", {"weight_order": torch.arange(K) + 1}),
        (
            "has an order of its columns in which not each of 0 to 255 is",
            {"weight_order": torch.zeros(K, dtype=torch.int64)},
        ),
    ):
        yield wanted, {name: part for name, part in (good | change).items() if part is not None}


def test_damaged_checkpoints_of_adze(tmp_path):
    rest = {name: torch.randn_like(p) for name, p in Net().named_parameters() if name != "proj.weight"}
    for wanted, tensors in damaged():
        write(tmp_path, {"quant_method": "adze"}, tensors, rest)
        net = Net()
        with pytest.raises(ValueError, match=f"adze.load_quantized: proj {wanted}"):
            adze.load_quantized(net, tmp_path)
        assert type(net.proj) is nn.Linear


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_checkpoint_that_fails_leaves_the_model(tmp_path, device):
    config, tensors, _ = next(checkpoints())
    rest = {name: torch.randn_like(p) for name, p in Net().named_parameters() if name != "proj.weight"}
    worse = {f"twin.{name}": tensor.clone() for name, tensor in tensors.items()}
    worse |= {"twin.qweight": words(K, 1), "twin.bias": torch.zeros(N)}
    for more, wanted in (
        (worse, "twin: awq: a weight .* has scales"),
        (
            {"twin.weight": torch.zeros(N, K), "twin.bias": torch.zeros(N + 1)},
            r"twin.bias is \[24\] in the model, \[25\]",
        ),
        ({"twin.weight": torch.zeros(N, K)}, "the checkpoint has no twin.bias"),
        (
            {"twin.weight": torch.zeros(N, K), "twin.bias": torch.zeros(N)},
            "table is on the meta device and not in the",
        ),
    ):
        with torch.device(device):
            net = Net()
            net.twin = nn.Linear(K, N)
        net.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
        modules, before = dict(net.named_modules()), {name: t.clone() for name, t in net.state_dict().items()}
        write(tmp_path, config, tensors, rest | more)
        with pytest.raises(ValueError, match=wanted):
            adze.load_quantized(net, tmp_path)
        assert dict(net.named_modules()) == modules and type(net.proj) is nn.Linear
        assert all(t.device.type == device for t in net.state_dict().values())
        assert device == "meta" or all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_files_that_cannot_be_read(tmp_path):
    config, tensors, _ = next(checkpoints())
    write(tmp_path, config, tensors, {})
    path, index = tmp_path / "config.json", tmp_path / "model.safetensors.index.json"
    good = path.read_text()
    for text, wanted in (
        ("{", "config.json is not JSON"),
        ("[]", "has no quantization_config"),
        ('{"quantization_config": "awq"}', "has no quantization_config"),
        ('{"quantization_config": {"quant_method": ["awq"]}}', r"quant_method is \['awq'\], it must be one of"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=wanted):
            adze.load_quantized(Net(), tmp_path)
    path.write_text(good)
    for text, wanted in (
        ("{}", "index.json has no weight_map"),
        ('{"weight_map": {"proj.qweight": 3}}', "other places than names of files"),
        ('{"weight_map": {"proj.qweight": "x"}}', "x cannot"),
        ('{"weight_map": {"embed.qweight": "model.safetensors"}}', "cannot be read: .*embed.qweight"),
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match=wanted):
            adze.load_quantized(Net(), tmp_path)
    index.unlink()
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(ValueError, match="model.safetensors cannot be read: "):
        adze.load_quantized(Net(), tmp_path)


def test_on_the_default_device():
    """The layer of an imported weight moves as every module does."""
    layer = adze.QuantizedLinear(formats.awq(awq_tensors(), {"group_size": G}), K).to(here())
    assert layer(torch.randn(2, K, device=here())).device.type == here().type


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dequantized(kind, zero_points, dtype, monkeypatch):
    """The op and torch make the same bits: those of the formula in float32, rounded once."""
    if zero_points and not kind.startswith("int4"):
        pytest.skip("only 4 bits have zeros")

    def bits(numbers):
        whole = torch.int32 if dtype == torch.float32 else torch.int16
        return torch.where(numbers.isnan(), 0, numbers).view(whole), numbers.isnan()

    def agree(made, k):
        want = bits(dequantized(made, k, torch.float64).to(dtype))
        for has_kernel in (True, False):
            monkeypatch.setattr(ops, "has_kernel", lambda op, device, found=has_kernel: found)
            got = dequantized(made, k, dtype)
            assert got.shape == (made.q.shape[0], k) and got.dtype == dtype
            assert all(map(torch.equal, bits(got), want))
        monkeypatch.undo()

    for n, k in ((5, 128), (130, 256), (3, 200), (4, 99)):  # 200: a last group that is not whole
        made = quantized(torch.randn(n, k), kind, zero_points)
        made = made._replace(**{name: part.to(here()) for name, part in made._asdict().items() if part is not None})
        agree(made, k)
        made.q.view(torch.uint8).random_(0, 256)  # every number that bytes hold, NaN of float8_e4m3fn too
        extremes = torch.tensor([2.0**-130, -3e38, 0, 1e-3, float("inf")]).repeat(made.scale.numel())
        made.scale.view(-1).copy_(extremes[: made.scale.numel()])
        agree(made, k)
