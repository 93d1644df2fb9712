/* gemm: what is checked and what is timed. It has more than 600 lines, as most of them are cases, one each. */
#include "suite.h"

#include <math.h>

/* A number of rows, against sizes of w that are multiples of nothing and of much. */
#define ROWS(m)                                                                                                      \
    "x=$[" m ",72] w=$[40,72]", "x=$[" m ",33] w=$[17,33] bias=$[17]",                                               \
        "x=$[" m ",128] w=$[96,128] residual=$[" m ",96]"

/* Every format, each with groups that the rows are no multiple of. */
#define QUANTISED(m)                                                                                                 \
    "x=$[" m ",100] w=i8[37,100] w_scale=$[37]", "x=$[" m ",128] w=i8[40,128] w_scale=f32[1]",                       \
        "x=$[" m ",200] w=i8[37,200] w_scale=f16[37,7] group=32",                                                    \
        "x=$[" m ",101] w=u8[37,51] w_scale=$[37] format=u4",                                                        \
        "x=$[" m ",200] w=u8[37,100] w_scale=bf16[37,2] group=128 format=u4",                                        \
        "x=$[" m ",135] w=u8[37,68] w_scale=f32[37,3] w_zero=u8[37,3] group=64 format=u4",                           \
        "x=$[" m ",128] w=u8[37,64] w_scale=f32[37] w_zero=u8[37] format=u4 rounding=2",                             \
        "x=$[" m ",100] w=f8e4m3[37,100] w_scale=f32[1]", "x=$[" m ",135] w=f8e4m3[37,135] w_scale=$[37]",           \
        "x=$[" m ",300] w=f8e4m3[200,300] w_scale=f32[2,3] group=128 group_rows=128"

/* Quantised weights of aligned rows and so many tokens that a GPU has tiles for them, with what follows. */
#define QUANTISED_TILES(m)                                                                                           \
    "x=$[" m ",336] w=i8[70,336] w_scale=f32[70] bias=$[70]",                                                        \
        "x=$[" m                                                                                                     \
        ",544] w=u8[40,272] w2=u8[23,272] w3=u8[7,272] w_scale=$[40,5] w2_scale=f16[23,5] w3_scale=f32[7,5] "        \
        "w_zero=u8[40,5] w3_zero=u8[7,5] group=128 format=u4",                                                       \
        "x=$[" m ",400] w=f8e4m3[133,400] w_scale=f32[2,4] group=128 group_rows=128 act=relu rounding=2"
#define QUANTISED_TILES_THEN(m)                                                                                      \
    "x=$[" m ",336] w=i8[61,336] w2=i8[61,336] w_scale=f16[61,6] w2_scale=f16[61,6] group=64 glu=1",                 \
        "x=$[" m ",288] w=u8[33,144] w2=u8[33,144] w_scale=$[33,5] w2_scale=$[33,5] w2_zero=u8[33,5] group=64 "      \
        "format=u4 glu=1 rounding=2 flags=const_weights",                                                            \
        "x=$[" m ",400] w=f8e4m3[99,400] w_scale=$[99] residual=$[" m ",99] gate=$[99]",                             \
        "x=$[" m ",544] w=u8[40,272] w_scale=f32[40] format=u4"

/* Quantised x, with sizes of w that are multiples of nothing and of much; out is f32, f16 (2) or bf16 (3). */
#define BYTES_OF(t, m)                                                                                               \
    "x=" t "[" m ",72] x_scale=f32[" m "] w=" t "[40,72] w_scale=f32[40] out_dtype=3",                               \
        "x=" t "[" m ",33] x_scale=f32[" m "] w=" t "[17,33] w_scale=f32[1] bias=f16[17] out_dtype=2",               \
        "x=" t "[" m ",128] x_scale=f32[" m "] w=" t "[96,128] w_scale=f16[96] residual=f32[" m ",96]",              \
        "x=" t "[" m ",640] x_scale=f32[1] w=" t "[70,640] w_scale=bf16[70,1] out_dtype=3 flags=const_weights",      \
        "x=" t "[" m ",656] x_scale=f32[" m "] w=" t "[70,656] w2=" t "[70,656] w_scale=f32[70] w2_scale=f32[70] "   \
        "glu=1 out_dtype=2"
#define BYTES(m) BYTES_OF("i8", m), BYTES_OF("f8e4m3", m)
/* All that follows, and views. */
#define BYTES_THEN(t)                                                                                                \
    "x=" t "[3,0] x_scale=f32[3] w=" t "[5,0] w_scale=f32[5] bias=bf16[5] out_dtype=3",                              \
        "x=" t "[2,64] x_scale=f32[2] w=" t "[0,64] w_scale=f32[0]",                                                 \
        "x=" t "[64] x_scale=f32[1] w=" t "[9,64] w_scale=f32[9] bias=f32[9] out_dtype=2",                           \
        "x=" t "[1,1] x_scale=f32[1] w=" t "[1,1] w_scale=f32[1]",                                                   \
        "x=" t "[3,20011] x_scale=f32[3] w=" t "[9,20011] w_scale=f32[9]",                                           \
        "x=" t "[5,8192] x_scale=f32[5] w=" t "[70,8192] w_scale=f32[70] out_dtype=3",                               \
        "x=" t "[130,2048] x_scale=f32[130] w=" t "[200,2048] w_scale=f32[200] bias=bf16[200] act=gelu out_dtype=3", \
        "x=" t "[5,100] x_scale=f32[5] w=" t                                                                         \
        "[37,100] w_scale=f32[37] bias=f16[37] act=silu rounding=2 out_dtype=2",                                     \
        "x=" t "[70,256] x_scale=f32[70] w=" t "[40,256] w2=" t "[40,256] w_scale=f32[40] w2_scale=f32[40] "         \
        "bias2=bf16[40] glu=1 act=gelu residual=bf16[70,40] gate=f32[40] rounding=2 out_dtype=3",                    \
        "x=" t "[9,256] x_scale=f32[9] w=" t "[40,256] w2=" t "[23,256] w3=" t "[7,256] w_scale=f32[40] "            \
        "w2_scale=f32[1] w3_scale=f32[7] bias3=f16[7] separate=1 out_dtype=2",                                       \
        "x=" t "[80,256] x_scale=f32[80] w=" t "[40,256] w2=" t "[23,256] w3=" t "[70,256] w_scale=f32[40] "         \
        "w2_scale=f32[23] w3_scale=f32[70] out_dtype=3",                                                             \
        "x=" t "[2,3,64] x_scale=f32[2,3] w=" t "[41,64] w_scale=f32[41] residual=bf16[2,3,41] gate=bf16[2,1,41] "   \
        "out_dtype=3",                                                                                               \
        "x=" t "[2:768,3:64,4:192,64:1] x_scale=f32[2:20,3:5,4:1]@+1 w=" t "[33,64] w_scale=f32[33]",                \
        "x=" t "[7:700,656:1]@+3 x_scale=f32[7]@+1 w=" t "[70:673,656:1]@+1 w_scale=f32[70]@+1 out=f16[7:80,70:1] "  \
        "out_dtype=2",                                                                                               \
        "x=" t "[7:704,656:1] x_scale=f32[7] w=" t "[70:672,656:1]@+16 w_scale=f32[70] out=f32[7:80,70:1]@+1",       \
        "out=bf16[65:100,40:1] x=" t "[65,128] x_scale=f32[65] w=" t "[40,128] w_scale=f32[40] "                     \
        "residual=bf16[65:100,40:1]@out out_dtype=3",                                                                \
        "x=" t "[40,256] x_scale=f32[40] w=" t "[130,256] w_scale=f32[130] out_dtype=3 flags=batch_invariant"

/* What follows the sums, in one rounding and in steps. */
#define EACH(rest) rest, rest " rounding=2"

