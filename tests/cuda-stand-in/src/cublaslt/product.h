// Work of a stream: a batch of products with their epilogue.
#pragma once

#include "rules.h"
#include "types.h"

#include <string>

namespace cuda_stand_in {

struct Work {
    Product product;
    Layout a_layout, b_layout, c_layout, d_layout;
    Shape shape;
    float alpha, beta;
    const void *a, *b, *c;
    void* d;
    void* workspace;
    size_t workspace_bytes;
};

// Computes, if all operands lie in living buffers. Returns an error code of the driver.
int run_work(const Work& work);

}  // namespace cuda_stand_in
