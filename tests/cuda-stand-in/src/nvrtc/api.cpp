// The functions of libnvrtc.so.13.
#include "../driver/control.h"
#include "compile.h"

#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>

using namespace cuda_stand_in;

namespace {

enum Result : int {
    SUCCESS = 0,
    OUT_OF_MEMORY = 1,
    PROGRAM_CREATION_FAILURE = 2,
    INVALID_INPUT = 3,
    INVALID_PROGRAM = 4,
    INVALID_OPTION = 5,
    COMPILATION = 6,
    INTERNAL_ERROR = 11,
};

constexpr const char* NAMES[] = {
    "NVRTC_SUCCESS",
    "NVRTC_ERROR_OUT_OF_MEMORY",
    "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
    "NVRTC_ERROR_INVALID_INPUT",
    "NVRTC_ERROR_INVALID_PROGRAM",
    "NVRTC_ERROR_INVALID_OPTION",
    "NVRTC_ERROR_COMPILATION",
    "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
    "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
    "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
    "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
    "NVRTC_ERROR_INTERNAL_ERROR",
};

struct Program {
    Source source;
    Options options;
    std::string image, log;
};

std::mutex mutex;
std::set<Program*> programs;

bool is_program(Program* program) {
    std::lock_guard lock(mutex);
    return programs.count(program) > 0;
}

Result compile_program(Program& program, int count, const char* const* texts) {
    program.options = {};
    program.log.clear();
    program.image.clear();
    const std::string unknown = read_options(count, texts, &program.options);
    if (!unknown.empty()) {
        program.log = "error: unrecognized option " + unknown + " found\n";
        return INVALID_OPTION;
    }
    uint64_t is_failing = 0;
    cuda_stand_in_get("fail_compilation", &is_failing);
    if (is_failing) {
        program.log = "error: the stand-in was asked to fail\n";
        return COMPILATION;
    }
    return compile(program.source, program.options, &program.image, &program.log) ? SUCCESS : COMPILATION;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API nvrtcVersion(int* major, int* minor) {
    if (!major || !minor) return INVALID_INPUT;
    *major = 13;
    *minor = 0;
    return SUCCESS;
}

extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int error) {
    return error >= 0 && size_t(error) < std::size(NAMES) ? NAMES[error] : "NVRTC_ERROR unknown";
}

API nvrtcCreateProgram(Program** program, const char* source, const char* name, int headers,
                       const char* const* texts, const char* const* names) {
    if (!program || !source || headers < 0) return INVALID_INPUT;
    auto created = std::make_unique<Program>();
    created->source.text = source;
    // A name may be a path; only its last part names a file here.
    const std::string file = std::filesystem::path(name ? name : "").filename();
    created->source.name = file.empty() ? "default_program" : file;
    for (int i = 0; i < headers; i++) created->source.headers[names[i]] = texts[i];
    std::lock_guard lock(mutex);
    programs.insert(created.get());
    *program = created.release();
    return SUCCESS;
}

API nvrtcDestroyProgram(Program** program) {
    std::lock_guard lock(mutex);
    if (!program || programs.erase(*program) == 0) return INVALID_PROGRAM;
    delete *program;
    *program = nullptr;
    return SUCCESS;
}

API nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    if (!is_program(program)) return INVALID_PROGRAM;
    try {
        return compile_program(*program, count, options);
    } catch (const std::exception& error) {
        program->log = error.what();
        return INTERNAL_ERROR;
    }
}

API nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
    if (!is_program(program)) return INVALID_PROGRAM;
    *bytes = program->log.size() + 1;
    return SUCCESS;
}

API nvrtcGetProgramLog(Program* program, char* text) {
    if (!is_program(program)) return INVALID_PROGRAM;
    memcpy(text, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}

// There is a cubin only for a real architecture.
API nvrtcGetCUBINSize(Program* program, size_t* bytes) {
    if (!is_program(program)) return INVALID_PROGRAM;
    *bytes = program->options.is_real ? program->image.size() : 0;
    return SUCCESS;
}

API nvrtcGetCUBIN(Program* program, char* image) {
    if (!is_program(program)) return INVALID_PROGRAM;
    if (program->options.is_real) memcpy(image, program->image.data(), program->image.size());
    return SUCCESS;
}

API nvrtcGetPTXSize(Program* program, size_t* bytes) {
    if (!is_program(program)) return INVALID_PROGRAM;
    *bytes = program->image.size();
    return SUCCESS;
}

API nvrtcGetPTX(Program* program, char* image) {
    if (!is_program(program)) return INVALID_PROGRAM;
    memcpy(image, program->image.data(), program->image.size());
    return SUCCESS;
}
