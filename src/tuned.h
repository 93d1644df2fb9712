/* tuned.h - the calls that `adze tune OP --table src/tuned.h` timed with every variant. It writes this file, a
   row per call, which may be more than 600 lines. A row changes the choice of a kernel where its two names
   differ.

   CARD(card, SMs, op, date, driver, commit)
   TUNED(op, form, rows from, to, the other sizes of the problem, fastest variant, the kernel's choice, us of
   each) */
/* clang-format off */
CARD("NVIDIA H200", 132, rms_norm, "2026-11-17", "580.159.04", "d75fb74")
TUNED(rms_norm, 12307, 260, 519, 4096, 0, 0, "384x2-full-b3", "384x2-full-b3", 2.906, 2.906) /* rms_norm x=bf16[1,512,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 260, 519, 4096, 0, 0, "512x2-full-b2", "512x2-full-b2", 4.644, 4.644) /* rms_norm x=bf16[1,512,4096] residual=bf16[1,512,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 260, 519, 2048, 0, 0, "384x2-full-b3", "384x2-full-b3", 2.018, 2.018) /* rms_norm x=bf16[1,512,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 260, 519, 2048, 0, 0, "512x2-full-b2", "512x2-full-b2", 2.808, 2.808) /* rms_norm x=bf16[1,512,2048] residual=bf16[1,512,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 260, 519, 5120, 0, 0, "512x2-full-b3", "384x2-full-b3", 3.264, 4.137) /* rms_norm x=bf16[1,512,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 260, 519, 5120, 0, 0, "512x2-full-b2", "512x2-full-b2", 6.250, 6.250) /* rms_norm x=bf16[1,512,5120] residual=bf16[1,512,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 260, 519, 8192, 0, 0, "512x4-full-b2", "512x2-full-b1", 4.584, 8.248) /* rms_norm x=bf16[1,512,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 260, 519, 8192, 0, 0, "512x8", "512x2-full-b2", 8.834, 9.110) /* rms_norm x=bf16[1,512,8192] residual=bf16[1,512,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 8320, 32768, 128, 0, 0, "8x3", "8x2-full-b1", 2.844, 3.269) /* rms_norm x=bf16[16384,128] weight=bf16[128] eps=1e-6 rounding=1 */
TUNED(rms_norm, 7082019, 1192, 3369, 2048, 0, 0, "256x2-full-b5", "256x2-full-b5", 6.826, 6.826) /* rms_norm x=bf16[1,2688,2048] scale=bf16[1,1,2048] scale_table=bf16[2048] shift=bf16[1,1,2048] shift_table=bf16[2048] eps=1e-6 rounding=2 */
TUNED(rms_norm, 7278627, 52, 5376, 2048, 0, 0, "512x2-full-late-b3", "512x2-full-late-b3", 11.951, 11.951) /* rms_norm x=bf16[1,2688,2048] residual=bf16[1,2688,2048] scale=bf16[1,1,2048] scale_table=bf16[2048] shift=bf16[1,1,2048] shift_table=bf16[2048] eps=1e-6 rounding=2 */
TUNED(rms_norm, 12307, 1, 8, 4096, 0, 0, "512x2-b2", "384x2-full-b3", 0.986, 1.023) /* rms_norm x=bf16[1,1,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 9, 93, 4096, 0, 0, "512x2-full-b1", "512x2-full-b1", 1.330, 1.330) /* rms_norm x=bf16[1,66,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 94, 259, 4096, 0, 0, "512x2-full-b1", "512x2-full-b1", 1.468, 1.468) /* rms_norm x=bf16[1,132,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 520, 1493, 4096, 0, 0, "384x2-full-b3", "384x2-full-b3", 2.900, 2.900) /* rms_norm x=bf16[1,528,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 1494, 8448, 4096, 0, 0, "256x5-b3", "256x5-b3", 17.195, 17.195) /* rms_norm x=bf16[1,4224,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 1, 8, 4096, 0, 0, "512x2-full-b2", "512x2-full-b2", 1.140, 1.140) /* rms_norm x=bf16[1,1,4096] residual=bf16[1,1,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 9, 93, 4096, 0, 0, "512x2-full-b2", "512x2-full-b2", 1.581, 1.581) /* rms_norm x=bf16[1,66,4096] residual=bf16[1,66,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 94, 259, 4096, 0, 0, "512x2-full-b2", "512x2-full-b2", 1.891, 1.891) /* rms_norm x=bf16[1,132,4096] residual=bf16[1,132,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 520, 1493, 4096, 0, 0, "512x2-full-b2", "512x2-full-b2", 4.778, 4.778) /* rms_norm x=bf16[1,528,4096] residual=bf16[1,528,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 1494, 8448, 4096, 0, 0, "512x2-full-b2", "512x2-full-b2", 33.454, 33.454) /* rms_norm x=bf16[1,4224,4096] residual=bf16[1,4224,4096] weight=bf16[4096] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 1, 8, 2048, 0, 0, "384x2-full-b3", "384x2-full-b3", 0.948, 0.948) /* rms_norm x=bf16[1,1,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 9, 93, 2048, 0, 0, "512x2-full-b1", "512x2-full-b1", 1.050, 1.050) /* rms_norm x=bf16[1,66,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 94, 259, 2048, 0, 0, "512x2-full-b1", "512x2-full-b1", 1.131, 1.131) /* rms_norm x=bf16[1,132,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 520, 1493, 2048, 0, 0, "512x2-b2", "384x2-full-b3", 1.997, 2.180) /* rms_norm x=bf16[1,528,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 1494, 8448, 2048, 0, 0, "512x4-full-b2", "512x4-full-b2", 9.042, 9.042) /* rms_norm x=bf16[1,4224,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 1, 8, 2048, 0, 0, "512x2-full-b2", "512x2-full-b2", 0.946, 0.946) /* rms_norm x=bf16[1,1,2048] residual=bf16[1,1,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 9, 93, 2048, 0, 0, "512x2-full-b2", "512x2-full-b2", 1.231, 1.231) /* rms_norm x=bf16[1,66,2048] residual=bf16[1,66,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 94, 259, 2048, 0, 0, "512x2-full-b2", "512x2-full-b2", 1.451, 1.451) /* rms_norm x=bf16[1,132,2048] residual=bf16[1,132,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 520, 1493, 2048, 0, 0, "512x2-full-b2", "512x2-full-b2", 2.863, 2.863) /* rms_norm x=bf16[1,528,2048] residual=bf16[1,528,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 1494, 8448, 2048, 0, 0, "512x2-full-b2", "512x4-full-b2", 17.211, 17.578) /* rms_norm x=bf16[1,4224,2048] residual=bf16[1,4224,2048] weight=bf16[2048] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 1, 8, 5120, 0, 0, "384x2-full-b3", "384x2-full-b3", 1.148, 1.148) /* rms_norm x=bf16[1,1,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 9, 93, 5120, 0, 0, "512x2-full-b1", "512x2-full-b1", 1.397, 1.397) /* rms_norm x=bf16[1,66,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 94, 259, 5120, 0, 0, "512x2-full-b1", "512x2-full-b1", 1.866, 1.866) /* rms_norm x=bf16[1,132,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 520, 1493, 5120, 0, 0, "512x2-full-b3", "384x2-full-b3", 3.340, 4.214) /* rms_norm x=bf16[1,528,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 1494, 8448, 5120, 0, 0, "512x4-full-b2", "512x4-full-b2", 21.049, 21.049) /* rms_norm x=bf16[1,4224,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 1, 8, 5120, 0, 0, "512x2-full-b2", "512x2-full-b2", 1.286, 1.286) /* rms_norm x=bf16[1,1,5120] residual=bf16[1,1,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 9, 93, 5120, 0, 0, "512x2-full-b2", "512x2-full-b2", 1.622, 1.622) /* rms_norm x=bf16[1,66,5120] residual=bf16[1,66,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 94, 259, 5120, 0, 0, "512x2-full-b2", "512x2-full-b2", 2.441, 2.441) /* rms_norm x=bf16[1,132,5120] residual=bf16[1,132,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 520, 1493, 5120, 0, 0, "512x2-full-b2", "512x2-full-b2", 6.412, 6.412) /* rms_norm x=bf16[1,528,5120] residual=bf16[1,528,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 1494, 8448, 5120, 0, 0, "512x2-full-b2", "512x2-full-b2", 42.064, 42.064) /* rms_norm x=bf16[1,4224,5120] residual=bf16[1,4224,5120] weight=bf16[5120] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 1, 8, 8192, 0, 0, "512x2-full-b1", "512x2-full-b1", 1.339, 1.339) /* rms_norm x=bf16[1,1,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 9, 93, 8192, 0, 0, "512x2-full-b1", "512x2-full-b1", 1.641, 1.641) /* rms_norm x=bf16[1,66,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 94, 259, 8192, 0, 0, "512x2-b2", "512x2-full-b1", 2.251, 2.323) /* rms_norm x=bf16[1,132,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 520, 1493, 8192, 0, 0, "512x4-full-b2", "512x2-full-b1", 4.706, 8.411) /* rms_norm x=bf16[1,528,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 1494, 8448, 8192, 0, 0, "512x4-full-b2", "512x4-full-b2", 33.378, 33.378) /* rms_norm x=bf16[1,4224,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 1, 8, 8192, 0, 0, "512x2-full-b2", "512x2-full-b2", 1.559, 1.559) /* rms_norm x=bf16[1,1,8192] residual=bf16[1,1,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 9, 93, 8192, 0, 0, "512x2-full-b2", "512x2-full-b2", 2.809, 2.809) /* rms_norm x=bf16[1,66,8192] residual=bf16[1,66,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 94, 259, 8192, 0, 0, "512x2-full-b2", "512x2-full-b2", 3.133, 3.133) /* rms_norm x=bf16[1,132,8192] residual=bf16[1,132,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 520, 1493, 8192, 0, 0, "512x8", "512x2-full-b2", 9.127, 9.332) /* rms_norm x=bf16[1,528,8192] residual=bf16[1,528,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 208915, 1494, 8448, 8192, 0, 0, "512x2-full-b2", "512x2-full-b2", 66.162, 66.162) /* rms_norm x=bf16[1,4224,8192] residual=bf16[1,4224,8192] weight=bf16[8192] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 1, 8, 128, 0, 0, "8x2-full-b1", "8x2-full-b1", 0.964, 0.964) /* rms_norm x=bf16[1,128] weight=bf16[128] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 9, 93, 128, 0, 0, "8x2-full-b1", "8x2-full-b1", 0.969, 0.969) /* rms_norm x=bf16[66,128] weight=bf16[128] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 94, 264, 128, 0, 0, "8x2-full-b1", "8x2-full-b1", 0.988, 0.988) /* rms_norm x=bf16[132,128] weight=bf16[128] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 265, 1493, 128, 0, 0, "8x2-full-b1", "8x2-full-b1", 1.043, 1.043) /* rms_norm x=bf16[528,128] weight=bf16[128] eps=1e-6 rounding=1 */
TUNED(rms_norm, 12307, 1494, 8319, 128, 0, 0, "8x2-full-b1", "8x2-full-b1", 1.381, 1.381) /* rms_norm x=bf16[4224,128] weight=bf16[128] eps=1e-6 rounding=1 */
TUNED(rms_norm, 7082019, 1, 8, 2048, 0, 0, "256x2-full-b5", "256x2-full-b5", 1.504, 1.504) /* rms_norm x=bf16[1,1,2048] scale=bf16[1,1,2048] scale_table=bf16[2048] shift=bf16[1,1,2048] shift_table=bf16[2048] eps=1e-6 rounding=2 */
TUNED(rms_norm, 7082019, 9, 93, 2048, 0, 0, "256x2-full-b5", "256x2-full-b5", 1.599, 1.599) /* rms_norm x=bf16[1,66,2048] scale=bf16[1,1,2048] scale_table=bf16[2048] shift=bf16[1,1,2048] shift_table=bf16[2048] eps=1e-6 rounding=2 */
TUNED(rms_norm, 7082019, 94, 264, 2048, 0, 0, "256x2-full-b5", "256x2-full-b5", 1.711, 1.711) /* rms_norm x=bf16[1,132,2048] scale=bf16[1,1,2048] scale_table=bf16[2048] shift=bf16[1,1,2048] shift_table=bf16[2048] eps=1e-6 rounding=2 */
TUNED(rms_norm, 7082019, 265, 1191, 2048, 0, 0, "256x2-full-b5", "256x2-full-b5", 2.368, 2.368) /* rms_norm x=bf16[1,528,2048] scale=bf16[1,1,2048] scale_table=bf16[2048] shift=bf16[1,1,2048] shift_table=bf16[2048] eps=1e-6 rounding=2 */
TUNED(rms_norm, 7082019, 3370, 8448, 2048, 0, 0, "256x2-full-b5", "256x2-full-b5", 9.825, 9.825) /* rms_norm x=bf16[1,4224,2048] scale=bf16[1,1,2048] scale_table=bf16[2048] shift=bf16[1,1,2048] shift_table=bf16[2048] eps=1e-6 rounding=2 */
TUNED(rms_norm, 7278627, 1, 51, 2048, 0, 0, "512x2-full-late-b3", "512x2-full-late-b3", 2.637, 2.637) /* rms_norm x=bf16[1,1,2048] residual=bf16[1,1,2048] scale=bf16[1,1,2048] scale_table=bf16[2048] shift=bf16[1,1,2048] shift_table=bf16[2048] eps=1e-6 rounding=2 */
CARD("NVIDIA H200", 132, layer_norm, "2026-11-17", "580.159.04", "d75fb74")
TUNED(layer_norm, 790563, 4412, 9216, 3072, 0, 0, "256x3-full-b4", "256x3-full-b4", 14.288, 14.288) /* layer_norm x=bf16[1,4608,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 2035747, 1471, 4159, 3072, 0, 0, "384x2-full-b3", "384x2-full-b3", 25.581, 25.581) /* layer_norm x=bf16[1,4096,3072] residual=bf16[1,4096,3072] gate=bf16[1,1,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 2035747, 260, 519, 3072, 0, 0, "384x2-full-b3", "384x2-full-b3", 4.965, 4.965) /* layer_norm x=bf16[1,512,3072] residual=bf16[1,512,3072] gate=bf16[1,1,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 790563, 1, 8, 3072, 0, 0, "256x3-full-b4", "256x3-full-b3", 1.175, 1.248) /* layer_norm x=bf16[1,1,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 790563, 9, 93, 3072, 0, 0, "256x3-full-b3", "256x3-full-b3", 1.446, 1.446) /* layer_norm x=bf16[1,66,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 790563, 94, 264, 3072, 0, 0, "256x3-full-b3", "256x3-full-b3", 1.598, 1.598) /* layer_norm x=bf16[1,132,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 790563, 265, 1493, 3072, 0, 0, "256x3-full-b4", "256x3-full-b3", 2.637, 2.960) /* layer_norm x=bf16[1,528,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 790563, 1494, 4411, 3072, 0, 0, "256x3-full-b4", "256x3-full-b4", 13.245, 13.245) /* layer_norm x=bf16[1,4224,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 2035747, 1, 8, 3072, 0, 0, "384x2-full-b3", "384x2-full-b3", 1.941, 1.941) /* layer_norm x=bf16[1,1,3072] residual=bf16[1,1,3072] gate=bf16[1,1,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 2035747, 9, 93, 3072, 0, 0, "384x2-full-b3", "384x2-full-b3", 2.264, 2.264) /* layer_norm x=bf16[1,66,3072] residual=bf16[1,66,3072] gate=bf16[1,1,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 2035747, 94, 259, 3072, 0, 0, "384x2-full-b3", "384x2-full-b3", 2.609, 2.609) /* layer_norm x=bf16[1,132,3072] residual=bf16[1,132,3072] gate=bf16[1,1,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 2035747, 520, 1470, 3072, 0, 0, "384x2-full-b3", "384x2-full-b3", 4.990, 4.990) /* layer_norm x=bf16[1,528,3072] residual=bf16[1,528,3072] gate=bf16[1,1,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
TUNED(layer_norm, 2035747, 4160, 8448, 3072, 0, 0, "384x2-full-b3", "384x2-full-b3", 26.502, 26.502) /* layer_norm x=bf16[1,4224,3072] residual=bf16[1,4224,3072] gate=bf16[1,1,3072] scale=bf16[1,1,3072] shift=bf16[1,1,3072] eps=1e-6 rounding=2 */
