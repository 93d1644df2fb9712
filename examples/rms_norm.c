/* rms_norm.c - one call of adze from C. With adze installed: cc rms_norm.c $(pkg-config --cflags --libs adze) &&
 * ./a.out */
#include <adze.h>
#include <stdio.h>

int main(void)
{
    float x[2][4] = {{1, 2, 3, 4}, {-1, 0, 1, 0}}, weight[4] = {1, 1, 2, 2}, out[2][4];
    adze_rms_norm_args args = {
        .call = ADZE_CALL(rms_norm),
        .out = {out, {2, 4}, {4, 1}, 2, ADZE_F32}, /* data, shape, strides in elements, rank, dtype */
        .x = {x, {2, 4}, {4, 1}, 2, ADZE_F32},
        .weight = {weight, {4}, {1}, 1, ADZE_F32},
        .eps = 1e-6f,
    };
    if (adze_rms_norm((adze_stream){ADZE_CPU, NULL}, &args) != ADZE_OK) {
        fprintf(stderr, "%s\n", adze_last_error());
        return 1;
    }
    for (int row = 0; row < 2; row++)
        printf("%9.6f %9.6f %9.6f %9.6f\n", (double)out[row][0], (double)out[row][1], (double)out[row][2],
               (double)out[row][3]);
    return 0;
}
