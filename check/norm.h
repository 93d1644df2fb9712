/* norm.h - the cases of rms_norm and layer_norm: the same call, two definitions. */
#ifndef ADZE_CHECK_NORM_H
#define ADZE_CHECK_NORM_H

#include "suite.h"

#define NORM_GOOD                                                                                                    \
    "x=$[7,123] weight=$[123] eps=1e-6", "x=$[0,64] weight=$[64] eps=1e-6", "x=$[3,0] eps=1e-6",                     \
        "x=$[1,1] eps=1e-5", "x=$[1] weight=$[1] eps=1e-5", "x=$[1,8] eps=1e-6", "x=$[5,15] eps=1e-6",               \
        "x=$[5,16] eps=1e-6", "x=$[5,17] eps=1e-6 weight=f32[17]", "x=$[3,64] weight=$[64] eps=1e-6",                \
        "x=$[3,72] weight=$[72] eps=1e-6", "x=$[9,128] weight=$[128] eps=1e-6",                                      \
        "x=$[3,1152] weight=$[1152] eps=1e-6", "x=$[2,2048] weight=$[2048] eps=1e-6",                                \
        "x=$[2,3072] weight=f32[3072] eps=1e-6", "x=$[3,4096] weight=$[4096] eps=1e-6",                              \
        "x=$[2,4544] weight=$[4544] eps=1e-6", "x=$[2,8192] weight=$[8192] eps=1e-6",                                \
        "x=$[1,16384] weight=$[16384] eps=1e-6", "x=$[2,32768] weight=$[32768] eps=1e-6", "x=$[1,65536] eps=1e-6",   \
        "x=$[1,131080] weight=$[131080] eps=1e-6", "x=$[1,40003] weight=$[40003] eps=1e-6",                          \
        "x=$[67,257] weight=$[257] eps=1e-6", /* other distributions */                                              \
        "x=$[5,256] weight=$[256] eps=1e-6 values:tiny", "x=$[5,123] eps=1e-5 values:tiny",                          \
        "x=$[5,520] weight=$[520] eps=1e-6 values:outlier", "x=$[5,256] eps=1e-6 values:equal",                      \
        "x=$[5,1024] weight=$[1024] bias=$[1024] eps=1e-6 values:mean", "x=$[5,64] eps=1e-6 values:zero",            \
        "x=$[5,264] weight=$[264] eps=1e-6 values:special", "x=$[5,256] weight=$[256] eps=1e-6 values:largest",      \
        "x=$[5,123] eps=1e-5 values:largest", "x=$[3,4097] bias=$[4097] eps=1e-6 values:largest",                    \
        "x=$[5,256] weight=$[256] eps=1e-6 values:opposite", "x=$[5,123] eps=1e-5 values:opposite",                  \
        "x=$[3,4097] bias=$[4097] eps=1e-6 values:opposite", /* views */                                             \
        "out=$[7:130,123:1] x=$[7:128,123:1] weight=$[123] eps=1e-6",                                                \
        "out=$[7:136,128:1] x=$[7:256,128:1] weight=$[128] eps=1e-6", "x=$[7,128]@+1 weight=$[128] eps=1e-6",        \
        "out=$[7,128]@+3 x=$[7,128] weight=$[128]@+1 eps=1e-6",                                                      \
        "out=$[2,3,4,64] x=$[2:768,3:64,4:192,64:1] weight=$[64] eps=1e-6", "x=$[2,3,2,3,40] weight=$[40] eps=1e-6", \
        "x=$[2:-256,128:1] eps=1e-6", "out=$[5,256] x=$[5,256]@out weight=$[256] eps=1e-6",                          \
        "out=$[5,2050] x=$[5,2050]@out eps=1e-6", /* options */                                                      \
        "x=$[5,256] weight=$[256] eps=1e-6 rounding=1", "x=$[5,250] weight=f32[250] eps=1e-6 rounding=1",            \
        "x=$[5,256] weight=$[256] eps=1e-6 weight_offset=1", "x=$[5,256] weight=$[256] bias=$[256] eps=1e-6",        \
        "x=$[5,256] weight=f32[256] bias=f32[256] eps=1e-6 rounding=1 out_dtype=1",                                  \
        "x=$[5,250] weight=f32[250] eps=1e-6 out_dtype=1", /* residual */                                            \
        "x=$[5,256] weight=$[256] bias=$[256] eps=1e-6 flags=const_weights",                                         \
        "x=$[5,256] residual=$[5,256] weight=$[256] eps=1e-6",                                                       \
        "x=$[5,256] residual=$[5,256] weight=$[256] eps=1e-6 rounding=8",                                            \
        "x=$[5,256] residual=$[5,256] weight=$[256] eps=1e-6 rounding=1 sum=none",                                   \
        "x=$[3,123] residual=$[3,123] weight=$[123] bias=$[123] eps=1e-6",                                           \
        "sum=$[5,256] x=$[5,256] residual=$[5,256]@sum weight=$[256] eps=1e-6",                                      \
        "out=$[5,256] sum=$[5,256] x=$[5,256]@out residual=$[5,256]@sum weight=$[256] eps=1e-6 rounding=8",          \
        "x=$[2,4096] residual=$[2,4096] weight=$[4096] eps=1e-6",                                                    \
        "x=$[2,16384] residual=$[2,16384] weight=$[16384] eps=1e-6",                                                 \
        "x=$[1,50000] residual=$[1,50000] weight=$[50000] eps=1e-6", /* modulation */                                \
        "x=$[2,5,256] scale=$[2,1,256] shift=$[2,1,256] eps=1e-6",                                                   \
        "x=$[2,5,256] scale=$[2,1,256] shift=$[2,1,256] eps=1e-6 rounding=2",                                        \
        "x=$[2,5,256] scale=$[2,5,256] shift=$[2,5,256] eps=1e-6 rounding=2",                                        \
        "x=$[2,5,256] scale=f32[2,1,256] shift=f32[2,1,256] eps=1e-6",                                               \
        "x=$[2,5,256] weight=$[256] bias=$[256] scale=$[256] eps=1e-6 rounding=2",                                   \
        "x=$[2,5,123] shift=$[2,1,123] eps=1e-6 rounding=2",                                                         \
        "scale=$[2:1536,1:1536,256:1] shift=$[2:1536,1:1536,256:1]@scale+256 x=$[2,5,256] eps=1e-6 "                 \
        "rounding=2",                                                                                                \
        "x=$[2,5,256] scale=$[2,1,256] scale_table=$[256] shift=$[2,1,256] shift_table=$[256] eps=1e-6",             \
        "x=$[2,5,256] scale=$[2,1,256] scale_table=$[256] shift=$[2,1,256] shift_table=$[256] eps=1e-6 "             \
        "rounding=2",                                                                                                \
        "x=$[2,5,256] scale=f32[2,5,256] scale_table=f32[1,1,256] shift=f32[2,5,256] shift_table=f32[256] "          \
        "eps=1e-6",                                                                                                  \
        "x=$[2,32,16] scale=$[2:96,1:96,16:1] scale_table=$[16] shift=$[2:96,1:96,16:1] shift_table=$[16] eps=1e-6 " \
        "rounding=2",                                                                                                \
        "x=$[2,5,44] scale=$[2,1,44] scale_table=$[44] shift=$[2,1,44] shift_table=$[44] eps=1e-6",                  \
        "x=$[2,5,251] residual=$[2,5,251] gate=$[2,1,251] gate_table=$[251] scale=f32[2,1,251] scale_table=$[251] "  \
        "eps=1e-6 rounding=2",                                                                                       \
        "x=$[2,3,4096] scale=$[2,1,4096] shift=$[2,1,4096] eps=1e-6",                                                \
        "x=$[2,2,8192] scale=$[2,1,8192] shift=$[2,1,8192] eps=1e-6 rounding=2", /* the block form */                \
        "x=$[2,5,256] residual=$[2,5,256] gate=$[2,1,256] scale=$[2,1,256] shift=$[2,1,256] eps=1e-6",               \
        "x=$[2,5,256] residual=$[2,5,256] gate=$[2,1,256] scale=$[2,1,256] shift=$[2,1,256] eps=1e-6 "               \
        "rounding=2",                                                                                                \
        "x=$[2,5,256] residual=$[2,5,256] gate=f32[2,1,256] gate_table=f32[256] scale=f32[2,1,256] "                 \
        "scale_table=f32[256] shift=f32[2,1,256] shift_table=f32[256] eps=1e-6",                                     \
        "x=$[2,5,250] residual=$[2,5,250] gate=$[2,5,250] gate_table=$[250] eps=1e-6 rounding=10",                   \
        "x=$[2,2,3072] residual=$[2,2,3072] gate=$[2,1,3072] weight=$[3072] bias=$[3072] eps=1e-6 "                  \
        "rounding=2", /* a residual, and no gate */                                                                  \
        "x=$[2,3,2048] residual=$[2,3,2048] scale=$[2,1,2048] scale_table=$[2048] shift=$[2,1,2048] "                \
        "shift_table=$[2048] eps=1e-6 rounding=2",                                                                   \
        "x=$[2,3,2048] scale=$[2,1,2048] scale_table=$[2048] shift=$[2,1,2048] shift_table=$[2048] eps=1e-6 "        \
        "rounding=2",                                                                                                \
        "x=$[2,3,2048] scale=$[2,1,2048] scale_table=$[2048] shift=$[2,1,2048] shift_table=$[2048] eps=1e-6",        \
        "x=$[2,3,2048] residual=$[2,3,2048] gate=$[2,1,2048] gate_table=$[2048] scale=$[2,1,2048] "                  \
        "scale_table=$[2048] shift=$[2,1,2048] shift_table=$[2048] eps=1e-6",                                        \
        "x=$[2,3,1536] scale=f32[2,1,1536] shift=f32[2,1,1536] eps=1e-6",                                            \
        "x=$[2,3,5120] scale=f32[2,1,5120] shift=f32[2,1,5120] eps=1e-6", /* a gate and weights */                   \
        "x=$[2,3,1536] residual=$[2,3,1536] gate=f32[2,1,1536] weight=f32[1536] bias=f32[1536] eps=1e-6",            \
        "x=$[2,3,1536] residual=$[2,3,1536] gate=f32[2,1,1536] weight=f32[1536] bias=f32[1536] eps=1e-6 "            \
        "weight_offset=1", /* added to the norm */                                                                   \
        "x=$[2,5,256] weight=$[256] shift=$[2,5,256] eps=1e-6 weight_offset=1 rounding=2",                           \
        "x=$[3,3584] weight=$[3584] shift=$[3,3584] eps=1e-6 weight_offset=1 rounding=2",                            \
        "x=$[3,10240] weight=$[10240] shift=$[1,10240] eps=1e-6 rounding=2",                                         \
        "out=$[5,1152] x=$[5,1152] weight=$[1152] shift=$[5,1152]@out eps=1e-6 rounding=2",                          \
        "x=$[2,3,3072] residual=$[2,3,3072] scale=$[2,1,3072] shift=$[2,1,3072] eps=1e-6", /* shapes of a GPU */     \
        "x=$[2,3,3072] scale=$[2,1,3072] shift=$[2,1,3072] eps=1e-6 rounding=2",                                     \
        "x=$[2,3072] weight=$[3072] eps=1e-6 rounding=1", "x=$[2,5120] weight=$[5120] bias=$[5120] eps=1e-6",        \
        "x=$[2,10240] weight=$[10240] eps=1e-6", "x=$[2,12000] weight=$[12000] eps=1e-6",                            \
        "x=$[2,2048] residual=$[2,2048] weight=$[2048] bias=$[2048] eps=1e-6"

