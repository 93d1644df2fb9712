def scale_add(x, y, *, a=1.0, out=None):
    """a * x + y; out may be x or y."""
    return ops.scale_add((x, y, a), out)
