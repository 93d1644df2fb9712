"""adze.diffusers is patching/diffusers/backend.py, under the name that users import: register() adds the backend."""

import sys

from .patching.diffusers import backend

sys.modules[__name__] = backend
