#include "fabric/cuda/descriptors.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "base/open_files.hpp"
#include "platform/threads.hpp"

namespace ferry::fabric {
namespace {

#if !defined(SYS_pidfd_open)
constexpr long kPidfdOpen = 434;  // the same on every architecture
#else
constexpr long kPidfdOpen = SYS_pidfd_open;
#endif
#if !defined(SYS_pidfd_getfd)
constexpr long kPidfdGetfd = 438;
#else
constexpr long kPidfdGetfd = SYS_pidfd_getfd;
#endif

struct Request {
  std::uint32_t magic = kMagic;
  SegmentId segment = 0;
  static constexpr std::uint32_t kMagic = 0x31514446;  // "FDQ1"
};

[[noreturn]] void fail(const std::string& call, int error) {
  throw std::runtime_error(call + ": " + error_text(error));
}

struct Name {
  sockaddr_un address{};
  socklen_t bytes = 0;
};

/// The first character 0: no file, gone with its socket.
Name name_of(const JobKey& key) {
  Name name;
  name.address.sun_family = AF_UNIX;
  const int written = std::snprintf(
      name.address.sun_path + 1, sizeof name.address.sun_path - 1, "ferry-cuda-%016llx%016llx",
      static_cast<unsigned long long>(key[0]), static_cast<unsigned long long>(key[1]));
  name.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                      static_cast<std::size_t>(written));
  return name;
}

UniqueDescriptor make_socket() {
  UniqueDescriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) fail("socket", errno);
  return fd;
}

void limit_waits(int fd, std::chrono::nanoseconds deadline) {
  const auto us = std::max<std::int64_t>(
      1000, std::chrono::duration_cast<std::chrono::microseconds>(deadline).count());
  const timeval time{us / 1000000, us % 1000000};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
}

bool same_user(int fd) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

/// One byte (1: here it is) and the descriptor beside it.
struct Parcel {
  std::byte given{};
  iovec data{&given, 1};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  Parcel() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
  }
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;
  void make_room() {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
};

}  // namespace

UniqueDescriptor take_descriptor(const ProcessName& owner, int number) {
  if (owner.pid_namespace != this_process().pid_namespace) {
    throw std::runtime_error("its process counts pids in another namespace (another container)");
  }
  const UniqueDescriptor process(static_cast<int>(syscall(kPidfdOpen, owner.pid, 0)));
  if (process.get() < 0) fail("pidfd_open", errno);
  // After pidfd_open: from now on the number cannot pass to another process.
  if (start_time_of(owner.pid) != owner.start_time) {
    throw std::runtime_error("its process is gone");
  }
  UniqueDescriptor copy(static_cast<int>(syscall(kPidfdGetfd, process.get(), number, 0)));
  if (copy.get() < 0) fail("pidfd_getfd", errno);
  return copy;
}

DescriptorServer::DescriptorServer(const JobKey& name)
    : listener_(make_socket()),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      owner_pid_(getpid()) {
  if (stop_.get() < 0) fail("eventfd", errno);
  clients_.reserve(kMostClients);
  const Name at = name_of(name);
  const auto* address = reinterpret_cast<const sockaddr*>(&at.address);
  if (bind(listener_.get(), address, at.bytes) != 0) fail("bind", errno);
  if (listen(listener_.get(), SOMAXCONN) != 0) fail("listen", errno);
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { serve(); });
}

DescriptorServer::~DescriptorServer() {
  if (getpid() != owner_pid_) {
    thread_.detach();  // a forked child: the thread is the parent's
    return;
  }
  const std::uint64_t one = 1;
  // Cannot fail: the counter is 0.
  [[maybe_unused]] const ssize_t written = write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void DescriptorServer::offer(SegmentId segment, int descriptor) {
  const std::lock_guard lock(mutex_);
  offers_[segment] = descriptor;
}

void DescriptorServer::withdraw(SegmentId segment) noexcept {
  const std::lock_guard lock(mutex_);
  offers_.erase(segment);
}

void DescriptorServer::serve() noexcept {
  std::array<pollfd, 2 + kMostClients> events{};
  for (;;) {
    events[0] = {listener_.get(), POLLIN, 0};
    events[1] = {stop_.get(), POLLIN, 0};
    for (std::size_t i = 0; i < clients_.size(); ++i) {
      events[2 + i] = {clients_[i].socket.get(), POLLIN, 0};
    }
    const int wait_ms = clients_.empty() ? -1 : 100;
    if (poll(events.data(), 2 + clients_.size(), wait_ms) < 0 && errno != EINTR) return;
    if (events[1].revents != 0) return;
    const auto now = Clock::now();
    std::erase_if(clients_, [&](const Client& client) {
      return answer(client.socket.get()) || now >= client.due;
    });
    if (events[0].revents != 0) admit(now);
  }
}

/// Who says nothing waits beside the others, not before them.
void DescriptorServer::admit(Clock::time_point now) noexcept {
  UniqueDescriptor client(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (client.get() < 0) {
    if (too_many_files(errno)) poll(nullptr, 0, 20);  // it stays in the queue: not in a tight loop
    return;
  }
  if (!same_user(client.get()) || answer(client.get())) return;
  if (clients_.size() == kMostClients) clients_.erase(clients_.begin());
  clients_.push_back({std::move(client), now + std::chrono::seconds(1)});
}

/// Whether this client is done: answered, or none of ours.
bool DescriptorServer::answer(int client) noexcept {
  Request request;
  const ssize_t got = recv(client, &request, sizeof request, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got != sizeof request || request.magic != Request::kMagic) return true;
  Parcel parcel;
  const std::lock_guard lock(mutex_);  // while it is sent the descriptor stays open
  const auto found = offers_.find(request.segment);
  if (found != offers_.end()) {
    parcel.given = std::byte{1};
    parcel.make_room();
    cmsghdr* header = CMSG_FIRSTHDR(&parcel.message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &found->second, sizeof(int));
  }
  // If it cannot be sent, the client's receive says so.
  [[maybe_unused]] const ssize_t sent =
      sendmsg(client, &parcel.message, MSG_NOSIGNAL | MSG_DONTWAIT);
  return true;
}

UniqueDescriptor ask_for_descriptor(const JobKey& name, SegmentId segment,
                                    std::chrono::nanoseconds deadline) {
  const UniqueDescriptor server = make_socket();
  limit_waits(server.get(), deadline);
  const Name at = name_of(name);
  if (connect(server.get(), reinterpret_cast<const sockaddr*>(&at.address), at.bytes) != 0) {
    fail("connect to its socket", errno);
  }
  if (!same_user(server.get())) throw std::runtime_error("its socket belongs to another user");
  const Request request{.segment = segment};
  if (send(server.get(), &request, sizeof request, MSG_NOSIGNAL) != sizeof request) {
    fail("send to its socket", errno);
  }
  Parcel parcel;
  parcel.make_room();
  const ssize_t got = recvmsg(server.get(), &parcel.message, MSG_CMSG_CLOEXEC);
  if (got < 0 && errno == EAGAIN) throw std::runtime_error("its socket gave no answer in time");
  if (got < 0) fail("receive from its socket", errno);
  UniqueDescriptor descriptor;
  const cmsghdr* header = CMSG_FIRSTHDR(&parcel.message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int number = -1;
    std::memcpy(&number, CMSG_DATA(header), sizeof number);
    descriptor = UniqueDescriptor(number);
  }
  if (got != 1 || parcel.given != std::byte{1} || descriptor.get() < 0) {
    throw std::runtime_error("it no longer offers the segment");
  }
  return descriptor;
}

}  // namespace ferry::fabric
