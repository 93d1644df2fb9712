"""bench/attention.py: attention and torch's, verified, timed and recorded."""

import importlib
import json
import pathlib
import sys

import pytest

pytest.importorskip("torch")
import torch  # noqa: E402

from bench_scripts import fixture  # noqa: E402

bench = fixture("attention")


def test_a_small_call(bench, monkeypatch, tmp_path, capsys):
    script, threads = bench["attention"], torch.get_num_threads()
    record = tmp_path / "times.json"
    words = f"attention.py --dtype f32 --call 1x2x3x5x8 --rounds 3 --seconds 0 --json {record}"
    monkeypatch.setattr(sys, "argv", words.split())
    try:
        script.main()
        (row,) = json.loads(record.read_text())["rows"]
        assert row["call"] == [1, 2, 3, 5, 8, False] and set(row["ms"]) == {"torch", "adze"}
        assert "f32      1     2     3     5     8" in capsys.readouterr().out
        monkeypatch.setattr(script.adze, "attention", lambda q, k, v, mask: q * 0)  # a wrong one is not timed
        with pytest.raises(SystemExit, match="the error of adze is"):
            script.main()
    finally:
        torch.set_num_threads(threads)


def test_masks_hide_keys(bench):
    """The mask of the calls hides the last quarter of the keys."""
    q, k, v, mask = bench["attention"].tensors((1, 1, 2, 8, 4, True), torch.float32, "cpu")
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :6], v[:, :, :6]))


@pytest.fixture
def record(bench, monkeypatch, tmp_path):
    """A run of a prompt and of two decode steps of a few tokens."""
    script, path = bench["attention"], tmp_path / "attention.json"
    monkeypatch.setitem(script.CASES, "prefill", script.PREFILL[2:3])
    monkeypatch.setitem(script.CASES, "decode", script.DECODE[2:4])
    words = f"attention.py --device cpu --what prefill decode --tiny --seconds 0 --commit abc --json {path}"
    monkeypatch.setattr(sys, "argv", words.split())
    return script, path


def test_calls_of_models(bench, record):
    script, path = record
    assert script.main() == 0
    run = json.loads(path.read_text())
    assert (
        run["adze_attention"] == 1 and run["commit"] == "abc" and run["date"] and "driver" in run and "clocks" in run
    )
    prompt, *steps = run["rows"]
    assert prompt["case"] == "1 x 32/8 heads d128, 24 causal" and prompt["best"] in ("torch", "flash")
    assert [row["case"] for row in steps] == ["1 x 32/8 heads d128, 1 of 24", "2 x 32/8 heads d128, 1 of 24"]
    for row in steps:
        assert row["us"].keys() >= {"adze", "adze, fp8 cache", "torch"} and row["gbps"] > 0
    assert {"variant": "cudnn", "case": prompt["case"]}.items() <= run["left_out"][0].items()
    report, facts = (importlib.import_module(name) for name in ("report", "facts"))
    run["path"] = pathlib.Path(path.name)
    text = report.performance({"here": [run]})
    assert "### Attention compared with PyTorch" in text
    head, row = (next(line for line in text.splitlines() if line.startswith(f"| {word}")) for word in ("us", "2 x"))
    assert "adze, fp8 cache" in head and len(row.split("|")) == len(head.split("|"))
    assert "attention prefill" in "".join(fact for fact, *_ in facts.attention_facts(path, run))


def test_a_wrong_result_is_left_out(record, monkeypatch):
    script, path = record
    right = script.adze.attention
    monkeypatch.setattr(script.adze, "attention", lambda q, k, v, **more: right(q, k, v, **more) * (k.shape[0] != 2))
    assert script.main() == 1
    run = json.loads(path.read_text())
    assert len(run["rows"]) == 2 and "the error of adze is" in run["left_out"][-1]["reason"]


def test_a_wrong_cache_leaves_the_rest(record, monkeypatch):
    script, path = record
    right = script.adze.attention
    wrong = lambda q, k, v, **more: right(q, k, v, **more) * ("k_scale" not in more)  # noqa: E731
    monkeypatch.setattr(script.adze, "attention", wrong)
    assert script.main() == 1
    run = json.loads(path.read_text())
    assert len(run["rows"]) == 3 and not any(script.FP8 in row["us"] for row in run["rows"])
