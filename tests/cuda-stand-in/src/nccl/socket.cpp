#include "socket.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <poll.h>
#include <random>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <utility>

namespace nccl_stand_in {

namespace {

// The address of a name starts with a zero byte: it is in no file system.
socklen_t address_of(const std::string& name, sockaddr_un* address) {
    *address = {};
    address->sun_family = AF_UNIX;
    memcpy(address->sun_path + 1, name.data(), name.size());
    return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Socket new_socket() { return Socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

bool wait_for_input(const Socket& socket, Deadline deadline) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd file{socket.file(), POLLIN, 0};
    return poll(&file, 1, int(std::clamp<int64_t>(left.count(), 0, 1'000'000'000))) == 1;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
    close();
    file_ = other.release();
    return *this;
}

int Socket::release() { return std::exchange(file_, -1); }

void Socket::close() {
    if (file_ >= 0) ::close(file_);
    file_ = -1;
}

std::string unused_name() {
    std::random_device random;
    char text[NAME_BYTES];
    snprintf(text, sizeof text, "nccl-stand-in-%08x%08x%08x", random(), random(), random());
    return text;
}

Socket listen_at(const std::string& name) {
    constexpr int WAITING_MAX = 1024;
    Socket listener = new_socket();
    sockaddr_un address;
    const socklen_t bytes = address_of(name, &address);
    if (bind(listener.file(), reinterpret_cast<sockaddr*>(&address), bytes) != 0) return Socket();
    if (listen(listener.file(), WAITING_MAX) != 0) return Socket();
    return listener;
}

Socket connect_to(const std::string& name) {
    Socket socket = new_socket();
    sockaddr_un address;
    const socklen_t bytes = address_of(name, &address);
    if (connect(socket.file(), reinterpret_cast<sockaddr*>(&address), bytes) != 0) return Socket();
    return socket;
}

Socket accept_from(const Socket& listener, Deadline deadline) {
    if (!wait_for_input(listener, deadline)) return Socket();
    return Socket(accept4(listener.file(), nullptr, nullptr, SOCK_CLOEXEC));
}

bool send_all(const Socket& socket, const void* bytes, size_t count) {
    for (const auto* at = static_cast<const char*>(bytes); count > 0;) {
        const ssize_t sent = send(socket.file(), at, count, MSG_NOSIGNAL);
        if (sent <= 0) return false;
        at += sent;
        count -= size_t(sent);
    }
    return true;
}

bool receive_all(const Socket& socket, void* bytes, size_t count, Deadline deadline) {
    for (auto* at = static_cast<char*>(bytes); count > 0;) {
        if (!wait_for_input(socket, deadline)) return false;
        const ssize_t received = recv(socket.file(), at, count, 0);
        if (received <= 0) return false;
        at += received;
        count -= size_t(received);
    }
    return true;
}

}  // namespace nccl_stand_in