/* So many tokens that a GPU has other kernels for them, with all that follows, and views. */
#define MANY(m)                                                                                                      \
    "x=$[" m ",264] w=$[72,264]", "x=$[" m ",264] w=$[72,264] bias=f32[72]",                                         \
        EACH("x=$[" m ",264] w=$[72,264] bias=$[72] residual=$[" m ",72]"),                                          \
        EACH("x=$[" m ",263] w=$[71,263] bias=$[71] act=gelu_tanh"),                                                 \
        EACH("x=$[" m ",264] w=$[72,264] bias=$[72] act=relu residual=$[" m ",72] gate=$[72]"),                      \
        EACH("x=$[" m ",264] w=$[72,264] w2=$[72,264] bias=$[72] bias2=$[72] glu=1"),                                \
        EACH("x=$[" m ",265] w=$[71,265] w2=$[71,265] bias=f32[71] glu=1 residual=$[" m ",71]"),                     \
        EACH("x=$[" m ",264] w=$[72,264] bias=$[72] out_dtype=1"),                                                   \
        "x=$[" m ",264] w=$[72,264] w2=$[40,264] w3=$[8,264] bias2=$[40] separate=1",                                \
        "x=$[" m ",264] w=$[72,264] w2=$[23,264] w3=$[7,264] bias3=$[7] residual=$[" m ",102]",                      \
        EACH("x=$[" m ",264] w=$[72,264] norm=rms eps=1e-6 norm_weight=$[264] bias=$[72]"),                          \
        "x=$[" m ",264] w=$[72,264] w2=$[72,264] norm=layer eps=1e-6 norm_weight=f32[264] glu=1 rounding=3",         \
        EACH("x=$[" m ",264] w=$[72,264] bias=$[72] values:special"),                                                \
        "x=$[" m ",264] w=$[72,264] act=relu values:special",                                                        \
        "residual=$[" m ",72] x=$[" m ",264] w=$[72,264] values:special",                                            \
        "x=$[" m ":270,264:1]@+1 w=$[72:265,264:1]@+3 bias=$[72]@+1 out=$[" m ":75,72:1]@+1",                        \
        "x=$[" m ":272,264:1] w=$[72:280,264:1] out=$[" m ":80,72:1] residual=$[" m ":96,72:1]",                     \
        "out=$[" m ":100,72:1] x=$[" m ",264] w=$[72,264] residual=$[" m ":100,72:1]@out",                           \
        "x=$[" m ":0,264:1] w=$[72,264]", "x=$[" m ",264] w=$[72:-264,264:1]",                                       \
        "x=$[2," m ",64] w=$[2,40,64] bias=$[40] residual=$[2," m ",40]",                                            \
        "x=$[2," m ",64] w=$[2,40,64] act=silu gate=$[2,1,40] residual=$[2," m ",40]",                               \
        "x=$[" m ",264] w=$[72,264] flags=batch_invariant"

/* An activation alone, and as a gate. */
#define ACT(act)                                                                                                     \
    EACH("x=$[5,100] w=$[37,100] bias=$[37] act=" act), EACH("x=$[5,64] w=$[40,64] w2=$[40,64] glu=1 act=" act)

