"""The notebooks, executed on the CPU as a reader would, and the tour that runs one of them in a terminal."""

import base64
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


def notebook(*cells):
    made = [{"cell_type": "code", "id": f"c{n}", "metadata": {}, "execution_count": None, "outputs": [],
             "source": text.splitlines(keepends=True)} for n, text in enumerate(cells)]  # fmt: skip
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def test_outputs_are_kept_without_jupyter(tmp_path):
    """By notebooks/execute.py, in a process of its own: it replaces plt.show."""
    pytest.importorskip("matplotlib")
    nbformat = pytest.importorskip("nbformat")
    plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nprint('before')\nplt.show()\nprint('after')"
    path, to = tmp_path / "small.ipynb", tmp_path / "to"
    path.write_text(json.dumps(notebook("x = 20\nprint('one')\nprint('two')\nx + 1", plot, "None")))
    to.mkdir()
    before = path.read_bytes()
    subprocess.run([sys.executable, "notebooks/execute.py", path, "--to", to], cwd=ROOT, check=True)
    book = nbformat.read(to / "small.ipynb", as_version=4)
    nbformat.validate(book)
    first, second, third = (cell.outputs for cell in book.cells)
    assert [cell.execution_count for cell in book.cells] == [1, 2, 3] and third == []
    assert first[0].text == "one\ntwo\n" and first[1].data["text/plain"] == "21"
    assert [output.output_type for output in second] == ["stream", "display_data", "stream"]
    assert base64.b64decode(second[1].data["image/png"]).startswith(b"\x89PNG")
    assert path.read_bytes() == before
    path.write_text(json.dumps(notebook("1 / 0")))
    done = subprocess.run([sys.executable, "notebooks/execute.py", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "small.ipynb, cell 1" in done.stderr and "ZeroDivisionError" in done.stderr
    assert json.loads(path.read_text()) == notebook("1 / 0")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_kept_outputs_are_of_one_run(path):
    """All cells or none were executed, in their order, without an error, and on a GPU."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in cells]
    outputs = [output for cell in cells for output in cell["outputs"]]
    if not outputs:
        assert set(counts) == {None}
        return
    assert counts == list(range(1, len(cells) + 1)) and "error" not in {o["output_type"] for o in outputs}
    assert re.match(r"NVIDIA .* torch.bfloat16 PyTorch", "".join(outputs[0]["text"]))
    assert any("image/png" in output.get("data", {}) for output in outputs)


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
