/* rms_norm_i8: y = x / sqrt(mean(x^2) + eps) * weight, scale = max(|y|) / 127 of each row, out = y / scale, rounded
 */
typedef struct adze_rms_norm_i8_args {
    adze_call call;
    adze_tensor out;    /* like x: i8 */
    adze_tensor scale;  /* [..., 1]: f32 */
    adze_tensor x;      /* [..., dim]: f32, f16, bf16 */
    adze_tensor weight; /* [dim], of x's dtype or f32; absent: ones */
    float eps;
    int32_t reserved; /* zero */
} adze_rms_norm_i8_args;
ADZE_API adze_status adze_rms_norm_i8(adze_stream stream, const adze_rms_norm_i8_args *args);
