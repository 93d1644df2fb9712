/* qk_norm_rope: what is checked and what is timed. */
#include "suite.h"

/* Tables of both dtypes, with and without rounding, a norm of each head or across them. */
#define TABLES(line, columns)                                                                                        \
    line " cos=$[7," columns "] sin=$[7," columns "] eps=1e-6",                                                      \
        line " cos=$[7," columns "] sin=$[7," columns "] eps=1e-6 rounding=3",                                       \
        line " cos=f32[7," columns "] sin=f32[7," columns "] eps=1e-6",                                              \
        line " cos=f32[7," columns "] sin=f32[7," columns "] eps=1e-6 rounding=7 weight_offset=1"
#define ANY_FORM(q, k, dim, q_dim, k_dim, more, columns)                                                             \
    TABLES("q=$[2,7,5," dim "]@+" q " k=$[2,7,3," dim "]@+" k " q_weight=$[" dim "] k_weight=f32[" dim "] " more,    \
           columns),                                                                                                 \
        TABLES("q=$[2,7,5," dim "]@+" q " k=$[2,7,3," dim "]@+" k " q_weight=$[" q_dim "]@+1 k_weight=f32[" k_dim    \
               "]@+1 across_heads=1 " more,                                                                          \
               columns)

static const char *const good[] = {
    "q=$[2,5,4,64] k=$[2,5,2,64] q_weight=$[64] k_weight=$[64] cos=$[2,5,64] sin=$[2,5,64] eps=1e-6 rounding=3",
    "q=$[2,5,4,64] k=$[2,5,2,64] q_weight=$[64] k_weight=$[64] cos=f32[5,32] sin=f32[5,32] eps=1e-6",
    "q=$[2,5,4,64] k=$[2,5,2,64] q_weight=$[64] k_weight=$[64] cos=f32[5,64] sin=f32[5,64] eps=1e-6 rounding=4 "
    "pairs=interleaved",
    "q=$[2,5,4,64] k=$[2,5,2,64] q_weight=f32[64] k_weight=f32[64] cos=f32[5,32] sin=f32[5,32] eps=1e-6 rounding=5 "
    "pairs=interleaved weight_offset=1",
    "q=$[2,5,4,256] k=$[2,5,1,256] q_weight=$[256] k_weight=$[256] cos=$[5,256] sin=$[5,256] eps=1e-6 rounding=2 "
    "weight_offset=1",
    "q=$[3,7,32,128] k=$[3,7,8,128] q_weight=$[128] k_weight=$[128] cos=$[3,7,128] sin=$[3,7,128] eps=1e-6 "
    "rounding=3",
    "q=$[3,7,32,128] k=$[3,7,8,128] q_weight=$[128] k_weight=$[128] cos=$[3,7,128] sin=$[3,7,128] eps=1e-6 "
    "rounding=3 flags=const_weights",
    "q=$[2,3,5,34] k=$[2,3,2,34] q_weight=f32[34] k_weight=f32[34] cos=f32[3,34] sin=f32[3,34] eps=1e-6 "
    "flags=const_weights",
    "q=$[2,9,3,128] q_weight=$[128] cos=$[9,128] sin=$[9,128] eps=1e-5", /* without k, without weights */
    "q=$[2,9,3,128] q_weight=$[128] cos=$[9,128] sin=$[9,128] eps=1e-6 rounding=3",
    "q=$[2,9,3,128] k=$[2,9,3,128] cos=$[9,128] sin=$[9,128] eps=1e-5",
    "q=$[2,9,3,128] k=$[2,9,3,128] k_weight=$[128] cos=$[9,64] sin=$[9,64] eps=1e-5", /* one mean across heads */
    "q=$[2,7,1,2048] k=$[2,7,1,2048] q_weight=$[2048] k_weight=$[2048] cos=f32[2,7,2048] sin=f32[2,7,2048] "
    "eps=1e-5 rounding=4 pairs=interleaved across_heads=1",
    "q=$[2,5,12,128] k=$[2,5,12,128] q_weight=$[1536] k_weight=$[1536] cos=f32[5,64] sin=f32[5,64] eps=1e-6 "
    "rounding=4 pairs=interleaved across_heads=1",
    "q=$[2,3,40,128] k=$[2,3,40,128] q_weight=f32[5120] k_weight=f32[5120] cos=f32[3,64] sin=f32[3,64] eps=1e-6 "
    "pairs=interleaved across_heads=1",
    "q=$[2,5,7,40] k=$[2,5,3,40] q_weight=$[280] k_weight=$[120] cos=f32[5,20] sin=f32[5,20] eps=1e-6 rounding=7 "
    "across_heads=1",
    "q=$[2,5,50,2] k=$[2,5,3,2] q_weight=$[100] k_weight=$[6] cos=f32[5,2] sin=f32[5,2] eps=1e-6 across_heads=1",
    "q=$[2,7,5,40] k=$[2,3,5,40] q_weight=$[280] k_weight=$[120] cos=f32[5,20] sin=f32[5,20] eps=1e-6 "
    "across_heads=1 heads_first=1",
    "q=$[1,2,64,256] k=$[1,2,2,256] q_weight=$[16384] k_weight=$[512] cos=f32[2,256] sin=f32[2,256] eps=1e-6 "
    "across_heads=1",
    "q=$[1,3,1,8192] k=$[1,3,1,8192] q_weight=$[8192] cos=f32[3,4096] sin=f32[3,4096] eps=1e-6",
    "q=$[1,2,3,12000] cos=f32[2,12000] sin=f32[2,12000] eps=1e-6 pairs=interleaved", /* sizes */
    "q=$[1,1,1,2] q_weight=$[2] cos=$[1,2] sin=$[1,2] eps=1e-6",
    "q=$[2,3,5,6] k=$[2,3,2,6] q_weight=$[6] k_weight=$[6] cos=f32[3,3] sin=f32[3,3] eps=1e-6",
    "q=$[2,3,5,30] k=$[2,3,2,30] q_weight=$[30] k_weight=$[30] cos=f32[3,15] sin=f32[3,15] eps=1e-6 "
    "pairs=interleaved",
    "q=$[2,3,5,34] k=$[2,3,2,34] q_weight=$[34] k_weight=f32[34] cos=$[3,34] sin=$[3,34] eps=1e-6 rounding=3",
    "q=$[2,3,5,72] k=$[2,3,2,72] q_weight=$[72] k_weight=$[72] cos=f32[3,36] sin=f32[3,36] eps=1e-6",
    "q=$[2,3,5,80] k=$[2,3,2,80] q_weight=$[80] k_weight=$[80] cos=f32[3,80] sin=f32[3,80] eps=1e-6",
    "q=$[2,3,5,96] k=$[2,3,2,96] q_weight=$[96] k_weight=$[96] cos=$[3,96] sin=$[3,96] eps=1e-6 rounding=3",
    "q=$[2,3,5,160] k=$[2,3,2,160] q_weight=$[160] k_weight=$[160] cos=f32[3,80] sin=f32[3,80] eps=1e-6",
    "q=$[2,3,5,512] k=$[2,3,2,512] q_weight=$[512] k_weight=$[512] cos=f32[3,256] sin=f32[3,256] eps=1e-6",
    "q=$[0,3,5,64] k=$[0,3,2,64] cos=$[3,64] sin=$[3,64]", "q=$[2,3,5,64] k=$[2,3,0,64] cos=$[3,64] sin=$[3,64]",
    "q=$[2,3,5,0] cos=$[3,0] sin=$[3,0]", /* in part */
    "q=$[2,3,4,96] k=$[2,3,2,96] q_weight=$[96] k_weight=$[96] cos=$[3,24] sin=$[3,24] rotary_dim=24 eps=1e-6 "
    "rounding=3",
    "q=$[2,3,4,128] k=$[2,3,2,128] q_weight=$[128] k_weight=$[128] cos=f32[3,32] sin=f32[3,32] rotary_dim=64 "
    "eps=1e-6 pairs=interleaved",
    "q_out=$[2,3,4,80] q=$[2,3,4,80]@q_out q_weight=$[80] cos=$[3,32] sin=$[3,32] rotary_dim=32 eps=1e-6", /* views */
    "q=$[2,4,50,128] k=$[2,2,50,128] q_weight=$[128] k_weight=$[128] cos=f32[50,64] sin=f32[50,64] heads_first=1 "
    "eps=1e-6",
    "q_out=$[2:1280,4:64,5:256,64:1] k_out=$[2:640,2:64,5:128,64:1] q=$[2:1280,4:64,5:256,64:1]@q_out "
    "k=$[2:640,2:64,5:128,64:1]@k_out q_weight=$[64] k_weight=$[64] cos=$[2,5,64] sin=$[2,5,64] heads_first=1 "
    "rounding=3 eps=1e-6",
    "q_out=$[2:2560,5:512,4:64,64:1] k_out=$[2:2560,5:512,2:64,64:1]@q_out+256 q=$[2:2560,5:512,4:64,64:1]@q_out "
    "k=$[2:2560,5:512,2:64,64:1]@q_out+256 q_weight=$[64] k_weight=$[64] cos=$[5,64] sin=$[5,64] rounding=3 eps=1e-6",
    "q=$[2,5,4,64]@+1 k=$[2,5,2,64]@+3 q_weight=$[64] k_weight=$[64] cos=$[5,64] sin=$[5,64]@+1 eps=1e-6",
    "q=$[2,5,4,64] k=$[2,5,2,64] q_weight=$[64]@+1 k_weight=$[64] cos=f32[5,64] sin=f32[5,64] eps=1e-6",
    "q=$[2:1400,5:270,4:66,64:1] k=$[2,5,2,64] q_weight=$[64] cos=$[5:67,64:1] sin=$[5:69,64:1] eps=1e-6",
    "q=$[2,5,4,64]@+1 k=$[2,5,2,64] q_weight=$[256] k_weight=$[128] cos=f32[5,32] sin=f32[5,32] eps=1e-6 "
    "across_heads=1 pairs=interleaved", /* other distributions */
    "q=$[2,5,4,64] k=$[2,5,2,64] q_weight=$[64] k_weight=$[64] cos=$[5,64] sin=$[5,64] eps=1e-6 values:tiny",
    "q=$[2,5,4,64] k=$[2,5,2,64] q_weight=$[64] k_weight=$[64] cos=$[5,64] sin=$[5,64] eps=1e-6 values:outlier",
    "q=$[2,5,4,64] k=$[2,5,2,64] q_weight=$[64] k_weight=$[64] cos=$[5,64] sin=$[5,64] eps=1e-6 values:zero",
    "q=$[2,5,4,64] k=$[2,5,2,64] q_weight=$[64] k_weight=$[64] cos=$[5,64] sin=$[5,64] eps=1e-6 values:special",
    /* tokens for several threads, one of them with the end of a batch and the start of the next */
    "q=$[2,90,8,64] k=$[2,90,2,64] q_weight=$[64] k_weight=$[64] cos=$[2,90,64] sin=$[2,90,64] eps=1e-6 rounding=3",
    /* rounded before the weight, rotated in float */
    "q=$[2,5,4,128] k=$[2,5,2,128] q_weight=$[128] k_weight=$[128] cos=f32[5,64] sin=f32[5,64] eps=1e-6 rounding=5 "
    "pairs=interleaved",
    "q=$[2,5,4,128] k=$[2,5,2,128] q_weight=$[128] k_weight=$[128] cos=f32[5,128] sin=f32[5,128] eps=1e-6 rounding=5 "
    "pairs=interleaved weight_offset=1",
    /* heads that share wide tables */
    "q=$[1,3,40,128] k=$[1,3,40,128] q_weight=$[5120] k_weight=$[5120] cos=f32[3,128] sin=f32[3,128] eps=1e-6 "
    "rounding=4 pairs=interleaved across_heads=1",
    "q=$[1,3,60,128] k=$[1,3,12,128] q_weight=$[7680] k_weight=$[1536] cos=f32[3,128] sin=f32[3,128] eps=1e-6 "
    "rounding=4 pairs=interleaved across_heads=1",
    /* no weights; one long head */
    "q=$[2,5,4,64] k=$[2,5,2,64] k_weight=$[64] cos=$[5,64] sin=$[5,64] eps=1e-6 rounding=2",
    "q=$[2,5,4,64] k=$[2,5,2,64] cos=f32[5,64] sin=f32[5,64] eps=1e-6 rounding=4 pairs=interleaved weight_offset=1",
    "q=$[2,5,4,64] k=$[2,5,2,64] q_weight=$[256] cos=f32[5,64] sin=f32[5,64] eps=1e-6 rounding=4 pairs=interleaved "
    "across_heads=1",
    "q=$[2,3,1,2048] k=$[2,3,1,2048] cos=f32[2,3,2048] sin=f32[2,3,2048] eps=1e-5 rounding=4 pairs=interleaved",
    "q=$[2,3,1,2048] k=$[2,3,1,2048] q_weight=$[2048] k_weight=$[2048] cos=f32[2,3,2048] sin=f32[2,3,2048] eps=1e-5 "
    "rounding=4 pairs=interleaved",
    /* units of 4, 2 and 1 elements: pairs of halves, pairs within a unit, an odd number of units, the rest of a head
     */
    ANY_FORM("4", "4", "72", "360", "216", "rotary_dim=56", "56"),
    ANY_FORM("4", "4", "72", "360", "216", "rotary_dim=56", "28"),
    ANY_FORM("2", "4", "40", "200", "120", "rotary_dim=20", "20"),
    ANY_FORM("2", "4", "40", "200", "120", "rotary_dim=20", "10"),
    ANY_FORM("1", "2", "36", "180", "108", "rotary_dim=34", "34"),
    ANY_FORM("1", "2", "138", "690", "414", "rotary_dim=34", "17"),
    ANY_FORM("4", "4", "48", "240", "144", "rotary_dim=36 pairs=interleaved", "36"),
    ANY_FORM("4", "4", "48", "240", "144", "rotary_dim=36 pairs=interleaved", "18"),
    ANY_FORM("2", "0", "40", "200", "120", "rotary_dim=30 pairs=interleaved", "30"),
    ANY_FORM("2", "0", "140", "700", "420", "rotary_dim=30 pairs=interleaved", "15"),
    ANY_FORM("1", "0", "33", "165", "99", "rotary_dim=30 pairs=interleaved", "30"),
    ANY_FORM("1", "0", "248", "1240", "744", "pairs=interleaved", "124"),
    /* heads that are rows of their own, and rows that do not fit in registers */
    TABLES("q=$[1,7,3,600]@+1 k=$[1,7,2,600]@+1 q_weight=$[600] k_weight=$[600]@+1", "600"),
    TABLES("q=$[1,7,3,600]@+4 k=$[1,7,2,600]@+4 q_weight=$[600]@+2 rotary_dim=96", "48"),
    "q=$[1,2,33,512]@+1 k=$[1,2,2,512]@+1 q_weight=$[16896] cos=$[2,512] sin=$[2,512] eps=1e-6 rounding=3 "
    "across_heads=1",
    "q=$[1,2,33,512]@+4 k=$[1,2,2,512]@+4 k_weight=f32[1024] cos=f32[2,256] sin=f32[2,256] eps=1e-6 rounding=7 "
    "weight_offset=1 pairs=interleaved across_heads=1",
    "q_out=$[1,2,33,512] q=$[1,2,33,512]@q_out q_weight=$[16896] cos=f32[2,250] sin=f32[2,250] eps=1e-6 "
    "rotary_dim=500 across_heads=1",
    /* heads first */
    TABLES("q=$[2,5,7,56]@+2 k=$[2,3,7,56]@+2 q_weight=f32[56]@+2 heads_first=1", "28"),
    TABLES("q=$[2,5,7,56] k=$[2,3,7,56] q_weight=$[280] k_weight=$[168] across_heads=1 heads_first=1", "56"),
    /* pieces of heads: the last of a half is short, or of one element, at every address; in place; several warps */
    TABLES("q=$[2,7,13,136]@+3 k=$[2,7,3,136]@+3 q_weight=$[136] k_weight=f32[136]@+1", "136"),
    TABLES("q=$[2,13,7,50]@+5 k=$[2,4,7,50]@+6 q_weight=$[50]@+1 rotary_dim=34 heads_first=1", "17"),
    TABLES("q_out=$[2,7,5,50]@+3 k_out=$[2,7,2,50]@+1 q=$[2,7,5,50]@q_out k=$[2,7,2,50]@k_out q_weight=$[50] "
           "rotary_dim=18 pairs=interleaved",
           "18"),
    TABLES("q=$[1,7,40,232]@+1 k=$[1,7,10,232]@+1 q_weight=$[9280] k_weight=f32[2320]@+1 across_heads=1", "116"),
    TABLES("q=$[1,7,13,48]@+2 q_weight=f32[624] across_heads=1 rotary_dim=26 pairs=interleaved", "13"), NULL};

