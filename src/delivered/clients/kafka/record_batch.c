/* Kafka's record batches (message format 2) from and to Arrow buffers. Plain C, called through ctypes without Python's
   lock; record_batch.py allocates all memory and compresses. Little-endian machines only, as Arrow's buffers are.

   A batch is a header of 61 bytes, big-endian, followed by records:

       0 base offset   8 length from here   12 leader epoch   16 magic   17 CRC-32C of what follows   21 attributes
       23 last offset delta   27 base timestamp   35 max timestamp   43 producer id   51 producer epoch
       53 base sequence   57 count

       record:  size, attributes (1 byte), timestamp delta, offset delta, key, value, header count, headers
       header:  key, value
       key, value: size (-1: null), bytes

   Sizes, deltas and counts of a record are zigzag varints. Decoding trusts nothing: every size is compared with the
   bytes at hand before it is used, every count with the least that so many would take. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

enum { HEADER = 61, LENGTH_FROM = 12, CRC_FROM = 21, MAGIC_AT = 16 };
enum { COMPRESSION = 7, APPEND_TIME = 8, TRANSACTIONAL = 16, CONTROL = 32 };
enum { RECORD_MIN = 7, HEADER_MIN = 2 }; /* the least bytes of a record with its size, and of a record's header */

/* ---- big-endian numbers ------------------------------------------------------------------------------------------ */

#define BIG_ENDIAN_OF(bits)                                                                                            \
    static inline int##bits##_t get##bits(const uint8_t *at)                                                           \
    {                                                                                                                  \
        uint##bits##_t raw;                                                                                            \
        memcpy(&raw, at, sizeof raw);                                                                                  \
        return (int##bits##_t)__builtin_bswap##bits(raw);                                                              \
    }                                                                                                                  \
    static inline void put##bits(uint8_t *at, int##bits##_t value)                                                     \
    {                                                                                                                  \
        uint##bits##_t raw = __builtin_bswap##bits((uint##bits##_t)value);                                             \
        memcpy(at, &raw, sizeof raw);                                                                                  \
    }

BIG_ENDIAN_OF(16)
BIG_ENDIAN_OF(32)
BIG_ENDIAN_OF(64)

/* ---- CRC-32C ------------------------------------------------------------------------------------------------------ */

/* The processor's instruction takes three cycles for eight bytes, but starts a new one in every cycle: three lanes run
   side by side. `over_lane` tells what a lane of zero bytes makes of a checksum, which joins the lanes. */

enum { LANE = 512 };
static uint32_t slices[8][256];
static uint32_t over_lane[4][256];
static int has_instruction;

static uint32_t crc_by_table(uint32_t crc, const uint8_t *at, size_t size)
{
    for (; size >= 8; size -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; i++)
            crc ^= slices[7 - i][(word >> (8 * i)) & 255];
    }
    while (size--)
        crc = (crc >> 8) ^ slices[0][(crc ^ *at++) & 255];
    return crc;
}

#if defined(__x86_64__)
#define CRC_TARGET __attribute__((target("sse4.2")))
#define CRC8(crc, byte) _mm_crc32_u8(crc, byte)
#define CRC64(crc, word) ((uint32_t)_mm_crc32_u64(crc, word))
#define CRC_SUPPORTED() (__builtin_cpu_init(), __builtin_cpu_supports("sse4.2"))
#elif defined(__aarch64__) && defined(__linux__)
#define CRC_TARGET __attribute__((target("+crc")))
#define CRC8(crc, byte) __crc32cb(crc, byte)
#define CRC64(crc, word) __crc32cd(crc, word)
#define CRC_SUPPORTED() ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0)
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

