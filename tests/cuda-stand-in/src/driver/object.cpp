#include "object.h"

#include "errors.h"
#include "launch.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

namespace cuda_stand_in {

namespace {

// Loaded objects by digest. They stay: what runs late may still need one.
std::mutex libraries_mutex;
std::map<uint64_t, void*> libraries;

// Loads a shared object from memory; null if that fails.
void* open_library(const void* object, size_t bytes) {
    const int file = memfd_create("cuda-stand-in-kernels", MFD_CLOEXEC);
    if (file < 0) return nullptr;
    const auto* at = static_cast<const char*>(object);
    for (size_t written = 0; written < bytes;) {
        const ssize_t n = write(file, at + written, bytes - written);
        if (n <= 0) {
            close(file);
            return nullptr;
        }
        written += size_t(n);
    }
    // A name of its own: the loader takes equal names for one library.
    const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) fprintf(stderr, "cuda stand-in: %s\n", dlerror());
    // The file stays open, so that its name is never reused.
    if (!library) close(file);
    return library;
}

struct SharedModule {
    const void* base;
    size_t id, bytes;
};

int find_shared_module(dl_phdr_info* info, size_t, void* out) {
    auto* found = static_cast<SharedModule*>(out);
    if (reinterpret_cast<const void*>(info->dlpi_addr) != found->base) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
        found->id = info->dlpi_tls_modid;
        found->bytes = info->dlpi_phdr[i].p_memsz;
    }
    return 1;
}

}  // namespace

int Module::load(const void* image, std::unique_ptr<Module>* module) {
    ImageHeader header;
    memcpy(&header, image, sizeof header.magic);
    if (memcmp(header.magic, IMAGE_MAGIC, sizeof IMAGE_MAGIC) != 0) return INVALID_IMAGE;
    memcpy(&header, image, sizeof header);
    constexpr uint64_t BYTES_MAX = 1 << 30;
    if (header.bytes > BYTES_MAX) return INVALID_IMAGE;
    const void* object = static_cast<const char*>(image) + sizeof header;
    if (digest_of(object, header.bytes) != header.digest) return INVALID_IMAGE;

    std::lock_guard lock(libraries_mutex);
    void*& library = libraries[header.digest];
    if (!library) library = open_library(object, header.bytes);
    if (!library) return INVALID_IMAGE;
    *module = std::make_unique<Module>();
    (*module)->library_ = library;
    link_map* map = nullptr;
    dlinfo(library, RTLD_DI_LINKMAP, &map);
    SharedModule shared{reinterpret_cast<const void*>(map->l_addr), 0, 0};
    dl_iterate_phdr(find_shared_module, &shared);
    (*module)->shared_module_ = shared.id;
    (*module)->shared_module_bytes_ = shared.bytes;
    return SUCCESS;
}

Function* Module::function(const std::string& name) {
    std::lock_guard lock(mutex_);
    auto& function = functions_[name];
    if (function) return function.get();
    const void* kernel = dlsym(library_, ("cuda_stand_in_kernel_" + name).c_str());
    if (!kernel) {
        functions_.erase(name);
        return nullptr;
    }
    function.reset(new Function{static_cast<const Kernel*>(kernel), shared_module_, shared_module_bytes_,
                                DYNAMIC_BYTES_DEFAULT});
    return function.get();
}

}  // namespace cuda_stand_in
