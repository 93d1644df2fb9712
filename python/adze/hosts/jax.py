"""The ops as functions of JAX arrays, under jit and outside: adze.h says what each one computes.

On CPUs and CUDA GPUs. There are no gradients: jax.grad says so. jax.vmap makes one call per entry; a batch costs less
as a dimension of the arrays, of which every op takes several.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ..operators import description
from ..operators.description import OPS
from ..operators.functions import take_functions


@functools.cache
def _register():
    """On CUDA the handler also runs in XLA's stage "initialize", where kernels are loaded before a graph is
    captured."""
    for op in OPS:
        cpu = jax.ffi.pycapsule(getattr(description.library, f"adze_xla_{op}"))
        cuda = jax.ffi.pycapsule(getattr(description.library, f"adze_xla_{op}_cuda"))
        jax.ffi.register_ffi_target(f"adze_{op}", cpu, platform="cpu")
        jax.ffi.register_ffi_target(f"adze_{op}", {"initialize": cuda, "execute": cuda}, platform="CUDA")


def _run(op, args, out=None, second=None, more=0, third=None):
    """The outputs of an op, with as many of the optional ones as `more` says. Scratch is an additional output of the
    XLA call, on the CPU too: while it traces, JAX does not know the device."""
    if out is not None or second is not None or third is not None:
        raise ValueError(f"adze: {op.name} cannot write given outputs, since JAX arrays are immutable")
    if op.changed:
        raise ValueError(f"adze: {op.name} changes {op.changed[0]} in place, and JAX arrays are immutable")
    _register()
    tensors, numbers = description.split(op, args)
    arrays = {name: jnp.asarray(array) for name, array in tensors.items()}
    for name, array in arrays.items():
        if not all(isinstance(size, int) for size in array.shape):
            raise ValueError(f"adze: {op.name}: {name} is {array.shape}, its sizes must be numbers when it is traced")
    given = tuple(description.Tensor(name, a.dtype.name, a.shape) for name, a in arrays.items())
    outputs, scratch = description.returns(op.name, given, tuple(numbers.items()))
    outputs = [output for output in outputs if output.name in description.returned(op, more)]
    count = len(outputs)
    if scratch:
        outputs.append(description.Tensor("scratch", "uint8", (scratch,)))
    call = jax.ffi.ffi_call(
        f"adze_{op.name}",
        [jax.ShapeDtypeStruct(output.shape, jnp.dtype(output.dtype)) for output in outputs],
        vmap_method="sequential",
    )
    results = call(
        *arrays.values(),
        inputs=" ".join(arrays),
        outputs=" ".join(output.name for output in outputs),
        **{name: (np.float32 if isinstance(value, float) else np.int32)(value) for name, value in numbers.items()},
    )
    return results[0] if count == 1 else tuple(results[:count])


def dtype_code(what, dtype, x=None):
    name = jnp.dtype(dtype).name
    return 0 if x is not None and jnp.asarray(x).dtype.name == name else description.dtype_code(what, name)


take_functions(globals(), lambda op: functools.partial(_run, op), outputs=False)
