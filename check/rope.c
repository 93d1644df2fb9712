/* rope: what is checked and what is timed. */
#include "suite.h"

/* Tables of both dtypes, with and without rounding. */
#define TABLES(line, columns)                                                                                        \
    line " cos=$[7," columns "] sin=$[7," columns "]", line " cos=$[7," columns "] sin=$[7," columns "] rounding=2", \
        line " cos=f32[7," columns "] sin=f32[7," columns "]",                                                       \
        line " cos=f32[7," columns "] sin=f32[7," columns "] rounding=2"

static const char *const good[] = {
    "q=$[2,5,4,64] k=$[2,5,2,64] cos=$[2,5,64] sin=$[2,5,64] rounding=2",
    "q=$[2,5,4,64] k=$[2,5,2,64] cos=f32[5,64] sin=f32[5,64]",
    "q=$[2,5,4,64] k=$[2,5,2,64] cos=f32[1,5,32] sin=f32[1,5,32]",
    "q=$[2,5,4,64] k=$[2,5,2,64] cos=$[5,32] sin=$[5,32] pairs=interleaved",
    "q=$[2,5,4,64] k=$[2,5,2,64] cos=f32[2,5,64] sin=f32[2,5,64] pairs=interleaved rounding=2",
    "q=$[3,7,32,128] k=$[3,7,8,128] cos=$[3,7,128] sin=$[3,7,128] rounding=2",
    "q=$[3,7,32,128] k=$[3,7,8,128] cos=f32[7,64] sin=f32[7,64] pairs=interleaved",
    "q=$[3,7,32,128] k=$[3,7,8,128] cos=$[3,7,128] sin=$[3,7,128] rounding=2 flags=const_weights",
    "q=$[2,3,5,34] k=$[2,3,2,34] cos=f32[3,34] sin=f32[3,34] flags=const_weights",
    "q=$[37,3,128] k=$[37,1,128] cos=f32[37,128] sin=f32[37,128]", /* without a batch */
    "q=$[2,9,4,128] cos=$[9,128] sin=$[9,128]",                    /* without k */
    "q=$[1,9,4,256] k=$[1,9,1,256] cos=$[9,256] sin=$[9,256]",
    "q=$[1,9,3,512] k=$[1,9,2,512] cos=f32[9,512] sin=f32[9,512]", /* sizes */
    "q=$[1,1,1,2] cos=$[1,2] sin=$[1,2]", "q=$[1,3,2,2] k=$[1,3,1,2] cos=$[3,1] sin=$[3,1] pairs=interleaved",
    "q=$[2,3,5,6] k=$[2,3,2,6] cos=f32[3,3] sin=f32[3,3]",
    "q=$[2,3,5,10] k=$[2,3,2,10] cos=f32[3,10] sin=f32[3,10] pairs=interleaved",
    "q=$[2,3,5,30] k=$[2,3,2,30] cos=$[3,15] sin=$[3,15] pairs=interleaved rounding=2",
    "q=$[2,3,5,34] k=$[2,3,2,34] cos=$[3,34] sin=$[3,34] rounding=2",
    "q=$[2,3,5,40] k=$[2,3,2,40] cos=$[3,40] sin=$[3,40]",
    "q=$[2,3,5,72] k=$[2,3,2,72] cos=f32[3,36] sin=f32[3,36] pairs=interleaved",
    "q=$[2,3,5,96] k=$[2,3,2,96] cos=$[3,96] sin=$[3,96] rounding=2",
    "q=$[2,3,5,160] k=$[2,3,2,160] cos=f32[3,80] sin=f32[3,80]",
    "q=$[0,3,5,64] k=$[0,3,2,64] cos=$[3,64] sin=$[3,64]", "q=$[2,0,5,64] k=$[2,0,2,64] cos=$[0,64] sin=$[0,64]",
    "q=$[2,3,5,64] k=$[2,3,0,64] cos=$[3,64] sin=$[3,64]", "q=$[2,3,5,0] cos=$[3,0] sin=$[3,0]", /* in part */
    "q=$[2,3,4,96] k=$[2,3,2,96] cos=$[3,24] sin=$[3,24] rotary_dim=24 rounding=2",
    "q=$[2,3,4,80] k=$[2,3,2,80] cos=$[3,32] sin=$[3,32] rotary_dim=32",
    "q=$[2,3,4,128] k=$[2,3,2,128] cos=f32[3,32] sin=f32[3,32] rotary_dim=64 pairs=interleaved",
    "q=$[2,3,4,128] k=$[2,3,2,128] cos=f32[3,6] sin=f32[3,6] rotary_dim=6 pairs=interleaved",
    "q_out=$[2,3,4,80] q=$[2,3,4,80]@q_out cos=$[3,32] sin=$[3,32] rotary_dim=32",
    "q=$[2,3,4,80] k=$[2,3,2,80] cos=$[3,32] sin=$[3,32] rotary_dim=32 rounding=2",
    "q=$[2,3,4,64] k=$[2,3,4,64] cos=$[3,16] sin=$[3,16] rotary_dim=16 rounding=2",
    "q=$[2,4,3,128] k=$[2,2,3,128] cos=$[3,64] sin=$[3,64] rotary_dim=64 pairs=interleaved heads_first=1 rounding=2",
    "k_out=$[2,3,2,128] q=$[2,3,4,128] k=$[2,3,2,128]@k_out cos=$[3,64] sin=$[3,64] rotary_dim=64 rounding=2",
    "q=$[2,3,5,64] k=$[2,3,2,64] cos=$[3,64] sin=$[3,64] pairs=interleaved", /* order of dimensions */
    "q=$[2,4,5,64] k=$[2,2,5,64] cos=$[2,5,64] sin=$[2,5,64] heads_first=1 rounding=2",
    "q=$[2,4,50,128] k=$[2,2,50,128] cos=f32[50,64] sin=f32[50,64] heads_first=1",
    "q=$[4,5,64] k=$[2,5,64] cos=$[5,64] sin=$[5,64] heads_first=1 pairs=interleaved",
    "q=$[2:1280,4:64,5:256,64:1] k=$[2:640,2:64,5:128,64:1] cos=$[2,5,64] sin=$[2,5,64] heads_first=1 rounding=2",
    "q_out=$[2:1280,4:64,5:256,64:1] k_out=$[2:640,2:64,5:128,64:1] q=$[2:1280,4:64,5:256,64:1]@q_out "
    "k=$[2:640,2:64,5:128,64:1]@k_out cos=$[2,5,64] sin=$[2,5,64] heads_first=1 rounding=2", /* in place */
    "q_out=$[9,4,128] k_out=$[9,2,128] q=$[9,4,128]@q_out k=$[9,2,128]@k_out cos=f32[9,64] sin=f32[9,64]",
    "q_out=$[9,4,128] k_out=$[9,2,128] q=$[9,4,128]@q_out k=$[9,2,128]@k_out cos=$[9,128] sin=$[9,128] "
    "pairs=interleaved rounding=2",
    /* q and k inside one qkv, whole and in place */
    "q=$[2:2880,5:576,4:72,72:1] k=$[2:2880,5:576,2:72,72:1]@q+288 cos=$[5,72] sin=$[5,72]",
    "q_out=$[2:2560,5:512,4:64,64:1] k_out=$[2:2560,5:512,2:64,64:1]@q_out+256 q=$[2:2560,5:512,4:64,64:1]@q_out "
    "k=$[2:2560,5:512,2:64,64:1]@q_out+256 cos=$[5,64] sin=$[5,64] rounding=2",
    /* heads of q, k and v in one tensor */
    "q_out=$[2:3840,5:768,4:192,64:1] k_out=$[2:3840,5:768,4:192,64:1]@q_out+64 "
    "q=$[2:3840,5:768,4:192,64:1]@q_out k=$[2:3840,5:768,4:192,64:1]@q_out+64 cos=$[5,16] sin=$[5,16] rotary_dim=16 "
    "rounding=2",
    /* odd addresses and strides */
    "q=$[2,5,4,64]@+1 k=$[2,5,2,64]@+3 cos=$[5,64] sin=$[5,64]@+1",
    "q_out=$[2,5,4,64]@+5 q=$[2,5,4,64] cos=f32[5,32]@+1 sin=f32[5,32] pairs=interleaved",
    "q=$[2:1400,5:270,4:66,64:1] k=$[2,5,2,64] cos=$[5:67,64:1] sin=$[5:69,64:1]",
    "q=$[2:-1280,5:256,4:64,64:1] cos=f32[2:-160,5:32,32:1] sin=f32[2:160,5:32,32:1]",
    "q=$[2,5,4,64] k=$[2,5,2,64] cos=$[5:64,32:1] sin=$[5:64,32:1]@cos+32 values:special",
    "q=$[2,5,4,64] k=$[2,5,2,64] cos=$[5,64] sin=$[5,64] values:special rounding=2",
    /* tokens for several threads, one of them with the end of a batch and the start of the next */
    "q=$[2,90,8,64] k=$[2,90,2,64] cos=$[2,90,64] sin=$[2,90,64] rounding=2",
    /* units of 4, 2 and 1 elements: pairs of halves, pairs within a unit, an odd number of units, the rest of a head
     */
    TABLES("q=$[2,7,5,72]@+4 k=$[2,7,3,72]@+4 rotary_dim=56", "56"),
    TABLES("q=$[2,7,5,72]@+4 k=$[2,7,3,72]@+4 rotary_dim=56", "28"),
    TABLES("q=$[2,7,5,40]@+2 k=$[2,7,3,40]@+4 rotary_dim=20", "20"),
    TABLES("q=$[2,7,5,40]@+2 k=$[2,7,3,40]@+4 rotary_dim=20", "10"),
    TABLES("q=$[2,7,5,36]@+1 k=$[2,7,3,36]@+2 rotary_dim=34", "34"),
    TABLES("q=$[2,7,5,36]@+1 k=$[2,7,3,36]@+2 rotary_dim=34", "17"),
    TABLES("q=$[2,7,5,48]@+4 k=$[2,7,3,48]@+4 rotary_dim=36 pairs=interleaved", "36"),
    TABLES("q=$[2,7,5,48]@+4 k=$[2,7,3,48]@+4 rotary_dim=36 pairs=interleaved", "18"),
    TABLES("q=$[2,7,5,40]@+2 k=$[2,7,3,40] rotary_dim=30 pairs=interleaved", "30"),
    TABLES("q=$[2,7,5,40]@+2 k=$[2,7,3,40] rotary_dim=30 pairs=interleaved", "15"),
    TABLES("q=$[2,7,5,33]@+1 k=$[2,7,3,33] rotary_dim=30 pairs=interleaved", "30"),
    TABLES("q=$[2,7,5,33]@+1 k=$[2,7,3,33] rotary_dim=30 pairs=interleaved", "15"),
    /* heads that are longer than a block of the tuned kernels; few elements; heads first; in place */
    TABLES("q=$[1,7,2,2064] k=$[1,7,1,2064]", "2064"), TABLES("q=$[1,7,2,2064] k=$[1,7,1,2064]", "1032"),
    TABLES("q=$[1,7,2,72] k=$[1,7,1,72] rotary_dim=2", "1"), TABLES("q=$[1,7,2,72] rotary_dim=18", "18"),
    TABLES("q=$[2,5,7,56]@+2 k=$[2,3,7,56]@+2 heads_first=1", "28"),
    TABLES("q=$[2:1960,5:56,7:280,56:1] k=$[2,3,7,56] heads_first=1 pairs=interleaved", "28"),
    TABLES("q_out=$[2,7,5,40] q=$[2,7,5,40]@q_out rotary_dim=18", "9"),
    /* pieces of heads: the last of a half is short, or of one element, at every address; in place */
    TABLES("q=$[2,7,13,136]@+3 k=$[2,7,3,136]@+3", "136"),
    TABLES("q=$[2,13,7,50]@+5 k=$[2,4,7,50]@+6 rotary_dim=34 heads_first=1", "17"),
    TABLES("q_out=$[2,7,5,50]@+3 k_out=$[2,7,2,50]@+1 q=$[2,7,5,50]@q_out k=$[2,7,2,50]@k_out rotary_dim=18 "
           "pairs=interleaved",
           "18"),
    NULL};

