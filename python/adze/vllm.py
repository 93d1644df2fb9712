"""adze.vllm is hosts/vllm.py, under the name that users import."""

import sys

from .hosts import vllm

sys.modules[__name__] = vllm
