#include "process.h"

#include <cerrno>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <spawn.h>
#include <stdexcept>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace cuda_stand_in {

int run_process(const std::vector<std::string>& arguments, std::string* output) {
    constexpr int NOT_FOUND = 127;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return NOT_FOUND;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    std::vector<char*> argv;
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    pid_t process;
    const int error = posix_spawnp(&process, argv[0], &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    char part[4096];
    for (;;) {
        const ssize_t n = error == 0 ? read(ends[0], part, sizeof part) : 0;
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        output->append(part, size_t(n));
    }
    close(ends[0]);
    if (error != 0) return NOT_FOUND;
    int status = 0;
    while (waitpid(process, &status, 0) < 0 && errno == EINTR) {
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : NOT_FOUND;
}

TemporaryFolder::TemporaryFolder(const std::string& parent) : path_(parent + "/building-XXXXXX") {
    if (!mkdtemp(path_.data())) throw std::runtime_error("could not create a folder in " + parent);
}

TemporaryFolder::~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

}  // namespace cuda_stand_in
