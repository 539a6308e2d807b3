// Attributes of the objects behind handles.
#pragma once

#include "types.h"

namespace cuda_stand_in {

// Where an attribute of an object lies; no address if the attribute is not known.
struct Attribute {
    void* address = nullptr;
    size_t bytes = 0;
};

Attribute attribute_of(Layout& layout, int attribute);
Attribute attribute_of(Product& product, int attribute);
Attribute attribute_of(Preference& preference, int attribute);

Status write_attribute(const Attribute& attribute, const void* value, size_t bytes);
// With zero bytes only the size is told.
Status read_attribute(const Attribute& attribute, void* value, size_t bytes, size_t* written);

}  // namespace cuda_stand_in
