"""compare_torch.py --sweep on the CPU, with small calls: what is drawn, how it is verified, and the summary."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import bench_scripts  # noqa: E402

NAMES = (
    "compare_ops",
    "compare_torch",
    "adze_ctypes",
    "sweep_draw",
    "sweep_report",
    "formulas",
    "product_formulas",
    "warming",
    "sweep",
    "report",
)
bench = bench_scripts.fixture(*NAMES)
pytestmark = pytest.mark.usefixtures("on_the_cpu")
SIZES = {"f32": 4, "f16": 2, "bf16": 2}


@pytest.fixture(scope="module")
def adze(bench):
    return bench["adze_ctypes"].Adze(torch)


@pytest.fixture
def quick(bench, monkeypatch):
    """Runs the formulas without compiling them. One test below runs the compiler."""

    def way(call, tuned):
        return lambda given: bench["formulas"].PLAIN[call.op](**given, **call.numbers)

    monkeypatch.setattr(bench["sweep"], "compiled_way", way)


@pytest.fixture
def run(bench, monkeypatch, tmp_path):
    def run(*arguments):
        out = tmp_path / "out.json"
        argv = [
            "compare_torch",
            "--sweep",
            "--device",
            "cpu",
            "--tiny",
            *arguments,
            "--commit",
            "abc",
            "--json",
            str(out),
        ]
        monkeypatch.setattr(sys, "argv", argv)
        return bench["compare_torch"].main(), json.loads(out.read_text())

    return run


def test_a_seed_says_all(bench):
    draws = bench["sweep_draw"].draws
    calls = [call.line for call in draws(7, 40)]
    assert [call.line for call in draws(7, 60)][:40] == calls
    assert not set(calls) & {call.line for call in draws(8, 40)}
    code = "import sweep_draw; print('\\n'.join(call.line for call in sweep_draw.draws(7, 40)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "5", "PYTHONPATH": str(bench_scripts.BENCH)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == calls


def test_lines_for_tune(bench, capsys):
    """Those of the sweep of the op, but for large ones."""
    draw = bench["sweep_draw"]
    calls = draw.draws(3, 30, ("glu",))
    draw.main(["glu", "--seed", "3", "--count", "30", "--megabytes", "20"])
    small = [call.line for call in calls if call.bytes <= 20e6]
    assert capsys.readouterr().out.splitlines() == small
    assert 0 < len(small) < len(calls)


def test_draws_cover_what_is_legal(bench):
    calls = bench["sweep_draw"].draws(1, 4000)
    rows = [call for call in calls if call.op not in ("group_norm", "rope", "qk_norm_rope")]
    lengths = [call.main.shape[-1] for call in rows if call.op in ("softmax", "activation", "gated_add")]
    assert min(lengths) < 40 and max(lengths) > 120000 and 1800 < sorted(lengths)[len(lengths) // 2] < 2400
    assert 0.2 < sum(n % 2 for n in lengths) / len(lengths) < 0.3
    assert 0.45 < sum(n % 8 == 0 for n in lengths) / len(lengths) < 0.55
    sizes = sorted(call.bytes for call in rows)
    assert sizes[0] < 1 << 17 and 400 << 20 < sizes[-1] < 1 << 30 and 4 << 20 < sizes[len(sizes) // 2] < 9 << 20
    assert {call.main.dtype for call in calls} == {"f32", "f16", "bf16"}
    bytes_off = {call.main.offset * SIZES[call.main.dtype] for call in calls}
    assert bytes_off == set(range(0, 16, 2))
    wider = [call for call in rows if call.main.stride[-2] > call.main.shape[-1]]
    assert 0.25 < len(wider) / len(rows) < 0.45
    assert {call.main.stride[-2] % 2 for call in wider} == {0, 1}
    assert 0.2 < sum(call.aligned for call in calls) / len(calls) < 0.6
    heads = [call for call in calls if call.op in ("rope", "qk_norm_rope")]
    assert {call.main.shape[-1] for call in heads} == set(range(32, 257, 8))
    partial = [call for call in heads if call.numbers["rotary_dim"] < call.main.shape[-1]]
    assert 0.3 < len(partial) / len(heads) < 0.5
    groups = [call for call in calls if call.op == "group_norm"]
    assert {call.numbers["channels_last"] for call in groups} == {0, 1}
    for call in groups:
        assert call.main.shape[3 if call.numbers["channels_last"] else 1] % call.numbers["groups"] == 0
    for op in ("rms_norm", "layer_norm"):
        forms = {
            tuple(name for name in ("residual", "weight", "scale") if name in c.tensors) for c in calls if c.op == op
        }
        assert {(), ("residual",), ("weight",), ("residual", "weight"), ("scale",), ("residual", "scale")} <= forms


def test_draws_of_products(bench):
    calls = bench["sweep_draw"].draws(1, 2000, ("gemm",))
    m, n, k = zip(*((c.main.shape[0], c.tensors["w"].shape[0], c.main.shape[1]) for c in calls), strict=True)
    assert (min(m), max(m)) == (1, 64) and 5 < sorted(m)[1000] < 12
    for side in (n, k):
        assert min(side) >= 64 and max(side) > 15000 and 0.45 < sum(s % 64 == 0 for s in side) / 2000 < 0.6
        assert sum(s % 8 != 0 for s in side) > 300
    assert {c.tensors["w"].dtype for c in calls} == {"f32", "f16", "bf16", "i8", "u8"}
    assert {c.main.dtype for c in calls} == {"f32", "f16", "bf16"}
    for name in ("bias", "residual", "norm_weight", "w2"):
        assert 0.15 < sum(name in c.tensors for c in calls) / 2000 < 0.35
    assert max(c.bytes for c in calls) < 3 << 30
    calls = bench["sweep_draw"].draws(1, 2000, ("attention",))
    queries, keys = zip(*((c.tensors["q"].shape[2], c.tensors["k"].shape[2]) for c in calls), strict=True)
    assert 0.3 < sum(n == 1 for n in queries) / 2000 < 0.5 and max(queries) > 4096 and max(keys) > 32768
    assert all(m <= n for m, n in zip(queries, keys, strict=True))
    assert any(1 < m < n for m, n in zip(queries, keys, strict=True))
    assert {c.main.shape[3] for c in calls} == {40, 64, 80, 96, 128, 160, 256}
    assert {c.main.shape[1] // c.tensors["k"].shape[1] for c in calls} == {1, 2, 4, 8}
    numbers = {tuple(c.numbers) for c in calls}
    assert numbers == {(), ("causal",), ("causal", "window")}
    assert {c.tensors["mask"].dtype for c in calls if "mask" in c.tensors} == {"bool", "f32", "f16", "bf16"}
    assert max(c.flops for c in calls) < 2e12 and max(c.bytes for c in calls) < 1 << 30


def test_a_tensor_lies_where_its_description_says(bench):
    for call in bench["sweep_draw"].draws(3, 60, limits=bench["sweep_draw"].TINY):
        for spec in call.tensors.values():
            made = bench["sweep"].tensor(spec, "cpu")
            assert tuple(made.shape) == spec.shape and made.stride() == spec.stride
            assert (made.data_ptr() - spec.offset * made.element_size()) % 16 == 0
            first = made.data_ptr() % 16 == 0
            assert first == (spec.offset * made.element_size() % 16 == 0)
            if spec.aligned:
                index = [range(n) if n < 5 else (0, n - 1) for n in spec.shape[:-1]]
                assert all(made[i].data_ptr() % 16 == 0 for i in index[0]) if index else first


@pytest.mark.parametrize("ops", ["OPS", "PRODUCTS"])
def test_lines_are_those_that_the_library_traces(bench, ops):
    """So `adze run` repeats the call, with its strides and offsets."""
    code = (
        "import sys, torch, adze_ctypes, sweep, sweep_draw\n"
        "adze = adze_ctypes.Adze(torch)\n"
        f"for call in sweep_draw.draws(2, 45, sweep_draw.{ops}, sweep_draw.TINY):\n"
        "    print('#', call.line, file=sys.stderr, flush=True)\n"
        "    sweep.adze_way(adze, call, 'cpu')(sweep.tensors(call, 'cpu'))\n"
    )
    environment = os.environ | {"ADZE_TRACE": "1", "PYTHONPATH": str(bench_scripts.BENCH)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 90
    acts = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "half": 0, "interleaved": 1}
    acts |= {"rms": 1, "u4": 1, "const_weights": 1}

    def fields_of(line):
        """By name: a tensor's text, or a number; zeros are left out."""
        words = dict(word.split("=") for word in line.split(" -> ")[0].split()[1:])
        numbers = {k: float(acts.get(v, v)) for k, v in words.items() if "[" not in v}
        return {k: v for k, v in words.items() if "[" in v}, {k: v for k, v in numbers.items() if v}

    calls = bench["sweep_draw"].draws(2, 45, getattr(bench["sweep_draw"], ops), limits=bench["sweep_draw"].TINY)
    for call, drawn, traced in zip(calls, lines[::2], lines[1::2], strict=True):
        tensors, numbers = fields_of(traced)
        assert {k: v for k, v in tensors.items() if k not in call.outputs} == fields_of(drawn[2:])[0], traced
        assert numbers == pytest.approx(fields_of(drawn[2:])[1], rel=1e-6), traced


