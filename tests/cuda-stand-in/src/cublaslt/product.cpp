#include "product.h"

#include "../driver/control.h"
#include "gemm.h"

#include <cmath>
#include <cstdio>
#include <cstring>

namespace cuda_stand_in {

namespace {

// Codes of the driver.
constexpr int DRIVER_SUCCESS = 0, ILLEGAL_ADDRESS = 700;
constexpr int F32_MANTISSA = 23, TF32_MANTISSA = 10, BF16_MANTISSA = 7;

float load(const void* elements, int type, size_t i) {
    return type == BF16 ? widen(static_cast<const uint16_t*>(elements)[i])
                        : static_cast<const float*>(elements)[i];
}

void store(void* elements, int type, size_t i, float value) {
    if (type == BF16) static_cast<uint16_t*>(elements)[i] = round_to_bf16(value);
    else static_cast<float*>(elements)[i] = value;
}

void* offset(const void* elements, int type, int64_t count) {
    const int64_t bytes = type == BF16 ? 2 : 4;
    return const_cast<char*>(static_cast<const char*>(elements)) + count * bytes;
}

constexpr float GELU_SCALE = 0.7978845608028654f, GELU_CUBE = 0.044715f;

float gelu(float x) { return 0.5f * x * (1.f + tanhf(GELU_SCALE * (x + GELU_CUBE * x * x * x))); }

float gelu_derivative(float x) {
    const float t = tanhf(GELU_SCALE * (x + GELU_CUBE * x * x * x));
    return 0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * GELU_SCALE * (1.f + 3.f * GELU_CUBE * x * x);
}

// A matrix as op(A) reads it.
View view_of(const Layout& layout, const void* elements, bool is_transposed) {
    const size_t leading = size_t(layout.leading);
    const bool is_by_columns = layout.order == COLUMN;
    View view{elements, layout.type, is_by_columns ? 1 : leading, is_by_columns ? leading : 1};
    if (is_transposed) std::swap(view.row_step, view.column_step);
    return view;
}

bool is_living(const char* name, const void* elements, size_t bytes) {
    if (cuda_stand_in_is_open(elements, bytes)) return true;
    fprintf(stderr, "cuda stand-in: matrix product: %zu bytes of %s at %p are not in a living buffer\n",
            bytes, name, elements);
    return false;
}

bool has_bias(const Product& product) {
    return product.epilogue & (BIAS_BIT | BGRAD_BIT | BGRADA_BIT | BGRADB_BIT) &&
           product.epilogue != EPILOGUE_DEFAULT;
}

bool are_operands_living(const Work& work) {
    const Product& product = work.product;
    const Layout& d = work.d_layout;
    const size_t batches = size_t(d.batches), element = d.element_bytes();
    bool is_ok = is_living("A", work.a, work.a_layout.bytes()) &&
                 is_living("B", work.b, work.b_layout.bytes()) && is_living("D", work.d, d.bytes());
    if (work.beta != 0.f) is_ok = is_ok && is_living("C", work.c, work.c_layout.bytes());
    if (has_bias(product)) {
        const size_t length = product.epilogue == EPILOGUE_BGRADB ? work.shape.n : work.shape.m;
        const size_t span = (batches - 1) * size_t(product.bias_batch_stride) + length;
        is_ok = is_ok && is_living("the bias", product.bias, span * element);
    }
    if (product.epilogue & AUX_BIT) {
        const size_t span = (batches - 1) * size_t(product.aux_batch_stride) +
                            (work.shape.n - 1) * size_t(product.aux_leading) + work.shape.m;
        is_ok = is_ok && is_living("the auxiliary output", product.aux, span * element);
    }
    if (work.workspace_bytes > 0)
        is_ok = is_ok && is_living("the workspace", work.workspace, work.workspace_bytes);
    return is_ok;
}

// Sums along k for the gradients of biases.
void store_sums(const View& view, bool over_columns, size_t lines, size_t k, void* to, int type) {
    for (size_t line = 0; line < lines; line++) {
        float sum = 0.f;
        for (size_t i = 0; i < k; i++) sum += over_columns ? view.at(line, i) : view.at(i, line);
        store(to, type, line, sum);
    }
}

// One element through the epilogue, up to the stored result.
struct EpilogueOf {
    const Product& product;
    int type;
    void *bias, *aux;

    float apply(float value, size_t i, size_t j) const {
        const unsigned epilogue = product.epilogue;
        if (epilogue == EPILOGUE_DEFAULT || epilogue == EPILOGUE_BGRADA || epilogue == EPILOGUE_BGRADB)
            return value;
        const size_t at = j * size_t(product.aux_leading) + i;
        if (epilogue & DGELU_BIT) return value * gelu_derivative(load(aux, type, at));
        if (epilogue & BIAS_BIT) value += load(bias, type, i);
        if (epilogue & AUX_BIT) store(aux, type, at, value);
        if (epilogue & GELU_BIT) return gelu(value);
        return epilogue & RELU_BIT ? fmaxf(value, 0.f) : value;
    }
};

int mantissa_of(int compute_type) {
    switch (compute_type) {
        case COMPUTE_32F_FAST_TF32: return TF32_MANTISSA;
        case COMPUTE_32F_FAST_16BF: return BF16_MANTISSA;
        default: return F32_MANTISSA;
    }
}

void run_batch(const Work& work, int64_t batch) {
    const Product& product = work.product;
    const auto [m, n, k] = work.shape;
    const auto part = [&](const Layout& layout, const void* elements) {
        return offset(elements, layout.type, batch * layout.batch_stride);
    };
    const View a = view_of(work.a_layout, part(work.a_layout, work.a), product.transpose_a != NO_TRANSPOSE);
    const View b = view_of(work.b_layout, part(work.b_layout, work.b), product.transpose_b != NO_TRANSPOSE);
    const std::vector<float> sums = multiply(a, b, m, n, k, mantissa_of(product.compute_type));
    const int type = work.d_layout.type;
    void* const bias = product.bias ? offset(product.bias, type, batch * product.bias_batch_stride) : nullptr;
    void* const aux = product.aux ? offset(product.aux, type, batch * product.aux_batch_stride) : nullptr;
    const EpilogueOf epilogue{product, type, bias, aux};
    const void* c = part(work.c_layout, work.c);
    void* d = part(work.d_layout, work.d);
    const View c_view = view_of(work.c_layout, c, false), d_view = view_of(work.d_layout, d, false);
    std::vector<float> row_sums(product.epilogue == EPILOGUE_DGELU_BGRAD ? m : 0);
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < m; i++) {
            float value = work.alpha * sums[j * m + i];
            if (work.beta != 0.f) value += work.beta * c_view.at(i, j);
            value = epilogue.apply(value, i, j);
            store(d, type, i * d_view.row_step + j * d_view.column_step, value);
            if (!row_sums.empty()) row_sums[i] += value;
        }
    for (size_t i = 0; i < row_sums.size(); i++) store(bias, type, i, row_sums[i]);
    if (product.epilogue == EPILOGUE_BGRADA) store_sums(a, true, m, k, bias, type);
    if (product.epilogue == EPILOGUE_BGRADB) store_sums(b, false, n, k, bias, type);
}

}  // namespace

int run_work(const Work& work) {
    if (!are_operands_living(work)) return ILLEGAL_ADDRESS;
    // What a program keeps in the workspace is lost.
    if (work.workspace_bytes > 0) memset(work.workspace, 0xff, work.workspace_bytes);
    for (int batch = 0; batch < work.d_layout.batches; batch++) run_batch(work, batch);
    return DRIVER_SUCCESS;
}

}  // namespace cuda_stand_in
