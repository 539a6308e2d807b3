#include "gemm.h"

#include <algorithm>
#include <cstring>
#include <memory>

namespace cuda_stand_in {

namespace {

#if defined(__AVX512F__)
constexpr size_t VECTOR = 16;
#else
constexpr size_t VECTOR = 8;
#endif
typedef float Vector __attribute__((vector_size(VECTOR * sizeof(float))));

// Tiles of the result that registers hold, and the part of k that caches hold.
constexpr size_t VECTORS = 2, ROWS = VECTORS * VECTOR, COLUMNS = 6, DEPTH = 512;

float round_mantissa(float value, int bits) {
    if (bits >= 23) return value;
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    if ((word & 0x7f800000u) == 0x7f800000u) return value;
    const uint32_t dropped = 23u - uint32_t(bits), half = (1u << (dropped - 1)) - 1;
    word = (word + half + ((word >> dropped) & 1u)) & ~((1u << dropped) - 1);
    memcpy(&value, &word, sizeof value);
    return value;
}

View transpose(const View& view) { return {view.elements, view.type, view.column_step, view.row_step}; }

struct Free {
    void operator()(float* memory) const { free(memory); }
};
using Panels = std::unique_ptr<float[], Free>;

Panels allocate(size_t floats) {
    constexpr size_t ALIGNMENT = 64;
    const size_t bytes = (floats * sizeof(float) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return Panels(static_cast<float*>(aligned_alloc(ALIGNMENT, bytes)));
}

// Copies lines of a matrix to panels [k, width] of `width` lines, widened and filled up with zeros.
// `line_step` is the distance of lines in memory, `depth_step` that along k.
template <class T>
Panels pack(const T* elements, size_t lines, size_t line_step, size_t k, size_t depth_step, size_t width,
            int mantissa_bits) {
    const size_t panels = (lines + width - 1) / width;
    Panels packed = allocate(panels * width * k);
    for (size_t panel = 0; panel < panels; panel++) {
        float* to = packed.get() + panel * width * k;
        const size_t present = std::min(width, lines - panel * width);
        const T* from = elements + panel * width * line_step;
        if (present < width) std::fill_n(to, width * k, 0.f);
        const auto load = [&](size_t line, size_t depth) {
            const T element = from[line * line_step + depth * depth_step];
            if constexpr (sizeof(T) == 2) return widen(element);
            else return round_mantissa(element, mantissa_bits);
        };
        if (line_step == 1) {
            for (size_t depth = 0; depth < k; depth++)
                for (size_t line = 0; line < present; line++) to[depth * width + line] = load(line, depth);
        } else {
            for (size_t line = 0; line < present; line++)
                for (size_t depth = 0; depth < k; depth++) to[depth * width + line] = load(line, depth);
        }
    }
    return packed;
}

Panels pack(const View& view, bool by_rows, size_t lines, size_t k, size_t width, int mantissa_bits) {
    const size_t line_step = by_rows ? view.row_step : view.column_step;
    const size_t depth_step = by_rows ? view.column_step : view.row_step;
    if (view.type == BF16)
        return pack(static_cast<const uint16_t*>(view.elements), lines, line_step, k, depth_step, width,
                    mantissa_bits);
    return pack(static_cast<const float*>(view.elements), lines, line_step, k, depth_step, width,
                mantissa_bits);
}

// sums [COLUMNS, ROWS] += a [depth, ROWS] x b [depth, COLUMNS]
void multiply_tile(const float* a, const float* b, size_t depth, float* sums) {
    Vector tile[COLUMNS][VECTORS];
    memcpy(tile, sums, sizeof tile);
    for (size_t k = 0; k < depth; k++) {
        Vector column[VECTORS];
        memcpy(column, a + k * ROWS, sizeof column);
#pragma GCC unroll 6
        for (size_t j = 0; j < COLUMNS; j++)
#pragma GCC unroll 2
            for (size_t v = 0; v < VECTORS; v++) tile[j][v] += column[v] * b[k * COLUMNS + j];
    }
    memcpy(sums, tile, sizeof tile);
}

}  // namespace

std::vector<float> multiply(const View& a, const View& b, size_t m, size_t n, size_t k, int mantissa_bits) {
    // Few rows would fill only a part of each tile. The transposed product has the same bits.
    if (m < VECTOR && m < n) {
        const std::vector<float> transposed = multiply(transpose(b), transpose(a), n, m, k, mantissa_bits);
        std::vector<float> result(m * n);
        for (size_t j = 0; j < n; j++)
            for (size_t i = 0; i < m; i++) result[j * m + i] = transposed[i * n + j];
        return result;
    }
    const Panels rows = pack(a, true, m, k, ROWS, mantissa_bits);
    const Panels columns = pack(b, false, n, k, COLUMNS, mantissa_bits);
    const size_t row_panels = (m + ROWS - 1) / ROWS, column_panels = (n + COLUMNS - 1) / COLUMNS;
    constexpr size_t TILE = ROWS * COLUMNS;
    const Panels sums = allocate(row_panels * column_panels * TILE);
    std::fill_n(sums.get(), row_panels * column_panels * TILE, 0.f);
    for (size_t first = 0; first < k; first += DEPTH) {
        const size_t depth = std::min(DEPTH, k - first);
        for (size_t i = 0; i < row_panels; i++)
            for (size_t j = 0; j < column_panels; j++)
                multiply_tile(rows.get() + (i * k + first) * ROWS, columns.get() + (j * k + first) * COLUMNS,
                              depth, sums.get() + (i * column_panels + j) * TILE);
    }
    std::vector<float> result(m * n);
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < row_panels; i++) {
            const float* tile = sums.get() + (i * column_panels + j / COLUMNS) * TILE + j % COLUMNS * ROWS;
            std::copy_n(tile, std::min(ROWS, m - i * ROWS), result.data() + j * m + i * ROWS);
        }
    return result;
}

}  // namespace cuda_stand_in