/* Quantised rows, of i8 (5) and f8e4m3 (4). */
#define NORM_BYTES_OF(kind)                                                                                          \
    "x=$[5,256] weight=$[256] eps=1e-6 out_dtype=" kind, "x=$[3,123] weight=$[123] eps=1e-6 out_dtype=" kind,        \
        "x=$[1,1] eps=1e-6 out_dtype=" kind, "x=$[0,64] out_dtype=" kind, "x=$[3,0] out_dtype=" kind,                \
        "x=$[64] weight=f32[64] eps=1e-6 rounding=1 out_dtype=" kind,                                                \
        "x=$[5,96] eps=1e-6 values:zero out_dtype=" kind, "x=$[5,96] eps=1e-6 values:outlier out_dtype=" kind,       \
        "x=$[5,96] eps=1e-6 values:equal out_dtype=" kind, "x=$[5,96] eps=1e-6 values:tiny out_dtype=" kind,         \
        "x=$[3,4096] weight=$[4096] eps=1e-6 rounding=1 out_dtype=" kind,                                            \
        "x=$[2,70001] weight=$[70001] eps=1e-6 out_dtype=" kind, "x=$[5,256] eps=1e38 out_dtype=" kind,              \
        "x=$[5,123] eps=1e38 out_dtype=" kind,                                                                       \
        "x=$[13,520] weight=$[520] bias=$[520] eps=1e-6 weight_offset=1 out_dtype=" kind,                            \
        "x=$[3,8192] residual=$[3,8192] weight=$[8192] eps=1e-6 rounding=1 sum=none out_dtype=" kind,                \
        "x=$[5,256] residual=$[5,256] weight=$[256] bias=$[256] eps=1e-6 out_dtype=" kind,                           \
        "x=$[5,256] residual=$[5,256] weight=$[256] eps=1e-6 rounding=8 sum=none out_dtype=" kind,                   \
        "out=i8[7:300,200:1]@+1 out_scale=f32[7]@+1 x=$[7:210,200:1]@+1 weight=$[200] eps=1e-6 out_dtype=5",         \
        "x=$[2:768,3:64,4:192,64:1] weight=$[64] eps=1e-6 out_dtype=" kind,                                          \
        "x=$[2,5,256] scale=$[2,1,256] scale_table=$[256] shift=$[2,1,256] shift_table=$[256] eps=1e-6 rounding=2 "  \
        "out_dtype=" kind,                                                                                           \
        "x=$[2,5,251] residual=$[2,5,251] gate=$[2,1,251] gate_table=$[251] scale=f32[2,1,251] eps=1e-6 rounding=2 " \
        "out_dtype=" kind
