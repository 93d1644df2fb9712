"""adze.jax is hosts/jax.py, under the name that users import."""

import sys

from .hosts import jax

sys.modules[__name__] = jax
