/* attention: what is checked and what is timed. */
#include "suite.h"

#include <math.h>

/* A number of queries, alone and in groups of heads, before and after a block of keys; v has its own row length. */
#define QUERIES(m)                                                                                                   \
    "q=$[1,2," m ",40] k=$[1,2,33,40] v=$[1,2,33,40] causal=1",                                                      \
        "q=$[1,6," m ",64] k=$[1,2,70,64] v=$[1,2,70,48] causal=1 sinks=$[6]"

/* A number of keys for one query and for more than the keys. */
#define KEYS(n)                                                                                                      \
    "q=$[2,4,1,64] k=$[2,2," n ",64] v=$[2,2," n ",64]", "q=$[1,2,20,40] k=$[1,2," n ",40] v=$[1,2," n ",40] "       \
                                                         "causal=1"

/* The length of a head's rows, in few and in many rows. */
#define HEAD(d)                                                                                                      \
    "q=$[1,2,3," d "] k=$[1,1,37," d "] v=$[1,1,37," d "]",                                                          \
        "q=$[1,1,25," d "] k=$[1,1,37," d "] v=$[1,1,37," d "] causal=1"

/* Few queries, and a block of them. */
#define EACH(rest)                                                                                                   \
    "q=$[2,4,2,40] k=$[2,2,50,40] v=$[2,2,50,40] " rest, "q=$[2,4,19,40] k=$[2,2,50,40] v=$[2,2,50,40] " rest

#define PAGED "lengths=i32[4] block_table=i32[4,3]"