def test_every_op_on_the_cpu(bench, run, quick, capsys):
    status, result = run("--seed", "5", "--count", "18", "--seconds", "600")
    assert status == 0 and result["adze_sweep"] == 1 and result["commit"] == "abc" and result["date"]
    assert result["settings"] == {"seed": 5, "count": 18, "tuned": True} and result["copy_gbps"] > 0
    assert {"driver", "clocks"} <= set(result) and result["machine"]["torch"] == torch.__version__
    rows = result["rows"]
    assert [row["line"] for row in rows] == [
        call.line for call in bench["sweep_draw"].draws(5, 18, limits=bench["sweep_draw"].TINY)
    ]
    assert [row["op"] for row in rows] == 2 * list(bench["sweep_draw"].OPS)
    for row in rows:
        assert 0 <= row["error"] <= 1 and not set(row["left_out"]) - {"eager"}
        assert row["us"]["adze"] > 0 and row["us"]["compile"] > 0 and row["best"] in row["us"]
        assert row["ratio"] == pytest.approx(row["us"][row["best"]] / row["us"]["adze"])
        assert row["share"] == pytest.approx(row["bytes"] / row["us"]["adze"] / 1000 / result["copy_gbps"])
    assert result["summary"]["timed"] == result["summary"]["drawn"] == 18 and result["summary"]["wrong"] == 0
    assert result["summary"]["min"] == min(row["ratio"] for row in rows)
    done = capsys.readouterr().out
    assert "The 10 worst:" in done and done.count("% of copy") == 10 and "18 of 18 calls timed, 0 wrong" in done


