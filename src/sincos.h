/* sincos.h - the numbers of rope_table's sine and cosine, for the CPU and for CUDA. */
#ifndef ADZE_SINCOS_H
#define ADZE_SINCOS_H

#define SINCOS_LIMIT    0x1p31f              /* an angle that is larger as a float gives NaN */
#define SINCOS_QUARTERS 0x1.45f306dc9c883p-1 /* 2 / pi */
/* pi / 2 in parts of at most 22 bits, so that a product with a whole number below 2^31 is exact, and the rest. */
#define SINCOS_PI_2A 0x1.921fbp0
#define SINCOS_PI_2B 0x1.5110bp-22
#define SINCOS_PI_2C 0x1.184698p-44
#define SINCOS_PI_2D 0x1.3198a2e037073p-69
/* Minimax on [-pi/4, pi/4]: sin r = r + r^3 S(r^2), cos r = 1 - r^2 / 2 + r^4 C(r^2). */
#define SINCOS_S0 (-0x1.555546p-3f)
#define SINCOS_S1 0x1.11076p-7f
#define SINCOS_S2 (-0x1.994e5cp-13f)
#define SINCOS_C0 0x1.55554ap-5f
#define SINCOS_C1 (-0x1.6c0c8ap-10f)
#define SINCOS_C2 0x1.9a020ap-16f

#endif
