@returns(
    shape=lambda x, output, **_: (*x.shape[:-1], 1) if output == "scale" else x.shape,
    dtype=lambda output, **_: DTYPES["float32" if output == "scale" else "int8"],
)
def rms_norm_i8(x, weight=None, *, eps=1e-6, out=None, scale_out=None):
    """rms_norm(x) * weight as int8, and the scale of each row: out * scale is the norm."""
    return ops.rms_norm_i8((x, weight, eps), out, scale_out)