@pytest.mark.parametrize(("op", "peer"), [("gemm", "eager"), ("attention", "torch")])
def test_products_on_the_cpu(bench, run, capsys, op, peer):
    status, result = run("--op", op, "--seed", "3", "--count", "25", "--seconds", "600")
    rows = result["rows"]
    assert status == 0 and len(rows) == 25 and {row["op"] for row in rows} == {op}
    assert result["summary"]["timed"] >= 23 and result["summary"]["wrong"] == 0
    assert sum(row.get("best") == peer for row in rows) > 5
    for row in rows:
        assert 0 <= row["error"] <= 1 and row["flops"] > 0 and not set(row["left_out"]) - {"int8pack", "torch"}
        assert "compile" not in row["us"]
    quantised = [row for row in rows if "w_scale" in row["line"]]
    assert all("dequantised" in row["us"] for row in quantised) and (op == "attention" or quantised)
    assert "The 10 worst:" in capsys.readouterr().out
    result["path"] = pathlib.Path(f"bench/results/cpu/sweep-{op}-abc.json")
    text = bench["report"].performance({"cpu": [result]})
    assert f"### Random calls of {op} compared with" in text and "max_autotune" not in text
    assert text.count("\n| `") == 10


@pytest.mark.parametrize("op", ["gemm", "attention"])
def test_the_bound_of_products(bench, adze, op):
    """An element that is off by some units of what is summed is wrong."""
    for call in bench["sweep_draw"].draws(11, 40, (op,), limits=bench["sweep_draw"].TINY):
        given = bench["sweep"].tensors(call, "cpu")
        outputs = bench["sweep"].adze_way(adze, call, "cpu")(given)
        worst, (exact,) = bench["product_formulas"].error_of(call, outputs, given)
        assert worst <= 1, call.line
        size = given["v"].double().abs().max() if op == "attention" else exact.abs().max()
        units = 4 if call.main.dtype != "f32" else 8192
        for broken in (float("nan"), units * torch.finfo(outputs[0].dtype).eps * size.item()):
            changed = [outputs[0].clone()]
            changed[0].view(-1)[0] += broken
            assert not bench["product_formulas"].error_of(call, changed, given)[0] <= 1, call.line