/* Tokens for every multiprocessor. */
static const char *const gpu[] = {
    "q=$[2,600,8,64] k=$[2,600,2,64] q_weight=$[64] k_weight=$[64] cos=$[2,600,64] sin=$[2,600,64] eps=1e-6 "
    "rounding=3",
    /* head dims that fill no power of 2 of lanes, parts of heads, and every address */
    "q=$[1,301,8,112] k=$[1,301,3,112] q_weight=$[112] k_weight=$[112] cos=$[301,112] sin=$[301,112] eps=1e-6 "
    "rounding=3",
    "q=$[1,301,8,80] k=$[1,301,3,80] q_weight=$[80] k_weight=$[80] cos=f32[301,40] sin=f32[301,40] eps=1e-6",
    "q=$[1,301,8,40] k=$[1,301,3,40] q_weight=$[40] k_weight=$[40] cos=$[301,40] sin=$[301,40] eps=1e-6 rounding=2",
    "q=$[1,301,8,88] k=$[1,301,3,88] q_weight=$[88] cos=f32[301,44] sin=f32[301,44] eps=1e-6 rounding=4 "
    "pairs=interleaved",
    "q=$[1,301,8,248]@+2 k=$[1,301,3,248]@+1 q_weight=$[248]@+3 k_weight=$[248]@+1 cos=f32[301,248]@+1 "
    "sin=f32[301,248] eps=1e-6 rounding=5 pairs=interleaved",
    "q=$[1,301,8,128] k=$[1,301,3,128] q_weight=$[128] k_weight=$[128] cos=f32[301,32] sin=f32[301,32] "
    "rotary_dim=64 eps=1e-6",
    "q=$[1,301,8,96] k=$[1,301,3,96] q_weight=$[96] k_weight=$[96] cos=$[301,24] sin=$[301,24] rotary_dim=24 "
    "eps=1e-6 rounding=3",
    "q=$[1,301,8,192] k=$[1,301,3,192] q_weight=$[192] k_weight=$[192] cos=f32[301,32] sin=f32[301,32] "
    "rotary_dim=64 eps=1e-6 rounding=4 pairs=interleaved weight_offset=1",
    /* several heads in a thread, of which the last ones have fewer; several rows in a block */
    "q=$[1,4801,13,40]@+2 k=$[1,4801,5,40]@+2 q_weight=$[40] k_weight=f32[40] cos=$[4801,40] sin=$[4801,40] eps=1e-6",
    "q=$[1,13,4801,88]@+1 k=$[1,5,4801,88]@+1 q_weight=$[88] cos=f32[4801,44] sin=f32[4801,44] heads_first=1 "
    "eps=1e-6",
    "q=$[2,2400,13,56] k=$[2,2400,5,56] q_weight=$[56] k_weight=$[56] cos=$[2,2400,28] sin=$[2,2400,28] eps=1e-6 "
    "pairs=interleaved rounding=2",
    "q=$[1,3001,4,40] k=$[1,3001,2,40] q_weight=$[160] k_weight=$[80] cos=$[3001,40] sin=$[3001,40] eps=1e-6 "
    "across_heads=1",
    "q=$[1,1501,24,56]@+3 k=$[1,1501,6,56]@+3 q_weight=$[1344] cos=f32[1501,28] sin=f32[1501,28] eps=1e-6 "
    "across_heads=1 pairs=interleaved",
    "q=$[1,4,5003,80] k=$[1,2,5003,80] q_weight=$[320] k_weight=f32[160] cos=f32[5003,8] sin=f32[5003,8] eps=1e-6 "
    "rotary_dim=16 across_heads=1 heads_first=1",
    "q=$[2,601,9,72]@+2 k=$[2,601,80,72]@+2 k_weight=$[5760] cos=$[601,72] sin=$[601,72] eps=1e-6 rounding=2 "
    "across_heads=1",
    "q=$[1,7,90,72]@+1 q_weight=$[6480] cos=f32[7,72] sin=f32[7,72] eps=1e-6 across_heads=1",
    /* several heads of each group of lanes, several tokens of a warp */
    "q=$[2,32,301,136]@+3 k=$[2,8,301,136]@+3 q_weight=$[136] k_weight=$[136] cos=$[301,136] sin=$[301,136] eps=1e-6 "
    "heads_first=1",
    "q=$[4,12,1680,40] q_weight=f32[480] cos=$[1680,40] sin=$[1680,40] eps=1e-6 across_heads=1 pairs=interleaved "
    "heads_first=1",
    "q=$[2,601,24,80]@+5 k=$[2,601,12,80]@+5 q_weight=$[80] k_weight=$[80] cos=$[601,40] sin=$[601,40] eps=1e-6 "
    "pairs=interleaved",
    "q=$[1,3001,8,112] k=$[1,3001,3,112] q_weight=$[112] k_weight=f32[112]@+1 cos=f32[3001,112] sin=f32[3001,112] "
    "eps=1e-6 pairs=interleaved",
    "q=$[1,4001,28,72] k=$[1,4001,7,72] q_weight=$[72] k_weight=$[72] cos=$[4001,36] sin=$[4001,36] eps=1e-6",
    "q=$[1,2001,24,128] k=$[1,2001,6,128] q_weight=$[3072]@+1 k_weight=$[768] cos=f32[2001,32] sin=f32[2001,32] "
    "eps=1e-6 rotary_dim=64 across_heads=1",
    NULL};

