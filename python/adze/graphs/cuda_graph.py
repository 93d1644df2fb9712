"""adze.graph: a module's forward as CUDA graphs, one per shape of its inputs."""

import contextlib
import threading
import warnings

import torch
from torch.utils import _pytree as pytree

from .module_state import ModuleState

WARMUP = 3  # calls before a capture: allocators, autotuners and lazily loaded kernels settle
MOST_WASTED = 8  # changes of a module in a row, each before its graphs paid off: then it runs without graphs
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
# Dtypes of which torch copies several tensors at once.
_GROUPED = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_one_capture = threading.RLock()  # a capture waits for the device, which another capture forbids


_capturing = threading.local()


def keep(*tensors):
    """Keeps tensors alive for the graph that this thread captures. False when adze.graph captures none."""
    kept = getattr(_capturing, "kept", None)
    if kept is None:
        return False
    kept.extend(tensors)
    return True


def capturing():
    """Whether this thread captures a graph of adze.graph."""
    return getattr(_capturing, "kept", None) is not None


def capture():
    """An object that identifies the capture under way: None without one, False when it is not adze.graph's."""
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return None
    kept = getattr(_capturing, "kept", None)
    return False if kept is None else kept


class Refused(RuntimeError):
    """Why a call cannot be replayed from a graph."""


class _Order:
    """Keeps replays in order when they come from several streams: they share buffers and memory."""

    def __init__(self):
        self.stream, self.done = None, torch.cuda.Event()

    def begin(self):
        stream = torch.cuda.current_stream()
        if self.stream is not None and stream != self.stream:
            stream.wait_event(self.done)
        self.stream = stream

    def end(self):
        self.done.record(self.stream)


class Inputs:
    """The buffers that a graph reads, and the other inputs that it was captured with."""

    def __init__(self, leaves):
        self.leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        alike = {}
        for at, own in enumerate(self.leaves):
            if isinstance(own, torch.Tensor):
                together = type(own) is torch.Tensor and own.dtype in _GROUPED
                alike.setdefault((own.dtype, own.device) if together else at, []).append(at)
        self.groups = [(places, [self.leaves[at] for at in places]) for places in alike.values()]

    def take(self, leaves):
        """Copies the tensors of a call, those of a dtype in one launch."""
        for places, own in self.groups:
            if len(own) == 1:
                own[0].copy_(leaves[places[0]])
            else:
                torch._foreach_copy_(own, [leaves[at] for at in places])


def handed_out(module, outputs):
    """What a replay returns: copies, which are the caller's; the graph's buffers where the module `lends` them, to a
    caller that has read them, on the same stream, before the next replay."""
    if getattr(module, "lends", False):
        return outputs
    return pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, outputs)