/* Tokens for every multiprocessor. */
static const char *const gpu[] = {
    "q=$[2,70,1,2048] k=$[2,70,1,2048] cos=f32[2,70,2048] sin=f32[2,70,2048] pairs=interleaved",
    "q=$[2,600,8,64] k=$[2,600,2,64] cos=$[2,600,64] sin=$[2,600,64] rounding=2",
    "q=$[1,3001,8,80] k=$[1,3001,3,80] cos=$[3001,32] sin=$[3001,32] rotary_dim=32 rounding=2",
    /* head dims that are no multiple of 16, parts of heads, and every address */
    "q=$[1,301,8,40] k=$[1,301,3,40] cos=$[301,40] sin=$[301,40] rounding=2",
    "q=$[1,301,8,56] k=$[1,301,3,56] cos=f32[301,28] sin=f32[301,28] pairs=interleaved",
    "q=$[1,301,8,72]@+1 k=$[1,301,3,72]@+2 cos=$[301,36]@+3 sin=$[301,36]@+1 pairs=interleaved",
    "q_out=$[1,301,8,88]@+1 q=$[1,301,8,88] cos=f32[301,88]@+1 sin=f32[301,88]",
    "q=$[1,301,8,104] k=$[1,301,3,104] cos=$[301,104] sin=$[301,104] pairs=interleaved rounding=2",
    "q=$[1,301,8,192] k=$[1,301,3,192] cos=f32[301,32] sin=f32[301,32] rotary_dim=64",
    "q=$[1,301,8,192] k=$[1,301,3,192] cos=f32[301,64] sin=f32[301,64] rotary_dim=64 pairs=interleaved",
    "q=$[1,301,8,200] k=$[1,301,3,200] cos=$[301,72] sin=$[301,72] rotary_dim=72",
    "q=$[1,301,8,66]@+1 k=$[1,301,3,66] cos=$[301,66] sin=$[301,66]",
    /* several heads in a thread, of which the last ones have fewer */
    "q=$[1,4801,13,40]@+2 k=$[1,4801,5,40]@+2 cos=$[4801,15] sin=$[4801,15] rotary_dim=30 pairs=interleaved",
    "q=$[1,13,4801,40]@+1 k=$[1,5,4801,40]@+1 cos=f32[4801,40] sin=f32[4801,40] heads_first=1",
    "q=$[2,2400,13,72]@+4 k=$[2,2400,5,72]@+4 cos=$[2,2400,36] sin=$[2,2400,36] rounding=2",
    "q=$[1,5001,16,56]@+5 k=$[1,5001,16,56]@+5 cos=$[5001,16] sin=$[5001,16] rotary_dim=16",
    "q=$[2,16,1501,136]@+3 k=$[2,4,1501,136]@+3 cos=f32[1501,68] sin=f32[1501,68] heads_first=1", NULL};

