"""The log-probability of a text for accuracy.py: a small Llama learns bytes from this repository's own documents, and
reads a document that it has not seen, in each dtype, as transformers runs it and patched.

It learns on the CPU, from a seed and in a fixed number of steps, so that the weights do not depend on the GPU.
"""

import copy
import math
import pathlib

import torch
import transformers

import adze

ROOT = pathlib.Path(__file__).resolve().parent.parent
HELD_OUT = "docs/python.md"
TEXTS = ["CONTRIBUTING.md", "docs/architecture.md", "docs/c.md", "docs/models.md", "docs/ops.md"]
TEXTS += ["docs/troubleshooting.md", "docs/versions.md", "docs/vllm.md", "include/adze.h", "include/adze_kernel.h"]
SIZE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
TINY = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2}
STEPS, TINY_STEPS = 200, 30
WINDOW, BATCH, RATE = 128, 8, 3e-3
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
VARIANTS = {"eager": None, "adze": {}, "adze fast": {"numerics": "fast"}}  # arguments of adze.patch


def read(*names):
    text = b"".join((ROOT / name).read_bytes() for name in names)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def model(size):
    config = transformers.LlamaConfig(
        vocab_size=256, num_key_value_heads=size["num_attention_heads"] // 2, max_position_embeddings=WINDOW,
        rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa", **size,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@torch.enable_grad()
def trained(tiny=False):
    """A model that has learned the texts, in float32 on the CPU."""
    steps, text = TINY_STEPS if tiny else STEPS, read(*TEXTS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model(TINY if tiny else SIZE)
        optimizer = torch.optim.AdamW(made.parameters(), RATE, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
        for _ in range(steps):
            first = torch.randint(len(text) - WINDOW, (BATCH, 1))
            batch = text[first + torch.arange(WINDOW)]
            loss = made(input_ids=batch, labels=batch, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return made.eval().requires_grad_(False)


def windows(tiny=False):
    """The held-out text in windows of equal length."""
    text = read(HELD_OUT)
    count = len(text) // WINDOW
    return text[: count * WINDOW].view(count, WINDOW)[: 8 if tiny else None]


def read_by(model, text):
    """Log-probabilities of each byte after the first of a window, and the most probable bytes."""
    logits = model(input_ids=text, use_cache=False).logits[:, :-1].float()
    log_probs = torch.log_softmax(logits, -1).gather(-1, text[:, 1:, None]).squeeze(-1)
    return log_probs.double(), logits.argmax(-1)


@torch.no_grad()
def rows(device, tiny=False):
    """A row for each dtype and variant: the text's log-probability, and how far each byte's is from float32's."""
    learned, text, found = trained(tiny).to(device), windows(tiny).to(device), []
    exact, best = read_by(learned, text)
    for dtype in DTYPES:
        eager_best = None
        for variant, options in VARIANTS.items():
            if dtype == "f32" and variant == "adze fast":
                continue  # float32 has no roundings to leave out
            one = copy.deepcopy(learned).to(DTYPES[dtype])
            if options is not None and not adze.patch(one, **options).patched:
                raise SystemExit("adze.patch found nothing to replace in the model")
            log_probs, greedy = read_by(one, text)
            eager_best = greedy if eager_best is None else eager_best
            found.append(
                {
                    "dtype": dtype,
                    "variant": variant,
                    "log_prob": log_probs.mean().item(),
                    "bits": -log_probs.mean().item() / math.log(2),
                    "difference": (log_probs.mean() - exact.mean()).item(),
                    "error": (log_probs - exact).square().mean().sqrt().item(),
                    "greedy_equal": (greedy == eager_best).double().mean().item(),
                    "greedy_equal_f32": (greedy == best).double().mean().item(),
                }
            )
    return found, text[:, 1:].numel()