static const char *const good[] = {
    "q=$[2,4,5,64] k=$[2,2,50,64] v=$[2,2,50,64]",
    QUERIES("1"),
    QUERIES("2"),
    QUERIES("4"),
    QUERIES("8"),
    QUERIES("15"),
    QUERIES("16"),
    QUERIES("17"),
    QUERIES("64"),
    KEYS("0"),
    KEYS("1"),
    KEYS("15"),
    KEYS("16"),
    KEYS("17"),
    KEYS("300"),
    HEAD("72"),
    HEAD("80"),
    HEAD("96"),
    HEAD("112"),
    HEAD("128"),
    HEAD("160"),
    HEAD("192"),
    HEAD("256"),
    HEAD("1"),
    HEAD("300"),
    "q=$[1,2,3,192] k=$[1,1,37,192] v=$[1,1,37,128]",
    "q=$[1,2,30,72] k=$[1,1,37,72] v=$[1,1,37,1]",
    "q=$[1,1,40,64] k=$[1,1,600,64] v=$[1,1,600,64] causal=1",
    "q=bf16[1,4,1,64] k=bf16[1,1,65537,64] v=bf16[1,1,65537,64]",
    "q=f32[1,2,1,40] k=f32[1,1,65537,40] v=f32[1,1,65537,40] values:wide",
    /* empty */
    "q=$[0,2,3,40] k=$[0,2,5,40] v=$[0,2,5,40]",
    "q=$[2,2,0,40] k=$[2,2,5,40] v=$[2,2,5,40]",
    "q=$[2,2,3,40] k=$[2,2,5,40] v=$[2,2,5,0]",
    "q=$[1,0,3,40] k=$[1,1,5,40] v=$[1,1,5,40]",
    /* options, alone and together */
    EACH("scale=0.3"),
    EACH("scale=-0.05 lse=none"),
    EACH("softcap=2.5"),
    EACH("softcap=30 causal=1 sinks=f32[4]"),
    EACH("sinks=$[4]"),
    EACH("window=1"),
    EACH("window=7"),
    EACH("causal=1 window=1"),
    EACH("causal=1 window=16 sinks=f32[4]"),
    EACH("causal=1 window=1000"),
    "q=$[1,1,70,40] k=$[1,1,300,40] v=$[1,1,300,40] causal=1 window=100",
    EACH("mask=u8[50]"),
    EACH("mask=bool[2,1,1,50] causal=1"),
    EACH("mask=$[4,1,50] sinks=$[4]"),
    EACH("mask=f32[50]@+1 softcap=3"),
    "q=$[2,4,5,40] k=$[2,2,50,40] v=$[2,2,50,40] mask=bool[2,4,5,50]",
    "q=$[2,4,19,40] k=$[2,2,50,40] v=$[2,2,50,40] mask=$[2,1,19,50] causal=1 scale=0.2",
    "q=$[2,4,19,40] k=$[2,2,50,40] v=$[2,2,50,40] mask=u8[2:0,4:0,19:57,50:1]@+3 window=20",
    "q=$[1,2,13,40] k=$[1,2,300,40] v=$[1,2,300,40] mask=f32[1,1,13,300] sinks=f32[2]",
    "q=$[1,2,70,40] k=$[1,1,700,40] v=$[1,1,700,40] mask=bool[1,1,70,700]",
    "q=$[1,1,70,40] k=$[1,1,601,40] v=$[1,1,601,40] mask=$[1:42490,1:42490,70:607,601:1]@+1",
    "q=$[1,2,6,40] k=$[1,2,523,40] v=$[1,2,523,40] mask=f32[6,523] causal=1",
    /* lengths, offsets and pages */
    EACH("lengths=i32[2]"),
    EACH("lengths=i32[2] causal=1 mask=u8[50]"),
    "q=$[6,2,3,40] k=$[6,1,20,40] v=$[6,1,20,40] lengths=i32[6] causal=1 sinks=f32[2]",
    "q=$[1,4,30,40] k=$[1,2,41,40] v=$[1,2,41,40] q_offsets=i32[5] k_offsets=i32[5] causal=1",
    "q=$[1,4,30,40] k=$[4,2,41,40] v=$[4,2,41,40] q_offsets=i32[5] lengths=i32[4] window=9",
    "q=$[4,2,3,40] k=$[1,2,41,40] v=$[1,2,41,40] k_offsets=i32[5]",
    "q=$[1,2,0,40] k=$[1,2,0,40] v=$[1,2,0,40] q_offsets=i32[1] k_offsets=i32[1]",
    "q=$[4,4,1,64] k=$[7,2,16,64] v=$[7,2,16,64] " PAGED,
    "q=$[4,4,6,64] k=$[7,1,16,64] v=$[7,1,16,40] causal=1 " PAGED,
    "q=$[4,2,14,40] k=$[7:40,2:4480,16:280,40:1] v=$[7,2,16,40] window=20 sinks=$[2] " PAGED,
    "q=$[1,4,29,40] k=$[3,2,16,40] v=$[3,2,16,40] q_offsets=i32[5] causal=1 " PAGED,
    "q=$[4,2,3,40] k=$[7,1,16,40] v=$[7,1,16,40] mask=f32[4,1,3,48] " PAGED,
    "q=$[4,2,1,128] k=$[2,1,256,128] v=$[2,1,256,128] " PAGED,
    "q=$[2,4,1,64] k=$[20,1,64,64] v=$[20,1,64,64] lengths=i32[2] block_table=i32[2,12]",
    "q=$[1,4,50,40] k=$[1,2,90,40] v=$[1,2,90,40] q_offsets=i32[41] k_offsets=i32[41] causal=1",
    /* many keys for few queries, whose parts are merged */
    "q=$[1,8,4,128] k=$[1,2,1500,128] v=$[1,2,1500,128] causal=1 sinks=f32[8]",
    "q=$[1,2,20,72] k=$[1,1,1500,72] v=$[1,1,1500,72]",
    "q=$[1,2,9,64] k=$[4,1,1300,64] v=$[4,1,1300,64] q_offsets=i32[5] lengths=i32[4]",
    /* few keys, in one warp and in several */
    "q=$[4,32,1,80] k=$[4,4,25,80] v=$[4,4,25,80]",
    "q=$[1,16,18,96] k=$[1,2,18,96] v=$[1,2,18,88] causal=1",
    "q=$[3,8,2,128] k=$[3,2,64,128] v=$[3,2,64,128] window=20 sinks=$[8]",
    "q=$[6,4,3,128] k=$[6,2,61,128] v=$[6,2,61,72] lengths=i32[6] causal=1 softcap=9",
    "q=$[6,2,1,64] k=$[6,2,60,64] v=$[6,2,60,64] lengths=i32[6] values:special",
    "q=$[33,8,1,64] k=$[33,4,293,64] v=$[33,4,293,64] mask=bool[33,1,1,293]",
    "q=$[1,2,40,8] k=$[1,2,1,8] v=$[1,2,1,200]",
    "q=$[1,4,1,128] k=$[1,1,3301,128] v=$[1,1,3301,128] lengths=i32[1]",
    "q=$[1,2,3,128] k=$[1,1,3250,128] v=$[1,1,3250,128] causal=1 sinks=f32[2]",
    "q=$[1,1,1,128] k=$[1,1,3323,128] v=$[1,1,3323,128] mask=bool[1,1,1,3323] window=3000",
    "q=$[1,2,1,128] k=$[14,1,256,128] v=$[14,1,256,128] lengths=i32[1] block_table=i32[1,13]",
    "q=$[70,4,1,128] k=$[70,2,97,128] v=$[70,2,97,128] lengths=i32[70]",
    /* old keys that may be read early */
    "q=$[2,8,1,128] k=$[2,2,700,128] v=$[2,2,700,128] lengths=i32[2] flags=const_cache",
    "q=$[1,4,3,64] k=$[1,2,513,64] v=$[1,2,513,64] causal=1 flags=const_cache",
    "q=$[4,4,2,128] k=$[9,2,64,128] v=$[9,2,64,128] causal=1 flags=const_cache " PAGED,
    "q=$[2,4,1,128] k=f8e4m3[2,2,900,128] v=f8e4m3[2,2,900,128] k_scale=f32[2,2,900] v_scale=f32[2,2,900] "
    "lengths=i32[2] flags=const_cache",
    /* many keys of few rows at any stride: heads after tokens, rows of v within a page of k, masks */
    "q=$[2,8,1,64] k=$[2:66048,4:64,258:256,64:1] v=$[2:66048,4:64,258:256,64:1]",
    "q=$[1,6,1,80] k=$[1:0,3:80,701:240,80:1] v=$[1:0,3:80,701:240,80:1] sinks=f32[6] lse=f32[1,6,1]",
    "q=$[3,8,2,128] k=$[3:180224,2:128,401:448,128:1] v=$[3:180224,2:128,401:448,128:1] causal=1",
    "q=$[2,16,1,96] k=$[2,2,129,96] v=$[2,2,129,40] mask=$[129] softcap=20",
    "q=$[1,3,2,40] k=$[1,1,515,40] v=$[1,1,515,120] mask=bool[1,3,2,515] scale=0.4",
    "q=$[2,4,1,160] k=$[2:48800,1:48800,305:160,160:1] v=$[2:48800,1:48800,305:160,160:1] flags=const_cache",
    "q=$[1,7,1,200] k=$[1,1,170,200] v=$[1,1,170,256] values:special",
    "q=$[1,2,4,256] k=$[1:0,2:256,1100:512,256:1] v=$[1,2,1100,256] causal=1",
    "q=$[9,8,1,64] k=$[9,4,1031,64] v=$[9,4,1031,64] flags=const_cache",
    "q=$[5,2,3,72] k=$[5,2,3,72] v=$[5,2,3,72]",
    /* many rows: tiles that are full or not, of all keys or of some */
    "q=$[1,2,300,128] k=$[1,1,450,128] v=$[1,1,450,128] causal=1",
    "q=$[2,3,129,64] k=$[2,1,257,64] v=$[2,1,257,64]",
    "q=$[1,2,140,96] k=$[1,1,200,96] v=$[1,1,200,80] sinks=f32[2]",
    "q=$[1,2,270,128] k=$[1,2,130,128] v=$[1,2,130,128] causal=1",
    "q=$[6,2,200,128] k=$[6,1,300,128] v=$[6,1,300,128] lengths=i32[6] causal=1",
    "q=$[2,1,200,64] k=$[2,1,300,64] v=$[2,1,300,64] lengths=i32[2] window=70",
    "q=$[1:0,3:64,400:192,64:1] k=$[1:0,1:0,400:64,64:1] v=$[1:0,1:0,400:64,64:1] window=90 causal=1",
    /* floats: rows of odd lengths at odd addresses, groups of heads, steps of keys that are full or not */
    "q=f32[2,8,1,33] k=f32[2,2,65,33] v=f32[2,2,65,33] lse=f32[2,8,1]",
    "q=f32[1,8,1,33]@+1 k=f32[1,1,1300,33]@+3 v=f32[1,1,1300,35]@+1 sinks=f32[8]",
    "q=f32[1,4,40,33] k=f32[1,1,63,33] v=f32[1,1,63,30] causal=1 window=20",
    "q=f32[2,8,1,160] k=f32[2,1,64,160] v=f32[2,1,64,160]",
    "q=f32[1,8,9,160] k=f32[1,2,700,160] v=f32[1,2,700,160] causal=1 softcap=5",
    "q=f32[2,4,70,160] k=f32[2,1,300,160] v=f32[2,1,300,160] lengths=i32[2] causal=1",
    "q=f32[1,2,1,256] k=f32[1,2,1,256] v=f32[1,2,1,256]",
    "q=f32[1,4,3,256] k=f32[1,1,1100,256] v=f32[1,1,1100,256] mask=bool[3,1100]",
    "q=f32[1,2,130,256] k=f32[1,1,65,256] v=f32[1,1,65,200] mask=f32[1,1,130,65] sinks=f32[2]",
    "q=f32[4,8,1,128] k=f32[40,1,16,128] v=f32[40,1,16,128] lengths=i32[4] block_table=i32[4,10]",
    "q=f32[1,4,90,100] k=f32[1,2,150,100] v=f32[1,2,150,100] q_offsets=i32[6] k_offsets=i32[6] causal=1",
    "q=f32[1,4,36,64] k=f32[1,1,2000,64] v=f32[1,1,2000,64] causal=1",
    /* floats on tensor cores: 64 rows or 128, row lengths and keys within and beyond a product's 8, 16 or 32 */
    "q=f32[1,1,65,17]@+1 k=f32[1,1,33,17]@+1 v=f32[1,1,33,9]@+3",
    "q=f32[2,3,129,64] k=f32[2,1,257,64] v=f32[2,1,257,64]@+1 causal=1 values:wide",
    "q=f32[1,2,70,65] k=f32[1,1,95,65] v=f32[1,1,95,65] values:special",
    "q=f32[1,2,150,128] k=f32[1,2,129,128] v=f32[1,2,129,100] window=50 sinks=f32[2]",
    "q=f32[1,1,70,192] k=f32[1,1,1500,192] v=f32[1,1,1500,130] values:outlier",
    "q=f32[1,1,140,256] k=f32[1,1,67,256] v=f32[1,1,67,256] causal=1 values:special",
    "q=f32[1,1,40,200] k=f32[1,1,70,200] v=f32[1,1,70,256] values:tiny scale=1",
    "q=f32[4,2,40,128] k=f32[7,1,16,128] v=f32[7,1,16,128] causal=1 softcap=20 " PAGED,
    "q=f32[1,4,200,48] k=f32[1,2,300,48] v=f32[1,2,300,48] q_offsets=i32[6] k_offsets=i32[6]",
    /* dtypes, addresses and row lengths that become floats */
    "q=$[2,8,1,33] k=$[2,2,300,33] v=$[2,2,300,35] lse=f32[2,8,1]",
    "q=$[1,4,70,36] k=$[1,2,150,36] v=$[1,2,150,36] causal=1 window=60",
    "q=$[1,4,30,41] k=$[1,2,41,41] v=$[1,2,41,41] q_offsets=i32[5] k_offsets=i32[5] causal=1",
    "q=$[4,4,6,33] k=$[7,1,16,33] v=$[7,1,16,33] mask=$[4,1,6,48] sinks=$[4] " PAGED,
    "q=$[1,8,1,512] k=$[1,1,700,512] v=$[1,1,700,512]",
    "q=$[1,1,70,512] k=$[1,1,130,512] v=$[1,1,130,300] causal=1",
    "q=$[1,2,33,300] k=$[1,1,40,300] v=$[1,1,40,512] lengths=i32[1]",
    "q=$[1,4,2,576] k=$[1,1,40,576] v=$[1,1,40,512]",
    "q=f32[2,4,1,64] k=i8[2,2,300,64] v=i8[2,2,300,64] k_scale=f32[2,2,300] v_scale=f32[1] lengths=i32[2]",
    "q=f32[1,4,70,128] k=f8e4m3[1,2,150,128] v=f8e4m3[1,2,150,128] k_scale=f32[1] v_scale=f32[1,2,150] causal=1",
    "q=f32[4,8,3,128] k=i8[7,2,16,128] v=i8[7,2,16,128] k_scale=f32[7,2,16] v_scale=f32[7,2,16] " PAGED,
    "q=$[1,4,2,36] k=f8e4m3[1,2,900,36] v=f8e4m3[1,2,900,36] k_scale=f32[1,2,900] v_scale=f32[1,2,900]",
    /* quantised keys */
    "q=$[2,4,1,64] k=i8[2,2,37,64] v=i8[2,2,37,64] k_scale=f32[2,2,37] v_scale=f32[2,2,37]",
    "q=$[2,4,19,72] k=f8e4m3[2,2,37,72] v=f8e4m3[2,2,37,40] k_scale=f32[1] v_scale=f32[1] causal=1",
    "q=$[4,4,2,64] k=f8e4m3[7,2,16,64] v=f8e4m3[7,2,16,64] k_scale=f32[7:64,2:16,16:1] v_scale=f32[7,2,16] " PAGED,
    "q=$[1,2,21,40] k=i8[1,1,41,40]@+1 v=i8[1,1,41,40]@+3 k_scale=f32[1] v_scale=f32[1,1,41] q_offsets=i32[4] "
    "k_offsets=i32[4]",
    "q=$[1,4,3,128] k=i8[1,1,1300,128] v=i8[1,1,1300,128] k_scale=f32[1,1,1300] v_scale=f32[1] causal=1",
    "q=$[1,2,20,128] k=f8e4m3[1,1,150,128] v=f8e4m3[1,1,150,64] k_scale=f32[1,1,150] v_scale=f32[1,1,150] window=70",
    "q=$[1,2,21,256] k=i8[1,1,80,256] v=i8[1,1,80,256] k_scale=f32[1] v_scale=f32[1,1,80] softcap=5 mask=f32[80]",
    "q=$[2,2,1,160] k=f8e4m3[2,1,70,160] v=f8e4m3[2,1,70,160] k_scale=f32[1] v_scale=f32[1] lengths=i32[2]",
    /* other distributions */
    EACH("values:special"),
    EACH("values:special sinks=f32[4] causal=1"),
    EACH("values:wide"),
    EACH("values:zero"),
    EACH("values:tiny scale=1"),
    EACH("values:outlier softcap=20"),
    "q=$[1,1,17,64] k=$[1,1,70,64] v=$[1,1,70,64] values:mean",
    /* views: heads after tokens, odd addresses, a shared head, keys backwards */
    "q=$[2:1000,4:40,5:200,40:1]@+1 k=$[2:4200,2:41,50:84,40:1]@+3 v=$[2:4200,2:41,50:84,40:1]@+1 "
    "out=$[2:1003,4:40,5:200,40:1]@+1 lse=f32[2:100,4:9,5:1]@+1",
    "q=$[1:0,4:40,30:160,40:1] k=$[1:0,1:0,50:-40,40:1] v=$[1:0,1:0,50:0,40:1] out=$[1:0,4:40,30:160,40:1] causal=1",
    NULL,
};

