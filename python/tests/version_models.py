"""Tiny models of the installed transformers or diffusers, with and without adze: prints what was found as JSON.

tests/versions.py runs it once for each version, and compares the counts of the versions. It is not a test by itself.
"""

import collections
import importlib
import json
import os
import sys
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402

import adze  # noqa: E402
from device import Watch  # noqa: E402


def judge(model, run, exact=None):
    """How many modules each rule has replaced, where the outputs are the same; a sentence where they are not."""
    expected, sure = run(), exact and exact()
    handle = adze.patch(model, strict=True)
    with Watch() as watch:
        found = run()
    if not watch.adze:
        return "no op of adze has run"
    try:
        torch.testing.assert_close(found, expected)
    except AssertionError as error:
        return str(error).strip().replace("\n", "; ")
    if exact and not torch.equal(exact(), sure):
        return "other tokens"
    left = len(handle.rows) - len(handle.patched)
    return dict(sorted(collections.Counter(row.rule for row in handle.rows if row.rule).items())) | {"left": left}


def transformers_models():
    import models

    for name in [*models.LANGUAGE, *models.OTHER]:
        model, arguments = models.build(name), models.inputs(name)
        exact = (lambda m=model, a=arguments: models.generate(m, a, 6)) if name in models.LANGUAGE else None
        yield name, model, lambda m=model, a=arguments: models.output(m, a), exact


def diffusers_models():
    made = importlib.import_module("diffusers_models")
    seams = importlib.import_module("diffusers_seams")
    for name in made.MODELS:
        model, inputs = made.make(name)
        yield name, model, lambda m=model, i=inputs: seams.output(m, i), None


def main(package):
    found = {}
    with torch.no_grad():
        for name, model, run, exact in {"transformers": transformers_models, "diffusers": diffusers_models}[
            package
        ]():
            try:
                found[name] = judge(model, run, exact)
            except Exception as error:  # it is in the table, and the other models still run
                found[name] = f"{type(error).__name__}: {error}".replace("\n", "; ")
    version = sys.modules[package].__version__
    print(json.dumps({"version": version, "torch": torch.__version__.split("+")[0], "models": found}))


if __name__ == "__main__":
    main(sys.argv[1])
