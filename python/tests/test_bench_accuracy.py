"""accuracy.py on the CPU: its formulas are those of the models, its inputs have outliers, a wrong result shows."""

import json
import pathlib
import re
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import bench_scripts  # noqa: E402

bench = bench_scripts.fixture("accuracy", "accuracy_calls", "accuracy_text", "compare_ops", "report")
pytestmark = pytest.mark.usefixtures("on_the_cpu")
ROWS = 3
DTYPES = ("bf16", "f16")


@pytest.fixture
def made(bench):
    """A call of MODELS with few rows, and its inputs."""
    calls = bench["accuracy_calls"]

    def made(name, dtype="bf16"):
        call = calls.Call(calls.MODELS[name].replace("$", dtype), ROWS)
        return call, calls.tensors(call, "cpu")

    return made


def eager(bench, call, given):
    return bench["accuracy"].listed(bench["accuracy_calls"].EAGER[call.op](**given, **call.numbers))


# ---- The formulas ----


def with_weights(module, weight, bias=None):
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = torch.nn.Parameter(bias, requires_grad=False)
    return module


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_the_models(bench, made, dtype):
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.llama import modeling_llama
    from transformers.models.olmo2 import modeling_olmo2
    from transformers.models.qwen3 import modeling_qwen3

    for name, cls, eps in (
        ("Llama, Qwen: norm", modeling_llama.LlamaRMSNorm, 1e-5),
        ("Llama, Qwen: norm", modeling_qwen3.Qwen3RMSNorm, 1e-5),
        ("Gemma: norm", modeling_gemma2.Gemma2RMSNorm, 1e-6),
        ("OLMo 2, torch.nn.RMSNorm", modeling_olmo2.Olmo2RMSNorm, 1e-6),
    ):
        call, given = made(name, dtype)
        module = with_weights(cls(call.main[1][-1], eps=eps), given["weight"])
        assert torch.equal(module(given["x"]), eager(bench, call, given)[0]), name
    call, given = made("GPT-2: residual + layer_norm", dtype)
    module = with_weights(torch.nn.LayerNorm(call.main[1][-1], eps=1e-5), given["weight"], given["bias"])
    out, total = eager(bench, call, given)
    assert torch.equal(total, given["residual"] + given["x"]) and torch.equal(module(total), out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_glu_are_those_of_the_models(bench, made, dtype):
    from transformers.models.qwen3 import modeling_qwen3

    call, given = made("Qwen3: qk norm + rope", dtype)
    q, k = (
        with_weights(modeling_qwen3.Qwen3RMSNorm(128, eps=1e-6), given[f"{name}_weight"])(given[name]).transpose(1, 2)
        for name in ("q", "k")
    )
    turned = modeling_qwen3.apply_rotary_pos_emb(q, k, given["cos"], given["sin"])
    for got, want in zip(eager(bench, call, given), turned, strict=True):
        assert torch.equal(got, want.transpose(1, 2))
    call, given = made("Llama, Qwen: silu glu", dtype)
    act = transformers.activations.ACT2FN["silu"]
    assert torch.equal(act(given["x"]) * given["value"], eager(bench, call, given)[0])


def test_modulation_is_that_of_flux(bench, made):
    normalization = pytest.importorskip("diffusers.models.normalization")
    call, given = made("FLUX: layer_norm + modulation")
    dim = call.main[1][-1]
    module = normalization.AdaLayerNormContinuous(dim, 1, elementwise_affine=False, eps=1e-6).bfloat16()
    module.silu = module.linear = torch.nn.Identity()
    with torch.no_grad():
        want = module(given["x"], torch.cat((given["scale"][:, 0], given["shift"][:, 0]), -1))
    assert torch.equal(want, eager(bench, call, given)[0])


# ---- The rows ----


def test_inputs_are_deterministic_and_have_outliers(bench, made):
    for name in bench["accuracy_calls"].MODELS:
        for dtype in DTYPES:
            call, given = made(name, dtype)
            for field, value in made(name, dtype)[1].items():
                assert torch.equal(value, given[field]) and value.isfinite().all(), (name, field)
    x = bench["accuracy_calls"].Values("cpu", "x").hidden((64, 2048))
    channels = x.abs().median(0).values
    assert (channels > 25 * channels.median()).sum() == 4, "one channel in 512 is an outlier"
    rows = x.abs().median(1).values
    assert (rows < 0.02 * rows.median()).sum() == 4, "one row in 16 is small"


def test_a_patched_call_is_as_near_to_float64_as_eager(bench):
    line_row, calls = bench["accuracy"].line_row, bench["accuracy_calls"]
    for name, line in calls.MODELS.items():
        for dtype in DTYPES:
            row = line_row(line.replace("$", dtype), "cpu", ROWS)
            assert row["dtype"] == dtype and row["equal"] > (0.9 if "gelu" in line else 0.999), (name, row)
            assert abs(row["error"] - row["eager_error"]) < 0.001, (name, row)
            assert 0 < row["error"] < 1 and row["max"] < 16, (name, row)


def test_errors_are_in_ulps(bench):
    calls = bench["accuracy_calls"]
    exact = torch.tensor([[1.0, 1.5, 2.0, -1.0]], dtype=torch.float64)
    right = exact.bfloat16()
    row = calls.compare([right], [right], [exact])
    assert row == {"equal": 1.0, "error": 0.0, "max": 0.0, "eager_error": 0.0, "eager_max": 0.0}
    off = right.clone()
    off[0, 1] += 2.0**-7  # the next bf16
    off[0, 2] += 2.0**-5  # the second after 2
    row = calls.compare([off], [right], [exact])
    assert row["equal"] == 0.5 and row["max"] == 2 and row["error"] == pytest.approx(((1 + 4) / 4) ** 0.5)
    assert row["eager_error"] == 0


def test_a_wrong_rounding_shows(bench):
    line = "glu x=bf16[3,1000] value=bf16[3,1000] act=silu"
    once, steps = (bench["accuracy"].line_row(text, "cpu", 0) for text in (line, f"{line} rounding=2"))
    assert once["line"] == line and once["equal"] < 0.9 and once["error"] < 0.8 * once["eager_error"]
    assert steps["equal"] > 0.999


def test_lines_are_read_as_the_program_reads_them(bench):
    call = bench["accuracy_calls"].Call(
        "rope q_out=bf16[512,32,128] q=bf16[512:4096,32:128,128:1]@q_out cos=f32[512,64] sin=f32[512,64] "
        "pairs=interleaved rotary_dim=64",
        rows=4,
    )
    assert call.specs["q"] == ("bf16", (4, 4, 128)) and call.specs["cos"] == ("f32", (4, 64))
    assert call.numbers == {"pairs": 1, "rotary_dim": 64}


# ---- The program, and the report ----


@pytest.fixture
def result(bench, monkeypatch, tmp_path):
    calls, out, lines = bench["accuracy_calls"], tmp_path / "out.json", tmp_path / "bench.json"
    lines.write_text(json.dumps({"rows": [{"line": "softmax x=bf16[2,64]"}, {"line": "new_op x=bf16[2,64]"}]}))
    kept = ["Llama, Qwen: norm", "Llama: rope"]
    monkeypatch.setattr(calls, "MODELS", {name: calls.MODELS[name] for name in kept})
    cases = [("rms_norm", (4, 256), "bf16"), ("group_norm + silu", (1, 64, 4, 4), "bf16")]
    monkeypatch.setattr(bench["accuracy"], "GPU_CASES", cases)
    argv = ["accuracy", "--device", "cpu", "--tiny", "--rows", "0", "--lines", str(lines), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", [*argv, "--json", str(out)])
    assert bench["accuracy"].main() == 0
    return json.loads(out.read_text())


def test_a_run_is_recorded_and_reported(bench, result):
    assert result["adze_accuracy"] == 1 and result["commit"] == "abc" and result["date"]
    assert {"machine", "driver", "clocks", "settings"} <= set(result)
    assert [gone["line"] for gone in result["left_out"]] == ["new_op x=bf16[2,64]"]
    assert [row.get("model") for row in result["rows"]] == [
        *["Llama, Qwen: norm"] * 2,
        *["Llama: rope"] * 2,
        *[None] * 3,
    ]
    texts = {(row["dtype"], row["variant"]): row for row in result["texts"]}
    assert texts["f32", "eager"]["error"] == 0 and texts["f32", "adze"]["error"] < 1e-5
    for dtype in DTYPES:
        error = texts[dtype, "eager"]["error"]
        assert 0 < error < 0.1 and texts[dtype, "adze"]["error"] == pytest.approx(error, rel=0.2)
        assert texts[dtype, "adze"]["greedy_equal"] > 0.98 and texts[dtype, "adze fast"]["greedy_equal"] > 0.95
    assert texts["bf16", "eager"]["bits"] < 6, "the model has learned something: 8 bits are chance"

    report, result["path"] = bench["report"], pathlib.Path("a.json")
    text = report.accuracy_section(result)
    first = report.equal_share(result["rows"][0]["equal"])
    assert f"| Llama, Qwen: norm | bf16 | {first} | 0." in text and "| bf16, adze fast | " in text
    timed = {"op": "rms_norm", "case": "4x256", "dtype": "bf16", "us": {"adze": 1.0, "eager": 3.0}}
    head, _, row = report.compare_table([timed], "us", report.accuracies([result])).splitlines()
    assert head.endswith("| best peer / adze | equal to eager | error, ulp (eager's) |") and re.search(
        r"[|] (100|99[.]..) % [|] 0[.]", row
    )
    assert "equal to eager" not in report.compare_table([timed], "us", {})
    timed |= {"best": "eager", "ratio": 3.0}
    compared = {"adze_compare": 1, "machine": {"gpu": "a GPU"}, "date": "2026-01-01", "rows": [timed]}
    text = report.readme_table({"there": [compared, result]})
    assert (
        re.search(r"3.00x [|] (100|99[.]..) % [|] 0[.]", text)
        and f"A text has {texts['bf16', 'adze']['bits']:.4f} bits per byte" in text
    )
    assert "equal to eager" not in report.readme_table({"there": [compared]})
    line = {"op": "softmax", "kernel": "cpu", "case": "2x64", "dtype": "bf16", "line": "softmax x=bf16[2,64]"}
    line |= {"us": 1.0, "spread": 0.0, "gbps": 1.0, "share": 0.5}
    machine = {"gpu": "", "cpu": "a CPU", "isa": "avx2", "threads": 1, "sm": 0, "sm_count": 0}
    run = {"machine": machine, "rows": [line], "driver": "", "clocks": ""}
    run |= {"ceilings": dict.fromkeys(("read", "two_reads", "copy", "write"), 1.0), "path": pathlib.Path("b.json")}
    run |= {"commit": "abc", "date": "2026-01-01"}
    assert re.search(r"50 % [|] (100|9[0-9][.]..) % [|] 0[.]", report.bench_section(run, report.accuracies([result])))
    assert "equal" not in report.bench_section(run, {})


def test_a_share_is_not_rounded_up(bench):
    assert [bench["report"].equal_share(share) for share in (1, 0.99999, 0.5)] == ["100 %", "99.99 %", "50.00 %"]


def test_weights_are_the_same_in_each_run(bench):
    text = bench["accuracy_text"]
    first, second = (text.trained(tiny=True).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert text.HELD_OUT not in text.TEXTS