static const char *const good[] = {
    "x=$[5,64] w=$[40,64] bias=$[40] residual=$[5,40] gate=$[40]",
    ROWS("0"),
    ROWS("1"),
    ROWS("2"),
    ROWS("3"),
    ROWS("4"),
    ROWS("5"),
    ROWS("6"),
    ROWS("7"),
    ROWS("8"),
    ROWS("9"),
    ROWS("15"),
    ROWS("16"),
    ROWS("17"),
    ROWS("33"),
    ROWS("64"),
    ROWS("65"),
    ROWS("200"),
    MANY("65"),
    /* sizes */
    "x=$[3,0] w=$[5,0]",
    "x=$[3,0] w=$[5,0] bias=$[5] act=silu",
    "x=$[3,0] w=$[5,0] bias=f32[5] norm=rms eps=1e-6",
    "x=$[3,8] w=$[0,8]",
    "x=$[3,8] w=$[0,8] w2=$[4,8] w3=$[0,8] bias2=$[4]",
    "x=$[3,8] w=$[4,8] w2=$[0,8] w3=$[3,8] separate=1",
    "x=$[0,8] w=$[4,8] norm=layer eps=1e-6",
    "x=$[1,1] w=$[1,1]",
    "x=$[1] w=$[1,1] bias=$[1]",
    "x=$[7] w=$[9,7] bias=$[9]",
    "x=$[9,1] w=$[300,1]",
    "x=$[9,300] w=$[1,300]",
    "x=$[1,2] w=$[70,2]",
    "x=$[2,7] w=$[70,7]",
    "x=$[4,31] w=$[33,31]",
    "x=$[1,1001] w=$[13,1001]",
    "x=$[17,1001] w=$[13,1001]",
    "x=$[1,4096] w=$[64,4096]",
    "x=$[1,4104] w=$[63,4104] bias=$[63]",
    "x=$[8,5000] w=$[50,5000]",
    "x=$[16,2056] w=$[65,2056]",
    "x=$[1,11008] w=$[32,11008]",
    "x=$[3,20011] w=$[9,20011]",
    "x=$[40,513] w=$[257,513]",
    "x=$[70,264] w=$[130,264] bias=f32[130]",
    "x=$[129,96] w=$[200,96] act=gelu",
    "x=$[1,64] w=$[3001,64]",
    /* activations and glu */
    ACT("silu"),
    ACT("gelu"),
    ACT("gelu_tanh"),
    ACT("gelu_quick"),
    ACT("relu"),
    ACT("relu2"),
    ACT("sigmoid"),
    EACH("x=$[1,72] w=$[55,72] w2=$[55,72] glu=1"),
    EACH("x=$[18,72] w=$[55,72] w2=$[55,72] bias=$[55] bias2=$[55] glu=1"),
    EACH("x=$[70,72] w=$[56,72] w2=$[56,72] bias2=f32[56] glu=1 residual=$[70,56] gate=f32[70,56]"),
    "x=$[5,72] w=$[55,72] w2=$[55,72] glu=1 out_dtype=1",
    /* residual and gate */
    EACH("x=$[5,64] w=$[40,64] residual=$[5,40]"),
    EACH("x=$[5,64] w=$[40,64] residual=$[5,40] gate=$[5,40]"),
    EACH("x=$[2,3,64] w=$[41,64] residual=$[2,3,41] gate=$[2,1,41]"),
    EACH("x=$[2,3,64] w=$[41,64] bias=$[41] act=silu residual=$[2,3,41] gate=f32[3,41]"),
    EACH("x=$[2,40,64] w=$[41,64] bias=f32[41] residual=$[2,40,41] gate=$[2,1,41]"),
    "x=$[5,64] w=$[40,64] residual=f32[5,40] out_dtype=1",
    "x=$[5,64] w=$[40,64] bias=$[40] residual=f32[5,40] gate=$[40] out_dtype=1 rounding=2",
    "x=$[5,64] w=$[40,64] out_dtype=1",
    "x=$[33,264] w=$[40,264] out_dtype=1 act=gelu",
    "x=$[1,4096] w=$[64,4096] out_dtype=1",
    /* several weights */
    "x=$[1,64] w=$[40,64] w2=$[24,64] w3=$[24,64]",
    "x=$[5,64] w=$[40,64] w2=$[23,64] w3=$[7,64] bias=$[40] bias3=$[7] act=relu",
    "x=$[5,64] w=$[40,64] w2=$[23,64] bias2=f32[23] residual=$[5,63] gate=$[63] rounding=2",
    "x=$[1,64] w=$[40,64] w2=$[24,64] w3=$[24,64] separate=1",
    "x=$[9,64] w=$[40,64] w2=$[23,64] w3=$[7,64] bias=$[40] bias2=$[23] bias3=$[7] separate=1 act=silu rounding=2",
    "x=$[5,64] w=$[40,64] w2=$[24,64] separate=1 out_dtype=1",
    "x=$[67,64] w=$[40,64] w2=$[24,64] w3=$[24,64] separate=1",
    "x=$[5,64] w=$[40,64] w2=$[40:64,64:1]@w+1600 w3=$[24,64]",
    /* the norm */
    EACH("x=$[1,96] w=$[40,96] norm=rms eps=1e-6 norm_weight=$[96]"),
    EACH("x=$[8,96] w=$[40,96] norm=rms eps=1e-6 norm_weight=$[96] weight_offset=1"),
    EACH("x=$[17,97] w=$[40,97] norm=layer eps=1e-5 norm_weight=$[97] norm_bias=$[97] bias=$[40]"),
    EACH("x=$[5,96] w=$[40,96] norm=layer eps=1e-5"),
    "x=$[5,96] w=$[40,96] norm=rms eps=1e-6 norm_weight=f32[96] norm_bias=f32[96] rounding=1",
    "x=$[5,96] w=$[40,96] norm=rms eps=1e-6 norm_weight=$[96] rounding=3",
    "x=$[1,4096] w=$[40,4096] norm=rms eps=1e-6 norm_weight=$[4096] rounding=1",
    "x=$[2,3,96] w=$[40,96] w2=$[8,96] w3=$[8,96] norm=rms eps=1e-6 norm_weight=$[96] separate=1",
    EACH("x=$[4,96] w=$[40,96] w2=$[40,96] norm=rms eps=1e-6 norm_weight=$[96] glu=1"),
    EACH("x=$[70,96] w=$[40,96] w2=$[40,96] norm=rms eps=1e-6 norm_weight=$[96] glu=1 residual=$[70,40]"),
    "x=$[5,264] w=$[40,264] norm=layer eps=1e-6 values:mean",
    "x=$[5,264] w=$[40,264] norm=rms eps=1e-6 values:tiny",
    "x=$[5,264] w=$[40,264] norm=rms eps=1e-6 values:outlier",
    /* other distributions */
    EACH("x=$[5,264] w=$[40,264] values:special"),
    EACH("x=$[40,264] w=$[40,264] bias=$[40] act=silu values:special"),
    EACH("x=$[3,264] w=$[40,264] w2=$[40,264] glu=1 act=relu values:special"),
    "x=$[3,264] w=$[40,264] norm=rms eps=1e-6 values:special",
    "w=$[40,264] x=$[3,264] residual=$[3,40] gate=$[40] values:special",
    "x=$[5,1000] w=$[40,1000] values:mean",
    "x=$[5,1000] w=$[40,1000] values:outlier",
    "x=$[5,1000] w=$[40,1000] values:zero bias=$[40]",
    "x=$[5,200] w=$[40,200] values:tiny",
    "x=$[5,200] w=$[40,200] values:wide act=gelu",
    "x=$[5,200] w=$[40,200] values:equal",
    /* views */
    "x=$[5:80,64:1] w=$[40:72,64:1] out=$[5:48,40:1]",
    "x=$[33:67,65:1] w=$[40:66,65:1] out=$[33:43,40:1] residual=$[33:50,40:1]",
    "x=$[5,64]@+1 w=$[40,64]@+3 bias=$[40]@+1 out=$[5,40]@+5",
    "x=$[17,64]@+2 w=$[40,64]@+1 bias=f32[40]@+1 out=$[17,40]@+1 residual=$[17,40]@+3 gate=$[40]@+7",
    "x=$[1,64]@+1 w=$[40:65,64:1]@+1",
    "x=$[38,848]@+1 w=$[256,848] bias=$[256]",
    /* x off a border where the weights are not, with enough products for a copy of it */
    "x=$[40:1027,1024:1]@+3 w=$[512,1024] bias=$[512] act=silu residual=$[40,512]",
    "x=$[17:1025,1024:1]@+1 w=i8[1024,1024] w_scale=f32[1024]",
    "x=$[3:0,64:1] w=$[40,64]",
    "x=$[5,64] w=$[40:0,64:1]",
    "x=$[2:-256,128:1] w=$[40:-128,128:1]",
    "x=$[2:768,3:64,4:192,64:1] w=$[33,64]",
    "x=$[2,3,2,3,40] w=$[9,40] bias=$[9] residual=$[2,3,2,3,9] gate=$[3,1,3,9]",
    "out=$[2:2000,3:600,2:300,3:96,20:1] x=$[2,3,2,3,40] w=$[20,40]",
    "out=$[5:100,40:1] x=$[5,64] w=$[40,64] residual=$[5:100,40:1]@out",
    "out=$[2:500,3:41,41:1] x=$[2,3,64] w=$[41,64] residual=$[2:500,3:41,41:1]@out gate=$[2,1,41] rounding=2",
    /* a batch */
    "x=$[3,5,64] w=$[3,40,64]",
    "x=$[3,1,64] w=$[3,40,64] bias=$[40] act=silu",
    "x=$[3,33,65] w=$[3,41,65] residual=$[3,33,41] gate=$[3,1,41]",
    "x=$[2,17,64] w=$[2:0,40:64,64:1]",
    "x=$[2:64,7:128,64:1] w=$[2:64,9:128,64:1]",
    "x=$[0,5,64] w=$[0,40,64]",
    "x=$[2,0,64] w=$[2,40,64]",
    "x=$[2,5,0] w=$[2,40,0] bias=$[40]",
    /* quantised weights */
    QUANTISED("1"),
    QUANTISED("3"),
    QUANTISED("8"),
    QUANTISED("16"),
    QUANTISED("33"),
    QUANTISED("70"),
    "x=$[2,1] w=i8[3,1] w_scale=f32[3]",
    "x=$[2,1] w=u8[3,1] w_scale=f32[3] format=u4",
    "x=$[2,0] w=u8[3,0] w_scale=f32[3] format=u4 bias=$[3]",
    "x=$[0,64] w=i8[3,64] w_scale=f32[3]",
    "x=$[2,64] w=i8[0,64] w_scale=f32[0]",
    "x=$[4,4096] w=u8[40,2048] w_scale=f16[40,32] w_zero=u8[40,32] group=128 format=u4",
    "x=$[1,14336] w=u8[40,7168] w_scale=$[40,448] group=32 format=u4",
    "x=$[2,5000] w=i8[33,5000] w_scale=$[33,157] group=32",
    "x=$[2,5000] w=f8e4m3[133,5000] w_scale=f32[2,40] group=128 group_rows=128",
    "x=$[3,96] w=i8[40:100,96:1]@+3 w_scale=f32[40:5,3:1]@+1 group=32 out=$[3:50,40:1]@+1",
    "x=$[3,96]@+1 w=u8[40:50,48:1]@+1 w_scale=f16[40:7,3:1] w_zero=u8[40:5,3:1]@+3 group=32 format=u4",
    "x=$[3,96] w=f8e4m3[40:97,96:1]@+1 w_scale=bf16[40]@+1 bias=$[40] act=silu",
    "x=$[3,96] w=i8[40:0,96:1] w_scale=f32[1]",
    "x=$[3,96] w=i8[40:0,96:1] w_scale=f32[40]",
    /* the stride of one row may be any number */
    "x=$[1,2200] w=$[1:9223372036854775807,2200:1]",
    "x=$[2,2200] w=i8[1:9223372036854775807,2200:1] w_scale=f32[1]",
    "x=$[1,2200] w=u8[1:9223372036854775807,1100:1] w_scale=f32[1,18] group=128 format=u4",
    "x=$[3,64] w=i8[40,64] w2=i8[24,64] w3=i8[9,64] w_scale=f32[40] w2_scale=f32[24] w3_scale=f32[9] separate=1",
    "x=$[3,64] w=u8[40,32] w2=u8[40,32] w_scale=$[40,2] w2_scale=$[40,2] w2_zero=u8[40,2] group=32 format=u4 glu=1",
    "x=$[3,64] w=f8e4m3[40,64] w2=f8e4m3[24,64] w_scale=f32[1] w2_scale=f32[1] norm=rms eps=1e-6 residual=$[3,64]",
    "x=$[3,264] w=i8[40,264] w_scale=f32[40] values:special",
    /* elements of x with more bits than whole numbers of three digits have: some, many */
    "x=$[1,4352] w=i8[70,4352] w_scale=f32[70] values:outlier",
    "x=$[3,1001] w=i8[40,1001] w_scale=f32[40] values:outlier",
    "x=$[5,1100] w=i8[33,1100] w2=i8[33,1100] w_scale=$[33] w2_scale=f32[1] glu=1 values:tiny",
    "x=$[2,3,1088] w=i8[9,1088] w_scale=f32[1] values:opposite",
    "x=$[5,100] w=i8[17,100] w_scale=$[17,2] group=64 values:outlier",
    "x=$[6,1601] w=i8[70:1605,1601:1]@+1 w_scale=f32[70,51] group=32 norm=rms eps=1e-6 norm_weight=$[1601]",
    "x=$[6,31] w=u8[17,16] w_scale=f16[17,1] w_zero=u8[17,1] group=32 format=u4 values:opposite",
    "x=$[7,1601] w=u8[65,801] w2=u8[65,801] w_scale=$[65,51] w2_scale=f32[65,51] w2_zero=u8[65,51] group=32 "
    "format=u4 glu=1 values:outlier",
    "x=$[2,1345] w=u8[67,673] w_scale=f16[67,22] w_zero=u8[67,22] group=64 format=u4 values:tiny",
    "x=$[4:4203,4200:1]@+1 w=u8[70:2103,2100:1]@+1 w_scale=bf16[70] w_zero=u8[70] format=u4 residual=$[4,70]",
    "x=$[3,264] w=u8[40,132] w_scale=f32[40,5] group=64 format=u4 values:special act=relu",
    "w_scale=f32[40,5] x=$[3,264] w=i8[40,264] group=64 flags=batch_invariant",
    /* one token and quantised weights: elements that are far apart, and all that follows */
    "x=$[1,4352] w=i8[333,4352] w_scale=$[333] flags=const_weights",
    "x=$[1,4352] w=u8[333,2176] w_scale=$[333,34] group=128 format=u4 flags=const_weights",
    "x=$[1,4608] w=i8[70,4608] w_scale=f32[70] norm=rms eps=1e-6 norm_weight=$[4608] weight_offset=1",
    "x=$[1,4608] w=i8[70,4608] w2=i8[70,4608] w_scale=f16[70] w2_scale=f16[70] bias2=$[70] glu=1 flags=const_weights",
    "x=$[1,4608] w=u8[70,2304] w_scale=f16[70,36] group=128 format=u4 bias=$[70] flags=const_weights",
    "x=$[1,4864] w=i8[70,4864] w_scale=f32[70] flags=const_weights",
    "x=$[1,4864] w=u8[70,2432] w_scale=f32[70,38] group=128 format=u4 flags=const_weights",
    "x=$[1,4096] w=i8[70,4096] w_scale=f32[70] values:special flags=const_weights",
    "x=$[1,4096] w=u8[70,2048] w_scale=$[70,32] group=128 format=u4 values:zero bias=f32[70]",
    "x=$[1,4096] w=u8[70,2048] w_scale=$[70,32] group=128 format=u4 values:tiny",
    "x=$[1,16384] w=u8[17,8192] w_scale=$[17,128] group=128 format=u4 values:outlier flags=const_weights",
    "x=$[1,2048] w=i8[129,2048] w2=i8[64,2048] w3=i8[65,2048] w_scale=f32[129] w2_scale=f32[64] w3_scale=f32[65] "
    "bias=$[129] bias3=f32[65] separate=1 rounding=2 flags=const_weights",
    "x=$[1,4096] w=u8[129,2048] w2=u8[64,2048] w3=u8[65,2048] w_scale=f16[129,32] w2_scale=f16[64,32] "
    "w3_scale=f16[65,32] group=128 format=u4 norm=rms eps=1e-6 norm_weight=$[4096] rounding=1 separate=1",
    "x=$[1,4096] w=u8[77,2048] w2=u8[77,2048] w_scale=$[77,32] w2_scale=$[77,32] group=128 format=u4 norm=rms "
    "eps=1e-6 norm_weight=$[4096] weight_offset=1 glu=1 rounding=3 flags=const_weights",
    "out=$[1,333] x=$[1,11008] w=u8[333,5504] w_scale=$[333,86] group=128 format=u4 residual=$[1,333]@out",
    "x=$[1,2176] w=i8[40,2176] w_scale=$[40] residual=f32[1,40] out_dtype=1 flags=const_weights",
    "x=$[1,4352] w=i8[70,4352] w_scale=$[70,34] group=128 flags=const_weights",
    "x=$[1,4352] w=i8[33,4352] w_scale=f32[33,136] group=32",
    "x=$[1,4608] w=i8[33,4608] w_scale=f16[33,72] group=64 norm=rms eps=1e-6 norm_weight=$[4608]",
    "x=$[1,4352] w=u8[70,2176] w_scale=$[70,136] w_zero=u8[70,136] group=32 format=u4",
    "x=$[1,4608] w=u8[33,2304] w_scale=$[33,72] w_zero=u8[33,72] group=64 format=u4 flags=const_weights",
    "x=$[1,4864] w=u8[33,2432] w_scale=$[33,38] w_zero=u8[33,38] group=128 format=u4",
    "x=$[1,4352] w=u8[33,2176] w_scale=f32[33] w_zero=u8[33] format=u4",
    /* few tokens and groups: ends of rows, of groups and of lines of 128 elements */
    "x=$[1,4097] w=i8[37,4097] w_scale=$[37,33] group=128 values:outlier",
    "x=$[2,4095] w=i8[35,4095] w_scale=f32[35,64] group=64 values:opposite",
    "x=$[4,1057] w=i8[34,1057] w_scale=f16[34,34] group=32 values:tiny",
    "x=$[6:1100,1090:1]@+1 w=i8[33:1093,1090:1]@+1 w_scale=f32[33:37,35:1]@+1 group=32 bias=$[33]",
    "x=$[1,4225] w=u8[39,2113] w_scale=$[39,34] w_zero=u8[39,34] group=128 format=u4 values:wide",
    "x=$[2,8191] w=u8[33,4096] w_scale=f16[33,64] w_zero=u8[33,64] group=128 format=u4 residual=$[2,33]",
    "x=$[2,1153] w=u8[33:600,577:1]@+1 w_scale=$[33:20,19:1] w_zero=u8[33:23,19:1]@+1 group=64 format=u4",
    "x=$[4,1025] w=u8[37,513] w_scale=f32[37,33] w_zero=u8[37,33] group=32 format=u4 values:special",
    "x=$[8,2079] w=u8[35,1040] w_scale=$[35,65] group=32 format=u4 values:opposite",
    "x=$[2,2000] w=u8[35,1000] w_scale=$[35] w_zero=u8[35] format=u4",
    /* quantised weights whose rows are of 16 bytes, in several steps of k, with all that follows */
    "x=$[1,1024] w=i8[300,1024] w_scale=$[300] flags=const_weights",
    "x=$[5,1024] w=i8[300,1024] w_scale=f32[300,8] group=128 bias=$[300]",
    "x=$[13,640] w=i8[300,640] w_scale=f16[300,10] group=64 residual=$[13,300] gate=$[13,300]",
    "x=$[40,640] w=i8[70,640] w_scale=f32[70] residual=$[40,70] rounding=2",
    "x=$[3,656] w=i8[70,656] w2=i8[70,656] w_scale=f32[70] w2_scale=$[70] glu=1",
    "x=$[3,656] w=i8[70,656] w2=i8[70,656] w_scale=f32[70] w2_scale=f32[70] glu=1 act=gelu bias2=$[70]",
    "x=$[3,656] w=i8[70,656] w2=i8[33,656] w3=i8[5,656] w_scale=f32[70] w2_scale=f32[33] w3_scale=f32[5] separate=1",
    "x=$[7:700,656:1] w=i8[70:672,656:1] w2=i8[3,656] w_scale=f32[70] w2_scale=f32[3] out=$[7:80,73:1]",
    "x=$[3,2048] w=u8[200,1024] w_scale=$[200,16] w_zero=u8[200,16] group=128 format=u4 flags=const_weights",
    "x=$[8,1600] w=u8[200,800] w_scale=f16[200,13] group=128 format=u4",
    "x=$[12,1056] w=u8[40,528] w_scale=f16[40] w_zero=u8[40] format=u4",
    "x=$[2,512] w=u8[40,256] w2=u8[40,256] w_scale=$[40,4] w2_scale=$[40,4] w2_zero=u8[40,4] group=128 format=u4 "
    "glu=1",
    "x=$[2,640] w=f8e4m3[300,640] w_scale=f32[3,5] group=128 group_rows=128",
    "x=$[9,640] w=f8e4m3[40,640] w_scale=$[40]",
    "x=$[1,1024] w=u8[300,512] w_scale=$[300,8] group=128 format=u4 norm=rms eps=1e-6 norm_weight=$[1024] rounding=1",
    "x=$[3,656] w=i8[70,656] w2=i8[70,656] w_scale=f32[70] w2_scale=$[70] glu=1 norm=rms eps=1e-6 "
    "norm_weight=f32[656] flags=const_weights",
    "x=$[10,640] w=f8e4m3[140,640] w2=f8e4m3[70,640] w_scale=f32[140] w2_scale=f32[70] separate=1 norm=layer "
    "eps=1e-5 "
    "norm_weight=$[640] norm_bias=$[640]",
    "x=$[3,320] w=i8[40,320] w_scale=f32[40,5] group=64 values:special",
    "x=$[3,384] w=u8[40,192] w_scale=f32[40,3] group=128 format=u4 values:special",
    /* the same with k long enough for 16 warps, and tokens of every kind of block */
    "x=$[1,2048] w=u8[40,1024] w_scale=f16[40,16] group=128 format=u4 norm=rms eps=1e-6 norm_weight=$[2048] "
    "rounding=1 flags=const_weights",
    "x=$[2,2304] w=u8[40,1152] w2=u8[40,1152] w_scale=f32[40,18] w2_scale=f32[40,18] group=128 format=u4 glu=1 "
    "bias=$[40] bias2=f32[40] rounding=2",
    "x=$[3:2056,2048:1] w=u8[33:1040,1024:1] w2=u8[17,1024] w3=u8[5,1024] w_scale=bf16[33:18,16:1] "
    "w2_scale=bf16[17,16] w3_scale=bf16[5,16] group=128 format=u4 out=$[3:64,55:1] residual=$[3:60,55:1] bias2=$[17]",
    "x=$[8,2048] w=u8[40,1024] w2=u8[24,1024] w3=u8[24,1024] w_scale=f16[40,16] w2_scale=f16[24,16] "
    "w3_scale=f16[24,16] group=128 format=u4 norm=rms eps=1e-6 norm_weight=$[2048] weight_offset=1 separate=1",
    "x=$[9,4096] w=u8[40,2048] w_scale=f16[40,32] group=128 format=u4 norm=rms eps=1e-6 norm_weight=$[4096]",
    "x=$[16,2048] w=u8[40,1024] w2=u8[40,1024] w_scale=f16[40,16] w2_scale=f16[40,16] group=128 format=u4 glu=1 "
    "residual=f32[16,40] out_dtype=1 rounding=2 flags=const_weights",
    "x=$[3,2048] w=u8[40,1024] w_scale=f32[40,16] group=128 format=u4 values:special",
    "x=$[3,2048] w=u8[40,1024] w_scale=f16[40,16] group=128 format=u4 flags=batch_invariant",
    "x=$[2,1088] w=i8[70,1088] w_scale=f32[70] residual=$[2,70] rounding=2",
    "x=$[8,1280] w=i8[70,1280] w2=i8[70,1280] w_scale=f32[70] w2_scale=$[70] glu=1 norm=rms eps=1e-6 "
    "norm_weight=$[1280] weight_offset=1 rounding=3",
    "x=$[10,1024] w=i8[70,1024] w_scale=$[70] norm=layer eps=1e-5 norm_weight=f32[1024]",
    "x=$[16,1088] w=i8[70,1088] w_scale=f32[1] bias=f32[70] out_dtype=1",
    "x=$[2,1152] w=f8e4m3[140,1152] w2=f8e4m3[70,1152] w_scale=f32[2,9] w2_scale=f32[1,9] group=128 group_rows=128 "
    "bias2=$[70] separate=1",
    "x=$[5,1280] w=f8e4m3[130,1280] w_scale=f32[130] norm=rms eps=1e-6 norm_weight=$[1280] residual=$[5,130]",
    "x=$[3,1024] w=f8e4m3[100,1024] w_scale=f32[1,8] group=128 group_rows=128",
    "x=$[9,1024] w=f8e4m3[100,1024] w_scale=$[100] values:special",
    /* quantised weights at any address, of any k: in words, in vectors, and less than one of them */
    "x=$[17,3] w=i8[5,3] w_scale=f32[5]",
    "x=$[2,7] w=i8[9,7] w_scale=f32[9] w2=i8[9,7] w2_scale=f32[9] glu=1",
    "x=$[4,31] w=f8e4m3[1,31] w_scale=f32[1]",
    "x=$[5,33] w=u8[9,17] w_scale=f32[9] w_zero=u8[9] format=u4",
    "x=$[12,15] w=u8[9,8] w_scale=f32[9,1] group=32 format=u4",
    "x=$[1,4095] w=i8[33,4095] w_scale=$[33]",
    "x=$[2,4095] w=u8[33,2048] w_scale=f16[33,32] w_zero=u8[33,32] group=128 format=u4 residual=$[2,33]",
    "x=$[7,4095] w=f8e4m3[17,4095] w_scale=f32[17,32] group=128 bias=$[17]",
    "x=$[4,1001] w=i8[40,1001] w_scale=bf16[40,16] group=64 flags=const_weights",
    "x=$[2,3,101] w=i8[33,101] w_scale=f32[33] residual=$[2,3,33] gate=$[2,1,33]",
    "x=$[9:1030,1025:1]@+1 w=i8[70:1027,1025:1]@+3 w2=i8[70:1029,1025:1]@+5 w_scale=f32[70] w2_scale=f32[70] glu=1 "
    "bias2=$[70] out=$[9:75,70:1]@+1",
    "x=$[6,1001]@+3 w=f8e4m3[40:1003,1001:1]@+7 w2=f8e4m3[9,1001]@+1 w3=f8e4m3[3,1001] w_scale=f16[40,8] "
    "w2_scale=f16[9,8] w3_scale=f16[3,8] group=128 separate=1",
    "x=$[13,777] w=u8[90:391,389:1]@+2 w_scale=$[90] w_zero=u8[90] format=u4 act=gelu bias=f32[90]",
    "x=$[3,264] w=i8[40:-264,264:1]@+1 w_scale=f32[40]",
    "x=$[40,1025] w=f8e4m3[100,1025] w_scale=f32[1,9] group=128 group_rows=128",
    "x=$[50,515] w=u8[20,258] w2=u8[20,258] w_scale=$[20,5] w2_scale=$[20,5] group=128 format=u4 glu=1 rounding=2",
    "x=$[70,333] w=i8[40,333] w2=i8[9,333] w3=i8[3,333] w_scale=f32[40] w2_scale=f32[9] w3_scale=f32[3] "
    "residual=$[70,52] norm=rms eps=1e-6 norm_weight=$[333]",
    "x=$[3,1001] w=i8[40,1001] w_scale=f32[40] values:special",
    "x=$[11,1001] w=u8[40,501] w_scale=f32[40,8] group=128 format=u4 values:special",
    "x=$[20,333] w=f8e4m3[40,333] w_scale=f32[40] flags=batch_invariant",
    /* few rows and long k, which blocks share; short k and many rows, which warps share */
    "x=$[3,4976] w=i8[24,4976] w_scale=f32[24] residual=$[3,24]",
    "x=$[5,5656] w=$[12,5656] bias=$[12]",
    "x=$[19:3340,3333:1]@+1 w=$[24,3333] bias=f32[24] rounding=2",
    "x=$[12,6401] w=u8[20,3201] w2=u8[20,3201] w_scale=f16[20,51] w2_scale=f16[20,51] w_zero=u8[20,51] "
    "w2_zero=u8[20,51] group=128 format=u4 glu=1",
    "x=$[35,4161] w=f8e4m3[24,4161] w_scale=f32[24,33] group=128",
    "x=$[5,100] w=i8[4500,100] w_scale=f32[4500] bias=$[4500]",
    "x=$[21,70] w=$[2300,70] w2=$[2300,70] glu=1 residual=$[21,2300]",
    "x=$[11,131] w=u8[3000,66] w_scale=f32[3000,2] w_zero=u8[3000,2] group=128 format=u4",
    QUANTISED_TILES("17"),
    QUANTISED_TILES_THEN("31"),
    QUANTISED_TILES("32"),
    QUANTISED_TILES_THEN("33"),
    QUANTISED_TILES("64"),
    QUANTISED_TILES_THEN("64"),
    QUANTISED_TILES("65"),
    QUANTISED_TILES_THEN("100"),
    QUANTISED_TILES("130"),
    "x=$[130:672,656:1] w=i8[70:672,656:1]@+16 w_scale=f32[70:12,11:1] group=64 out=$[130:75,70:1]@+1",
    "x=$[40,1024] w=f8e4m3[140,1024] w_scale=f32[2,8] group=128 group_rows=128 values:special",
    "x=$[40,640] w=i8[70,640] w_scale=f32[70] out_dtype=1 values:special",
    "x=$[40,640] w=i8[70,640] w_scale=f32[70,10] group=64 norm=rms eps=1e-6 norm_weight=$[640]",
    "x=$[40,640] w=u8[70,320] w_scale=f32[70,5] group=128 format=u4 flags=batch_invariant",
    /* quantised x */
    BYTES("0"),
    BYTES("1"),
    BYTES("2"),
    BYTES("5"),
    BYTES("8"),
    BYTES("15"),
    BYTES("16"),
    BYTES("17"),
    BYTES("33"),
    BYTES("64"),
    BYTES("65"),
    BYTES("200"),
    BYTES_THEN("i8"),
    BYTES_THEN("f8e4m3"),
    "x=i8[2,131071] x_scale=f32[2] w=i8[3,131071] w_scale=f32[3] values:equal",
    /* flags */
    "x=$[5,64] w=$[40,64] bias=$[40] flags=const_weights",
    "x=$[1,64] w=$[40,64] norm=rms eps=1e-6 norm_weight=$[64] flags=const_weights",
    "x=$[5,64] w=$[40,64] bias=$[40] flags=batch_invariant",
    "x=$[40,264] w=$[130,264] flags=batch_invariant",
    "x=$[65,1000] w=$[33,1000] flags=3",
    NULL,
};

