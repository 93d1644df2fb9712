"""bench/cpu.py with small calls: what it verifies, records and refuses, and the table of such a record."""

import json
import pathlib
import sys

import pytest
import torch

import bench_scripts

bench = bench_scripts.fixture("cpu", "report")


@pytest.fixture
def small(bench, monkeypatch):
    """One small call of each kind."""
    script = bench["cpu"]
    monkeypatch.setattr(script, "COLD", 1 << 20)
    calls = [
        ("gemm", "1 x", kind, lambda kind=kind: script.product(kind, 1, 96, 256)) for kind in ("bf16", "i8", "u4")
    ]
    calls += [("gemm", "40 x", "f32", lambda: script.product("f32", 40, 96, 256))]
    for hides in ("causal", "boolean mask", "added mask", None):
        calls.append(("attention", "", "f32", lambda hides=hides: script.attention("f32", 2, 2, 33, 33, 64, hides)))
    calls.append(("attention", "decode", "bf16", lambda: script.attention("bf16", 4, 2, 1, 300, 64)))
    monkeypatch.setattr(script, "cases", lambda: calls)
    return script


def test_a_run_is_verified_and_recorded(bench, small, monkeypatch, tmp_path, capsys):
    out = tmp_path / "cpu.json"
    monkeypatch.setattr(sys, "argv", ["cpu", "--seconds", "0", "--commit", "abc", "--json", str(out)])
    assert small.main() == 0
    run = json.loads(out.read_text())
    assert run["adze_cpu"] == 1 and run["commit"] == "abc" and len(run["rows"]) == 9
    assert [row["op"] for row in run["rows"] if "share" in row] == ["gemm"] * 3 + ["attention"]
    assert all(row["us"]["adze"] > 0 and row["us"]["torch"] > 0 for row in run["rows"])
    assert capsys.readouterr().out.count("x of torch") == 9
    run["path"] = pathlib.Path("bench/results/c/cpu-abc.json")
    text = bench["report"].performance({"c": [run]})
    assert "| gemm, 1 x 96 x 256 | bf16 |" in text and "| attention, 4/2 heads d64, 1 of 300 | bf16 |" in text


def test_cases_are_chosen_by_words(bench, small, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cpu", "--seconds", "0", "--what", "gemm", "--match", "u4"])
    assert small.main() == 0
    assert capsys.readouterr().out.count("x of torch") == 1


def test_another_result_is_refused(bench, small, monkeypatch):
    right = small.adze.gemm
    monkeypatch.setattr(small.adze, "gemm", lambda x, **w: right(x, **w) * 1.1)
    with torch.inference_mode(), pytest.raises(SystemExit, match="errors"):
        small.verify(small.product("bf16", 1, 96, 256))
