"""What follows torch's default device, which conftest.py sets, where torch itself does not; and what ran."""

import collections

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def here():
    return torch.get_default_device()


def generator(seed):
    return torch.Generator(here()).manual_seed(seed)


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
