"""What follows torch's default device, which conftest.py sets, where torch itself does not; and what ran."""

import collections
import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def here():
    return torch.get_default_device()


def generator(seed):
    return torch.Generator(here()).manual_seed(seed)


@contextlib.contextmanager
def default_device(device):
    """Another default device, or none. Under one Dynamo sees each method of a tensor through an override of torch's,
    and cannot trace all of them: what is compiled runs under none, as it does for most users."""
    before = here()
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


class Watch(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen[f"{op.namespace}.{op._opname}"] += 1
        return op(*args, **(kwargs or {}))

    @property
    def adze(self):
        """How many of them were adze's."""
        return sum(n for op, n in self.seen.items() if op.startswith("adze."))

    @property
    def matmuls(self):
        """How many multiplied matrices."""
        return sum(self.seen[f"aten.{name}"] for name in ("mm", "addmm", "addmm_", "linear"))
