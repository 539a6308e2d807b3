// A program goes through three steps: its headers and its text are written to a folder, with the stand-in's
// intrinsics; preprocessing it alone tells the names of its kernels; then it is compiled to a shared object,
// with a description of each kernel behind it. Objects are kept in a folder by the digest of all that went
// in.
#include "compile.h"

#include "../driver/control.h"
#include "../driver/object.h"
#include "process.h"
#include "scan.h"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>

namespace cuda_stand_in {

namespace {

namespace fs = std::filesystem;

const std::vector<std::string> FLAGS = {"-O2", "-march=native", "-fPIC", "-pthread", "-fvisibility=hidden",
                                        "-fno-gnu-unique", "-fno-exceptions", "-fno-rtti", "-fno-math-errno",
                                        "-fno-trapping-math", "-fno-strict-aliasing", "-fno-stack-protector",
                                        "-U_FORTIFY_SOURCE", "-Wno-attributes", "-Wno-psabi",
                                        "-Wno-unknown-pragmas", "-Wno-pragma-once-outside-header",
                                        // Accesses that are not aligned, and indices behind the end of an
                                        // array; the driver library has the handlers.
                                        "-fsanitize=alignment,bounds", "-fno-sanitize-recover=all"};

// Calls of functions at accesses to memory, which the driver library has, to count bytes; accesses stay as
// they are in the text, one after another.
const std::vector<std::string> COUNT_FLAGS = {"-fsanitize=thread", "-fno-tree-vectorize",
                                              "-fno-tree-loop-distribute-patterns"};

const std::string COMPILER = "g++";

// The folder of this library, which also holds the headers of kernels.
const std::string& library_folder() {
    static const std::string folder = [] {
        Dl_info info;
        dladdr(reinterpret_cast<const void*>(&compile), &info);
        return fs::absolute(info.dli_fname).parent_path().string();
    }();
    return folder;
}

std::string cache_folder() {
    const char* chosen = getenv("CUDA_STAND_IN_CACHE");
    const std::string folder = chosen && *chosen ? chosen : library_folder() + "/kernels";
    fs::create_directories(folder);
    return folder;
}

std::string read_file(const std::string& path) {
    std::stringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
}

void write_file(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << text;
}

std::string digest_text(const std::string& text) {
    char digits[17];
    snprintf(digits, sizeof digits, "%016llx",
             static_cast<unsigned long long>(digest_of(text.data(), text.size())));
    return digits;
}

// What names the compiler and the processor that it compiles for.
const std::string& compiler_identity() {
    static const std::string identity = [] {
        std::string text;
        run_process({COMPILER, "-march=native", "-Q", "--help=target"}, &text);
        run_process({COMPILER, "--version"}, &text);
        return digest_text(text);
    }();
    return identity;
}

bool has_counts() {
    uint64_t value = 0;
    return cuda_stand_in_get("count_bytes", &value) == 0 && value != 0;
}

std::vector<std::string> flags() {
    std::vector<std::string> all = FLAGS;
    if (has_counts()) all.insert(all.end(), COUNT_FLAGS.begin(), COUNT_FLAGS.end());
    return all;
}

std::vector<std::string> command(const std::string& standard, std::initializer_list<std::string> more) {
    std::vector<std::string> arguments{COMPILER, "-std=" + standard};
    for (std::string& flag : flags()) arguments.push_back(std::move(flag));
    arguments.insert(arguments.end(), more);
    return arguments;
}

// Precompiles what comes before every kernel; returns the folder to include it from. Without a precompiled
// header compilation is only slower.
std::string prelude_folder(const std::string& standard) {
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    const std::string execution = library_folder() + "/execution";
    const std::string folder =
        cache_folder() + "/prelude-" + standard + (has_counts() ? "-counts-" : "-") + compiler_identity();
    const std::string header = folder + "/kernel.h", precompiled = header + ".gch";
    if (fs::exists(precompiled)) return folder;
    const TemporaryFolder building(cache_folder());
    const std::string result = building.path() + "/kernel.h.gch";
    std::string log;
    if (run_process(command(standard, {"-x", "c++-header", execution + "/kernel.h", "-o", result}), &log) !=
        0)
        return execution;
    fs::create_directories(folder);
    // The precompiled header stands for this file, which is read only if it does not fit.
    const std::string forward = building.path() + "/kernel.h";
    write_file(forward, "#include \"" + execution + "/kernel.h\"\n");
    fs::rename(forward, header);
    fs::rename(result, precompiled);
    return folder;
}

std::string macros_text(const Options& options) {
    std::string text;
    for (const auto& [name, value] : options.macros) text += "#define " + name + " " + value + "\n";
    for (const std::string& name : options.undefined) text += "#undef " + name + "\n";
    if (options.has_features)
        text += "#define __CUDA_ARCH_FEAT_SM" + std::to_string(options.architecture) + "_ALL 1\n";
    return text + "#undef __CUDA_ARCH__\n#define __CUDA_ARCH__ " + std::to_string(options.architecture * 10) +
           "\n";
}

std::string image_of(const std::string& object) {
    ImageHeader header{};
    memcpy(header.magic, IMAGE_MAGIC, sizeof IMAGE_MAGIC);
    header.bytes = object.size();
    header.digest = digest_of(object.data(), object.size());
    return std::string(reinterpret_cast<const char*>(&header), sizeof header) + object;
}

// Names of the temporary folder do not help a reader.
void remove_all_of(const std::string& part, std::string* text) {
    for (size_t at; (at = text->find(part)) != std::string::npos;) text->erase(at, part.size());
}

bool has_device_functions(const Options& options, const std::string& scan, std::string* log) {
    const std::string function = options.is_device_default ? "" : function_without_device(read_file(scan));
    if (!function.empty()) *log += "error: a function has no __device__:" + function + "\n";
    return function.empty();
}

bool build(const Source& source, const Options& options, const std::string& target, std::string* log) {
    const TemporaryFolder building(cache_folder());
    const std::string folder = building.path() + "/";
    for (const auto& [name, text] : source.headers)
        write_file(folder + name, fs::path(name).filename() == "intrinsics.cuh"
                                      ? read_file(library_folder() + "/execution/intrinsics.cuh")
                                      : text);
    write_file(folder + source.name, source.text);
    const std::string macros = macros_text(options);
    const std::string include = "#include \"" + source.name + "\"\n";
    std::vector<std::string> folders{"-I" + building.path()};
    for (const std::string& include_folder : options.include_folders)
        folders.push_back("-I" + include_folder);

    write_file(folder + "scan.cpp", macros + "#define __CUDACC__ 1\n#define __CUDACC_RTC__ 1\n" + include);
    std::vector<std::string> scan{COMPILER, "-std=" + options.standard, "-E", "-P", "-nostdinc", "-w"};
    scan.insert(scan.end(), folders.begin(), folders.end());
    scan.insert(scan.end(), {folder + "scan.cpp", "-o", folder + "scan.ii"});
    if (run_process(scan, log) == 0 && has_device_functions(options, folder + "scan.ii", log)) {
        write_file(folder + "program.cpp", "#include \"kernel.h\"\n" + macros + include +
                                               kernels_text(read_file(folder + "scan.ii")));
        const std::string object = folder + "program.so";
        auto arguments = command(options.standard, {"-I" + prelude_folder(options.standard)});
        arguments.insert(arguments.end(), folders.begin(), folders.end());
        arguments.insert(arguments.end(), {"-shared", folder + "program.cpp", "-o", object,
                                           library_folder() + "/libcuda.so.1", "-Wl,-z,defs",
                                           // Without the compiler's own library of checks.
                                           "-nodefaultlibs", "-lm", "-lc", "-lgcc"});
        if (run_process(arguments, log) == 0) {
            fs::rename(object, target);
            return true;
        }
    }
    remove_all_of(folder, log);
    return false;
}

}  // namespace

bool compile(const Source& source, const Options& options, std::string* image, std::string* log) {
    std::string all = source.name + '\0' + source.text + '\0' + macros_text(options) + options.standard +
                      '\0' + compiler_identity() + library_folder();
    for (const auto& [name, text] : source.headers) all += '\0' + name + '\0' + text;
    for (const std::string& folder : options.include_folders) all += '\0' + folder;
    for (const std::string& flag : flags()) all += '\0' + flag;
    const std::string target = cache_folder() + "/" + digest_text(all) + ".so";
    // Text in folders may change without notice.
    const bool is_cached = options.include_folders.empty() && fs::exists(target);
    if (!is_cached && !build(source, options, target, log)) return false;
    *image = image_of(read_file(target));
    return true;
}

}  // namespace cuda_stand_in
