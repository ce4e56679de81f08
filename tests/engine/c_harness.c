/* The functions of c_kernels.c against float64, on random rows. Compiled together with it for any processor.
 *
 * Prints the largest error of each function, and fails if one is above its bound.
 */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int64_t i64;

void multiply(const uint8_t *bytes, i64 rows, i64 depth, const int8_t *weight, i64 outputs, const float *scales,
              const float *shift, float *product);
void finish(float *x, i64 rows, i64 width, const float *scales, const float *bias, i64 relu, const float *residual,
            i64 norm_first, const float *gamma, const float *beta, float eps, uint8_t *bytes, float *byte_scales);
void multiply_floats(const float *x, i64 rows, i64 depth, const void *weight, i64 wide, i64 outputs, float *product);
void write_cache(const float *x, i64 rows, i64 stride, const float *scales, const float *bias, i64 width,
                 const i64 *places, void *cache, i64 wide);
void attend(const float *x, i64 rows, i64 stride, const float *scales, const float *bias, i64 heads, i64 key, i64 value,
            float scaling, const void *cache, i64 wide, const i64 *firsts, const uint8_t *visible, const i64 *masks,
            i64 size, float *outputs, uint8_t *bytes, float *byte_scales);
void best(void *logits, i64 rows, i64 size, i64 wide, const float *scales, const float *bias, const uint8_t *hidden,
          i64 beams, i64 count, i64 normalize, float *values, i64 *tokens);

static uint64_t state = 1;

static i64 below(i64 limit) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (i64)((state >> 33) % (uint64_t)limit);
}

static float drawn(void) { return (float)below(1 << 20) / (1 << 18) - 2; } /* from -2 to 2, exact in float32 */

static float *numbers(i64 count) { /* blocks of their exact size, for sanitizers */
    float *room = malloc((count + 1) * sizeof(float));
    for (i64 i = 0; i < count; i++) room[i] = drawn();
    return room;
}

static double from_bfloat16(uint16_t bits) {
    union { uint32_t bits; float number; } wide = {(uint32_t)bits << 16};
    return wide.number;
}

static uint16_t *narrowed(float *numbers, i64 count, i64 wide) { /* in bfloat16. `numbers` become the same unless `wide` */
    uint16_t *halves = malloc(count * sizeof(uint16_t));
    for (i64 i = 0; i < count; i++) {
        union { float number; uint32_t bits; } cut = {numbers[i]};
        halves[i] = cut.bits >> 16;
        if (!wide) numbers[i] = (float)from_bfloat16(halves[i]);
    }
    return halves;
}

static double worst_of[9];
static const char *NAMES[] = {"multiply", "multiply_floats", "finish", "bytes", "write_cache", "attend", "best", "log-probability"};
static const double BOUNDS[] = {0, 1e-6, 3e-6, 0.51, 0.5, 3e-6, 1e-6, 5e-6};
enum { MULTIPLY, MULTIPLY_FLOATS, FINISH, BYTES, WRITE_CACHE, ATTEND, BEST, LOG_PROBABILITY, ALL };

static void note(int which, double error) {
    if (!(error <= worst_of[which])) worst_of[which] = error; /* a NaN stays */
}

/* The bytes are steps of `scale` from 128, and `scale` reaches the largest number at 127. */
static void check_bytes(const double *expected, i64 width, const uint8_t *bytes, float scale) {
    double most = 0;
    for (i64 i = 0; i < width; i++) most = fmax(most, fabs(expected[i]));
    note(FINISH, fabs(scale * 127 - most) / (most + 1e-9));
    for (i64 i = 0; i < width; i++) note(BYTES, fabs(((double)bytes[i] - 128) - expected[i] / (most / 127 + 1e-30)));
}

static void try_finish(void) {
    i64 rows = 1 + below(4), width = 1 + below(300), relu = below(2), norm = below(2), norm_first = below(2);
    float *x = numbers(rows * width), *residual = below(2) ? numbers(rows * width) : 0;
    float *scales = below(2) ? numbers(rows) : 0, *bias = below(2) ? numbers(width) : 0;
    float *gamma = norm ? numbers(width) : 0, *beta = norm && below(2) ? numbers(width) : 0;
    float *byte_scales = numbers(rows);
    uint8_t *bytes = malloc(rows * width);
    double *sum = malloc(rows * width * sizeof(double)), *normed = malloc(rows * width * sizeof(double));
    for (i64 r = 0; r < rows; r++) {
        double mean = 0, variance = 0, *row = sum + r * width;
        for (i64 i = 0; i < width; i++) {
            row[i] = (double)x[r * width + i] * (scales ? scales[r] : 1) + (bias ? bias[i] : 0);
            if (relu && row[i] < 0) row[i] = 0;
            if (residual) row[i] += residual[r * width + i];
            mean += row[i] / width;
        }
        for (i64 i = 0; i < width; i++) variance += (row[i] - mean) * (row[i] - mean) / width;
        for (i64 i = 0; i < width; i++)
            normed[r * width + i] = norm ? (row[i] - mean) / sqrt(variance + 1e-2) * gamma[i] + (beta ? beta[i] : 0) : row[i];
    }
    finish(x, rows, width, scales, bias, relu, residual, norm_first, gamma, beta, 1e-2f, bytes, byte_scales);
    for (i64 i = 0; i < rows * width; i++) {
        double expected = norm && !norm_first ? normed[i] : sum[i];
        note(FINISH, fabs(x[i] - expected) / (10 + fabs(expected)));
    }
    for (i64 r = 0; r < rows; r++) check_bytes(normed + r * width, width, bytes + r * width, byte_scales[r]);
    free(x), free(residual), free(scales), free(bias), free(gamma), free(beta), free(byte_scales), free(bytes);
    free(sum), free(normed);
}

