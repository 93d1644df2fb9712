"""The ops in other frameworks: JAX, TVM FFI (NumPy and DLPack) and vLLM."""
