#include "attributes.h"

#include <cstring>

namespace cuda_stand_in {

namespace {

template <class T>
Attribute at(T& field) {
    return {&field, sizeof field};
}

}  // namespace

// The cases are the documented numbers of attributes.
Attribute attribute_of(Layout& layout, int attribute) {
    switch (attribute) {
        case 0: return at(layout.type);
        case 1: return at(layout.order);
        case 2: return at(layout.rows);
        case 3: return at(layout.columns);
        case 4: return at(layout.leading);
        case 5: return at(layout.batches);
        case 6: return at(layout.batch_stride);
        case 7: return at(layout.plane_offset);
        default: return {};
    }
}

Attribute attribute_of(Product& product, int attribute) {
    switch (attribute) {
        case 0: return at(product.compute_type);
        case 1: return at(product.scale_type);
        case 2: return at(product.pointer_mode);
        case 3: return at(product.transpose_a);
        case 4: return at(product.transpose_b);
        case 5: return at(product.transpose_c);
        case 6: return at(product.fill_mode);
        case 7: return at(product.epilogue);
        case 8: return at(product.bias);
        case 10: return at(product.bias_batch_stride);
        case 11: return at(product.aux);
        case 12: return at(product.aux_leading);
        case 13: return at(product.aux_batch_stride);
        case 15: return at(product.multiprocessors);
        case 22: return at(product.aux_type);
        case 25: return at(product.fast_accumulation);
        case 26: return at(product.bias_type);
        default: return {};
    }
}

Attribute attribute_of(Preference& preference, int attribute) {
    switch (attribute) {
        case 0: return at(preference.search_mode);
        case 1: return at(preference.workspace_bytes_max);
        case 3: return at(preference.reduction_schemes);
        case 5: return at(preference.alignment_a);
        case 6: return at(preference.alignment_b);
        case 7: return at(preference.alignment_c);
        case 8: return at(preference.alignment_d);
        case 9: return at(preference.waves_max);
        case 12: return at(preference.implementations);
        default: return {};
    }
}

Status write_attribute(const Attribute& attribute, const void* value, size_t bytes) {
    if (!attribute.address || !value || bytes != attribute.bytes) return INVALID_VALUE;
    memcpy(attribute.address, value, bytes);
    return SUCCESS;
}

Status read_attribute(const Attribute& attribute, void* value, size_t bytes, size_t* written) {
    if (!attribute.address) return INVALID_VALUE;
    if (bytes == 0) {
        if (!written) return INVALID_VALUE;
        *written = attribute.bytes;
        return SUCCESS;
    }
    if (!value || bytes < attribute.bytes) return INVALID_VALUE;
    memcpy(value, attribute.address, attribute.bytes);
    if (written) *written = attribute.bytes;
    return SUCCESS;
}

}  // namespace cuda_stand_in