#ifdef CRC_TARGET
CRC_TARGET static uint32_t crc_by_instruction(uint32_t crc, const uint8_t *at, size_t size)
{
    uint64_t word;
    for (; size >= 3 * LANE; size -= 3 * LANE, at += 3 * LANE) {
        uint32_t lanes[3] = {crc, 0, 0};
        for (size_t i = 0; i < LANE; i += 8)
            for (size_t lane = 0; lane < 3; lane++) {
                memcpy(&word, at + lane * LANE + i, 8);
                lanes[lane] = CRC64(lanes[lane], word);
            }
        crc = lanes[0];
        for (size_t lane = 1; lane < 3; lane++)
            crc = lanes[lane] ^ over_lane[0][crc & 255] ^ over_lane[1][(crc >> 8) & 255] ^
                  over_lane[2][(crc >> 16) & 255] ^ over_lane[3][crc >> 24];
    }
    for (; size >= 8; size -= 8, at += 8) {
        memcpy(&word, at, 8);
        crc = CRC64(crc, word);
    }
    while (size--)
        crc = CRC8(crc, *at++);
    return crc;
}
#endif

__attribute__((constructor)) static void make_tables(void)
{
    static const uint8_t zeros[LANE];
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (0x82F63B78u & -(crc & 1));
        slices[0][byte] = crc;
    }
    for (int i = 1; i < 8; i++)
        for (int byte = 0; byte < 256; byte++)
            slices[i][byte] = (slices[i - 1][byte] >> 8) ^ slices[0][slices[i - 1][byte] & 255];
    for (int i = 0; i < 4; i++) /* linear: a byte's entry is the sum of those of its bits */
        for (uint32_t bit = 1; bit < 256; bit *= 2) {
            over_lane[i][bit] = crc_by_table(bit << (8 * i), zeros, LANE);
            for (uint32_t below = 1; below < bit; below++)
                over_lane[i][bit | below] = over_lane[i][bit] ^ over_lane[i][below];
        }
#ifdef CRC_TARGET
    has_instruction = CRC_SUPPORTED();
#endif
}

/* `by_table`: without the instruction, for tests. */
uint32_t rb_crc32c(const uint8_t *at, int64_t size, int by_table)
{
#ifdef CRC_TARGET
    if (has_instruction && !by_table)
        return ~crc_by_instruction(~0u, at, (size_t)size);
#endif
    (void)by_table;
    return ~crc_by_table(~0u, at, (size_t)size);
}

/* ---- Arrow columns as input --------------------------------------------------------------------------------------- */

typedef struct {
    const void *offsets; /* of the first value on; NULL: all values are null */
    const uint8_t *data;
    const uint8_t *valid; /* a bitmap; NULL: no value is null */
    int64_t valid_from;   /* the first value's bit */
    int64_t wide;         /* offsets have 64 bits instead of 32 */
} column;

typedef struct {
    const uint8_t *at;
    int64_t size; /* -1: null */
} bytes;

static inline int64_t offset_at(const void *offsets, int64_t wide, int64_t i)
{
    return wide ? ((const int64_t *)offsets)[i] : ((const int32_t *)offsets)[i];
}

static inline int is_valid(const column *from, int64_t i)
{
    int64_t bit = from->valid_from + i;
    return !from->valid || (from->valid[bit >> 3] >> (bit & 7) & 1);
}

static inline bytes value_at(const column *from, int64_t i)
{
    if (!from->offsets || !is_valid(from, i))
        return (bytes){NULL, -1};
    int64_t begin = offset_at(from->offsets, from->wide, i);
    return (bytes){from->data + begin, offset_at(from->offsets, from->wide, i + 1) - begin};
}

/* ---- encode ------------------------------------------------------------------------------------------------------- */

typedef struct {
    column key, value;
    column headers; /* a list: its offsets count headers; `data` is unused */
    column header_key, header_value;
    const int64_t *timestamps; /* milliseconds; NULL: `timestamp` for all */
    int64_t timestamp;
    const void *rows; /* the rows to write, in this order; NULL: all from the first on */
    int64_t rows_wide;
} records;

typedef struct {
    int64_t next;                         /* the first record that was not written */
    int64_t size;                         /* bytes written */
    int64_t needed;                       /* bytes of record `next`, if there was no room for it */
    int64_t base_timestamp, max_timestamp;
} encoded;

static inline uint64_t zigzag(int64_t value)
{
    return ((uint64_t)value << 1) ^ (uint64_t)(value >> 63);
}

