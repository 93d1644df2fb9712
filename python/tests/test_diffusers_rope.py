"""rope, qk_norm_rope, rope_table and their frequencies against transformers and diffusers themselves."""

import ctypes
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers.models import embeddings as diffusers_embeddings  # noqa: E402
from diffusers.models.transformers import transformer_flux, transformer_ltx, transformer_wan  # noqa: E402
from transformers import CohereConfig, Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, Qwen3Config  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.cohere import modeling_cohere  # noqa: E402
from transformers.models.gemma3 import modeling_gemma3  # noqa: E402
from transformers.models.gpt_neox import modeling_gpt_neox  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3  # noqa: E402

LIBRARY = Path(os.environ.get("ADZE_LIBRARY", Path(__file__).parents[2] / "build" / "libadze.so"))
if not LIBRARY.exists():
    pytest.skip(f"{LIBRARY} is not built", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("on_the_cpu")
lib = ctypes.CDLL(str(LIBRARY))
lib.adze_last_error.restype = ctypes.c_char_p

DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.int32: 7, torch.int64: 8, torch.float64: 10}
HALF_DTYPES = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, *HALF_DTYPES]
ROUND_NORM, ROUND_STEPS, ROUND_VALUE = 1, 2, 4
HALF, INTERLEAVED = 0, 1
ONCE, HALVES, PAIRS = 0, 1, 2


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 5),
        ("stride", ctypes.c_int64 * 5),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


class Stream(ctypes.Structure):
    _fields_ = [("device", ctypes.c_int32), ("handle", ctypes.c_void_p)]


class Call(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("scratch", ctypes.c_void_p),
        ("scratch_size", ctypes.c_size_t),
    ]


def args_of(tensors, floats, ints):
    fields = [("call", Call)] + [(name, Tensor) for name in tensors.split()]
    fields += [(name, ctypes.c_float) for name in floats.split()] + [(name, ctypes.c_int32) for name in ints.split()]
    return type("Args", (ctypes.Structure,), {"_fields_": fields})


RopeArgs = args_of("q_out k_out q k cos sin", "", "pairs rotary_dim heads_first rounding")
QkNormRopeArgs = args_of(
    "q_out k_out q k q_weight k_weight cos sin",
    "eps weight_offset",
    "across_heads pairs rotary_dim heads_first rounding reserved",
)
TableArgs = args_of("cos sin pos freq axis", "scale", "columns double_angle out_dtype")


class Spec(ctypes.Structure):
    _fields_ = (
        [("size", ctypes.c_uint32)]
        + [(name, ctypes.c_int32) for name in ("rope_type", "rotary_dim", "no_truncate")]
        + [
            (name, ctypes.c_double)
            for name in (
                "rope_theta factor partial_rotary_factor low_freq_factor high_freq_factor beta_fast beta_slow mscale "
                "mscale_all_dim attention_factor"
            ).split()
        ]
        + [("max_position_embeddings", ctypes.c_int64), ("original_max_position_embeddings", ctypes.c_int64)]
        + [("short_factor", ctypes.c_void_p), ("long_factor", ctypes.c_void_p)]
    )


def checked(status):
    assert status == 0, lib.adze_last_error().decode()


def call(op, args_type, **values):
    args = args_type()
    args.call.size = ctypes.sizeof(args_type)
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            t = getattr(args, name)
            t.data, t.rank, t.dtype = value.data_ptr(), value.dim(), DTYPES[value.dtype]
            t.shape[: value.dim()], t.stride[: value.dim()] = value.shape, value.stride()
        elif value is not None:
            setattr(args, name, value)
    checked(getattr(lib, f"adze_{op}")(Stream(-1, None), ctypes.byref(args)))


def rope(q, k, cos, sin, **options):
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    call("rope", RopeArgs, q_out=q_out, k_out=k_out, q=q, k=k, cos=cos, sin=sin, **options)
    return q_out, k_out


def qk_norm_rope(q, k, cos, sin, **options):
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    call("qk_norm_rope", QkNormRopeArgs, q_out=q_out, k_out=k_out, q=q, k=k, cos=cos, sin=sin, **options)
    return q_out, k_out


def table(pos, freq, columns, dtype=torch.float32, **options):
    width = freq.numel() * (1 if columns == ONCE else 2)
    cos, sin = (torch.empty(*pos.shape[:-1], width, dtype=dtype) for _ in range(2))
    options.update(columns=columns, out_dtype=DTYPES[dtype])
    call("rope_table", TableArgs, cos=cos, sin=sin, pos=pos, freq=freq, **options)
    return cos, sin


