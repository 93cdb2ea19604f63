// Reduce arrays of NCCL's types. Sums of half precision are accumulated in float32 and rounded once.
#include "nccl_emulated.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

size_t size_of_type(ncclDataType_t type) {
    switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
    }
}

static float from_bfloat16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static uint16_t to_bfloat16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if (isnan(number)) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); // to nearest, ties to even
}

double read_number(const void *numbers, size_t i, ncclDataType_t type) {
    switch (type) {
    case ncclInt8: return ((int8_t *)numbers)[i];
    case ncclUint8: return ((uint8_t *)numbers)[i];
    case ncclInt32: return ((int32_t *)numbers)[i];
    case ncclUint32: return ((uint32_t *)numbers)[i];
    case ncclFloat16: return ((_Float16 *)numbers)[i];
    case ncclBfloat16: return from_bfloat16(((uint16_t *)numbers)[i]);
    case ncclFloat32: return ((float *)numbers)[i];
    default: return ((double *)numbers)[i];
    }
}

static void write_number(void *numbers, size_t i, ncclDataType_t type, double value) {
    switch (type) {
    case ncclInt8: ((int8_t *)numbers)[i] = (int8_t)value; break;
    case ncclUint8: ((uint8_t *)numbers)[i] = (uint8_t)value; break;
    case ncclInt32: ((int32_t *)numbers)[i] = (int32_t)value; break;
    case ncclUint32: ((uint32_t *)numbers)[i] = (uint32_t)value; break;
    case ncclFloat16: ((_Float16 *)numbers)[i] = (_Float16)value; break;
    case ncclBfloat16: ((uint16_t *)numbers)[i] = to_bfloat16((float)value); break;
    case ncclFloat32: ((float *)numbers)[i] = (float)value; break;
    default: ((double *)numbers)[i] = value; break;
    }
}

#define COMBINE(A, B, REDUCTION) \
    ((REDUCTION) == ncclProd  ? (A) * (B) \
     : (REDUCTION) == ncclMax ? ((B) > (A) || (B) != (B) ? (B) : (A)) \
     : (REDUCTION) == ncclMin ? ((B) < (A) || (B) != (B) ? (B) : (A)) \
                              : (A) + (B))

// A double does not hold all integers of 64 bits.
static void reduce_int64(int64_t *out, const char *parts, size_t stride, int num_parts, size_t count, int reduction) {
    for (size_t i = 0; i < count; i++) {
        int64_t value = ((int64_t *)parts)[i];
        for (int part = 1; part < num_parts; part++) {
            int64_t other = ((int64_t *)(parts + part * stride))[i];
            value = COMBINE(value, other, reduction);
        }
        out[i] = value;
    }
}

void reduce_numbers(void *out, const char *parts, size_t stride, int num_parts, size_t count, ncclDataType_t type,
                    int reduction, double scale) {
    if (type == ncclInt64 || type == ncclUint64) {
        reduce_int64(out, parts, stride, num_parts, count, reduction);
        return;
    }
    bool is_float32 = type == ncclFloat32 || type == ncclFloat16 || type == ncclBfloat16;
    for (size_t i = 0; i < count; i++) {
        double value = read_number(parts, i, type);
        for (int part = 1; part < num_parts; part++) {
            double other = read_number(parts + part * stride, i, type);
            value = COMBINE(value, other, reduction);
            if (is_float32) value = (float)value;
        }
        write_number(out, i, type, value * scale);
    }
}
