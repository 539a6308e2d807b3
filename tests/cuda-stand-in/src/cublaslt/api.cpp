// The functions of libcublasLt.so.13.
#include "../driver/control.h"
#include "attributes.h"
#include "product.h"

#include <bit>
#include <cstdio>
#include <initializer_list>
#include <mutex>
#include <set>
#include <vector>

using namespace cuda_stand_in;

#define EXPORT extern "C" __attribute__((visibility("default")))
#define API EXPORT int

namespace {

struct Handle {};

bool is_aligned(const void* pointer, size_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

Status refuse(Status status, const char* reason) {
    fprintf(stderr, "cuda stand-in: cublasLtMatmul: %s\n", reason);
    return status;
}

Status check_pointers(const Work& work, const Algorithm& algorithm) {
    if (!work.a || !work.b || !work.d) return refuse(INVALID_VALUE, "a matrix is null");
    if (work.beta != 0.f && !work.c) return refuse(INVALID_VALUE, "C is null, and beta is not 0");
    if (work.d == work.a || work.d == work.b) return refuse(INVALID_VALUE, "D is an input");
    if (work.beta != 0.f && work.c == work.d && work.c_layout.leading != work.d_layout.leading)
        return refuse(INVALID_VALUE, "C and D are one matrix with two layouts");
    if (!is_aligned(work.a, algorithm.alignment_a) || !is_aligned(work.b, algorithm.alignment_b) ||
        !is_aligned(work.d, algorithm.alignment_d) ||
        (work.beta != 0.f && !is_aligned(work.c, algorithm.alignment_c)))
        return refuse(NOT_SUPPORTED,
                      "a matrix is less aligned than the preference of the algorithm promised");
    const unsigned epilogue = work.product.epilogue;
    if (epilogue == EPILOGUE_DEFAULT) return SUCCESS;
    if (epilogue & (BIAS_BIT | BGRAD_BIT | BGRADA_BIT | BGRADB_BIT)) {
        if (!work.product.bias) return refuse(INVALID_VALUE, "the bias is null");
        if (!is_aligned(work.product.bias, work.d_layout.element_bytes()))
            return refuse(INVALID_VALUE, "the bias is not aligned");
    }
    if (epilogue & AUX_BIT) {
        constexpr size_t AUX_ALIGNMENT = 16;
        if (!work.product.aux) return refuse(INVALID_VALUE, "the auxiliary output is null");
        if (!is_aligned(work.product.aux, AUX_ALIGNMENT))
            return refuse(INVALID_VALUE, "the auxiliary output is not aligned to 16 bytes");
    }
    return SUCCESS;
}

bool loads_eagerly() {
    uint64_t value = 0;
    cuda_stand_in_get("eager_loading", &value);
    return value != 0;
}

// Loads the kernel of a product, unless an earlier one had it: types, transposes, epilogue and the magnitude
// of the sizes choose it.
int load_kernel(const Work& work) {
    static auto& mutex = *new std::mutex;
    static auto& loaded = *new std::set<std::vector<uint64_t>>;
    if (loads_eagerly()) return 0;
    const auto magnitude = [](uint64_t size) { return uint64_t(std::bit_width(size)); };
    {
        std::lock_guard lock(mutex);
        const bool is_new = loaded
                                .insert({uint64_t(work.a_layout.type), uint64_t(work.b_layout.type),
                                         uint64_t(work.d_layout.type), uint64_t(work.product.transpose_a),
                                         uint64_t(work.product.transpose_b), work.product.epilogue,
                                         magnitude(work.d_layout.rows), magnitude(work.d_layout.columns)})
                                .second;
        if (!is_new) return 0;
    }
    return cuda_stand_in_load("cublasLtMatmul");
}

}  // namespace

EXPORT size_t cublasLtGetVersion() { return 130000; }
EXPORT size_t cublasLtGetCudartVersion() { return 13000; }

EXPORT const char* cublasLtGetStatusName(int status) {
    switch (status) {
        case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
        default: return "CUBLAS_STATUS_UNKNOWN";
    }
}

EXPORT const char* cublasLtGetStatusString(int status) { return cublasLtGetStatusName(status); }

API cublasLtCreate(Handle** handle) {
    if (!handle) return INVALID_VALUE;
    if (cuda_stand_in_load("cublasLtCreate")) return NOT_INITIALIZED;
    *handle = new Handle;
    return SUCCESS;
}

API cublasLtDestroy(Handle* handle) {
    if (!handle) return NOT_INITIALIZED;
    delete handle;
    return SUCCESS;
}

API cublasLtMatmulDescCreate(Product** product, int compute_type, int scale_type) {
    if (!product) return INVALID_VALUE;
    *product = new Product;
    (*product)->compute_type = compute_type;
    (*product)->scale_type = scale_type;
    return SUCCESS;
}

API cublasLtMatmulDescDestroy(Product* product) {
    delete product;
    return SUCCESS;
}

API cublasLtMatmulDescSetAttribute(Product* product, int attribute, const void* value, size_t bytes) {
    return product ? write_attribute(attribute_of(*product, attribute), value, bytes) : INVALID_VALUE;
}

API cublasLtMatmulDescGetAttribute(Product* product, int attribute, void* value, size_t bytes,
                                   size_t* written) {
    return product ? read_attribute(attribute_of(*product, attribute), value, bytes, written) : INVALID_VALUE;
}

API cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    if (!layout) return INVALID_VALUE;
    *layout = new Layout;
    (*layout)->type = type;
    (*layout)->rows = rows;
    (*layout)->columns = columns;
    (*layout)->leading = leading;
    return SUCCESS;
}

API cublasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return SUCCESS;
}

API cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t bytes) {
    return layout ? write_attribute(attribute_of(*layout, attribute), value, bytes) : INVALID_VALUE;
}

API cublasLtMatrixLayoutGetAttribute(Layout* layout, int attribute, void* value, size_t bytes,
                                     size_t* written) {
    return layout ? read_attribute(attribute_of(*layout, attribute), value, bytes, written) : INVALID_VALUE;
}

API cublasLtMatmulPreferenceCreate(Preference** preference) {
    if (!preference) return INVALID_VALUE;
    *preference = new Preference;
    return SUCCESS;
}

API cublasLtMatmulPreferenceDestroy(Preference* preference) {
    delete preference;
    return SUCCESS;
}

API cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value,
                                         size_t bytes) {
    return preference ? write_attribute(attribute_of(*preference, attribute), value, bytes) : INVALID_VALUE;
}

API cublasLtMatmulPreferenceGetAttribute(Preference* preference, int attribute, void* value, size_t bytes,
                                         size_t* written) {
    return preference ? read_attribute(attribute_of(*preference, attribute), value, bytes, written)
                      : INVALID_VALUE;
}

API cublasLtMatmulAlgoGetHeuristic(Handle* handle, const Product* product, const Layout* a, const Layout* b,
                                   const Layout* c, const Layout* d, const Preference* preference,
                                   int requested, HeuristicResult* results, int* returned) {
    if (!handle) return NOT_INITIALIZED;
    if (!product || !a || !b || !c || !d || !preference || requested <= 0 || !results || !returned)
        return INVALID_VALUE;
    *returned = 0;
    Shape shape;
    if (const Status status = check_product(*product, *a, *b, *c, *d, &shape)) return status;
    *returned = find_algorithms(*a, *b, *c, *d, *preference, requested, results);
    return *returned > 0 ? SUCCESS : NOT_SUPPORTED;
}

API cublasLtMatmulAlgoCheck(Handle* handle, const Product* product, const Layout* a, const Layout* b,
                            const Layout* c, const Layout* d, const Algorithm* algorithm,
                            HeuristicResult* result) {
    if (!handle) return NOT_INITIALIZED;
    if (!product || !a || !b || !c || !d || !algorithm || !result) return INVALID_VALUE;
    Shape shape;
    if (const Status status = check_product(*product, *a, *b, *c, *d, &shape)) return status;
    if (!is_algorithm(*algorithm)) return INVALID_VALUE;
    *result = {*algorithm, algorithm->workspace_bytes, SUCCESS, 1.f, {}};
    return SUCCESS;
}

API cublasLtMatmul(Handle* handle, const Product* product, const void* alpha, const void* a,
                   const Layout* a_layout, const void* b, const Layout* b_layout, const void* beta,
                   const void* c, const Layout* c_layout, void* d, const Layout* d_layout,
                   const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
    if (!handle) return NOT_INITIALIZED;
    if (!product || !alpha || !beta || !a_layout || !b_layout || !c_layout || !d_layout)
        return refuse(INVALID_VALUE, "an argument is null");
    Work work{*product, *a_layout, *b_layout, *c_layout, *d_layout, {}, 0.f, 0.f, a, b, c, d, workspace, 0};
    if (const Status status =
            check_product(*product, *a_layout, *b_layout, *c_layout, *d_layout, &work.shape))
        return refuse(status, "the product is not valid, or not supported");
    work.alpha = *static_cast<const float*>(alpha);
    work.beta = *static_cast<const float*>(beta);
    HeuristicResult chosen;
    if (!algorithm) {
        Preference preference;
        preference.workspace_bytes_max = workspace_bytes;
        find_algorithms(*a_layout, *b_layout, *c_layout, *d_layout, preference, 1, &chosen);
        algorithm = &chosen.algorithm;
    }
    if (!is_algorithm(*algorithm)) return refuse(INVALID_VALUE, "the algorithm is not one of this library");
    work.workspace_bytes = algorithm->workspace_bytes;
    if (work.workspace_bytes > workspace_bytes || (work.workspace_bytes > 0 && !workspace))
        return refuse(INVALID_VALUE, "the workspace is too small for the algorithm");
    constexpr size_t WORKSPACE_ALIGNMENT = 16;
    if (work.workspace_bytes > 0 && !is_aligned(workspace, WORKSPACE_ALIGNMENT))
        return refuse(INVALID_VALUE, "the workspace is not aligned to 16 bytes");
    if (const Status status = check_pointers(work, *algorithm)) return status;
    if (load_kernel(work)) return EXECUTION_FAILED;
    const int error = cuda_stand_in_enqueue(
        stream, "matrix product", [](void* own) { return run_work(*static_cast<Work*>(own)); },
        [](void* own) { delete static_cast<Work*>(own); }, new Work(work));
    if (error) return EXECUTION_FAILED;
    cuda_stand_in_count_matrix_product();
    return SUCCESS;
}