static inline int64_t varint_size(int64_t value)
{
    return (70 - __builtin_clzll(zigzag(value) | 1)) / 7;
}

static inline uint8_t *put_varint(uint8_t *at, int64_t value)
{
    uint64_t left = zigzag(value);
    for (; unlikely(left >= 128); left >>= 7)
        *at++ = (uint8_t)(left | 128);
    *at++ = (uint8_t)left;
    return at;
}

static inline int64_t bytes_size(bytes value)
{
    return varint_size(value.size) + (value.size > 0 ? value.size : 0);
}

static inline uint8_t *put_bytes(uint8_t *at, bytes value)
{
    at = put_varint(at, value.size);
    if (value.size > 0) {
        memcpy(at, value.at, (size_t)value.size);
        at += value.size;
    }
    return at;
}

/* Write records `from` to `to` as one batch's, as many as `room` has bytes for. */
void rb_encode(const records *in, int64_t from, int64_t to, uint8_t *out, int64_t room, encoded *result)
{
    uint8_t *at = out;
    int64_t i = from, base = 0, latest = 0, needed = 0;
    for (; i < to; i++) {
        int64_t row = in->rows ? offset_at(in->rows, in->rows_wide, i) : i;
        int64_t timestamp = in->timestamps ? in->timestamps[row] : in->timestamp;
        if (i == from)
            base = latest = timestamp;
        int64_t since = (int64_t)((uint64_t)timestamp - (uint64_t)base);
        bytes key = value_at(&in->key, row), value = value_at(&in->value, row);
        int64_t header = 0, header_end = 0;
        if (in->headers.offsets && is_valid(&in->headers, row)) {
            header = offset_at(in->headers.offsets, in->headers.wide, row);
            header_end = offset_at(in->headers.offsets, in->headers.wide, row + 1);
        }
        int64_t size = 1 + varint_size(since) + varint_size(i - from) + bytes_size(key) + bytes_size(value) +
                       varint_size(header_end - header);
        for (int64_t h = header; h < header_end; h++)
            size += bytes_size(value_at(&in->header_key, h)) + bytes_size(value_at(&in->header_value, h));
        needed = varint_size(size) + size;
        if (needed > room - (at - out))
            break;
        if (timestamp > latest)
            latest = timestamp;
        at = put_varint(at, size);
        *at++ = 0;
        at = put_varint(at, since);
        at = put_varint(at, i - from);
        at = put_bytes(at, key);
        at = put_bytes(at, value);
        at = put_varint(at, header_end - header);
        for (int64_t h = header; h < header_end; h++) {
            at = put_bytes(at, value_at(&in->header_key, h));
            at = put_bytes(at, value_at(&in->header_value, h));
        }
    }
    *result = (encoded){i, at - out, i < to ? needed : 0, base, latest};
}

/* Write the header of a batch of `size` bytes, whose records follow it already. */
void rb_seal(uint8_t *batch, int64_t size, int16_t attributes, int32_t count, int64_t base_timestamp,
             int64_t max_timestamp, int64_t producer_id, int16_t producer_epoch, int32_t base_sequence)
{
    put64(batch, 0); /* the broker assigns offsets */
    put32(batch + 8, (int32_t)(size - LENGTH_FROM));
    put32(batch + 12, -1);
    batch[MAGIC_AT] = 2;
    put16(batch + 21, attributes);
    put32(batch + 23, count - 1);
    put64(batch + 27, base_timestamp);
    put64(batch + 35, max_timestamp);
    put64(batch + 43, producer_id);
    put16(batch + 51, producer_epoch);
    put32(batch + 53, base_sequence);
    put32(batch + 57, count);
    put32(batch + 17, (int32_t)rb_crc32c(batch + CRC_FROM, size - CRC_FROM, 0));
}

/* ---- partitions of keys ------------------------------------------------------------------------------------------- */

