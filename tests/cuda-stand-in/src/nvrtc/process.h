// Runs the compiler.
#pragma once

#include <string>
#include <vector>

namespace cuda_stand_in {

// Runs a program; its output and its errors are appended to `output`. Returns its exit status, 127 if there
// is no such program.
int run_process(const std::vector<std::string>& arguments, std::string* output);

// A new folder that is removed, with the files in it, at the end.
class TemporaryFolder {
public:
    // Below `parent`, so that files can be renamed to files there.
    explicit TemporaryFolder(const std::string& parent);
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    ~TemporaryFolder();

    const std::string& path() const { return path_; }

private:
    std::string path_;
};

}  // namespace cuda_stand_in