static const adze_bad_case bad[] = {
    {"x=bf16[2,64] w=i8[4,64] w_scale=f32[]", ADZE_BAD_ARG, "w_scale has rank 0"},
    {"x=i32[3,8] w=i32[4,8] out=i32[3,4]", ADZE_BAD_DTYPE, "x is i32"},
    {"x=bf16[] w=bf16[4,8] out=bf16[4]", ADZE_BAD_ARG, "rank 0"},
    {"x=bf16[3,8] out=bf16[3,4]", ADZE_BAD_ARG, "w is absent"},
    {"x=bf16[3,8] w=f32[4,8] out=bf16[3,4]", ADZE_BAD_DTYPE,
     "w is f32, it must be x's bf16, i8, f8e4m3, or u8 in a format"},
    {"x=bf16[3,8] w=bf16[4,7] out=bf16[3,4]", ADZE_BAD_ARG, "rows of w have 7 elements, they must have 8"},
    {"x=bf16[3,8] w=bf16[8] out=bf16[3,1]", ADZE_BAD_ARG, "w has rank 1, it must be 2"},
    {"x=bf16[3,8] w=bf16[4:8,8:2] out=bf16[3,4]", ADZE_BAD_ARG, "w has stride 2"},
    {"x=bf16[3,8] w=bf16[4,8] w2=bf16[4,9] out=bf16[3,8]", ADZE_BAD_ARG, "rows of w2 have 9"},
    {"x=bf16[3,8] w=bf16[4,8] w2=bf16[1,4,8] out=bf16[3,8]", ADZE_BAD_ARG, "w2 has rank 3, it must be 2"},
    {"x=bf16[3,8] w=bf16[4,8] w3=bf16[4,8] out=bf16[3,8]", ADZE_BAD_ARG, "w3 is given without w2"},
    {"x=bf16[3,8] w=bf16[4,8] bias=bf16[5] out=bf16[3,4]", ADZE_BAD_ARG, "bias has 5 elements, it must have 4"},
    {"x=bf16[3,8] w=bf16[4,8] bias=f16[4] out=bf16[3,4]", ADZE_BAD_DTYPE, "bias is f16"},
    {"x=bf16[3,8] w=bf16[4,8] bias2=bf16[4] out=bf16[3,4]", ADZE_BAD_ARG, "bias2 is given without w2"},
    {"x=bf16[3,8] w=bf16[4,8] bias3=bf16[4] out=bf16[3,4]", ADZE_BAD_ARG, "bias3 is given without w3"},
    {"x=bf16[3,8] w=bf16[4,8] glu=1 out=bf16[3,4]", ADZE_BAD_ARG, "glu is 1, it needs w2"},
    {"x=bf16[3,8] w=bf16[4,8] glu=2 out=bf16[3,4]", ADZE_BAD_ARG, "glu is 2"},
    {"x=bf16[3,8] w=bf16[4,8] w2=bf16[5,8] glu=1 out=bf16[3,4]", ADZE_BAD_ARG, "w2 has 5 rows, w has 4"},
    {"x=bf16[3,8] w=bf16[4,8] w2=bf16[4,8] w3=bf16[4,8] glu=1 out=bf16[3,4]", ADZE_BAD_ARG, "w3 is given, glu"},
    {"x=bf16[3,8] w=bf16[4,8] w2=bf16[4,8] glu=1 separate=1 out=bf16[3,4]", ADZE_BAD_ARG, "separate is 1"},
    {"x=bf16[3,8] w=bf16[4,8] separate=1 out=bf16[3,4]", ADZE_BAD_ARG, "separate is 1, it needs w2"},
    {"x=bf16[3,8] w=bf16[4,8] w2=bf16[4,8] separate=1 out=bf16[3,4] out2=none", ADZE_BAD_ARG, "out2 is absent"},
    {"x=bf16[3,8] w=bf16[4,8] w2=bf16[4,8] separate=1 residual=bf16[3,4] out=bf16[3,4] out2=bf16[3,4]", ADZE_BAD_ARG,
     "residual is given, it must be absent with separate"},
    {"x=bf16[3,8] w=bf16[4,8] out=bf16[3,4] out2=bf16[3,4]", ADZE_BAD_ARG, "out2 must be absent"},
    {"x=bf16[3,8] w=bf16[2,4,8] out=bf16[3,4]", ADZE_BAD_ARG, "x has rank 2, it must be 3"},
    {"x=bf16[3,5,8] w=bf16[2,4,8] out=bf16[3,5,4]", ADZE_BAD_ARG, "the batch of w is 2, that of x 3"},
    {"x=bf16[2,5,8] w=bf16[2,4,8] w2=bf16[4,8] out=bf16[2,5,8]", ADZE_BAD_ARG, "w of rank 3 must be alone"},
    {"x=bf16[2,5,8] w=bf16[2,4,8] norm=rms out=bf16[2,5,4]", ADZE_BAD_ARG, "norm is 1, it must be 0"},
    {"x=bf16[3,8] w=bf16[4,8] norm=3 out=bf16[3,4]", ADZE_BAD_ARG, "norm is 3"},
    {"x=bf16[3,8] w=bf16[4,8] norm_weight=bf16[8] out=bf16[3,4]", ADZE_BAD_ARG, "norm_weight is given without norm"},
    {"x=bf16[3,8] w=bf16[4,8] norm_bias=bf16[8] out=bf16[3,4]", ADZE_BAD_ARG, "norm_bias is given without norm"},
    {"x=bf16[3,8] w=bf16[4,8] norm=rms norm_weight=bf16[7] out=bf16[3,4]", ADZE_BAD_ARG, "norm_weight has 7"},
    {"x=bf16[3,8] w=bf16[4,8] norm=rms eps=-1 out=bf16[3,4]", ADZE_BAD_ARG, "eps is -1"},
    {"x=bf16[3,8] w=bf16[4,8] act=8 out=bf16[3,4]", ADZE_BAD_ARG, "act is 8"},
    {"x=bf16[3,8] w=bf16[4,8] rounding=4 out=bf16[3,4]", ADZE_BAD_ARG, "rounding is 4"},
    {"x=bf16[3,8] w=bf16[4,8] out_dtype=2 out=f16[3,4]", ADZE_BAD_DTYPE, "out_dtype is f16"},
    {"x=bf16[3,8] w=bf16[4,8] gate=bf16[4] out=bf16[3,4]", ADZE_BAD_ARG, "gate is given without residual"},
    {"x=bf16[3,8] w=bf16[4,8] residual=bf16[3,5] out=bf16[3,4]", ADZE_BAD_ARG,
     "residual has 5 in dimension 1, it must have 4 as out"},
    {"x=bf16[3,8] w=bf16[4,8] residual=bf16[4] out=bf16[3,4]", ADZE_BAD_ARG, "residual has rank 1"},
    {"x=bf16[3,8] w=bf16[4,8] residual=f32[3,4] out=bf16[3,4]", ADZE_BAD_DTYPE, "residual is f32, it must be bf16"},
    {"x=bf16[3,8] w=bf16[4,8] residual=bf16[3,4] gate=bf16[3,8] out=bf16[3,4]", ADZE_BAD_ARG, "gate has 8"},
    {"x=bf16[3,8] w=bf16[4,8] out=bf16[3,8]", ADZE_BAD_ARG, "out has 8 in dimension 1, it must have 4"},
    {"x=bf16[3,8] w=bf16[8,8] out=bf16[3,8]@x", ADZE_BAD_ARG, "out overlaps x"},
    {"out=bf16[3,4] x=bf16[3,8] w=bf16[4,8] residual=bf16[3,4]@out+1", ADZE_BAD_ARG, "out overlaps residual"},
    {"x=bf16[3,8] w=i8[4,8] out=bf16[3,4]", ADZE_BAD_ARG, "w_scale is absent, w of i8 needs it"},
    {"x=bf16[3,8] w=bf16[4,8] w_scale=f32[4] out=bf16[3,4]", ADZE_BAD_ARG, "w_scale is given, w is not quantised"},
    {"x=bf16[3,8] w=bf16[4,8] group=32 out=bf16[3,4]", ADZE_BAD_ARG, "w is not quantised"},
    {"x=bf16[3,8] w=i8[4,8] w_scale=i32[4] out=bf16[3,4]", ADZE_BAD_DTYPE, "w_scale is i32"},
    {"x=bf16[3,8] w=i8[4,8] w_scale=f32[5] out=bf16[3,4]", ADZE_BAD_ARG, "it must be [1], [n] or [4, 1]"},
    {"x=bf16[3,8] w=i8[4,8] w_scale=f32[4,2] group=32 out=bf16[3,4]", ADZE_BAD_ARG,
     "4 x 2 elements, it must be [4, 1]"},
    {"x=bf16[3,8] w=i8[4,8] w_scale=f32[4] group=32 out=bf16[3,4]", ADZE_BAD_ARG, "rank 1"},
    {"x=bf16[3,8] w=i8[4,8] w_scale=f32[4,1] group=48 out=bf16[3,4]", ADZE_BAD_ARG, "group is 48"},
    {"x=bf16[3,8] w=i8[4,8] w_scale=f32[4] group_rows=2 out=bf16[3,4]", ADZE_BAD_ARG, "group_rows is 2"},
    {"x=bf16[3,8] w=i8[4,8] w_scale=f32[1,1] group=128 group_rows=128 out=bf16[3,4]", ADZE_BAD_ARG, "f8e4m3"},
    {"x=bf16[3,8] w=i8[4,8] w_scale=f32[4] format=u4 out=bf16[3,4]", ADZE_BAD_ARG, "format is 1, w of i8 has 0"},
    {"x=bf16[3,8] w=u8[4,4] w_scale=f32[4] out=bf16[3,4]", ADZE_BAD_ARG, "format is 0, w of u8 has 1"},
    {"x=bf16[3,8] w=u8[4,4] w_scale=f32[4] format=2 out=bf16[3,4]", ADZE_BAD_ARG, "format is 2"},
    {"x=bf16[3,8] w=u8[4,8] w_scale=f32[4] format=u4 out=bf16[3,4]", ADZE_BAD_ARG,
     "rows of w have 8 elements, they must have 4"},
    {"x=bf16[3,8] w=u8[4,4] w_scale=f32[4] w_zero=i8[4] format=u4 out=bf16[3,4]", ADZE_BAD_DTYPE, "w_zero is i8"},
    {"x=bf16[3,8] w=u8[4,4] w_scale=f32[4] w_zero=u8[3] format=u4 out=bf16[3,4]", ADZE_BAD_ARG, "w_zero has rank 1"},
    {"x=bf16[3,8] w=i8[4,8] w_scale=f32[4] w_zero=u8[4] out=bf16[3,4]", ADZE_BAD_ARG,
     "w_zero is given, w of i8 has none"},
    {"x=bf16[3,8] w=i8[4,8] w_scale=f32[4] w2=bf16[4,8] out=bf16[3,8]", ADZE_BAD_DTYPE, "w2 is bf16, w is i8"},
    {"x=bf16[3,5,8] w=i8[3,4,8] w_scale=f32[4] out=bf16[3,5,4]", ADZE_BAD_ARG, "w has rank 3, it must be 2"},
    {"x=u8[3,8] w=bf16[4,8] out=bf16[3,4]", ADZE_BAD_DTYPE, "x is u8, it must be f32, f16, bf16, i8 or f8e4m3"},
    {"x=i8[3,8] w=i8[4,8] w_scale=f32[4] out=f32[3,4]", ADZE_BAD_ARG, "x_scale is absent, x of i8 needs it"},
    {"x=bf16[3,8] x_scale=f32[3] w=bf16[4,8] out=bf16[3,4]", ADZE_BAD_ARG, "x_scale is given, x is not quantised"},
    {"x=i8[3,8] x_scale=f16[3] w=i8[4,8] w_scale=f32[4] out=f32[3,4]", ADZE_BAD_DTYPE,
     "x_scale is f16, it must be f32"},
    {"x=i8[3,8] x_scale=f32[4] w=i8[4,8] w_scale=f32[4] out=f32[3,4]", ADZE_BAD_ARG,
     "x_scale has 4 in dimension 0, it must have 3 as x"},
    {"x=i8[3,8] x_scale=f32[3,1] w=i8[4,8] w_scale=f32[4] out=f32[3,4]", ADZE_BAD_ARG, "x_scale has rank 2"},
    {"x=i8[3,8] x_scale=f32[3:2] w=i8[4,8] w_scale=f32[4] out=f32[3,4]", ADZE_BAD_ARG, "x_scale"},
    {"x=i8[3,8] x_scale=f32[3] w=i8[4,8] w_scale=f32[4] norm=rms out=f32[3,4]", ADZE_BAD_ARG,
     "norm is 1, it must be 0 for x of i8"},
    {"x=i8[3,8] x_scale=f32[3] w=f8e4m3[4,8] w_scale=f32[4] out=f32[3,4]", ADZE_BAD_DTYPE,
     "w is f8e4m3, it must be i8 as x"},
    {"x=f8e4m3[3,8] x_scale=f32[3] w=bf16[4,8] out=f32[3,4]", ADZE_BAD_DTYPE, "w is bf16, it must be f8e4m3 as x"},
    {"x=i8[3,8] x_scale=f32[3] w=i8[4,8] w_scale=f32[4,1] group=32 out=f32[3,4]", ADZE_BAD_ARG, "group is 32"},
    {"x=f8e4m3[3,8] x_scale=f32[3] w=f8e4m3[4,8] w_scale=f32[1,1] group=128 group_rows=128 out=f32[3,4]",
     ADZE_BAD_ARG, "w must have scales of whole rows for x of f8e4m3"},
    {"x=i8[3,8] x_scale=f32[3] w=i8[4,8] w_scale=f32[4] out_dtype=5 out=i8[3,4]", ADZE_BAD_DTYPE,
     "out_dtype is i8, it must be f32, f16 or bf16 for quantised x"},
    {"x=i8[3,8] x_scale=f32[3] w=i8[4,8] w_scale=f32[4] out=i8[3,4]", ADZE_BAD_DTYPE, "out is i8, it must be f32"},
    {"x=i8[3,8] x_scale=f32[3] w=i8[4,8] w_scale=f32[4] bias=f16[4] out_dtype=3 out=bf16[3,4]", ADZE_BAD_DTYPE,
     "bias is f16"},
    {"x=i8[1,131072] x_scale=f32[1] w=i8[1,131072] w_scale=f32[1] out=f32[1,1]", ADZE_BAD_ARG,
     "at most 131071 for x of i8"},
    {NULL, ADZE_OK, NULL},
};

