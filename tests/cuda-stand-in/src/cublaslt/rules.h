// What cuBLASLt accepts, as documented.
#pragma once

#include "types.h"

namespace cuda_stand_in {

struct Shape {
    size_t m, n, k;
};

// Checks that a product can be computed, and its shape.
Status check_product(const Product& product, const Layout& a, const Layout& b, const Layout& c,
                     const Layout& d, Shape* shape);

// Writes up to `count` algorithms, best first; returns how many.
int find_algorithms(const Layout& a, const Layout& b, const Layout& c, const Layout& d,
                    const Preference& preference, int count, HeuristicResult* results);

bool is_algorithm(const Algorithm& algorithm);

}  // namespace cuda_stand_in
