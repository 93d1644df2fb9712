@returns(
    shape=lambda x, output, **_: (*x.shape[:-1], 1) if output == "norm" else x.shape,
    dtype=lambda output, **_: DTYPES["float32"] if output == "norm" else None,
)
def l2_norm(x, *, eps=1e-6, need_norm=False, out=None, norm_out=None):
    """x / sqrt(sum(x^2) + eps) over the last dimension. With need_norm the result is (out, norm)."""
    return ops.l2_norm((x, eps), out, norm_out, need_norm)