#define NORM_BYTES NORM_BYTES_OF("5"), NORM_BYTES_OF("4")

/* Many rows: several share a block. */
#define NORM_GPU                                                                                                     \
    "x=$[2129,64] weight=$[64] eps=1e-6", "x=$[2131,512] weight=$[512] eps=1e-6", "x=$[1061,272] eps=1e-6",          \
        "x=$[2129,768] weight=$[768] bias=$[768] eps=1e-6", "x=$[1059,1152] weight=$[1152] eps=1e-6 rounding=1",     \
        "x=$[1061,2048] weight=$[2048] eps=1e-6", "x=$[1061,2048] residual=$[1061,2048] weight=$[2048] eps=1e-6",    \
        "x=$[1063,1536] residual=$[1063,1536] scale=$[1,1536] shift=$[1,1536] eps=1e-6 rounding=2",                  \
        "x=$[1061,1152] bias=$[1152] eps=1e-6", "x=$[1061,4544] eps=1e-6",                                           \
        "x=$[1061,4096] residual=$[1061,4096] eps=1e-6",                                                             \
        "x=$[1,1067,1152] scale=$[1,1,1152] shift=$[1,1,1152] eps=1e-6 rounding=2",                                  \
        "x=$[1,1061,4544] scale=$[1,1,4544] shift=$[1,1,4544] eps=1e-6",                                             \
        "x=$[1063,768] weight=$[768] shift=$[1063,768] eps=1e-6 weight_offset=1 rounding=2",                         \
        "x=$[1,1061,1536] scale=f32[1,1,1536] shift=f32[1,1,1536] eps=1e-6", /* every tensor off alignment */        \
        "out=$[1061,33]@+1 x=$[1061,33]@+2 weight=$[33]@+3 eps=1e-6", "x=$[1061,21] weight=$[21] eps=1e-6",          \
        "x=$[1061,22] eps=1e-6", "x=$[1061,23]@+7 weight=f32[23] eps=1e-6 rounding=1", "x=$[2129,56]@+6 eps=1e-6",   \
        "out=$[37:2056,2049:1]@+5 x=$[37:2051,2049:1]@+1 weight=$[2049]@+2 bias=f32[2049]@+1 eps=1e-6",              \
        "out=$[37,2049] sum=$[37,2049]@+3 x=$[37,2049]@+1 residual=$[37:2052,2049:1]@+6 weight=$[2049] eps=1e-6",    \
        "out=$[37,301] sum=$[37,301]@+3 x=$[37,301]@out residual=$[37,301]@sum weight=$[301] eps=1e-6 rounding=8",   \
        "x=$[37,301]@+1 weight=$[301]@+1 eps=1e-6 out_dtype=1", "x=$[3,9001] weight=$[9001] bias=$[9001] eps=1e-6",  \
        "x=$[3,70001] residual=$[3,70001]@+1 weight=$[70001] eps=1e-6", "x=$[2,131071] weight=$[131071] eps=1e-6",   \
        "x=$[3,20480] residual=$[3,20480] gate=$[1,20480] scale=f32[1,20480] shift=$[1,20480]@+1 eps=1e-6",          \
        "x=$[2,99888]@+7 scale=$[2,99888] shift=$[2,99888] eps=1e-6 rounding=2", "x=$[2,300001] weight=$[300001]",   \
        "x=$[1061,4098] weight=$[4098] eps=1e-6", "x=$[1061,4097] residual=$[1061,4097] weight=$[4097] eps=1e-6",    \
        "x=$[141,16390] weight=f32[16390]@+2 bias=$[16390] eps=1e-6", "x=$[3,90002]@+2 bias=$[90002] eps=1e-6",      \
        "x=$[1,1061,1002]@+2 scale=$[1,1,1002] shift=f32[1,1,1002] eps=1e-6 rounding=2", /* few and many rows */     \
        "x=$[1,1061,4097] scale=$[1,1,4097]@+1 shift=f32[1,1,4097]@+1 eps=1e-6",                                     \
        "x=$[1,1061,4096] scale=f32[1,1,4096] shift=$[1,1,4096] eps=1e-6",                                           \
        "x=$[1,3,60000] residual=$[1,3,60000] scale=f32[1,1,60000] shift=$[1,1,60000] eps=1e-6",                     \
        "x=$[2,5,251]@+1 residual=$[2,5,251] gate=f32[2,1,251]@+1 gate_table=$[251]@+2 scale=$[2,1,251]@+3 "         \
        "scale_table=f32[251] shift=$[2,5,251]@+4 shift_table=$[251]@+5 eps=1e-6 rounding=2",                        \
        "x=$[2,533,28]@+4 scale=$[2,1,28] shift=$[2,1,28] eps=1e-6", /* units of each width */                       \
        "x=$[2,533,30]@+2 scale=$[2,1,30] shift=$[2,1,30] eps=1e-6",                                                 \
        "x=$[2,533,29]@+1 scale=$[2,1,29] shift=$[2,1,29] eps=1e-6",                                                 \
        "x=$[2,533,100]@+4 scale=$[2,1,100] shift=$[2,1,100] eps=1e-6",                                              \
        "x=$[2,533,102]@+2 scale=$[2,1,102] shift=$[2,1,102] eps=1e-6",                                              \
        "x=$[2,533,101]@+1 scale=$[2,1,101] shift=$[2,1,101] eps=1e-6",                                              \
        "x=$[2,533,500] residual=$[2,533,500] scale=$[2,1,500] shift=$[2,1,500] eps=1e-6",                           \
        "x=$[2,533,502] residual=$[2,533,502] scale=$[2,1,502] shift=$[2,1,502] eps=1e-6",                           \
        "x=$[2,533,501] residual=$[2,533,501] scale=$[2,1,501] shift=$[2,1,501] eps=1e-6",                           \
        "x=$[1,1061,4108] scale=$[1,4108] shift=$[1,4108] eps=1e-6",                                                 \
        "x=$[1,3,5004] scale=$[1,3,5004] shift=$[1,1,5004] eps=1e-6",                                                \
        "x=$[1,3,5002] scale=$[1,3,5002] shift=$[1,1,5002] eps=1e-6",                                                \
        "x=$[1,3,5001] scale=$[1,3,5001] shift=$[1,1,5001] eps=1e-6",                                                \
        "x=$[1,3,9244] residual=$[1,3,9244] scale=$[1,1,9244] shift=$[1,1,9244] eps=1e-6",                           \
        "x=$[1,3,9242] residual=$[1,3,9242] scale=$[1,1,9242] shift=$[1,1,9242] eps=1e-6",                           \
        "x=$[1,3,9241] residual=$[1,3,9241] scale=$[1,1,9241] shift=$[1,1,9241] eps=1e-6",                           \
        "x=$[2,3,16380] scale=$[2,1,16380] shift=$[2,1,16380] eps=1e-6",                                             \
        "x=$[2,3,16382] scale=$[2,1,16382] shift=$[2,1,16382] eps=1e-6",                                             \
        "x=$[2,3,16383] scale=$[2,1,16383] shift=$[2,1,16383] eps=1e-6",                                             \
        "x=$[1,3,20004] residual=$[1,3,20004] sum=none scale=$[1,1,20004] shift=$[1,1,20004] eps=1e-6",              \
        "x=$[1,3,20002] residual=$[1,3,20002] sum=none scale=$[1,1,20002] shift=$[1,1,20002] eps=1e-6",              \
        "x=$[1,3,20001] residual=$[1,3,20001] sum=none scale=$[1,1,20001] shift=$[1,1,20001] eps=1e-6",              \
        "x=$[139,24890] weight=$[24890] eps=1e-6", /* every option in rows that are held packed */                   \
        "x=$[1,3,9002] residual=$[1,3,9002] gate=f32[1,1,9002] gate_table=$[9002] scale=$[1,1,9002] "                \
        "scale_table=f32[9002] weight=$[9002] bias=f32[9002] shift=$[1,3,9002] shift_table=$[9002] eps=1e-6 "        \
        "rounding=2",                                                                                                \
        "x=$[1,3,9001] residual=$[1,3,9001] gate=f32[1,1,9001] gate_table=$[9001] scale=$[1,1,9001] "                \
        "scale_table=f32[9001] weight=$[9001] bias=f32[9001] shift=$[1,3,9001] shift_table=$[9001] eps=1e-6 "        \
        "rounding=2",                                                                                                \
        "x=$[1,3,9001] residual=$[1,3,9001] gate=f32[1,1,9001] gate_table=$[9001] scale=$[1,1,9001] "                \
        "scale_table=f32[9001] weight=$[9001] bias=f32[9001] shift=$[1,3,9001] shift_table=$[9001] eps=1e-6 "        \
        "rounding=0",                                                                                                \
        "x=$[1,3,5002] residual=$[1,3,5002] gate=f32[1,1,5002] gate_table=$[5002] scale=$[1,1,5002] "                \
        "scale_table=f32[5002] weight=$[5002] bias=f32[5002] shift=$[1,3,5002] shift_table=$[5002] eps=1e-6 "        \
        "rounding=3",                                                                                                \
        "x=$[3,9002] scale=f32[1,9002] eps=1e-6 out_dtype=1",                                                        \
        "x=$[3,9001] scale=f32[1,9001] eps=1e-6 out_dtype=1", /* a sum that is not rounded */                        \
        "x=$[3,5002] residual=$[3,5002] scale=$[1,5002] eps=1e-6 rounding=8",                                        \
        "x=$[3,3001] residual=$[3,3001] shift=$[1,3001] eps=1e-6 rounding=8",                                        \
        "x=$[3,9001] residual=$[3,9001] weight=$[9001] eps=1e-6 rounding=8",                                         \
        "x=$[3,12008] residual=$[3,12008] weight=$[12008] eps=1e-6 rounding=8", /* only the weight off alignment */  \
        "x=$[8501,200] weight=$[200]@+1 eps=1e-6", "x=$[17001,24] weight=$[24]@+3 bias=f32[24]@+1 eps=1e-6",         \
        "x=$[1061,4096] residual=$[1061,4096] weight=f32[4096]@+1 eps=1e-6 values:mean", /* vectors of two rows */   \
        "x=$[17001,33]@+3 residual=$[17001,33] weight=$[33] eps=1e-6", "x=$[8501,132]@+4 weight=$[132] eps=1e-6",    \
        "x=$[8501,101] residual=$[8501,101] weight=$[101] eps=1e-6 rounding=8",                                      \
        "x=$[37,301] eps=1e-6 values:special", /* parameters off alignment */                                        \
        "x=$[2,1061,40] residual=$[2:59416,1061:56,40:1] scale=f32[2,1,40] shift=$[2,1,40]@+5 eps=1e-6",             \
        "x=$[3,211,472] scale=$[3,1,472] shift=$[3,1,472]@+1 eps=1e-6",                                              \
        "x=$[2,301,112] weight=f32[112] bias=$[112]@+1 scale=$[2,1,112]@+3 eps=1e-6 rounding=1",                     \
        "x=$[2,301,256] residual=$[2,301,256] shift=f32[2,1,256]@+1 eps=1e-6 rounding=8",                            \
        "x=$[1,301,2050] scale=$[1,1,2050]@+1 shift=$[1,1,2050] eps=1e-6",                                           \
        "x=$[2,5,1026] residual=$[2,5,1026] gate=$[2,1,1026]@+1 gate_table=f32[1026]@+1 scale=$[2,1,1026]@+3 "       \
        "scale_table=$[1026]@+1 shift=f32[2,5,1026]@+1 eps=1e-6 rounding=2",                                         \
        "x=$[141,33001] weight=$[33001] scale=$[1,33001] shift=$[1,33001]@+3 eps=1e-6",                              \
        "x=$[19,33000] residual=$[19,33000] bias=$[33000] scale=f32[19,33000]@+1 eps=1e-6",                          \
        "x=$[19,33000] residual=$[19,33000] weight=$[33000] eps=1e-6", /* units of 8 bytes */                        \
        "x=$[1061,122] weight=$[122] eps=1e-6", "x=$[1061,60]@+4 residual=$[1061,60] weight=$[60]@+1 eps=1e-6",      \
        "x=$[301,4108]@+4 residual=$[301,4108]@+4 weight=$[4108]@+1 bias=f32[4108]@+1 eps=1e-6",                     \
        "x=$[141,6555]@+4 residual=$[141,6555]@+4 weight=$[6555] eps=1e-6", "x=$[3,60002] weight=$[60002] eps=1e-6", \
        "out=$[37:136,123:1] x=$[37:136,123:1] weight=$[123]@+1 bias=$[123] eps=1e-6 values:mean",                   \
        "x=$[5:34586,33930:1]@+7 residual=$[5:54066,33930:1] weight=$[33930] eps=1e-6", "x=$[301,9001]@+5 eps=1e-6", \
        "x=$[139,90454] weight=f32[90454] bias=$[90454]@+3 eps=1e-6", /* rows of a part of a warp, and of a warp */  \
        "x=$[17003,32]@+3 residual=$[17003,32] weight=$[32] eps=1e-6", "x=$[9001,64]@+1 bias=f32[64]@+1 eps=1e-6",   \
        "x=$[9001,122]@+1 weight=$[122] eps=1e-6", "x=$[4001:256,250:1] weight=f32[250] eps=1e-6 rounding=1",        \
        "x=$[4001,511] residual=$[4001,511]@+2 weight=$[511]@+1 eps=1e-6", "x=$[2129,512]@+2 eps=1e-6 values:mean",  \
        "x=$[41:15500,7:70,31:500,61:1] weight=$[61] bias=$[61] eps=1e-6 weight_offset=1",                           \
        "sum=$[4001,130] x=$[4001,130] residual=$[4001,130]@sum weight=$[130] eps=1e-6 rounding=8",                  \
        "x=$[4001,500]@+2 weight=$[500] eps=1e-6 values:largest", "x=$[9001,77] eps=1e-6 values:opposite",           \
        "x=$[4001,512] weight=f32[512]@+1 bias=$[512]@+1 eps=1e-6", /* as many lanes as a row has vectors */         \
        "x=$[2,5003,40] residual=$[2:280168,5003:56,40:1] scale=f32[2,1,40] shift=$[2,1,40]@+5 eps=1e-6",            \
        "x=$[3,1501,88] scale=$[3,1,88]@+1 shift=f32[3,1,88] eps=1e-6 rounding=1", "x=$[40013,8] bias=f32[8]",       \
        "x=$[9007,112] residual=$[9007,112] weight=f32[112]@+1 bias=f32[112] eps=1e-6 values:mean",                  \
        "x=$[9007,144] residual=$[9007:160,144:1] weight=$[144]@+1 eps=1e-6 rounding=8",                             \
        "x=$[30011,40] residual=$[30011,40]@+8 weight=f32[40]@+1 eps=1e-6",                                          \
        "x=$[17003,30] weight=$[30] eps=1e-6", /* x or the residual off a border alone, in short rows */             \
        "x=$[9001:293,288:1]@+6 residual=$[9001,288] weight=$[288] eps=1e-6",                                        \
        "x=$[1628:453,440:1] bias=f32[440] eps=1e-6", "x=$[1790,264]@+7 weight=$[264]@+1 eps=1e-6 rounding=1",       \
        "x=$[4001:131,128:1]@+1 residual=$[4001:129,128:1]@+3 weight=f32[128] eps=1e-6 rounding=8",                  \
        "x=$[4001,256]@+2 residual=$[4001,256]@+5 bias=$[256] eps=1e-6 values:mean",                                 \
        "x=$[301,200] residual=$[301,200]@+1 weight=$[200] eps=1e-6",                                                \
        "x=$[2:185111,5003:37,32:1]@+3 residual=$[2,5003,32] bias=f32[32] scale=$[2,1,32] shift=f32[2,1,32] "        \
        "eps=1e-6",                                                                                                  \
        "x=$[3,1501,88]@+5 scale=$[3,1,88]@+1 shift=f32[3,1,88] eps=1e-6 rounding=1",                                \
        "x=$[139,16500] weight=$[16500] eps=1e-6", /* many long rows, in shared memory */                            \
        "x=$[133,20001] residual=$[133,20001] bias=$[20001] eps=1e-6",                                               \
        "x=$[133:40003,40000:1]@+1 residual=$[133,40000]@+3 weight=$[40000]@+1 eps=1e-6 rounding=1",                 \
        "x=$[133,40000] weight=f32[40000] bias=$[40000] eps=1e-6 values:mean",                                       \
        "out=$[37,301] sum=$[37,301]@+3 x=$[37,301]@out residual=$[37,301]@sum weight=$[301] eps=1e-6"

