/* philox.h - Philox 4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw ("Parallel random numbers:
   as easy as 1, 2, 3", 2011): ten rounds of two multiplications on a counter of four words, with a key of two. */
#ifndef ADZE_PHILOX_H
#define ADZE_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#    define ADZE_ON_BOTH __host__ __device__
#else
#    define ADZE_ON_BOTH
#endif

/* A uniform number of sample: 24 bits of the first word, from 0 to 1 - 2^-24. */
ADZE_ON_BOTH static inline float adze_philox_uniform(uint64_t seed, uint64_t counter, uint64_t row)
{
    uint32_t word[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)row, (uint32_t)(row >> 32)};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)word[0] * 0xD2511F53u, b = (uint64_t)word[2] * 0xCD9E8D57u;
        const uint32_t next[4] = {(uint32_t)(b >> 32) ^ word[1] ^ key[0], (uint32_t)b,
                                  (uint32_t)(a >> 32) ^ word[3] ^ key[1], (uint32_t)a};
        for (int i = 0; i < 4; i++)
            word[i] = next[i];
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return (float)(word[0] >> 8) * 0x1p-24f;
}

#endif
