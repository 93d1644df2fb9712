"""What stands for a CUDA graph on the CPU: the operators of a call are recorded with their numbers, and repeated on
the same memory. What the host computed in between is frozen, as in a graph."""

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from adze.generation import decode, replay
from adze.graphs import cuda_graph as graphs
from device import here


def _memory(x):
    return x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) else None


class _Record(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        self.calls.append((op, args, kwargs or {}, made))
        return made


class Tape:
    """In place of a captured graph: Tape(module, (args, kwargs), before), and replay(leaves)."""

    def __init__(self, module, args, before):
        self.replays, self.module = 0, module
        leaves, spec = pytree.tree_flatten(args)
        self.inputs = graphs.Inputs(leaves)
        args, kwargs = pytree.tree_unflatten(self.inputs.leaves, spec)
        with torch.no_grad():
            for _ in range(graphs.WARMUP):
                module(*args, **kwargs)
            with _Record() as record:
                self.outputs = module(*args, **kwargs)
        self.calls = record.calls
        graphs.refuse_objects(self.outputs)

    def replay(self, leaves):
        self.replays += 1
        self.inputs.take(leaves)
        with _disable_current_modes():  # what a graph launches is no call of torch's
            self.run()
        return graphs.handed_out(self.module, self.outputs)

    def run(self):
        for op, args, kwargs, before in self.calls:
            used = {_memory(x) for x in pytree.tree_leaves((args, kwargs))}
            now = op(*args, **kwargs)
            for own, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(now), strict=True):
                if isinstance(own, torch.Tensor) and _memory(own) not in used:  # no view, and not written in place
                    own.copy_(new)


def use(monkeypatch):
    """The graphs that adze.graph captures from now on, as a list: tapes where the tests run on the CPU, which then
    counts as a GPU."""
    made, capture = [], graphs._capture if here().type == "cuda" else Tape

    def record(*args):
        made.append(capture(*args))
        return made[-1]

    monkeypatch.setattr(graphs, "_capture", record)
    if here().type != "cuda":
        monkeypatch.setattr(graphs, "_on_gpu", lambda tensor: True)
        monkeypatch.setattr(decode, "_graphs", lambda device: True)
        monkeypatch.setattr(replay._Memory, "is_held", lambda self: False)  # a tape has the tensors, a graph has not
    return made
