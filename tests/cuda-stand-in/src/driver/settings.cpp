#include "settings.h"

#include <cstdlib>
#include <map>
#include <mutex>

namespace cuda_stand_in {

namespace {

uint64_t from_environment(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

std::mutex failing_mutex;
std::map<std::string, uint64_t> failing;  // launches of a kernel until the one that fails

}  // namespace

void Settings::reset() {
    bytes = from_environment("CUDA_STAND_IN_BYTES", 8ull << 30);
    order = from_environment("CUDA_STAND_IN_ORDER", 0);
    workers = from_environment("CUDA_STAND_IN_WORKERS", 1);
    devices = from_environment("CUDA_STAND_IN_DEVICES", 1);
    driver_version = from_environment("CUDA_STAND_IN_DRIVER_VERSION", 13000);
    compute_capability = from_environment("CUDA_STAND_IN_COMPUTE_CAPABILITY", 90);
    fail_compilation = from_environment("CUDA_STAND_IN_FAIL_COMPILATION", 0);
    count_bytes = from_environment("CUDA_STAND_IN_COUNT_BYTES", 0);
    stream_threads = from_environment("CUDA_STAND_IN_STREAM_THREADS", 0);
    queues = from_environment("CUDA_STAND_IN_QUEUES", 0);
    const char* loading = getenv("CUDA_MODULE_LOADING");
    eager_loading = loading && std::string(loading) == "EAGER";
    hang_ms = from_environment("CUDA_STAND_IN_HANG_MS", 10'000);
    logs = from_environment("CUDA_STAND_IN_LOG", 0);
    std::lock_guard lock(failing_mutex);
    failing.clear();
    if (const char* text = getenv("CUDA_STAND_IN_FAIL_LAUNCH")) {
        const std::string value = text;
        const size_t colon = value.rfind(':');
        const std::string number = colon == std::string::npos ? "1" : value.substr(colon + 1);
        failing[value.substr(0, colon)] = strtoull(number.c_str(), nullptr, 10);
    }
}

std::atomic<uint64_t>* Settings::find(const std::string& name) {
    const std::map<std::string, std::atomic<uint64_t>*> all = {
        {"bytes", &bytes},
        {"order", &order},
        {"workers", &workers},
        {"devices", &devices},
        {"driver_version", &driver_version},
        {"compute_capability", &compute_capability},
        {"fail_compilation", &fail_compilation},
        {"count_bytes", &count_bytes},
        {"stream_threads", &stream_threads},
        {"queues", &queues},
        {"eager_loading", &eager_loading},
        {"hang_ms", &hang_ms},
        {"logs", &logs},
    };
    const auto found = all.find(name);
    return found == all.end() ? nullptr : found->second;
}

Settings& settings() {
    static Settings settings;
    return settings;
}

void fail_launch(const std::string& kernel, uint64_t n) {
    std::lock_guard lock(failing_mutex);
    failing[kernel] = n;
}

bool is_failing_launch(const std::string& kernel) {
    std::lock_guard lock(failing_mutex);
    const auto found = failing.find(kernel);
    if (found == failing.end() || --found->second > 0) return false;
    failing.erase(found);
    return true;
}

void Counts::reset() {
    for (auto* count : {&launches, &copies_up, &copies_down, &copies_device, &memsets,
                        &stream_synchronizations, &event_synchronizations, &context_synchronizations,
                        &allocations, &leaked_buffers, &matrix_products, &bytes_loaded, &bytes_stored})
        *count = 0;
}

Counts& counts() {
    static Counts counts;
    return counts;
}

}  // namespace cuda_stand_in