static const char *const gpu[] = {
    /* many rows with a mask, or a softcap: each dtype and alignment, broadcast and not, in each shape of tiles */
    "q=$[1,2,150,64] k=$[1,1,333,64] v=$[1,1,333,64] mask=$[1,2,150,333] causal=1",
    "q=$[2,1,200,64] k=$[2,1,300,64] v=$[2,1,300,64] mask=bool[2,1,1,300] lengths=i32[2]",
    "q=$[1,2,131,96] k=$[1,1,270,96] v=$[1,1,270,80] mask=u8[131:271,270:1]@+5 window=100",
    "q=$[2,2,140,96] k=$[2,1,180,96] v=$[2,1,180,96] mask=f32[2:25201,1:25201,140:180,180:1]@+1",
    "q=$[1,2,131,128] k=$[1,2,270,128] v=$[1,2,270,128] mask=bool[1,1,131,270]",
    "q=$[1,2,131,128] k=$[1,2,257,128] v=$[1,2,257,128] mask=f32[2,131,257] values:outlier softcap=30",
    "q=$[2,1,150,128] k=$[2,1,401,128] v=$[2,1,401,128] mask=$[2,1,1,401]@+3 values:special",
    "q=$[1,2,150,256] k=$[1,1,200,256] v=$[1,1,200,256] causal=1 softcap=50",
    "q=$[1,2,130,200] k=$[1,1,161,200] v=$[1,1,161,160] mask=$[1,2,130,161]",
    /* keys in more parts than a cluster has blocks, and more pairs of a sequence and a head of k than a GPU has
       blocks */
    "q=$[1,24,1,64] k=$[1:0,3:64,12001:192,64:1] v=$[1:0,3:64,12001:192,64:1]",
    "q=$[1,6,4,80] k=$[1,3,9001,80] v=$[1,3,9001,80] causal=1 lse=f32[1,6,4]",
    "q=$[3,4,1,128] k=$[3:896128,1:128,7001:128,128:1] v=$[3:1792256,1:128,7001:256,128:1] mask=$[7001]",
    "q=$[1,6,1,160] k=$[1:0,3:160,3333:480,160:1] v=$[1:0,3:160,3333:480,160:1] sinks=$[6]",
    "q=$[2,8,1,256] k=$[2,1,3000,256] v=$[2,1,3000,256]",
    "q=$[101,8,1,64] k=$[101:17920,4:4480,70:64,64:1] v=$[101:17920,4:64,70:256,64:1] flags=const_cache",
    "q=$[67,8,1,80] k=$[67:37760,4:80,118:320,80:1] v=$[67,4,118,80]",
    "q=$[70,2,3,160] k=$[70,2,33,160] v=$[70,2,33,192] causal=1",
    "q=$[67,2,2,248] k=$[67,2,97,248] v=$[67,2,97,8]",
    "q=bf16[16,40,1,128] k=bf16[16,20,421,128] v=bf16[16,20,421,128] lengths=i32[16]",
    NULL,
};