static uint32_t murmur2(const uint8_t *at, int64_t size)
{
    const uint32_t m = 0x5BD1E995u;
    uint32_t hash = 0x9747B28Cu ^ (uint32_t)size, word;
    for (; size >= 4; size -= 4, at += 4) {
        memcpy(&word, at, 4);
        word *= m;
        word ^= word >> 24;
        hash = (hash * m) ^ (word * m);
    }
    if (size) {
        word = 0;
        memcpy(&word, at, (size_t)size);
        hash = (hash ^ word) * m;
    }
    hash ^= hash >> 13;
    hash *= m;
    return hash ^ (hash >> 15);
}

/* The partition that Java's producer chooses for a key; -1: null. */
void rb_partitions(const column *keys, int64_t n, int32_t partitions, int32_t *out)
{
    for (int64_t i = 0; i < n; i++) {
        bytes key = value_at(keys, i);
        out[i] = key.size < 0 ? -1 : (int32_t)(murmur2(key.at, key.size) & 0x7FFFFFFFu) % partitions;
    }
}

/* Rows by partition, in their order: those of partition p stand in `rows` from `starts[p]` to `starts[p + 1]`. Returns
   the first row whose partition does not exist, or -1. */
int64_t rb_group(const int32_t *partition_of, int64_t n, int32_t partitions, int64_t *starts, int32_t *rows)
{
    memset(starts, 0, (size_t)(partitions + 1) * sizeof *starts);
    for (int64_t i = 0; i < n; i++) {
        if (partition_of[i] < 0 || partition_of[i] >= partitions)
            return i;
        starts[partition_of[i] + 1]++;
    }
    for (int32_t p = 0; p < partitions; p++)
        starts[p + 1] += starts[p];
    for (int64_t i = 0; i < n; i++) /* moves each start to the end of its partition */
        rows[starts[partition_of[i]]++] = (int32_t)i;
    memmove(starts + 1, starts, (size_t)partitions * sizeof *starts);
    starts[0] = 0;
    return -1;
}

/* ---- decode ------------------------------------------------------------------------------------------------------- */

/* What is wrong; record_batch.py holds the texts. */
typedef enum {
    FINE,
    BAD_LENGTH,
    BAD_MAGIC,
    OLD_MAGIC,
    BAD_CRC,
    BAD_OFFSETS,
    BAD_ORDER,
    BAD_COUNT,
    BAD_COMPRESSION,
    BAD_CONTROL,
    BAD_RECORD_SIZE,
    BAD_VARINT,
    BAD_OFFSET_DELTA,
    BAD_KEY_SIZE,
    BAD_VALUE_SIZE,
    BAD_HEADER_COUNT,
    BAD_HEADER_SIZE,
    BYTES_LEFT,
    NO_ROOM,
} fault;

typedef struct {
    int64_t base_offset, last_offset, base_timestamp, max_timestamp;
    const uint8_t *records; /* of a compressed batch: compressed, until record_batch.py puts them elsewhere */
    int64_t size;           /* bytes of `records` */
    int64_t count;
    int64_t attributes;
} batch;

typedef struct {
    int64_t batches;     /* written to `out` */
    int64_t position;    /* every record below it was seen, or is left out for good */
    int64_t partial;     /* bytes of the whole batch of which the buffer has only a part; 0: there is none */
    int64_t fault;
    int64_t base_offset; /* of the batch with the fault */
    int64_t found, wanted;
} scanned;

/* Transactions that were aborted, as a read-committed reader takes them from a Fetch response. */
typedef struct {
    const int64_t *list; /* pairs of producer id and first offset, by first offset */
    int64_t count, next;
    int64_t *producers; /* whose current transaction will be aborted: room for `count` */
    int64_t active;
} aborted_transactions;

/* Whether the batch belongs to an aborted transaction; offsets must be asked for in ascending order. */
static int is_aborted(aborted_transactions *aborted, int64_t producer, int64_t last_offset, int transactional,
                      int abort_marker)
{
    for (; aborted->next < aborted->count && aborted->list[2 * aborted->next + 1] <= last_offset; aborted->next++)
        aborted->producers[aborted->active++] = aborted->list[2 * aborted->next];
    int found = 0;
    for (int64_t i = 0; i < aborted->active;) {
        if (aborted->producers[i] != producer) {
            i++;
        } else if (abort_marker) {
            aborted->producers[i] = aborted->producers[--aborted->active];
        } else {
            found = transactional;
            break;
        }
    }
    return found;
}

