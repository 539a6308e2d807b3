// Options of the runtime compiler.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace cuda_stand_in {

struct Options {
    std::vector<std::pair<std::string, std::string>> macros;  // names and values
    std::vector<std::string> undefined;
    std::vector<std::string> include_folders;
    std::string standard = "c++17";
    int architecture = 75;           // 90 for sm_90 and sm_90a
    bool is_real = false;            // sm_, not compute_
    bool has_features = false;       // sm_90a
    bool is_device_default = false;  // functions need no __device__
};

// Reads options; returns the first one that is not known, or an empty text.
std::string read_options(int count, const char* const* texts, Options* options);

}  // namespace cuda_stand_in