static const adze_bad_case bad[] = {
    {"q=bf16[3,64] cos=f32[3,64] sin=f32[3,64] q_out=bf16[3,64]", ADZE_BAD_ARG, "q has rank 2"},
    {"q=i32[3,2,64] cos=f32[3,64] sin=f32[3,64] q_out=i32[3,2,64]", ADZE_BAD_DTYPE, "q is i32"},
    {"q=bf16[3,2,64] k=f16[3,2,64] cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_DTYPE, "k is f16, q is bf16"},
    {"q=bf16[3,2,64] k=bf16[1,3,2,64] cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_ARG, "k has rank 4, q has 3"},
    {"q=bf16[2,3,2,64] k=bf16[1,3,2,64] cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_ARG, "k has batch 1, q has 2"},
    {"q=bf16[2,3,2,64] k=bf16[2,4,2,64] cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_ARG, "k has seq 4, q has 3"},
    {"q=bf16[2,3,2,64] k=bf16[2,3,2,32] cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_ARG, "k has head_dim 32, q has 64"},
    {"q=bf16[2,3,2,64] k=bf16[2,3,4,64] cos=f32[2,64] sin=f32[2,64] heads_first=1", ADZE_BAD_ARG,
     "k has seq 4, q has 2"},
    {"q=bf16[3,2,63] cos=f32[3,63] sin=f32[3,63]", ADZE_BAD_ARG, "rotary_dim is 63"},
    {"q=bf16[3,2,64] cos=f32[3,66] sin=f32[3,66] rotary_dim=66", ADZE_BAD_ARG, "rotary_dim is 66"},
    {"q=bf16[3,2,64] cos=f32[3,64] sin=f32[3,64] rotary_dim=-2", ADZE_BAD_ARG, "rotary_dim is -2"},
    {"q=bf16[3,2,64] cos=f16[3,64] sin=f32[3,64]", ADZE_BAD_DTYPE, "cos is f16"},
    {"q=bf16[3,2,64] cos=f32[3,64] sin=bf16[3,64]", ADZE_BAD_DTYPE, "sin is bf16, cos is f32"},
    {"q=bf16[3,2,64] cos=f32[64] sin=f32[64]", ADZE_BAD_ARG, "cos has rank 1"},
    {"q=bf16[3,2,64] cos=f32[2,3,64] sin=f32[2,3,64]", ADZE_BAD_ARG, "cos has batch 2, it must be 1"},
    {"q=bf16[3,2,64] cos=f32[4,64] sin=f32[4,64]", ADZE_BAD_ARG, "cos has 4 positions, q has 3"},
    {"q=bf16[3,2,64] cos=f32[3,16] sin=f32[3,16]", ADZE_BAD_ARG, "cos has 16 columns"},
    {"q=bf16[3,2,64] cos=f32[3,64] sin=f32[3,32]", ADZE_BAD_ARG, "different shapes"},
    {"q=bf16[3,2,64] cos=f32[3,64] sin=f32[1,3,64]", ADZE_BAD_ARG, "different shapes"},
    {"q=bf16[3,2,64] cos=f32[3,64] sin=f32[3,64] pairs=2", ADZE_BAD_ARG, "pairs is 2"},
    {"q=bf16[3,2,64] cos=f32[3,64] sin=f32[3,64] heads_first=2", ADZE_BAD_ARG, "heads_first is 2"},
    {"q=bf16[3,2,64] cos=f32[3,64] sin=f32[3,64] rounding=1", ADZE_BAD_ARG, "rounding is 1"},
    {"q=bf16[3,2,64] q_out=bf16[3,2,64] k_out=bf16[3,2,64] cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_ARG,
     "k_out must be absent"},
    {"q=bf16[3,2,64] k=bf16[3,2,64] k_out=none cos=f32[3,64] sin=f32[3,64]", ADZE_BAD_ARG, "k_out is absent"},
    {NULL, ADZE_OK, NULL}};

#define IN_PLACE(tokens)                                                                                             \
    "q_out=$[" tokens ",32,128] k_out=$[" tokens ",8,128] q=$[" tokens ",32,128]@q_out k=$[" tokens                  \
    ",8,128]@k_out cos=f32[" tokens ",64] sin=f32[" tokens ",64]"
static const char *const bench[] = {
    IN_PLACE("1"),
    IN_PLACE("512"),
    IN_PLACE("32768"),
    "q=$[1,4608,24,128] k=$[1,4608,24,128] cos=f32[4608,128] sin=f32[4608,128] pairs=interleaved",
    "q=$[1,4096,32,128] k=$[1,4096,32,128] cos=$[1,4096,32] sin=$[1,4096,32] rotary_dim=32 rounding=2",
    NULL};
static const char *const huge[] = {"q=$[1,560000,32,128] k=$[1,560000,8,128] cos=f32[560000,64] sin=f32[560000,64]",
                                   NULL};

const adze_suite adze_suite_rope = {
    .op = &adze_op_rope, .good = good, .bad = bad, .bench = bench, .gpu = gpu, .huge = huge};
