/* What stands between the products of a Transformer, in one pass over each row.
 *
 * c_kernels.py compiles this file and documents the calls. Every row is computed alone, and in an order that depends on
 * nothing but its own tokens: a sentence gets the same numbers in every batch.
 */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
enum { BLOCK = 64, AHEAD = 4 };  /* logits with one maximum, rows that are fetched ahead */
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline float from_bfloat16(uint16_t bits) {
    union { uint32_t bits; float number; } wide = {(uint32_t)bits << 16};
    return wide.number;
}

static inline floats vector_from_bfloat16(const uint16_t *numbers) {
    halves narrow;
    memcpy(&narrow, numbers, sizeof narrow);
    return (floats)(__builtin_convertvector(narrow, words) << 16);
}

static inline uint16_t to_bfloat16(float number) {  /* rounded to nearest, ties to even */
    union { float number; uint32_t bits; } wide = {number};
    return (wide.bits + 0x7FFF + (wide.bits >> 16 & 1)) >> 16;
}

static inline float exponential(float x) {  /* of x <= 0, by 2^n times a polynomial, within 2e-7 of it */
    x = x < -87 ? -87 : x;
    float n = nearbyintf(x * 1.44269504f), r = x - n * 0.693147181f;
    float power = 1 + r * (1 + r * (0.5f + r * (0.166666667f + r * (0.0416666667f + r * (8.3333333e-3f
        + r * 1.38888889e-3f)))));
    union { uint32_t bits; float number; } scale = {(uint32_t)((int)n + 127) << 23};
    return power * scale.number;
}