def test_a_wrong_kernel_has_no_speed(bench, run, quick, monkeypatch, capsys):
    right = bench["sweep"].adze_way

    def wrong(adze, call, device):
        def way(given):
            outputs = right(adze, call, device)(given)
            outputs[0].view(-1)[-1] += 1
            return outputs

        return way if call.op == "glu" else right(adze, call, device)

    monkeypatch.setattr(bench["sweep"], "adze_way", wrong)
    status, result = run("--seed", "5", "--count", "9", "--seconds", "600")
    bad = [row for row in result["rows"] if row["error"] > 1]
    assert status == 1 and result["summary"]["wrong"] == 1 and result["summary"]["timed"] == 8
    assert [row["op"] for row in bad] == ["glu"] and "us" not in bad[0] and "ratio" not in bad[0]
    assert capsys.readouterr().out.split("worst:\n")[1].lstrip().startswith("WRONG")


def test_a_call_that_is_refused_is_wrong(bench, run, quick, monkeypatch, capsys):
    def refuse(adze, call, device):
        def way(given):
            raise RuntimeError("glu: no kernel takes it")

        return way

    monkeypatch.setattr(bench["sweep"], "adze_way", refuse)
    status, result = run("--op", "glu", "--count", "1", "--seconds", "600")
    assert status == 1 and result["summary"]["wrong"] == 1 and result["summary"]["min"] is None
    done = capsys.readouterr().out
    assert "WRONG" in done and "left out: adze: glu: no kernel takes it" in done


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_bound_takes_the_rounded_truth_and_nothing_else(bench, adze, dtype):
    held, found = bench["formulas"].error_of, set()
    for call in bench["sweep_draw"].draws(11, 120, limits=bench["sweep_draw"].TINY):
        if call.main.dtype != dtype:
            continue
        given = bench["sweep"].tensors(call, "cpu")
        fields = given | call.numbers
        outputs = bench["sweep"].adze_way(adze, call, "cpu")(given)
        worst, exacts = held(call.op, outputs, fields)
        assert worst <= 1, call.line
        if "sum" not in call.outputs:  # there the exact value follows from the sum that was stored
            rounded = [exact.to(out.dtype) for exact, out in zip(exacts, outputs, strict=True)]
            assert held(call.op, rounded, fields)[0] <= 1, call.line
        place = exacts[0].abs().argmax()  # a large element, which two units of its dtype must not change
        units = 2 if dtype != "f32" else 4096
        for broken in (
            float("nan"),
            outputs[0].view(-1)[place].item() * (1 + units * torch.finfo(outputs[0].dtype).eps),
        ):
            changed = [outputs[0].clone(), *outputs[1:]]
            changed[0].view(-1)[place] = broken
            assert not held(call.op, changed, fields)[0] <= 1, call.line
        found.add(call.op)
    assert found == set(bench["sweep_draw"].OPS)


def test_peers_that_fail_are_left_out(bench, adze, quick, monkeypatch):
    def fails(**given):
        raise RuntimeError("not this call\nand more")

    call = bench["sweep_draw"].draws(1, 1, ("glu",), limits=bench["sweep_draw"].TINY)[0]
    given = bench["sweep"].tensors(call, "cpu")
    monkeypatch.setitem(bench["formulas"].EAGER, "glu", fails)
    ways, worst, left_out = bench["sweep"].proven(call, adze, False, given)
    assert set(ways) == {"adze", "compile"} and left_out == {"eager": "RuntimeError: not this call"} and worst <= 1
    monkeypatch.setitem(bench["formulas"].EAGER, "glu", lambda x, **rest: torch.ones(call.outputs["out"].shape))
    assert "computes something else" in bench["sweep"].proven(call, adze, False, given)[2]["eager"]


def test_the_compiler_is_run_before_and_its_work_is_found(bench, run, capfd):
    from torch._dynamo.utils import counters

    counters.clear()
    seed = str(int.from_bytes(os.urandom(3), "big"))  # so that no earlier run has left it in the cache
    status, result = run("--op", "activation", "--count", "1", "--seed", seed, "--workers", "1", "--seconds", "600")
    assert status == 0 and result["rows"][0]["us"]["compile"] > 0
    assert "1 of 1 compiled before, by 1 processes" in capfd.readouterr().out
    assert counters["inductor"]["fxgraph_cache_hit"] == 1 and not counters["inductor"]["fxgraph_cache_miss"]


def test_no_call_is_begun_when_the_time_is_over(run, quick, capsys):
    status, result = run("--count", "4", "--seconds", "0")
    assert status == 0 and result["rows"] == [] and result["summary"]["drawn"] == 4
    assert "4 were not run: the time was over" in capsys.readouterr().out


