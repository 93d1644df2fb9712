"""adze.graph: a module's forward as CUDA graphs, one per shape of its inputs."""

import threading

import torch
from torch.utils import _pytree as pytree

WARMUP = 3  # calls before a capture: allocators, autotuners and lazily loaded kernels settle


_capturing = threading.local()


def keep(*tensors):
    """Lets the graph that this thread captures hold tensors that it reads; False when adze.graph captures none."""
    kept = getattr(_capturing, "kept", None)
    if kept is None:
        return False
    kept.extend(tensors)
    return True


def capture():
    """What stands for the capture that goes on: None when there is none, False when it is not adze.graph's."""
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return None
    kept = getattr(_capturing, "kept", None)
    return False if kept is None else kept


class _Captured:
    """One graph, the buffers it reads and the outputs it writes."""

    def __init__(self, call, args, pool):
        leaves, self.spec = pytree.tree_flatten(args)
        self.inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(self.inputs, self.spec)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                call(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.kept = _capturing.kept = []
        try:
            with torch.cuda.graph(self.graph, pool=pool):
                self.outputs = call(*args, **kwargs)
        finally:
            _capturing.kept = None

    def replay(self, leaves):
        for own, given in zip(self.inputs, leaves, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given)
        self.graph.replay()
        return pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, self.outputs)


def _leave_capture(stream):
    """After a capture that failed: torch then leaves its stream the current one, and the generator counting for it,
    so that the next random number would be an error."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


class GraphHandle:
    """What adze.graph returns: call it like the module, or switch it off and on. The module itself is not changed."""

    def __init__(self, module, limit):
        self.module, self.limit = module, limit
        self.enabled, self.captured, self.refused = True, {}, {}
        self.pool = None
        self.owners = [own for m in module.modules() for own in (m._parameters, m._buffers) if own]

    def _key(self, leaves, spec):
        """None when a graph cannot stand for this call; else all that must be the same for one to."""
        if torch.is_grad_enabled():
            own = [t for owner in self.owners for t in owner.values()]
            if any(isinstance(t, torch.Tensor) and t.requires_grad for t in (*leaves, *own)):
                return None
        parts = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, (int, float, bool, str, type(None), torch.dtype)):
                    return None  # a cache or another object that a graph would freeze
                parts.append(leaf)
            elif leaf.device.type != "cuda":
                return None
            else:
                parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device))
        weights = tuple(t.data_ptr() for own in self.owners for t in own.values() if t is not None)
        return (*parts, spec, weights, self.module.training, torch.is_inference_mode_enabled())

    def __call__(self, *args, **kwargs):
        if not self.enabled or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self.module(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = self._key(leaves, spec)
        if key is None or key in self.refused:
            return self.module(*args, **kwargs)
        if key not in self.captured:
            if len(self.captured) >= self.limit:
                return self.module(*args, **kwargs)
            stream = torch.cuda.current_stream()
            try:
                with torch.no_grad():
                    captured = _Captured(self.module, (args, kwargs), self.pool)
            except (RuntimeError, NotImplementedError) as error:  # a module that cannot be captured runs as it is
                _leave_capture(stream)
                self.refused[key] = str(error)
                return self.module(*args, **kwargs)
            self.pool = captured.graph.pool()
            self.captured[key] = captured
        return self.captured[key].replay(leaves)

    def disable(self):
        self.enabled = False

    def enable(self):
        self.enabled = True

    def reset(self):
        """Drops the graphs and their memory."""
        self.captured.clear()
        self.refused.clear()
        self.pool = None

    def report(self):
        lines = [f"{len(self.captured)} graphs, {len(self.refused)} calls that run as they are"]
        lines += [f"refused: {reason.splitlines()[0]}" for reason in self.refused.values()]
        return "\n".join(lines)

    def __getattr__(self, name):
        return getattr(self.module, name)


def graph(module, limit=16):
    """A callable like `module` that replays a CUDA graph for each shape it has seen, up to `limit` of them.

    For steps that are bound by launches. Inputs are copied into the graph's buffers and outputs out of them. New
    shapes beyond the limit, inputs off the GPU, caches, and calls that need a gradient run the module itself. Weights
    that move (offloading, a new dtype) make a new graph; weights that change in place are seen by the old one."""
    return GraphHandle(module, limit)