#define EVERY_M(rest)                                                                                                \
    "x=$[1," rest, "x=$[2," rest, "x=$[4," rest, "x=$[8," rest, "x=$[16," rest, "x=$[32," rest, "x=$[64," rest

#define OF_BYTES(t, m, n, k)                                                                                         \
    "x=" t "[" m "," k "] x_scale=f32[" m "] w=" t "[" n "," k "] w_scale=f32[" n "] out_dtype=3 "                   \
    "flags=const_weights"
#define EVERY_BYTES_OF(t, n, k) OF_BYTES(t, "1", n, k), OF_BYTES(t, "16", n, k), OF_BYTES(t, "64", n, k)
#define EVERY_BYTES(n, k)       EVERY_BYTES_OF("i8", n, k), EVERY_BYTES_OF("f8e4m3", n, k)

static const char *const bench[] = {
    EVERY_M("4096] w=$[4096,4096] flags=const_weights"),
    EVERY_M("4096] w=$[11008,4096] flags=const_weights"),
    EVERY_M("4096] w=$[14336,4096] flags=const_weights"),
    EVERY_M("4096] w=$[22016,4096] flags=const_weights"),
    EVERY_M("14336] w=$[4096,14336] flags=const_weights"),
    EVERY_M("4096] w=$[128256,4096] flags=const_weights"),
    "x=$[1,4096] w=i8[14336,4096] w_scale=$[14336] flags=const_weights",
    "x=$[8,4096] w=i8[14336,4096] w_scale=$[14336] flags=const_weights",
    "x=$[1,8192] w=u8[8192,4096] w_scale=$[8192,64] group=128 format=u4 flags=const_weights",
    "x=$[16,8192] w=u8[8192,4096] w_scale=$[8192,64] group=128 format=u4 flags=const_weights",
    "x=$[1,4096] w=f8e4m3[14336,4096] w_scale=f32[112,32] group=128 group_rows=128 flags=const_weights",
    EVERY_BYTES("4096", "4096"),
    EVERY_BYTES("14336", "4096"),
    /* the layer of a model, at one token */
    "x=$[1,4096] w=$[4096,4096] w2=$[4096,4096] w3=$[4096,4096] norm=rms norm_weight=$[4096] eps=1e-6 rounding=1 "
    "separate=1 flags=const_weights",
    "x=$[1,4096] w=$[4096,4096] residual=$[1,4096] flags=const_weights",
    "x=$[1,4096] w=$[11008,4096] w2=$[11008,4096] norm=rms norm_weight=$[4096] eps=1e-6 rounding=1 glu=1 "
    "flags=const_weights",
    "x=$[1,11008] w=$[4096,11008] residual=$[1,4096] flags=const_weights",
    NULL,
};

