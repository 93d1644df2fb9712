/* l2_norm: norm = sqrt(sum(x^2) + eps) over the last dimension, out = x / norm */
typedef struct adze_l2_norm_args {
    adze_call call;
    adze_tensor out;  /* like x; may be x */
    adze_tensor norm; /* [..., 1]: f32; optional */
    adze_tensor x;    /* [..., dim]: f32, f16, bf16 */
    float eps;
    int32_t reserved; /* zero */
} adze_l2_norm_args;
ADZE_API adze_status adze_l2_norm(adze_stream stream, const adze_l2_norm_args *args);
