"""adze.tvm_ffi is hosts/tvm_ffi.py, under the name that users import."""

import sys

from .hosts import tvm_ffi

sys.modules[__name__] = tvm_ffi