#define BYTES_GPU(t)                                                                                                 \
    "x=" t "[1,4096] x_scale=f32[1] w=" t "[4096,4096] w_scale=f32[4096] out_dtype=3 flags=const_weights",           \
        "x=" t "[16,4096] x_scale=f32[16] w=" t "[1000,4096] w_scale=f32[1000] residual=bf16[16,1000] out_dtype=3",  \
        "x=" t "[50,4096] x_scale=f32[50] w=" t "[400,4096] w2=" t "[400,4096] w_scale=f32[400] w2_scale=f32[400] "  \
        "glu=1 out_dtype=2",                                                                                         \
        "x=" t "[300,1040] x_scale=f32[300] w=" t "[700,1040] w_scale=f32[700] out_dtype=3",                         \
        "x=" t "[700,2048] x_scale=f32[700] w=" t "[1300,2048] w2=" t "[1300,2048] w_scale=f32[1300] "               \
        "w2_scale=f32[1300] bias=bf16[1300] glu=1 out_dtype=3",                                                      \
        "x=" t "[520,14336] x_scale=f32[520] w=" t "[300,14336] w2=" t                                               \
        "[200,14336] w_scale=f32[300] w2_scale=f32[1] "                                                              \
        "residual=f32[520,500]",                                                                                     \
        "x=" t "[130,2048] x_scale=f32[130] w=" t                                                                    \
        "[512,2048] w_scale=f32[512] bias=bf16[512] residual=bf16[130,512] "                                         \
        "out_dtype=3",                                                                                               \
        "x=" t "[65,1040] x_scale=f32[65] w=" t "[256,1040] w_scale=f32[256] out_dtype=2",                           \
        "x=" t "[40,1024] x_scale=f32[1] w=" t "[256,1024] w_scale=f32[1] bias=f16[256] out_dtype=2",                \
        "x=" t "[513,1024] x_scale=f32[513] w=" t "[256,1024] w_scale=f32[1] act=silu out_dtype=3",                  \
        "x=" t "[513,1024] x_scale=f32[513] w=" t "[256,1024] w_scale=f32[256] residual=f32[513,256]"

