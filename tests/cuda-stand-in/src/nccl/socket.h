// Sockets between the processes of one machine, by names in the abstract namespace.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace nccl_stand_in {

using Deadline = std::chrono::steady_clock::time_point;

// A file descriptor that closes itself; -1: none.
class Socket {
public:
    Socket() = default;
    explicit Socket(int file) : file_(file) {}
    Socket(Socket&& other) noexcept : file_(other.release()) {}
    Socket& operator=(Socket&& other) noexcept;
    ~Socket() { close(); }

    int file() const { return file_; }
    explicit operator bool() const { return file_ >= 0; }
    int release();
    void close();

private:
    int file_ = -1;
};

constexpr size_t NAME_BYTES = 40;  // of a name, with its end

// A name that no other socket has.
std::string unused_name();
Socket listen_at(const std::string& name);
Socket connect_to(const std::string& name);
Socket accept_from(const Socket& listener, Deadline deadline);
// False if the other end is gone or the time is over.
bool send_all(const Socket& socket, const void* bytes, size_t count);
bool receive_all(const Socket& socket, void* bytes, size_t count, Deadline deadline);

}  // namespace nccl_stand_in
