/* The hashes of fingerprint.py, one value after another instead of one operation after another: the same results, bit
   for bit (tests/property/test_fingerprint.py), in a third of the time. Plain C, called through ctypes: it knows
   nothing of Python, and builds wherever a compiler is. Little-endian machines only, as Arrow's buffers are. */

#include <stdint.h>
#include <string.h>

#define WORD 0x9E3779B97F4A7C15u
#define LENGTH 0xC2B2AE3D27D4EB4Fu
#define COLUMN 0xD6E8FEB86659FD93u
#define LANE 0xA0761D6478BD642Fu

static inline uint64_t finish(uint64_t h)
{
    h ^= h >> 33;
    h *= 0xFF51AFD7ED558CCDu;
    h ^= h >> 33;
    h *= 0xC4CEB9FE1A85EC53u;
    return h ^ (h >> 33);
}

static inline uint64_t of_word(uint64_t word, uint64_t key)
{
    return finish((word ^ key) * WORD);
}

#define INTEGERS(name, type)                                                                                           \
    void name(const type *values, int64_t n, uint64_t key, uint64_t *out)                                              \
    {                                                                                                                  \
        for (int64_t i = 0; i < n; i++)                                                                                \
            out[i] = of_word((uint64_t)(int64_t)values[i], key);                                                       \
    }

INTEGERS(hash_i8, int8_t)
INTEGERS(hash_i16, int16_t)
INTEGERS(hash_i32, int32_t)
INTEGERS(hash_i64, int64_t)
INTEGERS(hash_u8, uint8_t)
INTEGERS(hash_u16, uint16_t)
INTEGERS(hash_u32, uint32_t)

/* Many numbers are one value: of NaN there is one, and -0.0 is 0.0. */
#define FLOATS(name, type)                                                                                             \
    void name(const type *values, int64_t n, uint64_t key, uint64_t *out)                                              \
    {                                                                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            double wide = (double)values[i] + 0.0;                                                                     \
            uint64_t word;                                                                                             \
            memcpy(&word, &wide, 8);                                                                                   \
            out[i] = of_word(wide == wide ? word : 0x7FF8000000000000u, key);                                          \
        }                                                                                                              \
    }

FLOATS(hash_f32, float)
FLOATS(hash_f64, double)

/* Pairs of words, the low one first. */
void hash_i128(const uint64_t *values, int64_t n, uint64_t key, uint64_t *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = of_word(of_word(values[2 * i], key) ^ values[2 * i + 1], key);
}

static inline uint64_t of_bytes(const uint8_t *at, uint64_t length, uint64_t key)
{
    uint64_t hash = (length * LENGTH) ^ key, word, left = length;
    for (; left >= 8; left -= 8, at += 8) {
        memcpy(&word, at, 8);
        hash = (hash ^ word) * WORD;
        hash ^= hash >> 32;
    }
    if (left) {
        if (length >= 8) { /* the eight bytes that end where the value ends, without those that were taken */
            memcpy(&word, at + left - 8, 8);
            word >>= 64 - 8 * left;
        } else {
            word = 0;
            for (uint64_t i = 0; i < left; i++)
                word |= (uint64_t)at[i] << (8 * i);
        }
        hash = (hash ^ word) * WORD;
        hash ^= hash >> 32;
    }
    return finish(hash);
}

/* Values lie between the offsets, of which there are n + 1. Returns 0, or 1 without a result if one is longer than
   `longest`: those have another hash. */
#define BYTES(name, type)                                                                                              \
    int name(const type *offsets, const uint8_t *data, int64_t n, int64_t longest, uint64_t key, uint64_t *out)        \
    {                                                                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            int64_t length = (int64_t)offsets[i + 1] - (int64_t)offsets[i];                                            \
            if (length > longest)                                                                                      \
                return 1;                                                                                              \
            out[i] = of_bytes(data + offsets[i], (uint64_t)length, key);                                               \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

BYTES(hash_bytes32, int32_t)
BYTES(hash_bytes64, int64_t)

/* A column's hashes into those of the records. */
void fold(uint64_t *total, const uint64_t *hashes, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint64_t mixed = (total[i] * COLUMN) ^ hashes[i];
        total[i] = mixed ^ (mixed >> 32);
    }
}

void finish_all(uint64_t *hashes, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        hashes[i] = finish(hashes[i]);
}

/* Sums of both lanes, modulo 2**64. */
void sums(const uint64_t *hashes, int64_t n, uint64_t *low_high)
{
    uint64_t low = 0, high = 0;
    for (int64_t i = 0; i < n; i++) {
        low += hashes[i];
        high += finish(hashes[i] ^ LANE);
    }
    low_high[0] = low;
    low_high[1] = high;
}