typedef struct {
    const uint8_t *at, *end;
    int failed;
} cursor;

static int64_t many_bytes(cursor *from, int bits)
{
    uint64_t value = 0;
    for (int shift = 0; shift < bits && from->at < from->end; shift += 7) {
        uint64_t byte = *from->at++;
        if (shift + 7 > bits && byte >> (bits - shift))
            break;
        value |= (byte & 127) << shift;
        if (byte < 128)
            return (int64_t)(value >> 1) ^ -(int64_t)(value & 1);
    }
    from->failed = 1;
    return 0;
}

static inline int64_t get_number(cursor *from, int bits)
{
    if (likely(from->at < from->end && *from->at < 128)) {
        int64_t byte = *from->at++;
        return (byte >> 1) ^ -(byte & 1);
    }
    return many_bytes(from, bits);
}

/* A number of 32 bits, in at most five bytes; of 64 bits, in at most ten. */
static inline int64_t get_varint(cursor *from)
{
    return get_number(from, 32);
}

static inline int64_t get_varlong(cursor *from)
{
    return get_number(from, 64);
}

/* 0: no abort marker, 1: abort marker, -1: not a control record. */
static int abort_marker(const uint8_t *at, int64_t size, int64_t count)
{
    if (count == 0)
        return 0; /* compacted */
    cursor record = {at, at + size, 0};
    int64_t length = get_varint(&record);
    if (record.failed || length < 1 || length > record.end - record.at)
        return -1;
    record.at++;
    get_varlong(&record);
    get_varint(&record);
    int64_t key = get_varint(&record);
    if (record.failed || key < 4 || key > record.end - record.at)
        return -1;
    return get16(record.at + 2) == 0;
}

/* Find the batches of a Fetch response's partition that may hold visible records from `start` to below `end`, and check
   them. Records are not looked at; `aborted` NULL: of aborted transactions, too. */
void rb_scan(const uint8_t *buffer, int64_t size, int64_t start, int64_t end, aborted_transactions *aborted, batch *out,
             int64_t room, scanned *result)
{
    *result = (scanned){.position = start};
    int64_t previous = -1;
    for (const uint8_t *at = buffer, *stop = buffer + size; at < stop;) {
        if (stop - at <= MAGIC_AT)
            return;
        batch *b = &out[result->batches];
        int64_t length = (int64_t)get32(at + 8) + LENGTH_FROM;
        uint8_t magic = at[MAGIC_AT];
        result->base_offset = get64(at);
        result->found = length;
#define REFUSE(code, what, expected)                                                                                   \
    do {                                                                                                               \
        result->fault = code, result->found = what, result->wanted = expected;                                         \
        return;                                                                                                        \
    } while (0)
        if (magic != 2)
            REFUSE(magic < 2 ? OLD_MAGIC : BAD_MAGIC, magic, 2);
        if (length < HEADER)
            REFUSE(BAD_LENGTH, length, HEADER);
        if (result->base_offset >= end) {
            result->position = result->position > end ? result->position : end;
            return;
        }
        if (length > stop - at) {
            result->partial = length;
            return;
        }
        uint32_t crc = rb_crc32c(at + CRC_FROM, length - CRC_FROM, 0);
        if (crc != (uint32_t)get32(at + 17))
            REFUSE(BAD_CRC, crc, (uint32_t)get32(at + 17));
        if (result->batches >= room)
            REFUSE(NO_ROOM, room, result->batches + 1);
        int64_t last_delta = get32(at + 23), producer = get64(at + 43);
        *b = (batch){result->base_offset, 0, get64(at + 27), get64(at + 35), at + HEADER, length - HEADER,
                     get32(at + 57), get16(at + 21)};
        if (b->base_offset < 0 || last_delta < 0 || b->base_offset > INT64_MAX - 1 - last_delta)
            REFUSE(BAD_OFFSETS, last_delta, 0);
        if (b->base_offset <= previous)
            REFUSE(BAD_ORDER, previous, 0);
        previous = b->last_offset = b->base_offset + last_delta;
        if ((b->attributes & COMPRESSION) > 4)
            REFUSE(BAD_COMPRESSION, b->attributes & COMPRESSION, 4);
        int64_t count_max = b->attributes & COMPRESSION ? last_delta + 1 : b->size / RECORD_MIN;
        if (b->count < 0 || b->count > last_delta + 1 || b->count > count_max)
            REFUSE(BAD_COUNT, b->count, count_max < last_delta + 1 ? count_max : last_delta + 1);
        int control = (b->attributes & CONTROL) != 0, marker = 0;
        if (control) {
            marker = b->attributes & COMPRESSION ? -1 : abort_marker(b->records, b->size, b->count);
            if (marker < 0)
                REFUSE(BAD_CONTROL, b->attributes, 0);
        }
        int transactional = (b->attributes & TRANSACTIONAL) != 0;
        int hidden = aborted && producer >= 0 && is_aborted(aborted, producer, b->last_offset, transactional, marker);
        if (!control && !hidden && b->count > 0 && b->last_offset >= start)
            result->batches++;
        if (b->last_offset >= result->position)
            result->position = b->last_offset < end ? b->last_offset + 1 : end;
        at += length;
    }
}

