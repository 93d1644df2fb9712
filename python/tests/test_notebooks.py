"""The notebooks, executed on the CPU as a reader would, and the tour that runs one of them in a terminal."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ENV = {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def code(path):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path, monkeypatch, tmp_path):
    for module in ("torch", "matplotlib", "ipykernel", "transformers"):
        pytest.importorskip(module)
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "a notebook has a plot"
    assert not [output for output in outputs if output.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_plots_have_names_and_units(path):
    plots = [cell for cell in code(path) if "plt.show()" in cell]
    assert plots
    for cell in plots:
        assert 'plt.xlabel("' in cell and re.search(r'plt\.ylabel\("[\w ]+, (us|GB/s)"\)', cell), cell


def test_tour():
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "examples/kernel_tour.py"],
        cwd=ROOT,
        env={**os.environ, **ENV},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"adze +\d+\.\d us", done.stdout) and re.search(r"^4096 +[\d.]+", done.stdout, re.M)
    assert "off by at most" in done.stdout


def test_site(tmp_path):
    """Every link of every page leads somewhere: mkdocs is strict."""
    pytest.importorskip("mkdocs")
    done = subprocess.run([sys.executable, "docs/site.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "build/site/performance.html").read_text()
    assert page.count(".svg") >= 10
    assert "<svg" in next((ROOT / "build/site").glob("h200-bench-*.svg")).read_text()
