"""bench/facts.py and bench/report.py: the tables of the worked examples, from the runs that are recorded."""

import json
import pathlib

import pytest

from bench_scripts import fixture

bench = fixture("facts", "report")
WHERE = {"machine": {"gpu": "a GPU", "torch": "2.11"}, "driver": "1", "clocks": "2", "commit": "abc"}
STEP = {"what": "decode", "model": "Qwen3-8B", "case": "1 x 32/8 heads d128, 1 of 1024", "ratio": 2.0, "gbps": 1.0}
ATTENTION = {
    "adze_attention": 1,
    "date": "2026-01-02",
    "rows": [
        STEP | {"us": {"adze": 4.5, "torch": 9.0, "cudnn": 10.0}, "tflops": {}},
        STEP | {"what": "prefill", "case": "a prompt", "us": {}, "tflops": {"adze": 400.25, "flash": 300.0}},
    ],
}
WAYS = {
    name: {"prompt": 20.5, "token": ms, "equal": 1}
    for name, ms in (("generate()", 30.25), ("generate(), kernel", 4.0))
}
PROJECT = {
    "adze_project": "qwen3-8b-kernels",
    "date": "2026-01-03",
    "kernels": "package/",
    "rows": [{"case": "rms_norm", "us": {"kernel": 1.5, "eager": 26.0}}, {"case": "b", "us": {"kernel": 2.0}}],
    "end_to_end": {
        "model": "qwen3",
        "ms": {"eager": 21.0, "kernel": 15.0},
        "generate": {"prompt": 512, "tokens": 32, "ways": WAYS},
    },
}


@pytest.fixture
def results(bench, monkeypatch, tmp_path):
    """An empty tree, and a function that records a run in it."""
    folder = tmp_path / "bench/results/h200"
    folder.mkdir(parents=True)
    for script in bench.values():
        monkeypatch.setattr(script, "ROOT", tmp_path)
    return lambda name, run: (folder / name).write_text(json.dumps(WHERE | run))


def of_qwen3(bench):
    return bench["facts"].example(*bench["facts"].EXAMPLES["examples/qwen3_8b/README.md"])


def test_what_is_not_recorded_has_no_table(bench, results):
    assert "|" not in of_qwen3(bench) and bench["report"].runs() == {}


def test_attention_and_the_project(bench, results):
    results("attention-0123456.json", ATTENTION)
    results("qwen3-8b-kernels-0123456.json", PROJECT)
    text = of_qwen3(bench)
    assert "bench/results/h200/attention-0123456.json:" in text
    assert "| attention 1 x 32/8 heads d128, 1 of 1024 | 4.50 us | 9.00 us | 10.00 us |" in text
    assert "| attention a prompt | 400.25 TFLOP/s | 300.00 TFLOP/s |" in text
    assert "| rms_norm | 1.50 us | 26.00 us |" in text and "| b | 2.00 us | - |" in text
    assert "(from package/):" in text
    assert "| a token | 30.25 ms | 4.00 ms |" in text and "| prompt of 512 | 20.50 ms |" in text
    assert "qwen3-8b-kernels" not in bench["facts"].example(*bench["facts"].EXAMPLES["examples/ltx_video/README.md"])


def test_only_the_newest_run_is_shown(bench, results):
    results("attention-0123456.json", ATTENTION)
    results("attention-6543210.json", ATTENTION | {"date": "2026-02-02"})
    text = of_qwen3(bench)
    assert "attention-6543210.json" in text and "attention-0123456.json" not in text


def test_performance_shows_both(bench, results):
    results("attention-0123456.json", ATTENTION)
    results("qwen3-8b-kernels-0123456.json", PROJECT)
    generate = {"adze_models": 1, "date": "2026-01-01", "script": "generate", "model": "qwen3-8b", "left_out": []}
    rows = [{"what": "generate(), a token", "variant": name, "ms": ms, "spread": 0.1} for name, ms in
            (("eager", 30.0), ("adze.generate", 4.0))]  # fmt: skip
    results("generate-qwen3-0123456.json", generate | {"settings": {}, "rows": rows})
    text = bench["report"].performance(bench["report"].runs())
    assert "### Attention compared with PyTorch 2.11: a GPU" in text and "Driver 1, clocks: 2." in text
    assert "| 1 x 32/8 heads d128, 1 of 1024 (Qwen3-8B) | 4.50 | 9.00 | 10.00 | 1.00 | 2.00 |" in text
    assert "PyTorch 2.11, kernels from package/." in text and "| generate(), kernel | 20.50 | 4.00 | 100 % |" in text
    assert "| generate(), a token, adze.generate | 4.00 | 10.0 % | 7.50 |" in text


def test_the_record_of_a_projects_program(bench, results):
    """`NAME bench --json`: its op, and the commit of adze."""
    ceilings = dict.fromkeys(("read", "two_reads", "copy", "write"), 4000.0)
    row = {"op": "my_norm", "kernel": "cuda", "dtype": "bf16", "case": "8192x4096", "us": 24.5, "us_alone": 25.0,
           "spread": 0.01, "gbps": 4100.0, "share": 0.955, "line": "my_norm x=bf16[8192,4096]"}  # fmt: skip
    gpu = {"gpu": "a GPU", "sm": 90, "sm_count": 132}
    run = {
        "adze_bench": 1,
        "program": "build/my_norm",
        "machine": gpu,
        "adze_commit": "fedcba9",
        "date": "2026-01-01",
    }
    results("my_norm-0123456.json", run | {"ceilings": ceilings, "rows": [row]})
    path = next(pathlib.Path(bench["report"].ROOT).rglob("my_norm-0123456.json"))
    recorded = json.loads(path.read_text())
    del recorded["commit"]
    path.write_text(json.dumps(recorded))
    text = bench["report"].performance(bench["report"].runs())
    assert "### my_norm bench: a GPU" in text and "commit of adze fedcba9" in text and "| 24.50 | 25.00 |" in text
    facts = list(bench["facts"].bench_facts(path, recorded))
    assert [fact[:2] for fact in facts] == [
        ("my_norm bf16 8192x4096, chained (PDL)", "24.50 us, 96 % of its ceiling")
    ]


def test_the_examples_are_marked(bench):
    """Each has the two marks between which its tables are written."""
    for name in bench["facts"].EXAMPLES:
        text = (pathlib.Path(__file__).parents[2] / name).read_text()
        assert text.count("<!-- results -->") == text.count("<!-- /results -->") == 1
