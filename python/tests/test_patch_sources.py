"""The table of known sources, the scan of packages, and how a version is added to it."""

import ast
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from adze.patching import known_sources as sources
from adze.patching import scan
from adze.patching.fingerprint import fingerprint, fingerprint_source, statements_node, structure_node

ROOT = Path(__file__).parents[2]


def test_a_name_is_of_one_package_and_a_hash_has_one_row():
    supported, table = sources.read()
    homes = {}
    for source in table:
        assert homes.setdefault(source.name, source.package) == source.package
    assert len({(source.package, source.hash) for source in table}) == len(table)
    assert sorted(supported) == ["diffusers", "transformers"]
    for releases in supported.values():
        assert releases == sorted(releases, key=sources.version_key)
        assert len({sources.version_key(release)[:2] for release in releases}) == len(releases) >= 6


# Classes whose source is another's from some version on. test_transformers_rope.py compares the installed ones.
JOINED = {"qwen2:Qwen2RotaryEmbedding.forward": "llama:LlamaRotaryEmbedding.forward"}


def test_every_supported_version_has_every_source_or_a_later_one():
    """A name that a supported version lacks would be a rule that does nothing there."""
    supported, table = sources.read()
    seen = {}
    for source in table:
        seen.setdefault((source.package, source.name), set()).update(source.versions)
    for name, other in JOINED.items():
        seen["transformers", name] |= seen["transformers", other]
    for (package, name), versions in seen.items():
        assert set(supported.get(package, ())) <= versions, name


def test_the_newest_version_is_the_one_that_is_pinned():
    pinned = dict(
        line.split("==") for line in (ROOT / "tests/requirements-models.txt").read_text().split() if "==" in line
    )
    for package in ("transformers", "diffusers"):
        assert sources.supported(package)[-1] == pinned[package]


def test_names():
    one = sources.hashes("llama:LlamaRMSNorm.forward")
    two = sources.hashes("llama:LlamaRMSNorm.forward t5:T5LayerNorm.forward")
    assert len(one) == 1 and len(two) == 2 and one < two
    every = sources.hashes("flux:FluxAttnProcessor.__call__")
    old = sources.hashes("flux:FluxAttnProcessor.__call__@0.36.0")
    assert len(old) == 1 and old < every
    for wrong in ("llama:LlamaNorm.forward", "flux:FluxAttnProcessor.__call__@0.1.0"):
        with pytest.raises(KeyError, match=wrong.partition("@")[0]):
            sources.hashes(wrong)


def test_fingerprints_are_of_the_installed_sources():
    """The table's row of a name is what the rules see when the class is imported."""
    pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    assert {fingerprint(llama.LlamaRMSNorm.forward)} == sources.hashes("llama:LlamaRMSNorm.forward")
    assert {fingerprint(llama.rotate_half)} == sources.hashes("llama:rotate_half")


# ---- Versions that are not supported ----


@pytest.mark.parametrize(
    "version, inside", [("5.22.0", True), ("5.17.3", True), ("5.16.1", False), ("6.0.0.dev0", False)]
)
def test_report_says_when_a_version_is_not_supported(version, inside, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import adze
    import models

    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "transformers" else real(name))
    report = adze.patch(models.build("llama")).report()
    sentence = f"transformers {version} is not among the versions that adze is tested with (5.17 to 5.23)"
    assert report.count(sentence) == (0 if inside else 1)


def test_other_models_are_not_warned_about(monkeypatch):
    torch = pytest.importorskip("torch")
    import adze

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    assert "is not among" not in adze.patch(torch.nn.LayerNorm(8)).report()


# ---- The scan ----

OLD = """
    import torch
    from torch import nn


    class LlamaRMSNorm(nn.Module):
        def forward(self, hidden_states):
            input_dtype = hidden_states.dtype
            hidden_states = hidden_states.to(torch.float32)
            variance = hidden_states.pow(2).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
            return self.weight * hidden_states.to(input_dtype)


    class OtherNorm(LlamaRMSNorm):
        pass


    class StrangeNorm(nn.Module):
        def forward(self, x):
            return x.sort().values


    class WrappedNorm(nn.Module):
        @compiled
        def forward(self, hidden_states):
            return hidden_states


    class LlamaDecoderLayer(nn.Module):
        def __init__(self, size):
            self.norm = LlamaRMSNorm(size)

        def forward(self, hidden_states):
            residual = hidden_states
            hidden_states = residual + self.mlp(hidden_states)
            residual = hidden_states
            hidden_states = self.norm(hidden_states)
            return residual + self.mlp(hidden_states)
"""


def package(folder, text, version="9.0.0"):
    home = folder / "transformers/models/llama"
    home.mkdir(parents=True)
    (home / "modeling_llama.py").write_text(textwrap.dedent(text))
    (folder / f"transformers-{version}.dist-info").mkdir()
    return scan.Package("transformers", folder / "transformers", version)


def findings(found):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from adze.patching.frame import rules_for

    return {
        f.name.partition(":")[2]: (f.kind, f.state, f.detail) for f in scan.scan(found, rules_for("transformers"))
    }


def test_scan(tmp_path):
    found = findings(package(tmp_path, OLD))
    assert found["LlamaRMSNorm.forward"] == found["OtherNorm.forward"] == ("norm", "known", "rms_norm")
    assert found["LlamaDecoderLayer.forward"] == ("fuse", "known", "add + norm, by statements")
    assert found["StrangeNorm.forward"][:2] == ("norm", "unknown")
    assert found["WrappedNorm.forward"] == ("norm", "unknown", "decorated by compiled")


