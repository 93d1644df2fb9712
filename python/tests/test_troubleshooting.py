"""The tables of docs/troubleshooting.md and of the skill: each row names the test or the file that shows it, what it
quotes is what adze says, and symptoms that no other test has are reproduced here."""

import functools
import importlib.machinery
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "docs/troubleshooting.md", ROOT / "skills/adze-kernels/references/troubleshooting.md"]
SHOWN_BY = re.compile(r"<!-- ([\w./-]+)::([^<>]+) --> \|$")  # in the last cell: a file, and a name in it


def rows():
    for path in PAGES:
        for line in path.read_text().splitlines():
            if line.startswith("|") and not re.match(r"\|(-|.*\bsymptom\b)", line):
                yield path.parent.name, line


def holds(path, name):
    """Whether a file has a name: a Python file a function, or a text that a test looks for; others the text."""
    text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
    return bool(re.search(rf"^def {name}\(", text, re.M)) if re.fullmatch(r"test_\w+", name) else name in text


@pytest.mark.parametrize("page, row", list(rows()), ids=lambda value: re.sub(r"\W+", "-", value)[:50])
def test_a_row_names_what_shows_it(page, row):
    shown = SHOWN_BY.search(row)
    assert shown, "the row has no <!-- file::name -->"
    assert holds(*shown.groups()), f"{shown[1]} has no {shown[2]}"


def test_a_name_that_is_not_there_is_found():
    assert not holds("python/tests/test_patch.py", "test_nosuch")
    assert not holds("python/tests/test_nosuch.py", "test_verify")
    assert holds("python/tests/test_patch.py", "test_verify") and holds("check/self.c", "RACE")


@functools.cache
def said():
    """The sources, with the parts of each string put together."""
    paths = [path for place in ("python/adze", "src", "bind", "hub") for path in sorted((ROOT / place).rglob("*"))]
    text = "\n".join(path.read_text() for path in paths if path.suffix in (".py", ".c", ".cu", ".cuh"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.parent.name)
def test_what_is_quoted_is_what_adze_says(page):
    """The longest part of each message between placeholders, colons and commas."""
    for line in page.read_text().splitlines():
        for message in re.findall(r"`([^`]+)`", line.split(" | ")[0]) if line.startswith("| `") else ():
            parts = re.split(r": |, |\.\.\.|\b[A-Z]{2,}\b|\bN\b|\bsm_\d+a?\b|\d+", message)
            part = max(parts, key=len).strip()
            assert len(part.split()) < 5 or part in said(), f"{message}: nothing says '{part}'"


# ---- Symptoms ----


def test_no_module():
    adze = pytest.importorskip("torch") and importlib.import_module("adze")
    with pytest.raises(TypeError, match="adze.patch: model is a int, it must be a module or a pipeline"):
        adze.patch(3)


def test_compiled_before_the_patch():
    torch = pytest.importorskip("torch")
    import adze

    model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    model.compile(backend="eager")
    with pytest.warns(UserWarning, match="adze: a Sequential was compiled before; patch first, then compile"):
        adze.patch(model)


def test_a_torch_that_is_too_old(tmp_path):
    """The native part beside a libtorch_cpu.so that has none of the functions it needs."""
    if not shutil.which("cc"):
        pytest.skip("cc is not here")
    (tmp_path / "empty.c").write_text("int empty;\n")
    library = tmp_path / "libtorch_cpu.so"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so"]
    subprocess.run(["cc", *flags, "-o", library, tmp_path / "empty.c"], check=True)
    native = next((ROOT / "python/adze/operators").glob("_adze*.so"))
    code = (
        f"import ctypes, sys; ctypes.CDLL({str(library)!r}); sys.path.insert(0, {str(native.parent)!r}); import _adze"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert re.search(r"ImportError: this torch has no \w+: adze needs torch 2.10 or newer", done.stderr), done.stderr


def test_two_copies_in_one_process(tmp_path):
    pytest.importorskip("torch")
    from adze.operators import _adze

    copy = shutil.copy(_adze.__file__, tmp_path)
    loader = importlib.machinery.ExtensionFileLoader("_adze", copy)
    with pytest.raises(ImportError, match="torch refused the operators of the namespace adze; is adze loaded twice?"):
        importlib.util.module_from_spec(importlib.util.spec_from_loader("_adze", loader))
