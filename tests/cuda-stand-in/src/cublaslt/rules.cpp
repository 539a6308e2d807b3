#include "rules.h"

#include <algorithm>
#include <initializer_list>

namespace cuda_stand_in {

namespace {

constexpr uint64_t ALGORITHM_MAGIC = 0x414c474f'53544e44;
constexpr uint64_t WORKSPACE_BYTES = 4 << 20;  // of the algorithm that wants one
constexpr size_t VECTOR_BYTES = 16;

bool is_valid(const Layout& layout) {
    if (layout.rows == 0 || layout.columns == 0 || layout.batches < 1) return false;
    const uint64_t length = layout.order == COLUMN ? layout.rows : layout.columns;
    return layout.leading >= int64_t(length);
}

bool are_types_supported(const Product& product, const Layout& a, const Layout& b, const Layout& c,
                         const Layout& d) {
    if (product.scale_type != F32 || a.type != b.type || c.type != d.type) return false;
    const bool is_exact = product.compute_type == COMPUTE_32F || product.compute_type == COMPUTE_32F_PEDANTIC;
    if (a.type == BF16) return is_exact && (d.type == BF16 || d.type == F32);
    const bool is_fast =
        product.compute_type == COMPUTE_32F_FAST_TF32 || product.compute_type == COMPUTE_32F_FAST_16BF;
    return a.type == F32 && d.type == F32 && (is_exact || is_fast);
}

bool is_epilogue(unsigned epilogue) {
    for (const unsigned known : {EPILOGUE_DEFAULT, EPILOGUE_RELU, EPILOGUE_BIAS, EPILOGUE_RELU_BIAS,
                                 EPILOGUE_GELU, EPILOGUE_GELU_BIAS, EPILOGUE_GELU_AUX, EPILOGUE_GELU_AUX_BIAS,
                                 EPILOGUE_DGELU, EPILOGUE_DGELU_BGRAD, EPILOGUE_BGRADA, EPILOGUE_BGRADB})
        if (epilogue == known) return true;
    return false;
}

Status check_epilogue(const Product& product, const Layout& d) {
    constexpr int64_t AUX_LEADING_UNIT = 8;
    if (!is_epilogue(product.epilogue)) return NOT_SUPPORTED;
    const unsigned vectors = BIAS_BIT | BGRAD_BIT | BGRADA_BIT | BGRADB_BIT | AUX_BIT;
    if (product.epilogue != EPILOGUE_DEFAULT && (product.epilogue & (vectors | DGELU_BIT)) &&
        d.order != COLUMN)
        return NOT_SUPPORTED;
    if (product.bias_type != -1 && product.bias_type != d.type) return NOT_SUPPORTED;
    if (product.aux_type != -1 && product.aux_type != d.type) return NOT_SUPPORTED;
    if (product.epilogue & AUX_BIT) {
        if (product.aux_leading < int64_t(d.rows)) return INVALID_VALUE;
        if (product.aux_leading % AUX_LEADING_UNIT != 0) return NOT_SUPPORTED;
    }
    return SUCCESS;
}

// The alignment that an algorithm counts on: full vectors, where the preference and the lines of the matrix
// allow.
uint16_t alignment_of(const Layout& layout, unsigned preferred) {
    const size_t line = size_t(layout.leading) * layout.element_bytes();
    size_t alignment = std::min<size_t>(VECTOR_BYTES, preferred);
    while (alignment > layout.element_bytes() && line % alignment != 0) alignment /= 2;
    return uint16_t(alignment);
}

}  // namespace

Status check_product(const Product& product, const Layout& a, const Layout& b, const Layout& c,
                     const Layout& d, Shape* shape) {
    for (const Layout* layout : {&a, &b, &c, &d}) {
        if (!is_valid(*layout)) return INVALID_VALUE;
        if (layout->order != COLUMN && layout->order != ROW) return NOT_SUPPORTED;
        if (layout->batches != d.batches) return INVALID_VALUE;
    }
    if (product.transpose_c != NO_TRANSPOSE || product.pointer_mode != HOST) return NOT_SUPPORTED;
    if (!are_types_supported(product, a, b, c, d)) return NOT_SUPPORTED;
    const bool is_a_transposed = product.transpose_a != NO_TRANSPOSE;
    const bool is_b_transposed = product.transpose_b != NO_TRANSPOSE;
    *shape = {is_a_transposed ? a.columns : a.rows, is_b_transposed ? b.rows : b.columns,
              is_a_transposed ? a.rows : a.columns};
    if ((is_b_transposed ? b.columns : b.rows) != shape->k) return INVALID_VALUE;
    if (d.rows != shape->m || d.columns != shape->n) return INVALID_VALUE;
    if (c.rows != d.rows || c.columns != d.columns || c.order != d.order) return INVALID_VALUE;
    return check_epilogue(product, d);
}

int find_algorithms(const Layout& a, const Layout& b, const Layout& c, const Layout& d,
                    const Preference& preference, int count, HeuristicResult* results) {
    int found = 0;
    for (const uint64_t workspace : {WORKSPACE_BYTES, uint64_t(0)}) {
        if (found == count || workspace > preference.workspace_bytes_max) continue;
        HeuristicResult& result = results[found++];
        result = {};
        result.algorithm.magic = ALGORITHM_MAGIC;
        result.algorithm.workspace_bytes = workspace;
        result.algorithm.alignment_a = alignment_of(a, preference.alignment_a);
        result.algorithm.alignment_b = alignment_of(b, preference.alignment_b);
        result.algorithm.alignment_c = alignment_of(c, preference.alignment_c);
        result.algorithm.alignment_d = alignment_of(d, preference.alignment_d);
        result.workspace_bytes = workspace;
        result.state = SUCCESS;
        result.waves = 1.f;
    }
    return found;
}

bool is_algorithm(const Algorithm& algorithm) { return algorithm.magic == ALGORITHM_MAGIC; }

}  // namespace cuda_stand_in
