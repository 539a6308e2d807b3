#include "arithmetic.h"

#include "../execution/bf16.h"

#include <algorithm>
#include <type_traits>

namespace nccl_stand_in {

namespace {

struct Bf16 {
    uint16_t bits;
    operator float() const { return cuda_stand_in::widen(bits); }
};

// `Wide` is the type of the arithmetic.
template <class Wide>
Wide combine(Wide a, Wide b, int reduction) {
    switch (reduction) {
        case PRODUCT: return a * b;
        case MAX: return std::max(a, b);
        case MIN: return std::min(a, b);
        default: return a + b;
    }
}

template <class T, class Wide = T>
void reduce_as(const std::vector<const void*>& vectors, size_t count, int reduction, void* result) {
    for (size_t i = 0; i < count; i++) {
        Wide value = static_cast<const T*>(vectors[0])[i];
        for (size_t j = 1; j < vectors.size(); j++)
            value = combine<Wide>(value, static_cast<const T*>(vectors[j])[i], reduction);
        if (reduction == AVERAGE) value = Wide(value / Wide(vectors.size()));
        if constexpr (std::is_same_v<T, Bf16>)
            static_cast<T*>(result)[i] = {cuda_stand_in::round_to_bf16(value)};
        else static_cast<T*>(result)[i] = value;
    }
}

}  // namespace

bool can_reduce(int type, int reduction) {
    const bool is_type = type <= UINT64 || type == FLOAT32 || type == FLOAT64 || type == BFLOAT16;
    return type >= INT8 && is_type && reduction >= SUM && reduction <= AVERAGE;
}

void reduce(const std::vector<const void*>& vectors, size_t count, int type, int reduction, void* result) {
    switch (type) {
        case INT8: return reduce_as<int8_t>(vectors, count, reduction, result);
        case UINT8: return reduce_as<uint8_t>(vectors, count, reduction, result);
        // Unsigned sums wrap, as those of a GPU.
        case INT32:
            if (reduction == SUM) return reduce_as<uint32_t>(vectors, count, reduction, result);
            return reduce_as<int32_t>(vectors, count, reduction, result);
        case UINT32: return reduce_as<uint32_t>(vectors, count, reduction, result);
        case INT64:
            if (reduction == SUM) return reduce_as<uint64_t>(vectors, count, reduction, result);
            return reduce_as<int64_t>(vectors, count, reduction, result);
        case UINT64: return reduce_as<uint64_t>(vectors, count, reduction, result);
        case FLOAT32: return reduce_as<float>(vectors, count, reduction, result);
        case FLOAT64: return reduce_as<double>(vectors, count, reduction, result);
        case BFLOAT16: return reduce_as<Bf16, float>(vectors, count, reduction, result);
        default: return;
    }
}

}  // namespace nccl_stand_in
