extern "C" __attribute__((visibility("default"))) unsigned long cublasLtGetVersion() { return 130000; }
