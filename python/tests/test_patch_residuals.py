"""Sums and norms that are fused by the statements of a forward: what is rewritten, what is refused, the numbers."""

import functools
import importlib
import types

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
from torch import nn  # noqa: E402

import adze  # noqa: E402
from adze.patching.fingerprint import undecorated  # noqa: E402
from adze.patching.residual_norm import norms_of_sums  # noqa: E402
from device import Watch, generator, here  # noqa: E402

RULE = "add + norm, by statements"
_LM = dict(
    vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=2,
)  # fmt: skip
_PAIR = dict(
    vocab_size=128, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=64, pad_token_id=0,
    eos_token_id=1, bos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=1,
)  # fmt: skip
_SEEN = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)

# A model, and the class of its blocks: no rule knows their sources.
MODELS = {
    "granite:GraniteDecoderLayer": lambda: hf.GraniteConfig(**_LM),
    "glm4:Glm4DecoderLayer": lambda: hf.Glm4Config(**_LM, head_dim=64),
    "apertus:ApertusDecoderLayer": lambda: hf.ApertusConfig(**_LM),
    "persimmon:PersimmonDecoderLayer": lambda: hf.PersimmonConfig(**{**_LM, "num_key_value_heads": 2}),
    "biogpt:BioGptDecoderLayer": lambda: hf.BioGptConfig(**{k: v for k, v in _LM.items() if "key_value" not in k}),
    "bart:BartEncoderLayer": lambda: hf.BartConfig(**_PAIR),
    "mbart:MBartEncoderLayer": lambda: hf.MBartConfig(**_PAIR),
    "pegasus:PegasusEncoderLayer": lambda: hf.PegasusConfig(**_PAIR),
    "blenderbot:BlenderbotEncoderLayer": lambda: hf.BlenderbotConfig(**_PAIR),
    "m2m_100:M2M100EncoderLayer": lambda: hf.M2M100Config(**_PAIR),
    "plbart:PLBartEncoderLayer": lambda: hf.PLBartConfig(**_PAIR),
    "dinov2:Dinov2Layer": lambda: hf.Dinov2Config(**_SEEN, mlp_ratio=2),
}


def build(name):
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(MODELS[name]())
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.to(here()).eval()


def arguments(name):
    if name.startswith("dinov2"):
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator(1))}
    ids = torch.randint(3, 99, (2, 12), generator=generator(1))
    return {"input_ids": ids, **({"decoder_input_ids": ids[:, :7]} if "Encoder" in name else {})}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models(name):
    """The blocks are found, the outputs are the model's, and each block has one launch less than without the rule."""
    model, inputs = build(name), arguments(name)
    expected = model(**inputs).last_hidden_state
    blocks = [path for path, module in model.named_modules() if type(module).__name__ == name.partition(":")[2]]
    with adze.patched(model) as handle:
        rules = {row.path: row.rule for row in handle.rows}
        assert [rules[path] for path in blocks] == [RULE] * 2
        with Watch() as fused:
            found = model(**inputs).last_hidden_state
        torch.testing.assert_close(found, expected)
    with adze.patched(model, ops={"norm", "rope", "act"}), Watch() as alone:
        model(**inputs)
    assert fused.seen["aten.add"] + fused.seen["aten.add_"] <= alone.seen["aten.add"] + alone.seen["aten.add_"] - 2
    assert torch.equal(model(**inputs).last_hidden_state, expected)


# ---- What is rewritten ----


class Block(nn.Module):
    """Its forward is set by each test."""

    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.LayerNorm(64), nn.LayerNorm(64)
        self.linear = nn.Linear(64, 64)
        self.__class__ = type("Block", (Block,), {"forward": forward})

    def __call__(self, *args, **kwargs):
        return nn.Module.__call__(self, *args, **kwargs)


def keeps(self, x, y):
    x = y + x
    y = x
    x = self.first(x)
    return x, y


def keeps_under_other_names(self, x, y):
    total = self.linear(x) * 2 + y
    kept = total
    normed = self.first(kept)
    return normed, total, kept


def keeps_nothing(self, x, y):
    x = x + self.linear(y)
    x = self.first(x)
    return x


def reads_the_sum_later(self, x, y):
    z = x + y
    n = self.first(z)
    return n - z


def has_two(self, x, y, again=True, *, more=1):
    """Both are replaced,
    also within a branch."""
    x = x + y
    y = x
    x = self.first(x)
    if again:
        x = y + x
        y = x
        x = self.second(x)
    return x * more, y


