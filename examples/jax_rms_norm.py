"""adze.jax compared with the same norm in jax.numpy, both under jit.

python examples/jax_rms_norm.py
"""

import jax
import jax.numpy as jnp

import adze.jax


def plain(x, weight, eps=1e-6):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps) * weight).astype(x.dtype)


x = jax.random.normal(jax.random.key(0), (8, 4096), jnp.bfloat16)
weight = jax.random.normal(jax.random.key(1), (4096,), jnp.bfloat16)
ours, theirs = jax.jit(adze.jax.rms_norm)(x, weight), jax.jit(plain)(x, weight)

print(f"rms_norm of {x.dtype.name}[{', '.join(map(str, x.shape))}] on {x.device}")
print(f"equal to jax.numpy: {(ours == theirs).mean():.2%} of all values")
print(f"largest difference: {jnp.abs(ours.astype(jnp.float32) - theirs.astype(jnp.float32)).max():.3g}")