static void try_multiply(void) { /* bytes whose products of two fit into 16 bits, as without VNNI */
    i64 rows = 1 + below(9), depth = 1 + below(90), outputs = 1 + below(90);
    i64 quads = (depth + 15) / 16 * 4, blocks = (outputs + 15) / 16;
    uint8_t *bytes = malloc(rows * depth);
    int8_t *weight = calloc(blocks * quads, 64), *flat = malloc(outputs * depth);
    for (i64 i = 0; i < rows * depth; i++) bytes[i] = 1 + below(255);
    for (i64 o = 0; o < outputs; o++)
        for (i64 i = 0; i < depth; i++) {
            flat[o * depth + i] = below(129) - 64;
            weight[(o / 16 * quads + i / 4) * 64 + o % 16 * 4 + i % 4] = flat[o * depth + i];
        }
    float *scales = numbers(outputs), *shift = numbers(outputs), *product = numbers(rows * outputs);
    multiply(bytes, rows, depth, weight, outputs, scales, shift, product);
    for (i64 r = 0; r < rows; r++)
        for (i64 o = 0; o < outputs; o++) {
            int64_t sum = 0;
            for (i64 i = 0; i < depth; i++) sum += bytes[r * depth + i] * flat[o * depth + i];
            float scaled = sum * scales[o];
            note(MULTIPLY, product[r * outputs + o] != scaled + shift[o]);
        }
    free(bytes), free(weight), free(flat), free(scales), free(shift), free(product);
}

static void try_multiply_floats(void) {
    i64 rows = 1 + below(9), depth = 1 + below(90), outputs = 1 + below(20), wide = below(2);
    float *x = numbers(rows * depth), *weight = numbers(outputs * depth), *product = numbers(rows * outputs);
    uint16_t *halves = narrowed(weight, outputs * depth, wide);
    multiply_floats(x, rows, depth, wide ? (void *)weight : (void *)halves, wide, outputs, product);
    for (i64 r = 0; r < rows; r++)
        for (i64 o = 0; o < outputs; o++) {
            double sum = 0;
            for (i64 i = 0; i < depth; i++) sum += (double)x[r * depth + i] * weight[o * depth + i];
            note(MULTIPLY_FLOATS, fabs(product[r * outputs + o] - sum) / (10 + fabs(sum)));
        }
    free(x), free(weight), free(product), free(halves);
}

static void try_write_cache(void) {
    i64 rows = 1 + below(4), width = 1 + below(100), stride = width + below(50), wide = below(2);
    float *x = numbers(rows * stride), *scales = below(2) ? numbers(rows) : 0, *bias = below(2) ? numbers(width) : 0;
    float *cache = calloc(2 * rows * width, sizeof(float));
    i64 *places = malloc(rows * sizeof(i64));
    for (i64 r = 0; r < rows; r++) places[r] = 2 * r + below(2);
    write_cache(x, rows, stride, scales, bias, width, places, cache, wide);
    for (i64 r = 0; r < rows; r++)
        for (i64 i = 0; i < width; i++) {
            double expected = (double)x[r * stride + i] * (scales ? scales[r] : 1) + (bias ? bias[i] : 0);
            i64 place = places[r] * width + i;
            double found = wide ? cache[place] : from_bfloat16(((uint16_t *)cache)[place]);
            double unit = ldexp(1, expected == 0 ? -126 : ilogb(expected) - (wide ? 23 : 7)); /* 24 or 8 bits */
            double error = fabs(found - expected) / unit;
            note(WRITE_CACHE, fmax(0, error - 1e-6 / unit)); /* the rounding of the float32 product */
        }
    free(x), free(scales), free(bias), free(cache), free(places);
}

