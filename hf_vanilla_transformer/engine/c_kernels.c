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
#if defined __AVX2__
#include <immintrin.h>
#endif

typedef int64_t i64;

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
enum { BLOCK = 64, AHEAD = 4, FEW = 4 };  /* logits with one maximum, rows fetched ahead, rows or blocks at once */
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

/* Vectors of 32 bits: sums, or four bytes each. `add_products` adds four products of unsigned and signed bytes to each
 * sum. Without VNNI two of them are added in 16 bits. */
#if defined __AVX512BW__
typedef int32_t lanes __attribute__((vector_size(64)));
static inline lanes add_products(lanes sums, lanes x, lanes weight) {
#ifdef __AVX512VNNI__
    return (lanes)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)weight);
#else
    __m512i pairs = _mm512_maddubs_epi16((__m512i)x, (__m512i)weight);
    return sums + (lanes)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#endif
}
#elif defined __AVX2__
typedef int32_t lanes __attribute__((vector_size(32)));
static inline lanes add_products(lanes sums, lanes x, lanes weight) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)x, (__m256i)weight);
    return sums + (lanes)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
typedef int32_t lanes __attribute__((vector_size(16)));
static inline lanes add_products(lanes sums, lanes x, lanes weight) {
    for (int shift = 0; shift < 32; shift += 8) sums += (x >> shift & 255) * (weight << (24 - shift) >> 24);
    return sums;
}
#endif
enum { PARTS = 16 * sizeof(int32_t) / sizeof(lanes) };  /* vectors of 16 sums */

/* The sums (rows, 16) of rows of x times a block of 16 outputs, (quads, 16, 4). An addition waits for the one before it:
 * a single row has FEW sums, which take the quads in turn and are added at the end. */
static inline __attribute__((always_inline)) void sum_block(
    const uint8_t *x, int rows, const int8_t *weight, i64 quads, int32_t *sums) {
    lanes found[FEW][PARTS], part;
    int apart = FEW / rows;
    memset(found, 0, sizeof found);
    for (i64 q = 0; q < quads; q += apart)
        for (int i = 0; i < apart * PARTS; i++) {
            memcpy(&part, weight + (q * PARTS + i) * sizeof part, sizeof part);
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, x + 4 * (r * quads + q + i / PARTS), sizeof four);
                lanes *sum = &found[r * apart + i / PARTS][i % PARTS];
                *sum = add_products(*sum, four - (lanes){0}, part);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) {
            for (int i = 1; i < apart; i++) found[r * apart][p] += found[r * apart + i][p];
            memcpy(sums + 16 * r + 16 / PARTS * p, &found[r * apart][p], sizeof part);
        }
}

/* Rows (R, D) times W^T, for few rows: a call of oneDNN takes longer than such a product. The weight has blocks of
 * 16 outputs and 4 inputs, (O / 16, D / 4, 16, 4), with zeros at the ends. Scales and shift are two steps, as in oneDNN,
 * so that both give the same bits. */