/* Sizes at which a GPU splits k or n among its blocks. */
static const char *const gpu[] = {
    "x=$[1,4096] w=$[4096,4096]",
    "x=$[4,4096] w=$[1024,4096] bias=$[1024]",
    "x=$[8,14336] w=$[256,14336] residual=$[8,256]",
    "x=$[16,11008] w=$[512,11008]",
    "x=$[64,4096] w=$[512,4096] bias=$[512] act=silu",
    "x=$[300,1024] w=$[700,1024]",
    "x=$[27,4096] w=$[1000,4096] residual=$[27,1000]",
    "x=$[50,4096] w=$[400,4096] w2=$[400,4096] glu=1",
    "x=$[64,2056] w=$[200,2056] w2=$[70,2056] w3=$[300,2056] bias3=$[300]",
    "x=$[3,40,520] w=$[3,300,520]",
    "x=$[1,4096] w=i8[4096,4096] w_scale=$[4096]",
    "x=$[8,8192] w=u8[2048,4096] w_scale=$[2048,64] group=128 format=u4",
    "x=$[16,8192] w=u8[2048,4096] w_scale=$[2048,64] w_zero=u8[2048,64] group=128 format=u4",
    "x=$[1,512] w=u8[20000,256] w_scale=$[20000,4] w_zero=u8[20000,4] group=128 format=u4 flags=const_weights",
    "x=$[2,1056] w=u8[9000,528] w2=u8[3000,528] w_scale=$[9000,9] w2_scale=$[3000,9] group=128 format=u4 separate=1",
    "x=$[3,656] w=i8[9000,656] w2=i8[9000,656] w_scale=f32[9000] w2_scale=f32[9000] glu=1 norm=rms eps=1e-6 "
    "norm_weight=$[656] flags=const_weights",
    "x=$[8,1024] w=f8e4m3[10000,1024] w_scale=f32[79,8] group=128 group_rows=128 residual=$[8,10000]",
    "x=$[1,512] w=i8[150000,512] w_scale=f16[150000,4] group=128",
    "x=$[1,2048] w=u8[9000,1024] w2=u8[300,1024] w3=u8[300,1024] w_scale=f16[9000,16] w2_scale=f16[300,16] "
    "w3_scale=f16[300,16] group=128 format=u4 norm=rms eps=1e-6 norm_weight=$[2048] flags=const_weights",
    "x=$[2,1024] w=i8[9000,1024] w2=i8[9000,1024] w_scale=f32[9000] w2_scale=f32[9000] glu=1 norm=rms eps=1e-6 "
    "norm_weight=$[1024] flags=const_weights",
    "x=$[16,2048] w=u8[3000,1024] w_scale=$[3000,16] group=128 format=u4 residual=$[16,3000]",
    "x=$[8,16384] w=u8[600,8192] w_scale=f32[600,128] group=128 format=u4",
    "x=$[1,4095] w=i8[4096,4095] w_scale=$[4096]",
    "x=$[8,4001] w=f8e4m3[11008,4001] w_scale=f32[86,32] group=128 group_rows=128",
    "x=$[16,14753] w=u8[320,7377] w_scale=$[320,116] group=128 format=u4",
    "x=$[41,4095] w=i8[1000,4095] w2=i8[1000,4095] w_scale=f32[1000] w2_scale=f32[1000] glu=1",
    "x=$[200,1001] w=u8[300,501] w_scale=$[300,8] w_zero=u8[300,8] group=128 format=u4 residual=$[200,300]",
    "x=$[27,4096] w=i8[1000,4096] w_scale=$[1000] residual=$[27,1000]",
    "x=$[64,14336] w=i8[500,14336] w_scale=f32[500,112] group=128 flags=const_weights",
    "x=$[50,2048] w=u8[4000,1024] w_scale=f16[4000,16] w_zero=u8[4000,16] group=128 format=u4 flags=const_weights",
    "x=$[64,1280] w=u8[2000,640] w2=u8[2000,640] w_scale=$[2000,10] w2_scale=$[2000,10] group=128 format=u4 glu=1",
    "x=$[30,4096] w=f8e4m3[3000,4096] w2=f8e4m3[300,4096] w3=f8e4m3[300,4096] w_scale=f32[24,32] w2_scale=f32[3,32] "
    "w3_scale=f32[3,32] group=128 group_rows=128 separate=1",
    "x=$[300,1040] w=i8[1000,1040] w2=i8[1000,1040] w_scale=f32[1000] w2_scale=f32[1000] glu=1",
    "x=$[520,2048] w=u8[1300,1024] w_scale=f32[1300,16] group=128 format=u4 bias=$[1300]",
    "x=$[1030,1024] w=f8e4m3[1500,1024] w_scale=f32[1500] flags=const_weights",
    "x=$[1,32768] w=$[64,32768]",
    "x=$[2,100003] w=$[3,100003]",
    MANY("128"),
    MANY("513"),
    "x=$[128,14336] w=$[520,14336] bias=$[520]",
    "x=$[70,4096] w=$[1000,4096] w2=$[1000,4096] glu=1 rounding=2",
    "x=$[2050,1024] w=$[3000,1024] residual=$[2050,3000]",
    BYTES_GPU("i8"),
    BYTES_GPU("f8e4m3"),
    NULL,
};

