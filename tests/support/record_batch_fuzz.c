/* Decodes mutated record batches, to be run under AddressSanitizer and UndefinedBehaviorSanitizer: every buffer has its
   exact size, so that the first byte beyond it is an error.

       record_batch_fuzz MUTATIONS SEED FILE...     each file: one valid batch, uncompressed */

#include <stdio.h>
#include <stdlib.h>

#include "record_batch.c"

static uint64_t state;

static uint64_t dice(uint64_t sides)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % sides;
}

static void *exactly(size_t size)
{
    void *found = malloc(size ? size : 1);
    if (!found)
        abort();
    return found;
}

static binary make_binary(int64_t rows, int64_t room)
{
    binary made = {exactly((size_t)(rows + 1) * 4), exactly((size_t)room), exactly((size_t)rows / 8 + 1), 0, 0, room};
    memset(made.valid, 255, (size_t)rows / 8 + 1);
    made.offsets[0] = 0;
    return made;
}

static void free_binary(binary *made)
{
    free(made->offsets), free(made->data), free(made->valid);
}

static size_t mutate(uint8_t *bytes, size_t size)
{
    static const uint8_t telling[] = {0, 1, 2, 127, 128, 129, 254, 255};
    for (uint64_t left = 1 + dice(4); left && size; left--) {
        size_t at = dice(3) ? dice(size) : dice(size < 80 ? size : 80); /* headers are short, and matter most */
        switch (dice(6)) {
        case 0: bytes[at] ^= (uint8_t)(1 << dice(8)); break;
        case 1: bytes[at] = telling[dice(sizeof telling)]; break;
        case 2: memset(bytes + at, 255, size - at < 9 ? size - at : 9); break; /* an endless varint, a huge count */
        case 3: size = dice(4) ? size : at; break;
        case 4: memmove(bytes + at, bytes + at / 2, size - at); break;
        case 5: bytes[at] = (uint8_t)dice(256); break;
        }
    }
    if (size > HEADER && dice(8)) { /* or nothing but the length and the CRC would be tested */
        if (dice(4))
            put32(bytes + 8, (int32_t)(size - LENGTH_FROM));
        if (dice(4))
            bytes[MAGIC_AT] = 2;
        if (dice(4))
            put16(bytes + 21, get16(bytes + 21) & ~COMPRESSION);
        int64_t length = (int64_t)get32(bytes + 8) + LENGTH_FROM;
        if (length >= HEADER && length <= (int64_t)size)
            put32(bytes + 17, (int32_t)rb_crc32c(bytes + CRC_FROM, length - CRC_FROM, 0));
    }
    return size;
}

static int64_t decode(const uint8_t *bytes, size_t size, uint64_t *outcomes)
{
    int64_t list[] = {1, 0, 7, 2, 1, 5}, producers[3], room = (int64_t)size / HEADER + 1;
    aborted_transactions aborted = {list, 3, 0, producers, 0};
    batch *found = exactly((size_t)room * sizeof *found);
    scanned seen;
    int64_t start = dice(2) ? 0 : (int64_t)dice(9), end = dice(2) ? INT64_MAX : (int64_t)dice(40);
    rb_scan(bytes, (int64_t)size, start, end, dice(2) ? &aborted : NULL, found, room, &seen);
    outcomes[seen.fault]++;
    int64_t rows = 0, total = 0;
    for (int64_t i = 0; i < seen.batches; i++) {
        rows += found[i].count < found[i].size / RECORD_MIN ? found[i].count : found[i].size / RECORD_MIN;
        total += found[i].size;
    }
    columns out = {.key = make_binary(rows, total), .value = make_binary(rows, total), .room = rows};
    out.offsets = exactly((size_t)rows * 8), out.timestamps = exactly((size_t)rows * 8);
    out.types = exactly((size_t)rows * 4);
    rb_decode(found, seen.batches, start, end, &out);
    if (seen.batches)
        outcomes[out.fault]++;
    if (!out.fault) {
        header_columns headers = {.lists = exactly((size_t)(out.rows + 1) * 4), .valid = exactly((size_t)out.rows / 8 + 1),
                                  .key = make_binary(out.headers, out.header_key_size),
                                  .value = make_binary(out.headers, out.header_value_size)};
        memset(headers.valid, 255, (size_t)out.rows / 8 + 1);
        rb_headers(found, seen.batches, start, end, &headers);
        if (headers.rows != out.rows || headers.headers != out.headers || headers.key.size != out.header_key_size)
            abort();
        free(headers.lists), free(headers.valid), free_binary(&headers.key), free_binary(&headers.value);
    }
    rows = out.rows;
    free_binary(&out.key), free_binary(&out.value);
    free(out.offsets), free(out.timestamps), free(out.types), free(found);
    return rows;
}

int main(int count, char **arguments)
{
    uint64_t outcomes[NO_ROOM + 1] = {0}, rows = 0;
    int64_t mutations = atoll(arguments[1]);
    state = (uint64_t)atoll(arguments[2]) * 0x9E3779B97F4A7C15u | 1;
    for (int64_t i = 0; i < mutations; i++) {
        uint8_t whole[1 << 16];
        size_t size = 0;
        for (uint64_t parts = 1 + dice(3); parts; parts--) { /* of several batches, one after another */
            FILE *file = fopen(arguments[3 + dice((uint64_t)count - 3)], "rb");
            size += fread(whole + size, 1, sizeof whole / 4, file);
            fclose(file);
        }
        uint8_t *bytes = exactly(size);
        memcpy(bytes, whole, size);
        size_t left = mutate(bytes, size);
        uint8_t *cut = exactly(left);
        memcpy(cut, bytes, left);
        free(bytes);
        rows += (uint64_t)decode(cut, left, outcomes);
        free(cut);
    }
    printf("%lld mutations, %llu records, faults:", (long long)mutations, (unsigned long long)rows);
    for (int fault = 0; fault <= NO_ROOM; fault++)
        printf(" %llu", (unsigned long long)outcomes[fault]);
    printf("\n");
    return 0;
}