/* A binary column of at most `room` bytes. */
typedef struct {
    int32_t *offsets;
    uint8_t *data;
    uint8_t *valid; /* a bitmap of ones, of which those of nulls are cleared */
    int64_t nulls, size, room;
} binary;

typedef struct {
    binary key, value;
    int64_t *offsets;
    int64_t *timestamps; /* microseconds */
    int32_t *types;
    int64_t rows, room;
    int64_t headers, header_key_size, header_value_size; /* what the records' headers need */
    int64_t fault, batch, found, wanted;
} columns;

static inline void append(binary *to, int64_t row, const uint8_t *at, int64_t size)
{
    if (size < 0) {
        to->valid[row >> 3] &= (uint8_t)~(1 << (row & 7));
        to->nulls++;
    } else {
        memcpy(to->data + to->size, at, (size_t)size);
        to->size += size;
    }
    to->offsets[row + 1] = (int32_t)to->size;
}

static inline int64_t micros(int64_t ms)
{
    int64_t us;
    if (likely(!__builtin_mul_overflow(ms, 1000, &us)))
        return us;
    return ms < 0 ? INT64_MIN : INT64_MAX;
}

/* Records of whole, decompressed batches into columns. The caller has room for all records and bytes of the batches. */
void rb_decode(const batch *batches, int64_t n, int64_t start, int64_t end, columns *out)
{
#define FAIL(code, what, expected)                                                                                     \
    do {                                                                                                               \
        out->fault = code, out->found = what, out->wanted = expected;                                                  \
        return;                                                                                                        \
    } while (0)
    for (int64_t i = 0; i < n; i++) {
        const batch *b = &batches[i];
        int append_time = (b->attributes & APPEND_TIME) != 0;
        int64_t last_delta = -1;
        cursor from = {b->records, b->records + b->size, 0};
        out->batch = i;
        if (b->count > b->size / RECORD_MIN)
            FAIL(BAD_COUNT, b->count, b->size / RECORD_MIN);
        if (b->count > out->room - out->rows || b->size > out->key.room - out->key.size ||
            b->size > out->value.room - out->value.size)
            FAIL(NO_ROOM, b->size, 0);
        for (int64_t r = 0; r < b->count; r++) {
            int64_t size = get_varint(&from), row = out->rows;
            if (from.failed || size < RECORD_MIN - 1 || size > from.end - from.at)
                FAIL(BAD_RECORD_SIZE, from.failed ? -1 : size, from.end - from.at);
            cursor record = {from.at + 1, from.at + size, 0};
            from.at += size;
            int64_t since = get_varlong(&record), delta = get_varint(&record), key_size = get_varint(&record);
            if (unlikely(record.failed))
                FAIL(BAD_VARINT, r, 0);
            if (unlikely(delta <= last_delta || delta > b->last_offset - b->base_offset))
                FAIL(BAD_OFFSET_DELTA, delta, b->last_offset - b->base_offset);
            last_delta = delta;
            if (unlikely(key_size < -1 || key_size > record.end - record.at))
                FAIL(BAD_KEY_SIZE, key_size, record.end - record.at);
            const uint8_t *key = record.at;
            record.at += key_size > 0 ? key_size : 0;
            int64_t value_size = get_varint(&record);
            if (unlikely(record.failed || value_size < -1 || value_size > record.end - record.at))
                FAIL(BAD_VALUE_SIZE, record.failed ? -1 : value_size, record.end - record.at);
            const uint8_t *value = record.at;
            record.at += value_size > 0 ? value_size : 0;
            int64_t headers = get_varint(&record);
            if (unlikely(record.failed || headers < 0 || headers > (record.end - record.at) / HEADER_MIN))
                FAIL(BAD_HEADER_COUNT, record.failed ? -1 : headers, (record.end - record.at) / HEADER_MIN);
            int64_t key_bytes = 0, value_bytes = 0;
            for (int64_t h = 0; h < 2 * headers; h++) { /* a key, a value, a key, ... */
                int64_t is_key = !(h & 1), length = get_varint(&record);
                if (record.failed || length < (is_key ? 0 : -1) || length > record.end - record.at)
                    FAIL(BAD_HEADER_SIZE, record.failed ? -1 : length, record.end - record.at);
                length = length > 0 ? length : 0;
                record.at += length;
                *(is_key ? &key_bytes : &value_bytes) += length;
            }
            if (unlikely(record.at != record.end))
                FAIL(BYTES_LEFT, record.end - record.at, 0);
            int64_t offset = b->base_offset + delta;
            if (offset < start || offset >= end)
                continue;
            append(&out->key, row, key, key_size);
            append(&out->value, row, value, value_size);
            out->offsets[row] = offset;
            int64_t created = (int64_t)((uint64_t)b->base_timestamp + (uint64_t)since);
            out->timestamps[row] = micros(append_time ? b->max_timestamp : created);
            out->types[row] = append_time;
            out->headers += headers;
            out->header_key_size += key_bytes;
            out->header_value_size += value_bytes;
            out->rows++;
        }
        if (from.at != from.end)
            FAIL(BYTES_LEFT, from.end - from.at, 0);
    }
}