def ulps(got, want):
    """The largest distance, in units of want's last place."""
    unit = torch.ldexp(torch.ones_like(want), torch.frexp(want)[1]) * torch.finfo(want.dtype).eps / 2
    unit = unit.clamp_min(torch.finfo(want.dtype).tiny * torch.finfo(want.dtype).eps)
    return ((got.double() - want.double()).abs() / unit.double()).max().item()


def same_turn(got, want, x, partner, cos, sin):
    """Products and their sum, in float or fused: three roundings of the larger term bound the difference."""
    terms = (x.double() * cos.double()).abs() + (partner.double() * sin.double()).abs()
    assert ((got.double() - want.double()).abs() <= 3 * 2**-24 * terms + 2**-140).all()


def random_heads(dtype, batch=2, seq=7, heads=4, kv_heads=2, dim=64):
    """q and k as models have them: [batch, heads, seq, dim], views of [batch, seq, heads, dim]."""
    torch.manual_seed(1)
    return [torch.randn(batch, seq, n, dim, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads)]


# Frequencies.

LONG = {"short_factor": [1 + 0.01 * i for i in range(32)], "long_factor": [2 + 0.5 * i for i in range(32)]}
TYPES = {
    "default": (0, {}),
    "linear": (1, {"factor": 3.0}),
    "dynamic": (2, {"factor": 2.5}),
    "yarn": (3, {"factor": 4.0, "original_max_position_embeddings": 2048}),
    "yarn-mscale": (
        3,
        {
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.9,
            "mscale_all_dim": 0.7,
            "beta_fast": 24,
            "beta_slow": 2,
        },
    ),
    "yarn-no_truncate": (3, {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}),
    "longrope": (4, {"original_max_position_embeddings": 1024, **LONG}),
    "longrope-factor": (4, {"original_max_position_embeddings": 1024, "factor": 8.0, **LONG}),
    "llama3": (
        5,
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "proportional": (6, {"partial_rotary_factor": 0.25, "factor": 2.0}),
}


def frequencies(rope_type, parameters, theta, dim, max_position_embeddings, seq_len=0):
    known = dict(parameters)
    spec = Spec(size=ctypes.sizeof(Spec), rope_type=rope_type, rotary_dim=dim, rope_theta=theta)
    spec.max_position_embeddings = max_position_embeddings
    spec.no_truncate = not known.pop("truncate", True)
    lists = {name: torch.tensor(known.pop(name, []), dtype=torch.float64) for name in ("short_factor", "long_factor")}
    for name, values in lists.items():
        setattr(spec, name, values.data_ptr() or None)
    for name, value in known.items():
        setattr(spec, name, value)
    freq, scale = torch.empty(dim // 2, dtype=torch.float64), ctypes.c_float()
    checked(
        lib.adze_rope_frequencies(
            ctypes.byref(spec), ctypes.c_int64(seq_len), ctypes.c_void_p(freq.data_ptr()), ctypes.byref(scale)
        )
    )
    return freq, scale.value


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("seq_len", [None, 1000, 9000])
@pytest.mark.parametrize("name", TYPES)
def test_frequencies(name, seq_len, theta):
    number, parameters = TYPES[name]
    kind = name.split("-")[0]
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    init = ROPE_INIT_FUNCTIONS.get(kind) or modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters
    want, want_scale = init(config, device="cpu", seq_len=seq_len)
    freq, scale = frequencies(number, parameters, theta, 64, 4096, seq_len or 0)
    assert torch.equal(freq, freq.float().double())
    assert ulps(freq.float(), want) <= 1
    assert scale == pytest.approx(want_scale, rel=1e-7)


def test_frequencies_refuse():
    spec = Spec(size=ctypes.sizeof(Spec), rope_type=1, rotary_dim=64, rope_theta=1e4)
    freq, scale = (ctypes.c_double * 32)(), ctypes.c_float()
    for change, says in (
        ({}, b"factor"),
        ({"size": 0}, b"spec.size is 0"),
        ({"size": 4096 + 8}, b"spec.size"),
        ({"rope_type": 9}, b"rope_type is 9"),
        ({"rotary_dim": 7}, b"rotary_dim is 7"),
        ({"rope_theta": 0.0}, b"rope_theta is 0"),
        ({"rope_type": 4}, b"original_max_position_embeddings"),
        ({"rope_type": 4, "original_max_position_embeddings": 8}, b"short_factor"),
    ):
        bad = Spec.from_buffer_copy(spec)
        for name, value in change.items():
            setattr(bad, name, value)
        assert lib.adze_rope_frequencies(ctypes.byref(bad), ctypes.c_int64(0), freq, ctypes.byref(scale)) == 1
        assert says in lib.adze_last_error()


def axes_of(function, columns, *arguments):
    freq, axis = torch.empty(columns, dtype=torch.float64), torch.empty(columns, dtype=torch.int32)
    checked(getattr(lib, function)(*arguments, ctypes.c_void_p(freq.data_ptr()), ctypes.c_void_p(axis.data_ptr())))
    return freq, axis


# Tables.


@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
def test_table_llama(name):
    number, parameters = TYPES[name]
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": name, "rope_theta": 500000.0, **parameters},
    )
    module = modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.tensor([[0, 1, 2, 100, 4095, 131071], [5, 6, 7, 8, 9, 100000]])
    _, scale = frequencies(number, parameters, 500000.0, 64, 131072)
    want = module(torch.zeros(1), positions)
    got = table(positions[..., None], module.inv_freq, HALVES, scale=scale)
    for g, w in zip(got, want, strict=True):
        assert ulps(g, w) <= 3
    want = module(torch.zeros(1, dtype=torch.bfloat16), positions)
    got = table(positions[..., None], module.inv_freq, HALVES, torch.bfloat16, scale=scale)
    for g, w in zip(got, want, strict=True):
        assert ulps(g, w) <= 1


def test_table_flux():
    ids = torch.cat([torch.zeros(5, 3), torch.cartesian_prod(torch.zeros(1), torch.arange(40.0), torch.arange(64.0))])
    want = transformer_flux.FluxPosEmbed(10000, [16, 56, 56])(ids)
    freq, axis = axes_of("adze_rope_axes", 64, 3, (ctypes.c_int32 * 3)(16, 56, 56), ctypes.c_double(10000))
    got = table(ids, freq, PAIRS, axis=axis, double_angle=1)
    for g, w in zip(got, want, strict=True):
        assert ulps(g, w) <= 2


@pytest.mark.parametrize("head_dim", [12, 64, 128])
def test_table_wan(head_dim):
    frames, height, width = 3, 8, 10
    module = transformer_wan.WanRotaryPosEmbed(head_dim, (1, 2, 2), 1024)
    want = module(torch.zeros(1, 4, frames, height, width))
    freq, axis = axes_of("adze_rope_video_axes", head_dim // 2, head_dim, ctypes.c_double(10000))
    ids = torch.cartesian_prod(*(torch.arange(n) for n in (frames, height // 2, width // 2)))
    got = table(ids, freq, PAIRS, axis=axis, double_angle=1)
    for g, w in zip(got, want, strict=True):
        assert ulps(g, w.reshape(g.shape)) <= 2


def ltx_table(dim, size, scale, base=(20.0, 2048.0, 2048.0)):
    freq, axis = axes_of("adze_rope_fractions", dim // 2, dim, ctypes.c_double(10000))
    floats, ints = ctypes.c_float * 3, ctypes.c_int32 * 3
    pos = torch.empty(size[0] * size[1] * size[2], 3)
    checked(
        lib.adze_rope_fraction_positions(
            ints(*size), floats(*scale), floats(1, 1, 1), floats(*base), ctypes.c_void_p(pos.data_ptr())
        )
    )
    return pos, freq, axis


@pytest.mark.parametrize("dim", [12, 64, 2048])
def test_table_ltx(dim):
    size, scale = (7, 16, 24), (8 / 25, 32.0, 32.0)
    module = transformer_ltx.LTXVideoRotaryPosEmbed(dim)
    want = module(torch.zeros(1, 1), *size, rope_interpolation_scale=scale)
    pos, freq, axis = ltx_table(dim, size, scale)
    got = table(pos, freq.float(), PAIRS, axis=axis)
    # A power that differs in its last bit, and rounds apart in two products, moves the angle by that share of it.
    turn = freq.repeat_interleave(2) * pos[:, axis.long()].repeat_interleave(2, dim=1).double()
    for g, w in zip(got, want, strict=True):
        assert ((g - w[0]).abs() <= 2**-23 * (3 * turn.abs() + 2)).all()


# Rotation.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shared", [True, False])
def test_rope_llama(dtype, shared):
    q, k = random_heads(dtype)
    positions = torch.arange(7)[None] if shared else torch.stack([torch.arange(7), torch.arange(50, 57)])
    config = LlamaConfig(hidden_size=256, num_attention_heads=4)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, positions)
    want = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    got = rope(q, k, cos, sin, heads_first=1, rounding=ROUND_STEPS)
    for g, w, x in zip(got, want, (q, k), strict=True):
        if dtype == torch.float32:
            same_turn(g, w, x, modeling_llama.rotate_half(x), cos[:, None], sin[:, None])
        else:
            assert torch.equal(g, w)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_rope_partial(dtype):
    q, k = random_heads(dtype)
    config = GPTNeoXConfig(hidden_size=256, num_attention_heads=4)
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(q, torch.arange(7)[None])
    want = modeling_gpt_neox.apply_rotary_pos_emb(q, k, cos, sin)
    got = rope(q, k, cos, sin, heads_first=1, rounding=ROUND_STEPS, rotary_dim=cos.shape[-1])
    assert cos.shape[-1] < 64
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_rope_interleaved(dtype):
    q, k = random_heads(dtype)
    config = CohereConfig(hidden_size=256, num_attention_heads=4)
    cos, sin = modeling_cohere.CohereRotaryEmbedding(config)(q, torch.arange(7)[None])
    want = modeling_cohere.apply_rotary_pos_emb(q, k, cos, sin)
    got = rope(q, k, cos, sin, heads_first=1, pairs=INTERLEAVED)
    for g, w in zip(got, want, strict=True):
        # The product is rounded to float before it is added, or not: a neighbour now and then.
        assert (g == w).float().mean() > 0.999 and ulps(g, w) <= 1


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_rope_flux(dtype):
    q, k = (t.transpose(1, 2) for t in random_heads(dtype, seq=40, kv_heads=4, dim=128))
    cos, sin = transformer_flux.FluxPosEmbed(10000, [16, 56, 56])(torch.randint(0, 64, (40, 3)))
    got = rope(q, k, cos, sin, pairs=INTERLEAVED)
    for g, x in zip(got, (q, k), strict=True):
        want = diffusers_embeddings.apply_rotary_emb(x, (cos, sin), sequence_dim=1)
        assert (g == want).float().mean() > 0.999


def nearly_equal(got, want, x):
    """The sums of squares differ in their last bits, so that now and then a value rounds to the other side."""
    assert (got == want).float().mean() > 0.995
    limit = 4 * torch.finfo(got.dtype).eps * x.abs().amax()
    assert ((got.double() - want.double()).abs() <= limit).all()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_qk_norm_rope_qwen3(dtype):
    config = Qwen3Config(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    attention = modeling_qwen3.Qwen3Attention(config, 0).to(dtype)
    q, k = random_heads(dtype, seq=50)
    cos, sin = modeling_qwen3.Qwen3RotaryEmbedding(config)(q, torch.arange(50)[None])
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.normal_(norm.weight)
    want = modeling_qwen3.apply_rotary_pos_emb(attention.q_norm(q), attention.k_norm(k), cos, sin)
    weights = {"q_weight": attention.q_norm.weight.detach(), "k_weight": attention.k_norm.weight.detach()}
    eps = attention.q_norm.variance_epsilon
    got = qk_norm_rope(q, k, cos, sin, **weights, eps=eps, heads_first=1, rounding=ROUND_NORM | ROUND_STEPS)
    for g, w in zip(got, want, strict=True):
        nearly_equal(g, w, w)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_qk_norm_rope_gemma3(dtype):
    config = Gemma3TextConfig(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    q, k = random_heads(dtype, seq=50)
    norm = modeling_gemma3.Gemma3RMSNorm(64, eps=config.rms_norm_eps).to(dtype)
    torch.nn.init.normal_(norm.weight)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=4))(
        q, torch.arange(50)[None]
    )
    want = modeling_gemma3.apply_rotary_pos_emb(norm(q), norm(k), cos, sin)
    weight = norm.weight.detach()
    got = qk_norm_rope(
        q,
        k,
        cos,
        sin,
        q_weight=weight,
        k_weight=weight,
        eps=config.rms_norm_eps,
        weight_offset=1.0,
        heads_first=1,
        rounding=ROUND_STEPS,
    )
    for g, w in zip(got, want, strict=True):
        nearly_equal(g, w, w)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_qk_norm_rope_ltx(dtype):
    torch.manual_seed(1)
    size, scale, dim = (2, 8, 8), (8 / 25, 32.0, 32.0), 2048
    q, k = (torch.randn(2, 128, dim, dtype=dtype) for _ in range(2))
    attention = transformer_ltx.LTXAttention(dim, heads=32, kv_heads=32, dim_head=64).to(dtype)
    for norm in (attention.norm_q, attention.norm_k):
        torch.nn.init.normal_(norm.weight)
    tables = transformer_ltx.LTXVideoRotaryPosEmbed(dim)(q, *size, rope_interpolation_scale=scale)
    want = [
        transformer_ltx.apply_rotary_emb(norm(x), tables)
        for norm, x in ((attention.norm_q, q), (attention.norm_k, k))
    ]
    weights = {"q_weight": attention.norm_q.weight.detach(), "k_weight": attention.norm_k.weight.detach()}
    got = qk_norm_rope(
        q[:, :, None],
        k[:, :, None],
        *tables,
        **weights,
        eps=attention.norm_q.eps,
        pairs=INTERLEAVED,
        across_heads=1,
        rounding=ROUND_VALUE,
    )
    for g, w in zip(got, want, strict=True):
        nearly_equal(g[:, :, 0], w, w)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_qk_norm_rope_wan(dtype):
    q, k = (t.transpose(1, 2) for t in random_heads(dtype, batch=1, seq=60, heads=3, kv_heads=3, dim=128))
    norm = torch.nn.RMSNorm(384, eps=1e-6, dtype=dtype)
    torch.nn.init.normal_(norm.weight)
    cos, sin = transformer_wan.WanRotaryPosEmbed(128, (1, 2, 2), 64)(torch.zeros(1, 4, 3, 8, 10))
    weight = norm.weight.detach()
    got = qk_norm_rope(
        q,
        k,
        cos[0, :, 0],
        sin[0, :, 0],
        q_weight=weight,
        k_weight=weight,
        eps=1e-6,
        pairs=INTERLEAVED,
        across_heads=1,
        rounding=ROUND_VALUE,
    )
    for g, x in zip(got, (q, k), strict=True):
        x1, x2 = norm(x.flatten(2)).unflatten(2, (3, -1)).unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos[..., 0::2], sin[..., 1::2]
        want = torch.stack([x1 * c - x2 * s, x1 * s + x2 * c], dim=-1).flatten(3).to(dtype)
        nearly_equal(g, want, want)


# Whole models: the same tokens when their rotation is adze's.


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("module", [modeling_llama, modeling_qwen3, modeling_gpt_neox])
def test_whole_model(module, dtype, monkeypatch):
    common = {
        "vocab_size": 128,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config, model_type = {
        modeling_llama: (LlamaConfig(**common, num_key_value_heads=2), "LlamaForCausalLM"),
        modeling_qwen3: (Qwen3Config(**common, num_key_value_heads=2, head_dim=64), "Qwen3ForCausalLM"),
        modeling_gpt_neox: (GPTNeoXConfig(**common), "GPTNeoXForCausalLM"),
    }[module]
    torch.manual_seed(1)
    model = getattr(module, model_type)(config).to(dtype).eval()
    ids = torch.randint(0, 128, (2, 32))
    calls = []

    def replacement(q, k, cos, sin, **_):
        calls.append(1)
        return rope(q, k, cos, sin, heads_first=1, rounding=ROUND_STEPS, rotary_dim=cos.shape[-1])

    with torch.no_grad():
        want = model(ids).logits
        monkeypatch.setattr(module, "apply_rotary_pos_emb", replacement)
        got = model(ids).logits
    assert len(calls) == 2
    assert torch.equal(got, want)


def test_whole_ltx(monkeypatch):
    torch.manual_seed(1)
    model = transformer_ltx.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=16,
    ).eval()
    inputs = {
        "hidden_states": torch.randn(2, 512, 4),
        "encoder_hidden_states": torch.randn(2, 16, 16),
        "timestep": torch.randint(0, 1000, (2,)),
        "encoder_attention_mask": torch.ones(2, 16).bool(),
        "num_frames": 2,
        "height": 16,
        "width": 16,
    }
    calls = []

    def replacement(x, freqs):
        calls.append(1)
        out = torch.empty_like(x)
        call("rope", RopeArgs, q_out=out[:, :, None], q=x[:, :, None], cos=freqs[0], sin=freqs[1], pairs=INTERLEAVED)
        return out

    with torch.no_grad():
        want = model(**inputs).sample
        monkeypatch.setattr(transformer_ltx, "apply_rotary_emb", replacement)
        got = model(**inputs).sample
    assert len(calls) == 2
    # One block of float arithmetic after a difference in the last bit of q and k.
    assert (got - want).abs().max() <= 32 * 2**-24 * want.abs().max()
