"""Puts this project's kernels into the model of model.py, and takes them out again."""

import torch

import model as place


def guarded(forward, module):
    """There is no backward kernel: where a gradient is needed, the module runs its own code."""

    def call(*args, **kwargs):
        given = [t for t in (*args, *kwargs.values(), *module.parameters()) if isinstance(t, torch.Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            return type(module).forward(module, *args, **kwargs)
        return forward(module, *args, **kwargs)

    return call


def inject(model, kernel, ops):
    """How many modules each op has taken."""
    taken = dict.fromkeys(ops, 0)
    for op in ops:
        for kind, forward in place.forwards(kernel).get(op, {}).items():
            for module in model.modules():
                if type(module) is kind:
                    module.forward = guarded(forward, module)
                    taken[op] += 1
    if "attention" in ops and hasattr(place, "ATTENTION"):
        import attention

        taken["attention"] = attention.inject(model, kernel, place.ATTENTION)
    return taken


def remove(model):
    if "attention_before" in model.__dict__:
        import attention

        attention.remove(model)
    for module in model.modules():
        module.__dict__.pop("forward", None)