class _Captured:
    """One graph, the buffers it reads and the outputs it writes."""

    def __init__(self, call, args, before):
        """before: another graph of the same module, with whose memory pool this one is captured, or None."""
        self.replays, self.call = 0, call
        self.order = _Order() if before is None else before.order
        self.order.begin()
        leaves, self.spec = pytree.tree_flatten(args)
        self.inputs = Inputs(leaves)
        args, kwargs = pytree.tree_unflatten(self.inputs.leaves, self.spec)
        warmup = torch.cuda.Stream()
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup):
            for _ in range(WARMUP):
                outputs = call(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(warmup)
        refuse_objects(outputs)
        del outputs
        self.graph = torch.cuda.CUDAGraph()
        self.kept = _capturing.kept = []
        pool = None if before is None else before.graph.pool()
        try:
            # Other threads may go on; what they allocate is not part of this graph.
            with _generator_of_others(call) as release:
                with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                    release()
                    self.outputs = call(*args, **kwargs)
        finally:
            _capturing.kept = None
        self.order.end()

    def replay(self, leaves):
        self.replays += 1
        self.order.begin()
        self.inputs.take(leaves)
        self.graph.replay()
        outputs = handed_out(self.call, self.outputs)
        self.order.end()
        return outputs


@contextlib.contextmanager
def _generator_of_others(module):
    """For the capture of a module that draws no random numbers, which its attribute `random` says: a function to be
    called in the capture. From then on other threads may draw random numbers, which torch refuses during a capture:
    it has registered the state of its generator for the graph, and they draw by a copy of that state meanwhile. A
    draw in the instant between the beginning of the capture and that call still fails."""
    if getattr(module, "random", True):
        yield lambda: None
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    own, other = generator.graphsafe_get_state(), generator.clone_state()
    try:
        yield lambda: generator.graphsafe_set_state(other)
    finally:
        seed, offset = other.initial_seed(), max(own.get_offset(), other.get_offset())
        generator.graphsafe_set_state(own)
        if seed != own.initial_seed():  # somebody has set it
            generator.manual_seed(seed)
            offset = other.get_offset()
        generator.set_offset(offset)


def refuse_objects(outputs):
    """Raises for outputs that a replay could only hand out again, such as a cache: each caller must have its own."""
    for leaf in pytree.tree_leaves(outputs):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            name = type(leaf).__name__
            hint = "; call it with use_cache=False" if "Cache" in name else ""
            raise Refused(f"it returns a {name}, and each replay would return the same one{hint}")


def _on_gpu(tensor):
    return tensor.device.type == "cuda"


def _capture(module, args, before):
    stream = torch.cuda.current_stream()
    try:
        with torch.no_grad():
            return _Captured(module, args, before)
    except Refused:
        raise
    except (RuntimeError, NotImplementedError):
        _leave_capture(stream)
        raise


def _leave_capture(stream):
    """Cleans up after a capture that failed. torch leaves the capture's stream current and the random generator
    registered for the graph, so that the next random number would raise."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


class GraphHandle:
    """What adze.graph returns: call it like the module, or switch it off and on. The module itself is not changed.

    Threads may share it: one call at a time goes through its graphs."""

    def __init__(self, module, limit, ahead=False):
        """ahead: replay() may start a graph before it has compared the module, and drop what it returns after a
        change. That is for a forward whose repetition changes nothing."""
        self.module, self.limit, self.ahead = module, limit, ahead
        self.enabled, self.captured, self.refused = True, {}, {}
        self.lock, self.state = threading.RLock(), None
        self.wasted = 0  # changes of the module in a row, each before a graph was replayed more often than warmed up

    def _given(self, leaves):
        """The part of a graph's key that describes the inputs; None where no graph can take them."""
        parts = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, _PLAIN):
                    return None  # a cache or another object that a graph would freeze
                parts.append((type(leaf), leaf))  # 1 and True are equal
            elif not _on_gpu(leaf):
                return None
            else:
                parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device))
        return parts

    def _needs_gradient(self, leaves):
        if not torch.is_grad_enabled():
            return False
        own = [t for owner in self.state.weights for t in owner.values()]
        return any(isinstance(t, torch.Tensor) and t.requires_grad for t in (*leaves, *own))

    def _key(self, parts, spec):
        weights = tuple(t.data_ptr() for own in self.state.weights for t in own.values() if t is not None)
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return (*parts, spec, weights, autocast, torch.is_inference_mode_enabled())

    def _refresh(self):
        """Drops the graphs if the module has changed since their capture. False if it changes too often for graphs to
        pay off."""
        if self.state is None:
            self.state = ModuleState(self.module)
        elif not self.state.same():
            paid = any(graph.replays > WARMUP for graph in self.captured.values())
            self.wasted = 0 if paid or not self.captured else self.wasted + 1
            self._drop()
            if self.wasted == MOST_WASTED:
                warnings.warn(
                    f"adze.graph: the {type(self.module).__name__} changed {MOST_WASTED} times in a row before its "
                    "graphs were replayed often enough to pay off; it runs without graphs until reset()",
                    stacklevel=4,
                )
            self.state.record()
        return self.wasted < MOST_WASTED

    def _graph(self, args, kwargs, leaves, spec, parts):
        """The graph for a call, captured if need be, or None where the module must run."""
        if not self._refresh() or self._needs_gradient(leaves):
            return None
        key = self._key(parts, spec)
        if key in self.refused:
            return None
        if key not in self.captured:
            if len(self.captured) >= self.limit:
                return None
            before = next(iter(self.captured.values()), None)
            try:
                with _one_capture:
                    captured = _capture(self.module, (args, kwargs), before)
            except (RuntimeError, NotImplementedError) as error:  # a module that cannot be captured runs eagerly
                self.refused[key] = str(error)
                if isinstance(error, Refused):
                    warnings.warn(
                        f"adze.graph runs the {type(self.module).__name__} without a graph: {error}", stacklevel=4
                    )
                self.state.ran()
                return None
            self.state.ran()
            self.captured[key] = captured
        return self.captured[key]

    def _started(self, leaves, spec, parts):
        """The outputs of a graph that runs while the module is compared: (outputs,), or None without a graph or after
        a change. The graph reads nothing that may be gone: its key has the addresses of the weights, and the state
        keeps everything else that the module had."""
        if self.state is None or self._needs_gradient(leaves):
            return None
        captured = self.captured.get(self._key(parts, spec))
        outputs = None if captured is None else (captured.replay(leaves),)
        return outputs if outputs is not None and self.state.same() else None

    def replay(self, *args, **kwargs):
        """The outputs of a graph, captured if need be, as (outputs,); None where the module must run."""
        if not self.enabled or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        parts = self._given(leaves)
        if parts is None:
            return None
        with self.lock:
            outputs = self._started(leaves, spec, parts) if self.ahead else None
            if outputs is not None:
                return outputs
            captured = self._graph(args, kwargs, leaves, spec, parts)
            return None if captured is None else (captured.replay(leaves),)

    def __call__(self, *args, **kwargs):
        outputs = self.replay(*args, **kwargs)
        return self.module(*args, **kwargs) if outputs is None else outputs[0]

    def disable(self):
        self.enabled = False

    def enable(self):
        self.enabled = True

    def reset(self):
        """Drops the graphs and their memory."""
        with self.lock:
            self._drop()
            self.state, self.wasted = None, 0

    def _drop(self):
        self.captured.clear()
        self.refused.clear()

    def report(self):
        lines = [f"{len(self.captured)} graphs, {len(self.refused)} calls that run without a graph"]
        lines += [f"refused: {reason.splitlines()[0]}" for reason in self.refused.values()]
        if self.wasted >= MOST_WASTED:
            lines.append("the module changes too often: it runs without graphs until reset()")
        return "\n".join(lines)

    def __getattr__(self, name):
        return getattr(self.module, name)


def graph(module, limit=16):
    """A callable like `module` that replays a CUDA graph for each shape it has seen, up to `limit` of them.

    For steps that are bound by launches. Inputs are copied into the graph's buffers and outputs out of them. New
    shapes beyond the limit, inputs off the GPU, caches, and calls that need a gradient run the module itself, and so
    does a module that returns a cache. Weights that move (offloading, a new dtype) make a new graph; weights that
    change in place are seen by the old one. Before each call the module's attributes, hooks, forwards and submodules
    are compared with those of the capture. After a change (an adapter, a patch that is disabled) graphs are captured
    again."""
    if not callable(module):
        raise ValueError(f"adze.graph: module is a {type(module).__name__}, it must be callable")
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"adze.graph: limit is {limit!r}, it must be a whole number of 1 or more")
    return GraphHandle(module, limit)
