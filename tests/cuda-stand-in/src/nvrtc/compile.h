// Compiles CUDA C++ to an image for the driver library.
#pragma once

#include "options.h"

#include <map>
#include <string>

namespace cuda_stand_in {

struct Source {
    std::string name, text;
    std::map<std::string, std::string> headers;  // texts by name
};

// Returns whether that succeeded; `log` gets what the compiler wrote.
bool compile(const Source& source, const Options& options, std::string* image, std::string* log);

}  // namespace cuda_stand_in
