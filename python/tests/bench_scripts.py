"""The scripts of bench/ as modules. One has the name of a module of these tests, so sys.modules is restored."""

import importlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


def fixture(*scripts):
    """A fixture that gives these scripts, by name."""

    @pytest.fixture(scope="module", name="bench")
    def bench():
        names = [path.stem for path in BENCH.glob("*.py")]
        before = {name: sys.modules.pop(name, None) for name in names}
        sys.path.insert(0, str(BENCH))
        try:
            yield {name: importlib.import_module(name) for name in scripts}
        finally:
            sys.path.remove(str(BENCH))
            for name, module in before.items():
                sys.modules.pop(name, None)
                if module is not None:
                    sys.modules[name] = module

    return bench
