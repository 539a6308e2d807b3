#include "options.h"

#include <cstdlib>

namespace cuda_stand_in {

namespace {

// Options that change nothing here.
constexpr const char* WITHOUT_EFFECT[] = {"--use_fast_math",
                                          "-use_fast_math",
                                          "--fmad",
                                          "-fmad",
                                          "--ftz",
                                          "-ftz",
                                          "--prec-div",
                                          "-prec-div",
                                          "--prec-sqrt",
                                          "-prec-sqrt",
                                          "--generate-line-info",
                                          "-lineinfo",
                                          "--device-debug",
                                          "-G",
                                          "--ptxas-options",
                                          "-Xptxas",
                                          "--maxrregcount",
                                          "-maxrregcount",
                                          "--restrict",
                                          "-restrict",
                                          "--extra-device-vectorization",
                                          "-extra-device-vectorization",
                                          "--disable-warnings",
                                          "-w",
                                          "--dopt",
                                          "-dopt",
                                          "--diag-suppress",
                                          "--diag-error",
                                          "--diag-warn",
                                          "--time",
                                          "--minimal",
                                          "-minimal",
                                          "--no-cache",
                                          "-no-cache",
                                          "--split-compile",
                                          "--Ofast-compile",
                                          "--builtin-move-forward"};

// Options whose value may be the next argument.
constexpr const char* WITH_VALUE[] = {"-D",
                                      "--define-macro",
                                      "-U",
                                      "--undefine-macro",
                                      "-I",
                                      "--include-path",
                                      "-std",
                                      "--std",
                                      "-arch",
                                      "--gpu-architecture",
                                      "-Xptxas",
                                      "--ptxas-options",
                                      "-maxrregcount",
                                      "--maxrregcount"};

bool takes_value(const std::string& name) {
    for (const char* known : WITH_VALUE)
        if (name == known) return true;
    return false;
}

bool read_architecture(const std::string& text, Options* options) {
    constexpr int OLDEST = 75;  // of version 13
    options->is_real = text.rfind("sm_", 0) == 0;
    const size_t prefix = options->is_real ? 3 : text.rfind("compute_", 0) == 0 ? 8 : 0;
    if (prefix == 0) return false;
    char* end;
    options->architecture = int(strtol(text.c_str() + prefix, &end, 10));
    const std::string suffix = end;
    options->has_features = suffix == "a" || suffix == "f";
    return options->architecture >= OLDEST && (suffix.empty() || options->has_features);
}

bool read_option(const std::string& name, const std::string& value, Options* options) {
    if (name == "-D" || name == "--define-macro") {
        const size_t equals = value.find('=');
        options->macros.emplace_back(value.substr(0, equals),
                                     equals == std::string::npos ? "1" : value.substr(equals + 1));
        return !value.empty();
    }
    if (name == "-U" || name == "--undefine-macro") {
        options->undefined.push_back(value);
        return !value.empty();
    }
    if (name == "-I" || name == "--include-path") {
        options->include_folders.push_back(value);
        return !value.empty();
    }
    if (name == "-std" || name == "--std") {
        options->standard = value;
        return value == "c++11" || value == "c++14" || value == "c++17" || value == "c++20";
    }
    if (name == "-default-device" || name == "--device-as-default-execution-space") {
        options->is_device_default = true;
        return true;
    }
    if (name == "-arch" || name == "--gpu-architecture") return read_architecture(value, options);
    for (const char* known : WITHOUT_EFFECT)
        if (name == known) return true;
    return false;
}

}  // namespace

std::string read_options(int count, const char* const* texts, Options* options) {
    for (int i = 0; i < count; i++) {
        const std::string text = texts[i];
        std::string name = text, value;
        const size_t equals = text.find('=');
        const std::string glued = text.substr(0, 2);
        if (text.size() > 2 && (glued == "-D" || glued == "-U" || glued == "-I")) {
            name = glued;
            value = text.substr(2);
        } else if (equals != std::string::npos) {
            name = text.substr(0, equals);
            value = text.substr(equals + 1);
        } else if (takes_value(name) && i + 1 < count) {
            value = texts[++i];
        }
        if (!read_option(name, value, options)) return text;
    }
    return {};
}

}  // namespace cuda_stand_in
