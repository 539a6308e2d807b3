// Page-locked memory of the host.
#pragma once

#include <cstddef>

namespace cuda_stand_in {

// Null if there is no memory.
void* allocate_page_locked(size_t bytes);
bool free_page_locked(void* memory);
// Whether page-locked memory holds these bytes.
bool is_page_locked(const void* memory, size_t bytes);

}  // namespace cuda_stand_in
