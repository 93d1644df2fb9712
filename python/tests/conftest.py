"""Where tests run: ADZE_TEST_DEVICE=cuda makes a GPU torch's default device, before tests are collected."""

import gc
import importlib.util
import os

import pytest

gc.disable()  # until all is imported: see pytest_collection_finish
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of a GPU's memory from torch
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS can then be deterministic

if importlib.util.find_spec("torch"):
    import torch

    torch.backends.cudnn.allow_tf32 = False  # convolutions of f32 keep full precision, as GEMMs do by default
    if os.environ.get("ADZE_TEST_DEVICE", "cpu") != "cpu":
        torch.set_default_device(os.environ["ADZE_TEST_DEVICE"])


def pytest_collection_finish():
    """What torch and transformers make when they are imported stays: a collection that looks at it takes a second."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def deterministic():
    """Where gradients compare by bits: some backward kernels of CUDA add in any order otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def on_the_cpu():
    from device import default_device

    with default_device(None):
        yield


@pytest.fixture
def no_gradients():
    with torch.inference_mode(False), torch.no_grad():
        yield


@pytest.fixture
def llama():
    import models

    return models.build("llama")
