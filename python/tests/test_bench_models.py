"""The model benchmarks with tiny models on the CPU: they run, compare before they time, and write what they found."""

import json
import pathlib
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")
import bench_scripts  # noqa: E402

bench = bench_scripts.fixture("models", "qwen3", "generate", "report", "generate_video", "rms_norm", "compile_graph")
pytestmark = pytest.mark.usefixtures("on_the_cpu")
FEW = ["--device", "cpu", "--tiny", "--steps", "2", "--warmup-iterations", "1"]


@pytest.fixture
def run(bench, monkeypatch, tmp_path):
    def run(script, *arguments):
        out = tmp_path / "out.json"
        argv = [script, *arguments, "--commit", "abc", "--json", str(out)]
        monkeypatch.setattr(sys, "argv", argv)
        status = bench[script].main()
        return status, json.loads(out.read_text())

    return run


def assert_result(status, result, script, variants, whats):
    assert status == 0 and result["left_out"] == []
    assert result["adze_models"] == 1 and result["script"] == script and result["commit"] == "abc"
    assert result["machine"]["torch"] == torch.__version__ and result["machine"]["cpu"] and result["date"]
    assert {"driver", "clocks", "settings"} <= set(result)
    assert [(row["what"], row["variant"]) for row in result["rows"]] == [(w, v) for w in whats for v in variants]
    for row in result["rows"]:
        assert row["ms"] > 0 and row["spread"] >= 0 and row["steps"] == 2
        assert 0 < row["error"] <= 2 * row["eager_error"] and row["eager_error"] < 1e-4  # of float
        assert row["equal"] == 1 if row["variant"] == "eager" else 0 < row["equal"] <= 1


@pytest.mark.parametrize("flux", [False, True])
def test_a_step_of_a_diffusion_transformer(run, flux):
    status, result = run("generate_video", *FEW, "--use-optimized-kernels", *(["--flux"] if flux else []))
    what = "FLUX.1-dev step" if flux else "LTX-Video step"
    assert_result(status, result, "generate_video", ["eager", "adze"], [what])


def test_prefill_and_decode(run):
    status, result = run("qwen3", *FEW, "--variants", "adze")
    assert_result(status, result, "qwen3", ["eager", "adze"], ["prefill of 16", "decode"])
    for row in result["rows"][2:]:
        assert row["whole_ms"] > 0 and row["whole_equal"] == 1


def test_generate(run, bench):
    ways = ["eager", "adze", "adze fast", "adze fast, launched", "adze.generate", "adze.generate, int8"]
    options = ["--device", "cpu", "--tiny", "--rounds", "2", "--batch", "2"]
    status, result = run("generate", *options, "--variants", *ways)
    assert status == 0 and result["script"] == "generate" and result["commit"] == "abc" and result["date"]
    found = {(row["what"], row["variant"]): row for row in result["rows"]}
    whats = [f"generate(), {what}, batch 2" for what in ("prompt of 16", "a token", "prompt and 6 tokens")]
    assert list(found) == [(what, variant) for variant in ways for what in whats]
    for (what, variant), row in found.items():
        assert row["ms"] > 0 and row["steps"] == (2 * 5 if "a token" in what else 2)
        assert row["equal"] == 1 or "int8" in variant
    with pytest.raises(SystemExit, match="no variant 'graph'"):
        run("generate", "--device", "cpu", "--tiny", "--variants", "graph")


def test_a_report_has_the_rows_of_generate(bench):
    ms = {"eager": 31.5, "adze": 18.25, "compile": 7.5, "adze + compile": 7.25}
    rows = [{"what": "generate(), a token", "variant": name, "ms": value} for name, value in ms.items()]
    run = {"adze_models": 1, "machine": {"gpu": "a GPU"}, "settings": {}, "model": "tiny", "rows": rows}
    table = bench["report"].models_table({"there": [run]})
    assert "| tiny, generate(), a token | 31.50 | 18.25 | 7.50 | 7.25 | - | - | - |" in table


def test_the_time_of_a_token_is_shared_by_its_kernels(bench):
    work = [
        (10.0, 14.0, "void gemm_bulk<__nv_bfloat16, bulk_shape<1, 16>, (bulk_norm)1>(gemm_params)"),
        (13.0, 16.0, "void attention_cluster<f16>(attention_params)"),  # begins before the product has ended
        (20.0, 24.0, "void gemm_bulk<__nv_bfloat16, bulk_shape<1, 16>, (bulk_norm)0>(gemm_params)"),
        (24.0, 25.0, "void at::native::(anonymous namespace)::fill<int>(int)"),
    ]
    kernels = bench["models"].by_kernel(work, 2)
    assert kernels == [
        {"kernel": "gemm_bulk", "launches": 1.0, "us": 4.0},
        {"kernel": "attention_cluster", "launches": 0.5, "us": 1.0},
        {"kernel": "fill", "launches": 0.5, "us": 0.5},
    ]
    shown = bench["report"].kernels_table({"what": "a token", "variant": "loop", "kernels": kernels})
    assert "a token, loop:" in shown and "| gemm_bulk | 73 % |" in shown