static const char *const huge[] = {"x=$[3,4096] w=$[600000,4096]", "x=$[600000,4096] w=$[64,4096] bias=$[64]",
                                   "x=$[8,1024] w=i8[100000,1024] w_scale=f32[100000]", NULL};

/* Rows of one token for quantised weights, by their length, which no other case has: elements that are 2^30 apart,
   the largest of which have a weight of 0 in every other row; elements that are 2^50 apart; one infinity. A kernel
   that takes x as whole numbers has the first as they are, and must not take the others. */
static void spread(adze_gemm_args *a)
{
    enum { APART = 4352, FAR_APART = 4608, INFINITE = 4864 };
    const int64_t k = a->x.rank == 2 && a->x.shape[0] == 1 && a->w.rank == 2 && !a->x_scale.dtype ? a->x.shape[1] : 0;
    const int packed = a->w.dtype == ADZE_U8;
    if ((k != APART && k != FAR_APART && k != INFINITE) || !(packed || a->w.dtype == ADZE_I8))
        return;
    for (int64_t i = 0; i < k; i++) {
        const int64_t at = i * a->x.stride[1];
        const double v = adze_get(&a->x, at), small = k == FAR_APART ? 0x1p-40 : 0x1p-18;
        if (k == INFINITE)
            adze_put(&a->x, at, i == 100 ? INFINITY : v);
        else
            adze_put(&a->x, at, i % 128 == 5 ? v * 0x1p12 : i % 128 > 9 ? v * small : v);
        for (int64_t r = 0; r < a->w.shape[0] && i % 128 == 5; r += 2) {
            const int64_t of = r * a->w.stride[0] + (packed ? i / 2 : i) * a->w.stride[1];
            adze_put(&a->w, of, packed ? (double)(((int)adze_get(&a->w, of) & 15) | 8 << 4) : 0);
        }
    }
}

/* Scales as weights have them: positive, and so small that sums of f16 are finite. Zeros are of 4 bits. One row of f8
   has a NaN, where there are many. */
static void fill(void *args)
{
    adze_gemm_args *a = args;
    enum { NAN_ROW = 77 };
    spread(a);
    if (a->w.dtype == ADZE_F8E4M3 && a->w.shape[0] > NAN_ROW && a->w.shape[1] > 0)
        adze_put(&a->w, NAN_ROW * a->w.stride[0] + a->w.shape[1] / 2 * a->w.stride[1], NAN);
    const adze_tensor *const small[] = {&a->w_scale, &a->w2_scale, &a->w3_scale, &a->x_scale,
                                        &a->w_zero,  &a->w2_zero,  &a->w3_zero};
    for (int i = 0; i < 7; i++) {
        const adze_tensor *t = small[i];
        if (t->rank > 2)
            continue;
        for (int64_t r = 0; r < (t->rank == 2 ? t->shape[0] : t->rank > 0) && t->dtype; r++)
            for (int64_t j = 0; j < t->shape[t->rank - 1]; j++) {
                const int64_t at = (t->rank == 2 ? r * t->stride[0] : 0) + j * t->stride[t->rank - 1];
                const double v = adze_get(t, at);
                adze_put(t, at, i < 4 ? (v < 0 ? -v : v) * 0x1p-6 + 0x1p-8 : (double)((int)v & 15));
            }
    }
}

static void at_most(int64_t *size, int64_t most)
{
    *size = *size < most ? *size : most;
}

/* k stays: the other dimensions are independent of each other. */
static void cut(void *args)
{
    enum { M = 70, N = 96 };
    adze_gemm_args *a = args;
    adze_tensor *const w[] = {&a->w, &a->w2, &a->w3}, *const bias[] = {&a->bias, &a->bias2, &a->bias3};
    adze_tensor *const scale[] = {&a->w_scale, &a->w2_scale, &a->w3_scale};
    adze_tensor *const zero[] = {&a->w_zero, &a->w2_zero, &a->w3_zero};
    int64_t columns = 0;
    for (int i = 0; i < 3; i++) {
        at_most(&w[i]->shape[w[i]->rank == 3], N);
        at_most(&bias[i]->shape[0], N);
        at_most(&scale[i]->shape[0], scale[i]->rank == 2 && a->group_rows == 128 ? 1 : N);
        at_most(&zero[i]->shape[0], N);
        columns += i == 0 || (w[i]->dtype && !a->glu) ? w[i]->shape[w[i]->rank == 3] : 0;
    }
    if (a->w.rank == 3)
        at_most(&a->w.shape[0], 2);
    adze_tensor *const rows[] = {&a->x, &a->residual, &a->gate};
    for (int i = 0; i < 3; i++)
        for (int d = 0; d < rows[i]->rank - 1; d++)
            at_most(&rows[i]->shape[d], d == rows[i]->rank - 2 ? M : 2);
    for (int d = 0; d < a->x_scale.rank; d++)
        at_most(&a->x_scale.shape[d], d == a->x_scale.rank - 1 ? M : 2);
    for (int i = 1; i < 3; i++)
        at_most(&rows[i]->shape[rows[i]->rank ? rows[i]->rank - 1 : 0], columns);
}

static double flops(const void *args)
{
    const adze_gemm_args *a = args;
    const adze_tensor *const w[] = {&a->w, &a->w2, &a->w3};
    int64_t columns = 0;
    for (int i = 0; i < 3; i++)
        columns += w[i]->dtype ? w[i]->shape[w[i]->rank - 2] : 0;
    return 2.0 * (double)adze_count(&a->x) * (double)columns;
}

const adze_suite adze_suite_gemm = {.op = &adze_op_gemm,
                                    .good = good,
                                    .bad = bad,
                                    .bench = bench,
                                    .gpu = gpu,
                                    .huge = huge,
                                    .fill = fill,
                                    .cut = cut,
                                    .flops = flops};