static float maximum(const float *x, i64 size) {
    float most = -FLT_MAX;
    for (i64 i = 0; i < size; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* The numbers of a row as round(x / scale) + 128, from 1 to 255. */
static void quantize(const float *x, i64 size, uint8_t *bytes, float *scale) {
    float most = 1e-28f;
    for (i64 i = 0; i < size; i++) {
        float absolute = fabsf(x[i]);
        most = absolute > most ? absolute : most;
    }
    float inverse = 127 / most;
    for (i64 i = 0; i < size; i++) bytes[i] = (uint8_t)(int)(x[i] * inverse + 128.5f);
    *scale = most / 127;
}

void finish(float *x, i64 rows, i64 width, const float *scales, const float *bias, i64 relu, const float *residual,
            i64 norm_first, const float *gamma, const float *beta, float eps, uint8_t *bytes, float *byte_scales) {
    float *hidden = malloc(width * sizeof(float));
    for (i64 r = 0; r < rows; r++, x += width) {
        float scale = scales ? scales[r] : 1;
        if (bias) for (i64 i = 0; i < width; i++) x[i] = x[i] * scale + bias[i];
        else for (i64 i = 0; i < width; i++) x[i] *= scale;
        if (relu) for (i64 i = 0; i < width; i++) x[i] = x[i] > 0 ? x[i] : 0;
        if (residual) for (i64 i = 0; i < width; i++) x[i] += residual[r * width + i];
        float *normed = x;
        if (gamma) {
            float mean = 0, variance = 0;
            for (i64 i = 0; i < width; i++) mean += x[i];
            mean /= width;
            for (i64 i = 0; i < width; i++) variance += (x[i] - mean) * (x[i] - mean);
            float inverse = 1 / sqrtf(variance / width + eps);
            if (norm_first) normed = hidden;
            for (i64 i = 0; i < width; i++)
                normed[i] = (x[i] - mean) * inverse * gamma[i] + (beta ? beta[i] : 0);
        }
        if (bytes) quantize(normed, width, bytes + r * width, byte_scales + r);
    }
    free(hidden);
}

void write_cache(const float *x, i64 rows, i64 stride, const float *scales, const float *bias, i64 width,
                 const i64 *places, uint16_t *cache) {
    for (i64 r = 0; r < rows; r++, x += stride) {
        uint16_t *row = cache + places[r] * width;
        for (i64 i = 0; i < width; i++) row[i] = to_bfloat16(x[i] * scales[r] + (bias ? bias[i] : 0));
    }
}

/* A cache has numbers of 32 bits if `wide`, else bfloat16. It is a constant wherever these functions are inlined. */
static inline __attribute__((always_inline)) float number(const void *cache, i64 place, int wide) {
    return wide ? ((const float *)cache)[place] : from_bfloat16(((const uint16_t *)cache)[place]);
}

static inline __attribute__((always_inline)) floats vector(const void *cache, i64 place, int wide) {
    if (!wide) return vector_from_bfloat16((const uint16_t *)cache + place);
    floats numbers;
    memcpy(&numbers, (const float *)cache + place, sizeof numbers);
    return numbers;
}

/* Rows of the cache are read whole, one after the other, and fetched some rows ahead: they come from memory. */
static inline __attribute__((always_inline)) void attend_row(
    const float *restrict query, const void *restrict cache, int wide, const i64 *restrict seen, i64 count, i64 heads,
    i64 key, i64 value, float *restrict scores, float *restrict output) {
    i64 width = heads * (key + value), size = wide ? 4 : 2;
    for (i64 n = 0; n < count; n++) {
        if (n + AHEAD < count)
            for (i64 i = 0; i < width * size; i += 64)
                __builtin_prefetch((const char *)cache + seen[n + AHEAD] * width * size + i);
        for (i64 h = 0; h < heads; h++) {
            i64 keys = seen[n] * width + h * key;
            float sum = 0;
            for (i64 i = 0; i < key; i++) sum += query[h * key + i] * number(cache, keys + i, wide);
            scores[h * count + n] = sum;
        }
    }
    for (i64 i = 0; i < heads * value; i++) output[i] = 0;
    for (i64 h = 0; h < heads; h++) {
        float *weights = scores + h * count, most = maximum(weights, count), total = 0;
        for (i64 n = 0; n < count; n++) weights[n] = exponential(weights[n] - most);
        for (i64 n = 0; n < count; n++) total += weights[n];
        for (i64 n = 0; n < count; n++) weights[n] /= total;
    }
    for (i64 n = 0; n < count; n++) {
        i64 values = seen[n] * width + heads * key;
        for (i64 h = 0; h < heads; h++) {
            float weight = scores[h * count + n];
            i64 i = h * value, end = i + value;
            for (; i + LANES <= end; i += LANES) {
                floats sums;
                memcpy(&sums, output + i, sizeof sums);
                sums += weight * vector(cache, values + i, wide);
                memcpy(output + i, &sums, sizeof sums);
            }
            for (; i < end; i++) output[i] += weight * number(cache, values + i, wide);
        }
    }
}

/* The usual widths of a head are constants, so that their loops are unrolled. */
static inline __attribute__((always_inline)) void attend_row_of(
    const float *query, const void *cache, int wide, const i64 *seen, i64 count, i64 heads, i64 key, i64 value,
    float *scores, float *output) {
    if (key == 64 && value == 64) attend_row(query, cache, wide, seen, count, heads, 64, 64, scores, output);
    else if (key == 32 && value == 32) attend_row(query, cache, wide, seen, count, heads, 32, 32, scores, output);
    else attend_row(query, cache, wide, seen, count, heads, key, value, scores, output);
}

/* The places of a mask that are not zero, from `first` on. Most of a wide search's are zero, eight at a time. */
static i64 list_seen(const uint8_t *mask, i64 size, i64 first, i64 *seen) {
    i64 count = 0;
    for (i64 start = 0; start < size; start += 8) {
        i64 end = start + 8 < size ? start + 8 : size;
        uint64_t eight = 0;
        memcpy(&eight, mask + start, end - start);
        if (!eight) continue;
        for (i64 n = start; n < end; n++) {
            seen[count] = first + n;
            count += mask[n] != 0;
        }
    }
    return count;
}

void attend(const float *x, i64 rows, i64 stride, const float *scales, const float *bias, i64 heads, i64 key, i64 value,
            float scaling, const void *cache, i64 wide, const i64 *firsts, const uint8_t *visible, const i64 *masks,
            i64 size, float *outputs, uint8_t *bytes, float *byte_scales) {
    i64 width = heads * value;
    float *query = malloc(heads * (key + value) * sizeof(float)), *hidden = query + heads * key;
    float *scores = malloc(heads * size * sizeof(float));
    i64 *seen = malloc(size * sizeof(i64));
    for (i64 r = 0; r < rows; r++, x += stride) {
        i64 count = list_seen(visible + masks[r], size, firsts[r], seen);
        float scale = scales ? scales[r] : 1;
        for (i64 i = 0; i < heads * key; i++) query[i] = (x[i] * scale + (bias ? bias[i] : 0)) * scaling;
        float *output = outputs ? outputs + r * width : hidden;
        if (wide) attend_row_of(query, cache, 1, seen, count, heads, key, value, scores, output);
        else attend_row_of(query, cache, 0, seen, count, heads, key, value, scores, output);
        if (bytes) quantize(output, width, bytes + r * width, byte_scales + r);
    }
    free(query);
    free(scores);
    free(seen);
}

/* The logits of a row as floats: those of a product with their scale and bias, in place, or others as they are. */
static float *read_logits(void *logits, i64 row, i64 size, i64 wide, const float *scales, const float *bias,
                          float *room) {
    if (!wide) {
        const uint16_t *numbers = (const uint16_t *)logits + row * size;
        for (i64 i = 0; i < size; i++) room[i] = from_bfloat16(numbers[i]);
        return room;
    }
    float *x = (float *)logits + row * size;
    if (bias) for (i64 i = 0; i < size; i++) x[i] = x[i] * scales[row] + bias[i];
    else if (scales) for (i64 i = 0; i < size; i++) x[i] *= scales[row];
    return x;
}

void best(void *logits, i64 rows, i64 size, i64 wide, const float *scales, const float *bias, const uint8_t *hidden,
          i64 beams, i64 count, i64 normalize, float *values, i64 *tokens) {
    float *room = wide ? 0 : malloc(size * sizeof(float));
    for (i64 r = 0; r < rows; r++, values += count, tokens += count) {
        float *x = read_logits(logits, r, size, wide, scales, bias, room);
        const uint8_t *mask = hidden ? hidden + r / beams * size : 0;
        if (mask) for (i64 i = 0; i < size; i++) x[i] = mask[i] ? -1e30f : x[i];
        for (i64 n = 0; n < count; n++) values[n] = -FLT_MAX, tokens[n] = n;
        for (i64 first = 0; first < size; first += BLOCK) {
            i64 end = first + BLOCK < size ? first + BLOCK : size;
            float least = values[count - 1];
            if (!(maximum(x + first, end - first) > least)) continue;
            for (i64 i = first; i < end; i++) {
                if (!(x[i] > values[count - 1])) continue;
                i64 n = count - 1;
                for (; n > 0 && x[i] > values[n - 1]; n--) values[n] = values[n - 1], tokens[n] = tokens[n - 1];
                values[n] = x[i], tokens[n] = i;
            }
        }
        if (!normalize) continue;
        float most = values[0], total = 0;
        for (i64 i = 0; i < size; i++) total += exponential(x[i] - most);
        for (i64 n = 0; n < count; n++) values[n] -= most + logf(total);
    }
    free(room);
}
