// How functions of the driver are exported.
#pragma once

#include <cstddef>
#include <cstdint>

#define API extern "C" __attribute__((visibility("default"))) int

using Address = unsigned long long;  // CUdeviceptr