void multiply(const uint8_t *bytes, i64 rows, i64 depth, const int8_t *weight, i64 outputs, const float *scales,
              const float *shift, float *product) {
    i64 width = (depth + 15) / 16 * 16, quads = width / 4;
    uint8_t *x = calloc(rows, width);
    for (i64 r = 0; r < rows; r++) memcpy(x + r * width, bytes + r * depth, depth);
    for (i64 first = 0; first < outputs; first += 16, weight += 16 * width) {
        i64 count = outputs - first < 16 ? outputs - first : 16;
        for (i64 r = 0, some; r < rows; r += some) {
            int32_t sums[FEW * 16];
            some = rows - r < FEW ? 1 : FEW;
            if (some == FEW) sum_block(x + r * width, FEW, weight, quads, sums);
            else sum_block(x + r * width, 1, weight, quads, sums);
            for (i64 i = 0; i < some; i++)
                for (i64 o = 0; o < count; o++)
                    product[(r + i) * outputs + first + o] = sums[16 * i + o] * scales[first + o];
        }
    }
    for (i64 r = 0; r < rows; r++, product += outputs)
        for (i64 o = 0; o < outputs; o++) product[o] += shift[o];
    free(x);
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

void write_cache(const float *x, i64 rows, i64 stride, const float *scales, const float *bias, i64 width,
                 const i64 *places, void *cache, i64 wide) {
    for (i64 r = 0; r < rows; r++, x += stride) {
        float scale = scales ? scales[r] : 1;
        float *floats = (float *)cache + places[r] * width;
        uint16_t *narrow = (uint16_t *)cache + places[r] * width;
        if (wide) for (i64 i = 0; i < width; i++) floats[i] = x[i] * scale + (bias ? bias[i] : 0);
        else for (i64 i = 0; i < width; i++) narrow[i] = to_bfloat16(x[i] * scale + (bias ? bias[i] : 0));
    }
}

/* The sums of products of rows of x (R, D) with outputs of a weight from its row `first` on, R or outputs at once. */
static inline __attribute__((always_inline)) void dot(
    const float *x, int rows, i64 depth, const void *weight, i64 first, int outputs, int wide, float *sums) {
    floats found[FEW], numbers;
    memset(found, 0, sizeof found);
    i64 i = 0;
    for (; i + LANES <= depth; i += LANES)
        for (int o = 0; o < outputs; o++) {
            floats part = vector(weight, (first + o) * depth + i, wide);
            for (int r = 0; r < rows; r++) {
                memcpy(&numbers, x + r * depth + i, sizeof numbers);
                found[r * outputs + o] += numbers * part;
            }
        }
    for (int o = 0; o < outputs; o++)
        for (int r = 0; r < rows; r++) {
            float sum = 0;
            for (int lane = 0; lane < LANES; lane++) sum += found[r * outputs + o][lane];
            for (i64 rest = i; rest < depth; rest++)
                sum += x[r * depth + rest] * number(weight, (first + o) * depth + rest, wide);
            sums[r * outputs + o] = sum;
        }
}

static inline __attribute__((always_inline)) void multiply_floats_of(
    const float *x, i64 rows, i64 depth, const void *weight, int wide, i64 outputs, float *product) {
    float sums[FEW];
    for (i64 o = 0; o < outputs;) {
        i64 several = o + FEW <= outputs ? FEW : 1;
        for (i64 r = 0; r < rows;) {
            if (r + FEW <= rows)
                for (i64 end = o + several, each = o; each < end; each++) {
                    dot(x + r * depth, FEW, depth, weight, each, 1, wide, sums);
                    for (i64 i = 0; i < FEW; i++) product[(r + i) * outputs + each] = sums[i];
                }
            else if (several == FEW) dot(x + r * depth, 1, depth, weight, o, FEW, wide, product + r * outputs + o);
            else dot(x + r * depth, 1, depth, weight, o, 1, wide, product + r * outputs + o);
            r += r + FEW <= rows ? FEW : 1;
        }
        o += several;
    }
}

/* Rows (R, D) times W^T of a weight (O, D) in float32 if `wide`, else bfloat16. */
void multiply_floats(const float *x, i64 rows, i64 depth, const void *weight, i64 wide, i64 outputs, float *product) {
    if (wide) multiply_floats_of(x, rows, depth, weight, 1, outputs, product);
    else multiply_floats_of(x, rows, depth, weight, 0, outputs, product);
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

/* A stack for few rows. Its structures are those of c_stack.py. */
typedef struct {  /* with scales a weight of `multiply`, else one of `multiply_floats` */
    const void *weight;
    const float *scales, *shift, *bias;
    i64 depth, outputs, wide;
} linear;

typedef struct {  /* without heads a feed-forward network with ReLU */
    linear first, last;
    i64 heads, key, value;
    float scaling;
} sublayer;

typedef struct {
    const float *gamma, *beta;
    float eps;
} normalization;

typedef struct {  /* without places nothing is written into the cache */
    void *cache;
    const i64 *places, *firsts, *masks;
    const uint8_t *visible;
    i64 size, wide;
} keys;

static void multiply_by(const linear *by, i64 rows, const uint8_t *bytes, const float *x, float *product) {
    if (by->scales) multiply(bytes, rows, by->depth, by->weight, by->outputs, by->scales, by->shift, product);
    else multiply_floats(x, rows, by->depth, by->weight, by->wide, by->outputs, product);
}

/* `x` (R, D) becomes the states. In int8 `bytes` and `byte_scales` become the same quantised, else they and `inner` are
 * null. There is a norm before and after each sub-layer. For each row `room` has 2 D + the widest product + the widest
 * input, and `inner` the widest input. */
void run_stack(float *x, i64 rows, i64 width, const sublayer *sublayers, i64 count, const normalization *norms,
               const keys *caches, i64 pre_norm, i64 widest, float *room, uint8_t *inner, float *inner_scales,
               uint8_t *bytes, float *byte_scales) {
    float *states = x, *next = room, *normed = next + rows * width, *hidden = normed + rows * width;
    float *attended = hidden + rows * widest;
    float *input = bytes || !pre_norm ? states : normed;
    if (input == normed) memcpy(normed, states, rows * width * sizeof(float));
    finish(input, rows, width, 0, 0, 0, 0, bytes != 0, norms->gamma, norms->beta, norms->eps, bytes, byte_scales);
    for (const sublayer *at = sublayers; at < sublayers + count; at++) {
        const linear *first = &at->first, *last = &at->last;
        multiply_by(first, rows, bytes, input, hidden);
        if (at->heads) {
            i64 queries = at->heads * at->key;
            if (caches->places)
                write_cache(hidden + queries, rows, first->outputs, byte_scales, first->bias ? first->bias + queries : 0,
                            queries + at->heads * at->value, caches->places, caches->cache, caches->wide);
            attend(hidden, rows, first->outputs, byte_scales, first->bias, at->heads, at->key, at->value, at->scaling,
                   caches->cache, caches->wide, caches->firsts, caches->visible, caches->masks, caches->size,
                   bytes ? 0 : attended, inner, inner_scales);
            caches++;
        } else {
            finish(hidden, rows, first->outputs, byte_scales, first->bias, 1, 0, 0, 0, 0, 0, inner, inner_scales);
        }
        multiply_by(last, rows, inner, at->heads ? attended : hidden, next);
        norms++;
        i64 keeps_sum = pre_norm && at + 1 < sublayers + count;
        if (bytes || !keeps_sum) {
            finish(next, rows, width, inner_scales, last->bias, 0, states, keeps_sum, norms->gamma, norms->beta,
                   norms->eps, bytes, byte_scales);
            input = next;
        } else {
            finish(next, rows, width, 0, last->bias, 0, states, 0, 0, 0, 0, 0, 0);
            memcpy(normed, next, rows * width * sizeof(float));
            finish(normed, rows, width, 0, 0, 0, 0, 0, norms->gamma, norms->beta, norms->eps, 0, 0);
        }
        float *before = states;
        states = next;
        next = before;
    }
    if (states != x) memcpy(x, states, rows * width * sizeof(float));
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