@pytest.mark.parametrize("function", [keeps, keeps_under_other_names, keeps_nothing, reads_the_sum_later, has_two])
@torch.no_grad()
def test_is_fused(function):
    block = Block(function).to(here())
    x, y = (torch.randn(2, 5, 64, generator=generator(i)) for i in range(2))
    expected = block(x, y)
    with adze.patched(block) as handle:
        assert {row.path: row.rule for row in handle.rows}[""] == RULE
        with Watch() as watch:
            found = block(x, y)
        torch.testing.assert_close(found, expected)
        # Neither a sum of two tensors nor a norm of torch's is left.
        assert watch.seen["aten.add"] == watch.seen["aten.native_layer_norm"] == 0
        if function is has_two:
            torch.testing.assert_close(block(x, y, False, more=3)[0], 3 * block(x, y, again=False)[0])
    assert norms_of_sums(function) == (("first", "second") if function is has_two else ("first",))


@torch.no_grad()
def test_what_cannot_be_fused_is_added_and_normed():
    block = Block(keeps).to(here())
    x = torch.randn(2, 5, 64, generator=generator(0))
    for other in (2.0, torch.randn(64, generator=generator(1)), torch.randn(2, 5, 64, dtype=torch.float64)):
        module = block.double() if isinstance(other, torch.Tensor) and other.dtype == torch.float64 else block
        given = x.double() if module.first.weight.dtype == torch.float64 else x
        expected = module(given, other)
        with adze.patched(module):
            normed, total = module(given, other)
        assert torch.equal(total, expected[1]) and normed.dtype == expected[0].dtype
        torch.testing.assert_close(normed, expected[0])


def test_hooks_of_the_norm_still_run():
    block, seen = Block(keeps).to(here()), []
    x, y = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    adze.patch(block)
    block.first.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        block(x, y)
    assert seen == [1]


def test_layers_share_one_code():
    """Dynamo compiles a code once: two layers of a class must not be two functions to it."""
    model = build("granite:GraniteDecoderLayer")
    adze.patch(model)
    one, two = (layer.forward.__func__ for layer in model.layers)
    assert one is not two and one.__code__ is two.__code__


@pytest.mark.parametrize("name", ["granite:GraniteDecoderLayer", "dinov2:Dinov2Layer"])
@torch.no_grad()
def test_compiles_whole(name):
    model, inputs = build(name), arguments(name)
    expected = model(**inputs).last_hidden_state
    adze.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**inputs).last_hidden_state, expected)


# ---- What is refused ----


def has_a_statement_between(self, x, y):
    x = x + y
    y = self.linear(y)
    return self.first(x), y


def adds_in_place(self, x, y):
    x += y
    y = x
    x = self.first(x)
    return x, y


def norms_something_else(self, x, y):
    z = x + y
    n = self.first(y)
    return n, z


def norms_with_more(self, x, y):
    z = x + y
    n = self.first(z, None)
    return n


def subtracts(self, x, y):
    x = x - y
    x = self.first(x)
    return x


def calls_locals(self, x, y):
    x = x + y
    x = self.first(x)
    return locals()["x"]


def has_a_private_name(self, x, y):
    x = x + y
    x = self.first(x)
    return x * self.__dict__.get("a", 1) * getattr(self, "b", 1) * self.__private


def made_within(scale):
    def forward(self, x, y):
        x = x + y
        x = self.first(x)
        return x * scale

    return forward


def wrapped(function):
    @functools.wraps(function)
    def wrapper(self, *args):
        return function(self, *args) * 2

    return wrapper


REFUSED = [
    has_a_statement_between, adds_in_place, norms_something_else, norms_with_more, subtracts, calls_locals,
    has_a_private_name, made_within(3), wrapped(keeps_nothing),
]  # fmt: skip


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_is_refused(function):
    block = Block(function)
    with adze.patched(block) as handle:
        assert "" not in handle.patched
        assert "forward" not in block.__dict__


def test_a_source_that_is_not_the_code_is_refused():
    """A file may have changed since it was loaded."""
    other = types.FunctionType(
        keeps_nothing.__code__.replace(co_firstlineno=has_two.__code__.co_firstlineno), globals(), "forward"
    )
    assert norms_of_sums(keeps_nothing) and not norms_of_sums(other)


def test_an_unknown_norm_is_left_alone():
    block = Block(keeps)
    block.first = nn.GroupNorm(5, 5)
    with adze.patched(block) as handle:
        assert "" not in handle.patched


def test_ops_chooses():
    with adze.patched(Block(keeps), ops={"norm"}) as handle:
        assert "" not in handle.patched and "first" in handle.patched


def test_blocks_that_are_known_keep_their_rule():
    home = importlib.import_module("transformers.models.llama.modeling_llama")
    assert norms_of_sums(undecorated(home.LlamaDecoderLayer.forward)) == ("post_attention_layernorm",)
    config = hf.LlamaConfig(**_LM)
    with adze.patched(home.LlamaDecoderLayer(config, 0)) as handle:
        assert handle.rows[0].rule == "add + norm"