def test_an_op_that_is_not_there(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare_torch", "--sweep", "--device", "cpu", "--op", "rope_table"])
    with pytest.raises(SystemExit):
        bench["compare_torch"].main()
    assert "there is no op 'rope_table' here; there are rms_norm, layer_norm" in capsys.readouterr().err


def test_fixed_rows_compute_what_their_peers_do(bench, adze, monkeypatch):
    """Every op of the plain comparison, smaller than there."""
    ops, cases = bench["compare_ops"].OPS, bench["compare_ops"].GPU_CASES
    assert set(ops) == {name for name, _, _ in cases}
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    new = bench["compare_torch"].New("cpu", torch.bfloat16)
    for name, shape, _ in {name: case for case in cases for name in case[:1]}.values():
        small = [min(n, 64 if n % 64 == 0 else n % 64 or n) for n in shape]
        sample = ops[name].tensors(new, *(max(n, 128) if name == "rope" else n for n in small))
        with torch.inference_mode():
            ways = bench["compare_torch"].variants_of(
                ops[name], adze, sample, None
            )  # raises where one is another call
        others = {"compile"} if getattr(ops[name], "compiles", True) else {"torch"}
        assert {"adze"} | others <= set(ways) and len(ways) > 1, name


def test_the_report_shows_the_worst(bench, run, quick):
    result = run("--seed", "5", "--count", "11", "--seconds", "600")[1]
    report = bench["report"]
    result["path"] = pathlib.Path("bench/results/cpu/sweep-abc.json")
    result["rows"][3] |= {"error": 2.0}
    for key in ("us", "best", "ratio", "share"):
        del result["rows"][3][key]
    text = report.performance({"cpu": [result]})
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    bad = result["rows"][3]
    assert len(lines) == 10
    assert lines[0] == f"| `{bad['line']}` | {'yes' if bad['aligned'] else 'no'} | - | - | - | wrong |"
    ratios = [float(line.split("|")[-2]) for line in lines[1:]]
    assert ratios == sorted(ratios) and "11 of 11 calls timed, 0 wrong" in text and "Seed 5," in text


def test_summary_counts(bench):
    def row(ratio, share, size, aligned, error=0.5):
        return {"ratio": ratio, "share": share, "bytes": size, "aligned": aligned, "error": error}

    large = 64 << 20
    rows = [row(1.0, 0.9, large, True), row(0.9, 0.84, large, True), row(0.98, 0.84, large - 1, True)]
    rows += [row(2.0, 0.71, large, False), row(0.97, 0.69, large, False), {"error": math.nan, "bytes": 1}]
    found = bench["sweep_report"].summary(rows, 9)
    assert found == {
        "drawn": 9, "timed": 5, "wrong": 1, "min": 0.9, "median": 0.98, "losses": 2, "large": 2, "large_below": 1,
        "large_off": 2, "large_off_below": 1,
    }  # fmt: skip
    assert "5 of 9 calls timed, 1 wrong; best peer / adze: least 0.90, median 0.98; 2 below" in bench[
        "sweep"
    ].summary_text(found)


@pytest.mark.parametrize("ops", ["OPS", "PRODUCTS"])
def test_operators_take_calls_as_the_library_does(bench, adze, ops):
    """On the CPU a sweep times the operators of the Python package."""
    draw, sweep = bench["sweep_draw"], bench["sweep"]
    operators = sweep.Operators()
    for call in draw.draws(3, 40, getattr(draw, ops), draw.TINY):
        given = sweep.tensors(call, "cpu")
        found, expected = (sweep.adze_way(way, call, "cpu")(given) for way in (operators, adze))
        assert all(map(torch.equal, found, expected)), call.line


@pytest.mark.parametrize("name", ["GPU", "CPU"])
def test_sizes_are_those_of_the_device(bench, name):
    draw = bench["sweep_draw"]
    limits = getattr(draw, name)
    calls = draw.draws(1, 1000, draw.OPS, limits)
    lengths = [call.main.shape[-1] for call in calls if call.op == "activation"]
    assert limits.dim[0] <= min(lengths) and limits.dim[1] / 2 < max(lengths) <= limits.dim[1] + 8
    largest = max(call.bytes for call in calls if call.op != "group_norm")  # which has whole channels
    assert limits.bytes[1] / 2 < largest < 1.1 * limits.bytes[1]
