"""bench/attention.py: attention and torch's, verified and timed."""

import json
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
