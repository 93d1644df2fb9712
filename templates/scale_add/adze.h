/* scale_add: out = a * x + y */
typedef struct adze_scale_add_args {
    adze_call call;
    adze_tensor out; /* like x; may be x or y */
    adze_tensor x;   /* [..., dim]: f32, f16, bf16 */
    adze_tensor y;   /* like x */
    float a;
    int32_t reserved; /* zero */
} adze_scale_add_args;
ADZE_API adze_status adze_scale_add(adze_stream stream, const adze_scale_add_args *args);