#define NORM_BAD                                                                                                     \
    {"x=bf16[3,8] weight=bf16[7] out=bf16[3,8]", ADZE_BAD_ARG, "weight has 7 elements, it must have 8"},             \
        {"x=bf16[3,8] weight=bf16[1,8] out=bf16[3,8]", ADZE_BAD_ARG, "weight has rank 2"},                           \
        {"x=bf16[3,8] weight=f16[8] out=bf16[3,8]", ADZE_BAD_DTYPE, "weight is f16"},                                \
        {"x=i32[3,8] out=i32[3,8]", ADZE_BAD_DTYPE, "x is i32"},                                                     \
        {"x=bf16[3,8] residual=bf16[3,7] out=bf16[3,8]", ADZE_BAD_ARG, "residual has 7 in dimension 1"},             \
        {"x=bf16[3,8] residual=f32[3,8] out=bf16[3,8]", ADZE_BAD_DTYPE, "residual is f32"},                          \
        {"x=bf16[3,8] gate=bf16[8] out=bf16[3,8]", ADZE_BAD_ARG, "gate is given without residual"},                  \
        {"x=bf16[3,8] scale_table=bf16[8] out=bf16[3,8]", ADZE_BAD_ARG, "without scale"},                            \
        {"x=bf16[3,8] scale=bf16[2,8] out=bf16[3,8]", ADZE_BAD_ARG, "scale has 2 in dimension 0"},                   \
        {"x=bf16[3,8] scale=bf16[3,1] out=bf16[3,8]", ADZE_BAD_ARG, "scale has 1 in dimension 1"},                   \
        {"x=bf16[3,8] scale=bf16[1,3,8] out=bf16[3,8]", ADZE_BAD_ARG, "scale has rank 3"},                           \
        {"x=bf16[3,8] sum=bf16[3,8] out=bf16[3,8]", ADZE_BAD_ARG, "sum must be absent"},                             \
        {"x=bf16[3,8] rounding=64 out=bf16[3,8]", ADZE_BAD_ARG, "rounding is 64, it must be 0 or a sum of 1, 2"},    \
        {"x=bf16[3,8] eps=-1 out=bf16[3,8]", ADZE_BAD_ARG, "eps is -1"},                                             \
        {"x=bf16[3,8] out_dtype=5 out=i8[3,8] out_scale=none", ADZE_BAD_ARG, "out_scale"},                           \
        {"x=bf16[3,8] out_dtype=5 out=i8[3,8] out_scale=f32[2]", ADZE_BAD_ARG, "out_scale has 2 in dimension 0"},    \
        {"x=bf16[3,8] out_dtype=4 out=f8e4m3[3,8] out_scale=f16[3]", ADZE_BAD_DTYPE, "out_scale is f16"},            \
        {"x=bf16[3,8] out=bf16[3,8] out_scale=f32[3]", ADZE_BAD_ARG, "out_scale must be absent"},                    \
        {"x=bf16[3,8] out_dtype=2 out=f16[3,8]", ADZE_BAD_DTYPE, "out_dtype is f16"},                                \
        {"x=bf16[] out=bf16[]", ADZE_BAD_ARG, "rank 0"},                                                             \
    {                                                                                                                \
        "x=bf16[3,8] out=none", ADZE_BAD_ARG, "out is absent"                                                        \
    }

#endif