#define QKV   "q=bf16[2,4,3,8] k=bf16[2,2,5,8] v=bf16[2,2,5,8] "
#define OUT   " out=bf16[2,4,3,8]"
#define PAGES "q=bf16[2,4,3,8] k=bf16[7,2,16,8] v=bf16[7,2,16,8] "
#define I8    "q=bf16[2,4,3,8] k=i8[2,2,5,8] v=i8[2,2,5,8] "

static const adze_bad_case bad[] = {
    {"q=i32[2,4,3,8] k=i32[2,2,5,8] v=i32[2,2,5,8] out=i32[2,4,3,8]", ADZE_BAD_DTYPE, "q is i32"},
    {"q=bf16[4,3,8] k=bf16[2,2,5,8] v=bf16[2,2,5,8]" OUT, ADZE_BAD_ARG, "q has rank 3, it must be 4"},
    {"q=bf16[2,4,3,8] k=f32[2,2,5,8] v=f32[2,2,5,8]" OUT, ADZE_BAD_DTYPE,
     "k is f32, it must be q's bf16, i8 or f8e4m3"},
    {"q=bf16[2,4,3,8] k=bf16[2,2,5,8] v=f32[2,2,5,8]" OUT, ADZE_BAD_DTYPE, "v is f32, it must be k's bf16"},
    {"q=bf16[2,4,3,8] k=bf16[2,2,5,9] v=bf16[2,2,5,8]" OUT, ADZE_BAD_ARG, "k has 9 in dimension 3, it must have 8"},
    {"q=bf16[2,4,3,8] k=bf16[2,2,5,8] v=bf16[2,2,6,8]" OUT, ADZE_BAD_ARG, "v has 6 in dimension 2, it must have 5"},
    {"q=bf16[2,4,3,8] k=bf16[2,3,5,8] v=bf16[2,3,5,8]" OUT, ADZE_BAD_ARG,
     "4 heads, they must be a multiple of k's 3"},
    {"q=bf16[2,4,3,8] k=bf16[3,2,5,8] v=bf16[3,2,5,8]" OUT, ADZE_BAD_ARG, "k has 3 in dimension 0, it must have 2"},
    {"q=bf16[2,4,3,8] k=bf16[2:160,2:80,5:16,8:2] v=bf16[2,2,5,8]" OUT, ADZE_BAD_ARG, "k has stride 2"},
    {"q=bf16[2,4,3,0] k=bf16[2,2,5,0] v=bf16[2,2,5,8]" OUT, ADZE_BAD_ARG,
     "rows of q have 0 elements, they must have 1 to 1024"},
    {QKV "out=bf16[2,4,3,9]", ADZE_BAD_ARG, "out has 9 in dimension 3, it must have 8"},
    {QKV "lse=bf16[2,4,3]" OUT, ADZE_BAD_DTYPE, "lse is bf16, it must be f32"},
    {QKV "softcap=-1" OUT, ADZE_BAD_ARG, "softcap is -1, it must not be negative"},
    {QKV "scale=inf" OUT, ADZE_BAD_ARG, "scale is inf"},
    {QKV "causal=2" OUT, ADZE_BAD_ARG, "causal is 2"},
    {QKV "window=-1" OUT, ADZE_BAD_ARG, "window is -1"},
    {QKV "mask=f16[5]" OUT, ADZE_BAD_DTYPE, "mask is f16, it must be bool, u8, f32 or q's bf16"},
    {QKV "mask=u8[3,1]" OUT, ADZE_BAD_ARG, "mask has 1 in dimension 1, it must have 5"},
    {QKV "mask=u8[2,5]" OUT, ADZE_BAD_ARG, "mask has 2 in dimension 0, it must have 3 or 1"},
    {QKV "sinks=f16[4]" OUT, ADZE_BAD_DTYPE, "sinks is f16, it must be f32 or q's bf16"},
    {QKV "sinks=f32[2]" OUT, ADZE_BAD_ARG, "sinks has 2 in dimension 0, it must have 4"},
    {QKV "lengths=i64[2]" OUT, ADZE_BAD_DTYPE, "lengths is i64, it must be i32"},
    {QKV "lengths=i32[3]" OUT, ADZE_BAD_ARG, "lengths has 3 in dimension 0, it must have 2"},
    {QKV "k_scale=f32[1]" OUT, ADZE_BAD_ARG, "k_scale is given, k and v are not quantised"},
    {QKV "q_offsets=i32[3]" OUT, ADZE_BAD_ARG, "q has 2 in dimension 0, it must have 1"},
    {QKV "k_offsets=i32[4]" OUT, ADZE_BAD_ARG, "k_offsets has 4 in dimension 0, it must have 3"},
    {QKV "q_offsets=i32[0]" OUT, ADZE_BAD_ARG, "q_offsets is empty, it must have sequences + 1 elements"},
    {"q=bf16[2,4,3,8] k=bf16[1,2,5,8] v=bf16[1,2,5,8] k_offsets=i32[3] lengths=i32[2]" OUT, ADZE_BAD_ARG,
     "lengths is given, k_offsets has the lengths"},
    {"q=bf16[2,4,3,8] k=bf16[1,2,5,8] v=bf16[1,2,5,8] k_offsets=i32[3] mask=u8[5]" OUT, ADZE_BAD_ARG,
     "mask is given, it must be absent with q_offsets and k_offsets"},
    {PAGES "block_table=i32[2,3]" OUT, ADZE_BAD_ARG, "lengths is absent, block_table needs it"},
    {PAGES "lengths=i32[2] block_table=i32[3,3]" OUT, ADZE_BAD_ARG, "block_table has 3 in dimension 0"},
    {PAGES "lengths=i32[2] block_table=i32[6]" OUT, ADZE_BAD_ARG, "block_table has rank 1, it must be 2"},
    {I8 "v_scale=f32[1]" OUT, ADZE_BAD_ARG, "k_scale is absent, k and v of i8 need it"},
    {I8 "k_scale=f32[2,2,5] v_scale=f32[2,2,4]" OUT, ADZE_BAD_ARG, "v_scale has 4 in dimension 2, it must have 5"},
    {I8 "k_scale=f16[1] v_scale=f32[1]" OUT, ADZE_BAD_DTYPE, "k_scale is f16, it must be f32"},
    {I8 "k_scale=f32[5] v_scale=f32[1]" OUT, ADZE_BAD_ARG, "k_scale has rank 1, it must be [1], or of rank 3"},
    {"q=bf16[2,4,3,8] k=bf16[2,2,5,8] v=bf16[2,2,5,8] out=bf16[2,4,3,8]@q", ADZE_BAD_ARG, "out overlaps q"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "q=$[1,32,1024,128] k=$[1,32,1024,128] v=$[1,32,1024,128] causal=1 lse=none",
    "q=$[1,32,2048,128] k=$[1,8,2048,128] v=$[1,8,2048,128] causal=1 lse=none",
    "q=$[2,24,1024,64] k=$[2,24,1024,64] v=$[2,24,1024,64] lse=none",
    "q=$[1,32,1,128] k=$[1,8,8192,128] v=$[1,8,8192,128] lse=none",
    "q=$[1,32,1,128] k=$[1,32,4096,128] v=$[1,32,4096,128] lse=none",
    "q=$[8,32,1,128] k=$[8,8,8192,128] v=$[8,8,8192,128] lse=none",
    "q=$[8,32,1,128] k=f8e4m3[8,8,8192,128] v=f8e4m3[8,8,8192,128] k_scale=f32[1] v_scale=f32[1] lse=none",
    "q=$[8,32,1,128] k=$[1024,8,64,128] v=$[1024,8,64,128] lengths=i32[8] block_table=i32[8,128] lse=none",
    NULL,
};

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Lengths around a page's, with some that are none; the keys of a batch of large ones are all there. */
static int64_t length_of(int64_t s, int64_t n, int64_t page)
{
    if (n > 1000)
        return n;
    const int64_t paged[] = {page + 1, page - 1, n, page, 0}, plain[] = {n, n / 2 + 1, 1, n + 7, 0, -2};
    return page ? paged[s % 5] : plain[s % 6];
}

/* Pages that are read are of k, the others are nowhere. */
static void fill_pages(const adze_attention_args *a)
{
    const int64_t max = a->block_table.shape[1], page = a->k.shape[2], pages = a->k.shape[0];
    for (int64_t s = 0; s < a->block_table.shape[0]; s++)
        for (int64_t b = 0; b < max; b++) {
            const int64_t n = least(((const int32_t *)a->lengths.data)[s], max * page);
            adze_put(&a->block_table, s * a->block_table.stride[0] + b,
                     b * page < n ? (double)((7 * (s * max + b) + 3) % pages) : -1);
        }
}

/* Sequences of different lengths, the first of them empty where there are many; of an even number of them the last
   row belongs to none. */
static void fill_offsets(const adze_tensor *t, int64_t total)
{
    const int64_t sequences = t->dtype ? t->shape[0] - 1 : -1, squared = sequences ? sequences * sequences : 1;
    const int64_t last = total - (sequences % 2 == 0 && total > 0);
    for (int64_t s = 0; s <= sequences; s++) {
        const int64_t at = s * s * last / squared;
        adze_put(t, s, (double)at);
    }
}

/* A part of the keys is hidden, from some queries all of them. Where there are many keys, the later ones are hidden
   too, from each query fewer than from the one before. */
static void fill_mask(const adze_tensor *mask)
{
    adze_rows rows;
    const int64_t n = mask->shape[mask->rank - 1];
    const int adds = mask->dtype == ADZE_F32 || mask->dtype == ADZE_F16 || mask->dtype == ADZE_BF16;
    adze_rows_init(&rows, mask, 1, &mask);
    for (int64_t r = 0; r < rows.count; r++)
        for (int64_t j = 0; j < n; j++) {
            const int later = n > 256 && j > (r + 1) * n / rows.count;
            const int hidden = r % 5 == 3 || (j * 7 + r) % 4 == 1 || (r % 5 == 1 && j < n / 2) || later;
            if (hidden || !adds)
                adze_put(mask, adze_row_offset(&rows, 0, r) + j, !hidden ? 1 : adds ? -INFINITY : 0);
        }
}

static void fill(void *args)
{
    const adze_attention_args *a = args;
    const int64_t page = a->block_table.dtype ? a->k.shape[2] : 0;
    const int64_t n = page ? a->block_table.shape[1] * page : a->k.shape[2];
    for (int64_t s = 0; a->lengths.dtype && s < a->lengths.shape[0]; s++)
        adze_put(&a->lengths, s, (double)length_of(s, n, page));
    if (page)
        fill_pages(a);
    fill_offsets(&a->q_offsets, a->q.shape[2]);
    fill_offsets(&a->k_offsets, a->k.shape[2]);
    if (a->mask.dtype)
        fill_mask(&a->mask);
    const adze_tensor *const scales[] = {&a->k_scale, &a->v_scale};
    for (int i = 0; i < 2; i++) {
        const adze_tensor *t = scales[i];
        adze_rows rows;
        if (!t->dtype)
            continue;
        adze_rows_init(&rows, t, 1, &t);
        for (int64_t r = 0; r < rows.count; r++)
            for (int64_t j = 0; j < t->shape[t->rank - 1]; j++) {
                const int64_t at = adze_row_offset(&rows, 0, r) + j;
                adze_put(t, at, fabs(adze_get(t, at)) * 0x1p-6 + 0x1p-8);
            }
    }
}

/* Keys and sequences stay; heads and queries are independent of each other. */
static void cut(void *args)
{
    enum { HEADS = 4, M = 40 };
    adze_attention_args *a = args;
    const int64_t group = a->q.shape[1] / a->k.shape[1], heads = group < HEADS ? HEADS / group * group : group;
    a->q.shape[1] = least(a->q.shape[1], heads);
    a->k.shape[1] = a->v.shape[1] = a->q.shape[1] / group;
    a->sinks.shape[0] = a->q.shape[1];
    a->q.shape[2] = least(a->q.shape[2], M);
    adze_tensor *const scales[] = {&a->k_scale, &a->v_scale};
    for (int i = 0; i < 2; i++)
        if (scales[i]->rank == 3)
            scales[i]->shape[1] = a->k.shape[1];
    if (a->mask.dtype && a->mask.rank > 1)
        a->mask.shape[a->mask.rank - 2] = least(a->mask.shape[a->mask.rank - 2], M);
    if (a->mask.dtype && a->mask.rank > 2)
        a->mask.shape[a->mask.rank - 3] = least(a->mask.shape[a->mask.rank - 3], a->q.shape[1]);
}

/* Without what a mask hides; of a causal call half, where queries are as many as keys. */
static double flops(const void *args)
{
    const adze_attention_args *a = args;
    const int64_t n = a->block_table.dtype ? a->block_table.shape[1] * a->k.shape[2] : a->k.shape[2];
    const double m = (double)a->q.shape[2], hidden = a->causal && m > 1 ? (m - 1) / 2 : 0;
    return 2.0 * (double)(a->q.shape[0] * a->q.shape[1]) * m * ((double)n - hidden) *
           (double)(a->q.shape[3] + a->v.shape[3]);
}

const adze_suite adze_suite_attention = {.op = &adze_op_attention,
                                         .good = good,
                                         .gpu = gpu,
                                         .bad = bad,
                                         .bench = bench,
                                         .fill = fill,
                                         .cut = cut,
                                         .flops = flops};