def test_a_report_has_errors_and_equal_shares(bench):
    row = {"what": "decode", "ms": 2.0, "spread": 0.01, "eager_error": 0.5}
    rows = [row | {"variant": name, "error": 0.5, "equal": 1.0} for name in ("eager", "compile", "adze + compile")]
    rows.append(row | {"variant": "adze", "error": 0.45, "equal": 0.04, "whole_equal": 0.0625})
    run = {"adze_models": 1, "machine": {"gpu": "a GPU"}, "settings": {}, "model": "tiny", "script": "qwen3.py"}
    run |= {"rows": rows, "left_out": [], "commit": "abc", "date": "2026-01-01", "path": pathlib.Path("a.json")}
    report = bench["report"]
    assert "| decode, adze | 2.00 | 1.0 % | 1.00 | - | - | 0.90 | 4 % | 6 % |" in report.models_section(run)
    assert "| tiny, decode | 2.00 | 2.00 | 2.00 | 2.00 | - | - | 0.90 |" in report.models_table({"there": [run]})
    run["rows"] = [rows[0], rows[1], rows[3]]
    assert "| tiny, decode | 2.00 | 2.00 | 2.00 | - | - | - | 0.90 |" in report.models_table({"there": [run]})
    run["rows"] = rows[:3]
    assert report.models_table({"there": [run]}) == "", "a step without a time of plain adze.patch"
    run["rows"] = [rows[0], rows[3]]
    assert report.models_table({"there": [run]}) == "", "a step without a time of torch.compile"


def test_switches_name_variants(bench):
    chosen = bench["generate_video"].chosen

    def names(device="cuda", **switches):
        options = dict(device=device, variants=None, use_optimized_kernels=None, compile=False, graph=False)
        return chosen(bench["models"].argparse.Namespace(**options | switches))

    assert names("cpu") == ["eager", "compile", "adze", "adze + compile", "pass"]
    assert len(names()) == 10 and names(variants=["pass"]) == ["eager", "pass"]
    assert names(use_optimized_kernels=False) == ["eager"]
    assert names(compile=True) == ["eager", "compile"]
    assert names(graph=True) == ["eager", "eager + graph"]
    assert names(use_optimized_kernels=True, compile=True) == ["eager", "adze + compile"]
    assert names(use_optimized_kernels=True, compile=True, graph=True) == ["eager", "adze + compile + graph"]
    assert names(use_optimized_kernels=False, compile=True) == ["eager", "compile"]
    with pytest.raises(SystemExit, match="no variant 'adze [+] graph'"):
        names("cpu", use_optimized_kernels=True, graph=True)


def test_full_size_models_have_the_published_number_of_weights(bench):
    def weights(make):
        with torch.device("meta"):
            return sum(p.numel() for p in make().parameters())

    def language(name):
        config = bench["qwen3"].config(name, tiny=False)
        return transformers.AutoModelForCausalLM.from_config(config)

    assert weights(lambda: language("qwen3-8b")) == 8_190_735_360
    assert weights(lambda: language("llama-2-7b")) == 6_738_415_616


def test_built_models_have_norms_of_one_and_rotary_tables(bench):
    options = bench["models"].argparse.Namespace(device="cpu", dtype="bf16")
    config = bench["qwen3"].config("qwen3-8b", tiny=True)
    model = bench["models"].build(lambda: transformers.AutoModelForCausalLM.from_config(config), options)
    fresh = transformers.AutoModelForCausalLM.from_config(config)
    rotary = model.model.rotary_emb.inv_freq
    assert rotary.dtype == torch.float32 and torch.equal(rotary, fresh.model.rotary_emb.inv_freq)
    assert (model.model.norm.weight == 1).all()
    assert 0.019 < model.lm_head.weight.float().std() < 0.021