static void try_attend(void) {
    i64 usual[] = {64, 32}, odd = below(3), pick = below(2);
    i64 heads = 1 + below(5), key = odd ? 1 + below(40) : usual[pick], value = odd ? 1 + below(40) : usual[pick];
    i64 rows = 1 + below(4), size = 1 + below(90), width = heads * (key + value), wide = below(2), quantized = below(2);
    i64 stride = heads * key + below(20), slots = rows * size;
    float *x = numbers(rows * stride), *scales = below(2) ? numbers(rows) : 0, *byte_scales = numbers(rows);
    float *bias = below(2) ? numbers(heads * key) : 0, *outputs = quantized ? 0 : numbers(rows * heads * value);
    float *floats = numbers(slots * width);
    uint16_t *halves = narrowed(floats, slots * width, wide);
    uint8_t *visible = malloc(slots), *bytes = malloc(rows * heads * value);
    i64 *firsts = malloc(rows * sizeof(i64)), *masks = malloc(rows * sizeof(i64)), often = 1 + below(9);
    for (i64 i = 0; i < slots; i++) visible[i] = below(often) == 0;
    for (i64 r = 0; r < rows; r++) firsts[r] = masks[r] = (rows - 1 - r) * size;
    attend(x, rows, stride, scales, bias, heads, key, value, 0.2f, wide ? (void *)floats : (void *)halves, wide, firsts,
           visible, masks, size, outputs, quantized ? bytes : 0, quantized ? byte_scales : 0);
    double *expected = malloc(heads * value * sizeof(double)), *weights = malloc(size * sizeof(double));
    for (i64 r = 0; r < rows; r++) {
        for (i64 h = 0; h < heads; h++) {
            double most = -INFINITY, total = 0;
            for (i64 n = 0; n < size; n++) {
                weights[n] = 0;
                for (i64 i = 0; i < key; i++) {
                    double query = (double)x[r * stride + h * key + i] * (scales ? scales[r] : 1);
                    query = (query + (bias ? bias[h * key + i] : 0)) * 0.2f;
                    weights[n] += query * floats[(firsts[r] + n) * width + h * key + i];
                }
                if (visible[masks[r] + n]) most = fmax(most, weights[n]);
            }
            for (i64 n = 0; n < size; n++) {
                weights[n] = visible[masks[r] + n] ? exp(weights[n] - most) : 0;
                total += weights[n];
            }
            for (i64 i = 0; i < value; i++) {
                double sum = 0;
                for (i64 n = 0; n < size; n++)
                    sum += weights[n] * floats[(firsts[r] + n) * width + heads * key + h * value + i];
                expected[h * value + i] = total > 0 ? sum / total : 0;
                if (!quantized) note(ATTEND, fabs(outputs[(r * heads + h) * value + i] - expected[h * value + i]) / 2);
            }
        }
        if (quantized) check_bytes(expected, heads * value, bytes + r * heads * value, byte_scales[r]);
    }
    free(x), free(scales), free(byte_scales), free(bias), free(outputs), free(floats), free(halves), free(visible);
    free(bytes), free(firsts), free(masks), free(expected), free(weights);
}

static void try_best(void) {
    i64 beams = 1 + below(3), sentences = 1 + below(3), rows = beams * sentences, size = 20 + below(700), count = 1 + below(9), normalize = below(2);
    float *logits = numbers(rows * size), *scales = below(2) ? numbers(rows) : 0;
    float *bias = scales && below(2) ? numbers(size) : 0, *values = numbers(rows * count);
    uint8_t *hidden = below(2) ? malloc(sentences * size) : 0;
    i64 *tokens = malloc(rows * count * sizeof(i64));
    double *expected = malloc(rows * size * sizeof(double));
    for (i64 i = 0; hidden && i < sentences * size; i++) hidden[i] = i % size >= 10 && below(2);
    for (i64 i = 0; i < rows * size; i++) {
        expected[i] = (double)logits[i] * (scales ? scales[i / size] : 1) + (bias ? bias[i % size] : 0);
        if (hidden && hidden[i / size / beams * size + i % size]) expected[i] = -1e30;
    }
    best(logits, rows, size, 1, scales, bias, hidden, beams, count, normalize, values, tokens);
    for (i64 r = 0; r < rows; r++) {
        double *row = expected + r * size, total = 0, most = -INFINITY;
        for (i64 i = 0; i < size; i++) most = fmax(most, row[i]);
        for (i64 i = 0; i < size; i++) total += exp(row[i] - most);
        for (i64 n = 0; n < count; n++) {
            i64 token = tokens[r * count + n], better = 0;
            if (token < 0 || token >= size) note(BEST, INFINITY);
            /* the n-th best has at most n that are better, up to the rounding of float32 */
            for (i64 i = 0; i < size; i++) better += row[i] > row[token] + 1e-6;
            note(BEST, better > n ? INFINITY : 0);
            for (i64 m = 0; m < n; m++) note(BEST, tokens[r * count + m] == token ? INFINITY : 0);
            double score = normalize ? row[token] - most - log(total) : row[token];
            note(LOG_PROBABILITY, fabs(values[r * count + n] - score) / (1 + fabs(score)));
        }
    }
    free(logits), free(scales), free(bias), free(values), free(hidden), free(tokens), free(expected);
}

int main(void) {
    for (int round = 0; round < 300; round++) try_multiply(), try_multiply_floats(), try_finish(), try_write_cache(), try_attend(), try_best();
    int failed = 0;
    for (int which = 0; which < ALL; which++) {
        int within = worst_of[which] <= BOUNDS[which];
        printf("%s %.3g of %.3g%s\n", NAMES[which], worst_of[which], BOUNDS[which], within ? "" : " TOO MUCH");
        failed |= !within;
    }
    return failed;
}