static const adze_bad_case bad[] = {
    {"q=bf16[3,64] cos=f32[3,64] sin=f32[3,64] q_out=bf16[3,64]", ADZE_BAD_ARG, "q has rank 2"},
    {"q=bf16[3,2,64] k=f16[3,2,64] cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_DTYPE, "k is f16, q is bf16"},
    {"q=bf16[2,3,2,64] k=bf16[2,4,2,64] cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_ARG, "k has seq 4, q has 3"},
    {"q=bf16[3,2,64] cos=f32[3,66] sin=f32[3,66] rotary_dim=66", ADZE_BAD_ARG, "rotary_dim is 66"},
    {"q=bf16[3,2,64] cos=f32[4,64] sin=f32[4,64]", ADZE_BAD_ARG, "cos has 4 positions, q has 3"},
    {"q=bf16[3,2,64] q_weight=bf16[32] cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_ARG,
     "q_weight has 32 elements, it must have 64"},
    {"q=bf16[3,2,64] q_weight=bf16[64] cos=f32[3,64] sin=f32[3,64] across_heads=1", ADZE_BAD_ARG,
     "q_weight has 64 elements, it must have 128"},
    {"q=bf16[3,2,64] k=bf16[3,1,64] k_weight=bf16[128] cos=f32[3,64] sin=f32[3,64] across_heads=1", ADZE_BAD_ARG,
     "k_weight has 128 elements, it must have 64"},
    {"q=bf16[3,2,64] q_weight=f16[64] cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_DTYPE, "q_weight is f16"},
    {"q=bf16[3,2,64] k_weight=bf16[64] cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_ARG, "k_weight is given without k"},
    {"q=bf16[3,2,64] cos=f32[3,64] sin=f32[3,64] eps=-1", ADZE_BAD_ARG, "eps is -1"},
    {"q=bf16[3,2,64] cos=f32[3,64] sin=f32[3,64] across_heads=2", ADZE_BAD_ARG, "across_heads is 2"},
    {"q=bf16[3,2,64] cos=f32[3,64] sin=f32[3,64] rounding=8", ADZE_BAD_ARG, "rounding is 8"},
    {NULL, ADZE_OK, NULL}};

#define QWEN(tokens)                                                                                                 \
    "q_out=$[" tokens ",32,128] k_out=$[" tokens ",8,128] q=$[" tokens ",32,128]@q_out k=$[" tokens                  \
    ",8,128]@k_out q_weight=$[128] k_weight=$[128] cos=$[" tokens ",128] sin=$[" tokens ",128] eps=1e-6 rounding=3"
static const char *const bench[] = {
    QWEN("1"),
    QWEN("512"),
    QWEN("32768"),
    "q=$[1,4992,1,2048] k=$[1,4992,1,2048] q_weight=$[2048] k_weight=$[2048] cos=f32[1,4992,2048] "
    "sin=f32[1,4992,2048] eps=1e-5 rounding=4 pairs=interleaved across_heads=1",
    "q=$[1,4608,24,128] k=$[1,4608,24,128] q_weight=$[128] k_weight=$[128] cos=f32[4608,128] sin=f32[4608,128] "
    "eps=1e-6 rounding=4 pairs=interleaved",
    "q=$[1,32760,12,128] k=$[1,32760,12,128] q_weight=$[1536] k_weight=$[1536] cos=f32[32760,64] sin=f32[32760,64] "
    "eps=1e-6 rounding=4 pairs=interleaved across_heads=1",
    "q=$[1,4096,24,128] k=$[1,4096,24,128] q_weight=$[128] k_weight=$[128] cos=f32[4096,64] sin=f32[4096,64] "
    "eps=1e-6 rounding=5 pairs=interleaved",
    NULL};
static const char *const huge[] = {
    "q=$[1,560000,32,128] k=$[1,560000,8,128] q_weight=$[128] k_weight=$[128] cos=f32[560000,64] sin=f32[560000,64] "
    "eps=1e-6",
    NULL};

const adze_suite adze_suite_qk_norm_rope = {
    .op = &adze_op_qk_norm_rope, .good = good, .bad = bad, .bench = bench, .gpu = gpu, .huge = huge};