def test_scan_finds_what_is_near(tmp_path):
    changed = OLD.replace("return self.weight * hidden", "return (self.weight + 1) * hidden")
    kind, state, detail = findings(package(tmp_path / "a", changed))["LlamaRMSNorm.forward"]
    newest = sources.supported("transformers")[-1]
    assert (kind, state) == ("norm", "near")
    assert detail == f"near llama:LlamaRMSNorm.forward of transformers {newest}: 1 of 6 statements differ"
    renamed = OLD.replace("variance_epsilon", "eps").replace("input_dtype", "dtype")
    kind, state, detail = findings(package(tmp_path / "b", renamed))["LlamaRMSNorm.forward"]
    assert state == "near" and detail.endswith("the same but for its names")


def test_structure_and_statements():
    one, other, more = (ast.parse(text).body[0] for text in (
        "def f(self, x):\n    y = x + 1\n    return y",
        "def f(self, z):\n    y = z + 1\n    return y",
        "def f(self, x):\n    if x:\n        y = x + 1\n    return y",
    ))  # fmt: skip
    assert structure_node(one) == structure_node(other) != structure_node(more)
    assert statements_node(one)[1:] == [s for s in statements_node(more)[1:] if s in statements_node(one)]


# ---- A new version ----


@pytest.fixture
def table(tmp_path, monkeypatch):
    copy = tmp_path / "fingerprints.json"
    copy.write_text(sources.TABLE.read_text())
    monkeypatch.setattr(sources, "TABLE", copy)
    return copy


def row(name):
    return [source for source in sources.read()[1] if source.name == name]


def test_a_version_is_recorded(table, tmp_path):
    changed = scan.record([package(tmp_path, OLD)])
    assert sorted(changed) == ["llama:LlamaDecoderLayer.forward"]
    (norm,) = row("llama:LlamaRMSNorm.forward")
    assert norm.versions[-1] == "9.0.0"
    assert [s.versions[-1] for s in row("llama:LlamaDecoderLayer.forward")] == [sources.supported("transformers")[-1]]


def test_a_changed_source_is_added_when_it_is_accepted(table, tmp_path):
    assert scan.record([package(tmp_path, OLD)], ["llama:LlamaDecoderLayer.forward"]) == {}
    old, new = sorted(row("llama:LlamaDecoderLayer.forward"), key=lambda s: s.versions)
    assert new.versions == ("9.0.0",)
    body = textwrap.dedent(OLD).partition("LlamaDecoderLayer")[2]
    assert new.hash == fingerprint_source("class A" + body, "forward")


def test_a_new_source_is_added_when_it_is_accepted(table, tmp_path, monkeypatch, capsys):
    """The guide "Adding a model": a class that no rule knows."""
    monkeypatch.setattr(scan, "installed", lambda name: scan.Package(name, tmp_path / name, "9.0.0"))
    package(tmp_path, OLD)
    package(tmp_path / "older", OLD, "8.9.0")
    command = ["--record", "--package", "transformers", "--accept", "llama:StrangeNorm.forward"]
    scan.main(command)
    assert "known: llama:StrangeNorm.forward\n" in capsys.readouterr().out
    scan.main([*command, "--of", str(tmp_path / "older")])
    (norm,) = row("llama:StrangeNorm.forward")
    assert norm.versions == ("8.9.0", "9.0.0")


def test_a_name_that_is_nowhere_is_not_accepted(table, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scan, "installed", lambda name: scan.Package(name, tmp_path / name, "9.0.0"))
    package(tmp_path, OLD)
    before = table.read_text()
    wrong = ["--record", "--package", "transformers", "--accept", "llama:StrangeNorm"]
    with pytest.raises(SystemExit, match="--accept llama:StrangeNorm: not in transformers 9.0.0; --scan lists"):
        scan.main(wrong)
    with pytest.raises(SystemExit):
        scan.main(["--scan", *wrong[1:]])
    assert "--accept goes with --record" in capsys.readouterr().err
    assert table.read_text() == before


def test_writing_what_was_read_changes_nothing(table):
    before = table.read_text()
    sources.write(*sources.read())
    assert table.read_text() == before
    assert json.loads(before)["supported"] == sources.read()[0]


def test_diff(tmp_path):
    old, new = (
        package(tmp_path / "a", OLD, "9.0.0"),
        package(tmp_path / "b", OLD.replace("pow(2)", "pow(3)"), "9.1.0"),
    )
    lines = scan.diff(old, new, ["llama:LlamaRMSNorm.forward", "llama:LlamaDecoderLayer.forward"])
    assert [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")] == [
        "-    variance = hidden_states.pow(2).mean(-1, keepdim=True)",
        "+    variance = hidden_states.pow(3).mean(-1, keepdim=True)",
    ]


def test_command(tmp_path, capsys):
    pytest.importorskip("transformers")
    package(tmp_path, OLD)
    scan.main(["--scan", "--package", "transformers", "--of", str(tmp_path)])
    said = capsys.readouterr().out
    assert "transformers 9.0.0" in said and "norm       2 known, 0 near, 2 unknown" in said
    command = [sys.executable, "-m", "adze.fingerprint", "--scan", "--package", "nosuch"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 2 and "nosuch" in said.stderr


def test_scan_without_the_native_part(tmp_path):
    pytest.importorskip("torch")
    shutil.copytree(ROOT / "python/adze", tmp_path / "adze", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "adze.fingerprint", "--scan", "--package", "torch"]
    said = subprocess.run(command, capture_output=True, text=True, env=env)
    assert said.returncode == 1 and said.stderr.startswith("python -m adze.fingerprint --scan: adze: the native part")
    assert "make python" in said.stderr and "Traceback" not in said.stderr


# ---- The table in the docs ----


def test_the_page_is_of_the_last_run():
    said = subprocess.run([sys.executable, ROOT / "tests/versions.py", "--check"], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
