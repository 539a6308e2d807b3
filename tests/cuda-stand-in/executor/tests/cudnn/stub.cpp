// A CUDA driver without a device, with what cuDNN calls to build plans: it accepts kernels and finds their
// names. Every other function that cuDNN links against reports that there is no device.
namespace {
constexpr int SUCCESS = 0, NO_DEVICE = 100, DRIVER_VERSION = 13000;
char loaded, kernel;
int accept(void **place, void *object) {
    *place = object;
    return SUCCESS;
}
}  // namespace

#define WITHOUT_DEVICE(name) \
    int name() { return NO_DEVICE; }

extern "C" {
int cuDriverGetVersion(int *version) {
    *version = DRIVER_VERSION;
    return SUCCESS;
}
int cuGetErrorString(int, const char **text) {
    *text = "no device";
    return SUCCESS;
}
int cuGetErrorName(int, const char **name) {
    *name = "CUDA_ERROR_NO_DEVICE";
    return SUCCESS;
}
int cuKernelGetAttribute(int *value, ...) {
    *value = 0;
    return SUCCESS;
}
int cuLibraryLoadData(void **library, ...) { return accept(library, &loaded); }
int cuLibraryGetKernel(void **found, ...) { return accept(found, &kernel); }
int cuLibraryGetModule(void **module, ...) { return accept(module, &loaded); }
int cuLibraryUnload(...) { return SUCCESS; }
int cuModuleLoadData(void **module, ...) { return accept(module, &loaded); }
int cuModuleGetFunction(void **found, ...) { return accept(found, &kernel); }
int cuModuleUnload(...) { return SUCCESS; }
int cuKernelGetFunction(void **found, ...) { return accept(found, &kernel); }
int cuKernelSetAttribute(...) { return SUCCESS; }
int cuFuncSetAttribute(...) { return SUCCESS; }
WITHOUT_DEVICE(cuInit)
WITHOUT_DEVICE(cuCtxGetCurrent)
WITHOUT_DEVICE(cuCtxGetLimit)
WITHOUT_DEVICE(cuCtxPopCurrent)
WITHOUT_DEVICE(cuCtxPushCurrent)
WITHOUT_DEVICE(cuDeviceGet)
WITHOUT_DEVICE(cuDeviceGetCount)
WITHOUT_DEVICE(cuLaunchCooperativeKernel)
WITHOUT_DEVICE(cuLaunchKernel)
WITHOUT_DEVICE(cuLaunchKernelEx)
WITHOUT_DEVICE(cuLibraryLoadFromFile)
WITHOUT_DEVICE(cuLinkAddData)
WITHOUT_DEVICE(cuLinkComplete)
WITHOUT_DEVICE(cuLinkCreate)
WITHOUT_DEVICE(cuLinkDestroy)
WITHOUT_DEVICE(cuOccupancyMaxPotentialClusterSize)
WITHOUT_DEVICE(cuStreamGetCtx)
WITHOUT_DEVICE(cuTensorMapEncodeIm2col)
WITHOUT_DEVICE(cuTensorMapEncodeTiled)
}