@pytest.fixture
def checkpoint(tmp_path):
    """A pipeline of LTX-Video with tiny parts, saved."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5, patch_size=4,
        spatio_temporal_scaling=(True, True, True, False), decoder_spatio_temporal_scaling=(True, True, True, False),
    )  # fmt: skip
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=64, cross_attention_dim=128,
        caption_channels=32, num_layers=1,
    )  # fmt: skip
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((c, -2.0) for c in "\u2581abcdefghijklmnopqrstuvwxyz,")]
    t5 = transformers.T5Config(vocab_size=32, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=vae, transformer=transformer,
        text_encoder=transformers.T5EncoderModel(t5),
        tokenizer=transformers.T5TokenizerFast(vocab=vocab, extra_ids=0),
    ).save_pretrained(tmp_path / "checkpoint")  # fmt: skip
    return str(tmp_path / "checkpoint")


def test_a_whole_pipeline(run, checkpoint):
    status, result = run("generate_video", *FEW, "--model", checkpoint, "--use-optimized-kernels")
    assert_result(status, result, "generate_video", ["eager", "adze"], ["transformer step"])
    assert all(row["whole_ms"] > row["ms"] and 0 < row["whole_equal"] <= 1 for row in result["rows"])


def test_rms_norm(run):
    status, result = run("rms_norm", "--device", "cpu", "--tiny", "--variants", "eager", "adze")
    assert status == 0 and result["left_out"] == [] and result["copy_gbps"] > 0
    assert [row["case"] for row in result["rows"]] == ["64x512", "3x1000"]
    for row in result["rows"]:
        for name in ("eager", "adze"):
            assert 0 < row["units"][name] < 4 and row["us"][name] > 0
            assert row["share"][name] == pytest.approx(row["bytes"] / row["us"][name] / 1000 / result["copy_gbps"])


def test_rms_norm_that_is_wrong_is_not_timed(bench, run, monkeypatch):
    monkeypatch.setattr(bench["rms_norm"], "adze_op", lambda x, weight: x)
    status, result = run("rms_norm", "--device", "cpu", "--tiny", "--variants", "eager", "adze")
    assert status == 1 and [gone["variant"] for gone in result["left_out"]] == ["adze", "adze"]
    assert all(list(row["us"]) == ["eager"] for row in result["rows"])


def test_a_compiled_block(run, tmp_path, capfd):
    picture = tmp_path / "out.png"
    status, result = run("compile_graph", *FEW, "--variants", "pass", "--plot", str(picture))
    assert_result(status, result, "compile_graph", ["eager", "pass"], ["16 tokens"])
    assert result["rows"][1]["letter"] == "C" and result["rows"][1]["replaced"]["silu, product"] == 1
    assert picture.exists() or "matplotlib is not installed" in capfd.readouterr().err


class Scale(torch.nn.Module):
    def forward(self, x):
        return x * 1.01


def test_a_variant_that_computes_something_else_is_left_out(bench, monkeypatch):
    models = bench["models"]
    options = models.argparse.Namespace(
        device="cpu", dtype="bf16", steps=2, warmup_iterations=0, json=None, plot=None, turn=None
    )
    wrong = {
        "off": lambda x: x * 1.02,
        "nan": lambda x: x * float("nan"),
        "shape": lambda x: x[:1] * 1.01,
        "dtype": lambda x: x.float() * 1.01,
        "raises": lambda x: x.nothing,
    }

    @models.contextlib.contextmanager
    def variant(name, module, device, mode=None, regional=False):
        yield wrong.get(name, module)

    monkeypatch.setattr(models, "variant", variant)
    results = models.Comparison(options)
    results.measure(Scale(), {"x": torch.randn(64, 64).bfloat16()}, ["eager", *wrong], what="it")
    assert [row["variant"] for row in results.rows] == ["eager"]
    assert [gone["variant"] for gone in results.left_out] == list(wrong)
    assert results.finish("test", "it") == 1


def test_measurements_take_turns(bench, tmp_path):
    turn, path, order = bench["models"].turn, tmp_path / "turn", []

    def other():
        with turn(path):
            order.append("other")

    with turn(path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        order.append("this")
    thread.join()
    assert order == ["this", "other"]


def test_busy_time_counts_overlaps_once(bench):
    busy_us = bench["models"].busy_us
    assert busy_us([]) == 0
    assert busy_us([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5


def test_median_and_spread(bench):
    assert bench["models"].summary([4.0]) == {"ms": 4.0, "spread": 0.0, "steps": 1}
    assert bench["models"].summary([1.0, 2.0, 3.0, 4.0, 5.0]) == {
        "ms": 3.0,
        "spread": pytest.approx(2 / 3),
        "steps": 5,
    }


def test_regional_compile_takes_the_repeated_blocks(bench):
    models = bench["models"]

    class Block(torch.nn.Linear):
        pass

    class Model(torch.nn.Sequential):
        _repeated_blocks = ["Block"]

    model = Model(Block(4, 4), torch.nn.ReLU(), Block(4, 4))
    made, blocks = models._compiled(model, True, {"backend": "eager"})
    assert made is model and blocks == [model[0], model[2]]
    assert all((m._compiled_call_impl is not None) == (m in blocks) for m in model)
    with pytest.raises(models.LeftOut, match="repeat"):
        models._compiled(torch.nn.Linear(2, 2), True, {})