typedef struct {
    int32_t *lists; /* offsets of the records' lists */
    uint8_t *valid; /* a bitmap of ones: the lists of records without headers become null */
    binary key, value;
    int64_t rows, headers;
} header_columns;

/* The headers of records that rb_decode has checked and counted. */
void rb_headers(const batch *batches, int64_t n, int64_t start, int64_t end, header_columns *out)
{
    for (int64_t i = 0; i < n; i++) {
        cursor from = {batches[i].records, batches[i].records + batches[i].size, 0};
        for (int64_t r = 0; r < batches[i].count; r++) {
            int64_t size = get_varint(&from);
            cursor record = {from.at + 1, from.at + size, 0};
            from.at += size;
            get_varlong(&record);
            int64_t offset = batches[i].base_offset + get_varint(&record);
            if (offset < start || offset >= end)
                continue;
            for (int part = 0; part < 2; part++) { /* over key and value */
                int64_t length = get_varint(&record);
                record.at += length > 0 ? length : 0;
            }
            int64_t headers = get_varint(&record), row = out->rows++;
            if (!headers)
                out->valid[row >> 3] &= (uint8_t)~(1 << (row & 7));
            for (int64_t h = 0; h < 2 * headers; h++) {
                int64_t length = get_varint(&record);
                append(h & 1 ? &out->value : &out->key, out->headers + h / 2, record.at, length);
                record.at += length > 0 ? length : 0;
            }
            out->headers += headers;
            out->lists[row + 1] = (int32_t)out->headers;
        }
    }
}
