// Descriptors cross between processes: no GPU is needed for that.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fabric/cuda/descriptors.hpp"
#include "fabric/cuda/device_memory.hpp"
#include "ferry/error.hpp"

namespace ferry::fabric {
namespace {

using namespace std::chrono_literals;

struct File {
  UniqueDescriptor fd{memfd_create("ferry-test", MFD_CLOEXEC)};
  ino_t inode = inode_of(fd.get());
  static ino_t inode_of(int fd) {
    struct stat info{};
    return fstat(fd, &info) == 0 ? info.st_ino : 0;
  }
};

/// Runs in a child process; its exit status, or −1.
template <typename Body>
int in_child(Body&& body) {
  const pid_t child = fork();
  if (child == 0) {
    try {
      _exit(body());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      _exit(99);
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int open_files() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

TEST(Descriptors, CrossOverASocket) {
  const int before = open_files();
  {
    const JobKey name = random_key(0);
    const File first;
    const File second;
    DescriptorServer server(name);
    server.offer(0, first.fd.get());
    server.offer(7, second.fd.get());
    EXPECT_EQ(in_child([&] {
                const auto a = ask_for_descriptor(name, 0, 5s);
                const auto b = ask_for_descriptor(name, 7, 5s);
                const bool closes = (fcntl(a.get(), F_GETFD) & FD_CLOEXEC) != 0;
                return File::inode_of(a.get()) == first.inode &&
                               File::inode_of(b.get()) == second.inode && closes
                           ? 0
                           : 1;
              }),
              0);
    server.withdraw(7);
    EXPECT_THROW(ask_for_descriptor(name, 7, 5s), std::runtime_error);
    EXPECT_THROW(ask_for_descriptor(name, 3, 5s), std::runtime_error);
    EXPECT_THROW(ask_for_descriptor(random_key(0), 0, 5s), std::runtime_error);
    EXPECT_EQ(File::inode_of(ask_for_descriptor(name, 0, 5s).get()), first.inode);
  }
  EXPECT_EQ(open_files(), before);
}

TEST(Descriptors, ManyAskAtOnce) {
  const JobKey name = random_key(0);
  const File file;
  DescriptorServer server(name);
  server.offer(0, file.fd.get());
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        right += File::inode_of(ask_for_descriptor(name, 0, 20s).get()) == file.inode;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 400);
}

TEST(Descriptors, SilentVisitorsHoldNobodyUp) {
  const JobKey name = random_key(0);
  const File file;
  DescriptorServer server(name);
  server.offer(0, file.fd.get());
  sockaddr_un where{};
  where.sun_family = AF_UNIX;
  const int length = std::snprintf(
      where.sun_path + 1, sizeof where.sun_path - 1, "ferry-cuda-%016llx%016llx",
      static_cast<unsigned long long>(name[0]), static_cast<unsigned long long>(name[1]));
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  std::vector<UniqueDescriptor> silent;
  for (int i = 0; i < 100; ++i) {  // more than are kept
    silent.emplace_back(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(silent.back().get(), reinterpret_cast<sockaddr*>(&where), bytes), 0);
  }
  EXPECT_EQ(File::inode_of(ask_for_descriptor(name, 0, 800ms).get()), file.inode);
}

TEST(Descriptors, AForkedChildLeavesTheServerAlone) {
  const JobKey name = random_key(0);
  const File file;
  auto server = std::make_unique<DescriptorServer>(name);
  server->offer(0, file.fd.get());
  EXPECT_EQ(in_child([&] {
              server.reset();
              return 0;
            }),
            0);
  EXPECT_EQ(File::inode_of(ask_for_descriptor(name, 0, 5s).get()), file.inode);
}

TEST(Descriptors, TakenFromAChild) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const File file;
    const std::int64_t said[3] = {this_process().pid, file.fd.get(),
                                  static_cast<std::int64_t>(file.inode)};
    if (write(ready[1], said, sizeof said) != sizeof said) _exit(1);
    pause();
    _exit(0);
  }
  std::int64_t said[3]{};
  ASSERT_EQ(read(ready[0], said, sizeof said), static_cast<ssize_t>(sizeof said));
  ProcessName owner = this_process();
  owner.pid = said[0];
  owner.start_time = start_time_of(said[0]).value();
  try {
    EXPECT_EQ(File::inode_of(take_descriptor(owner, static_cast<int>(said[1])).get()),
              static_cast<ino_t>(said[2]));
  } catch (const std::runtime_error& error) {
    // A sandbox may forbid it; then device memory uses the socket.
    EXPECT_NE(std::string(error.what()).find("pidfd_getfd"), std::string::npos) << error.what();
  }
  ProcessName other = owner;
  other.start_time += 1;
  EXPECT_THROW(take_descriptor(other, static_cast<int>(said[1])), std::runtime_error);
  EXPECT_THROW(take_descriptor(owner, 900), std::runtime_error);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_THROW(take_descriptor(owner, static_cast<int>(said[1])), std::runtime_error);
  close(ready[0]);
  close(ready[1]);
}

TEST(DeviceMemoryWithoutGpu, EveryRankHearsWhoHasNone) {
  // In a child: another test may not want CUDA to have started in this process.
  EXPECT_EQ(in_child([] {
              const auto bootstraps = thread_bootstrap(2);
              std::atomic<int> right = 0;
              std::vector<std::thread> threads;
              for (int rank = 0; rank < 2; ++rank) {
                threads.emplace_back([&, rank] {
                  try {
                    make_device_memory(*bootstraps[static_cast<std::size_t>(rank)],
                                       {.device = rank == 1 ? 4096 : 0});
                  } catch (const Error& error) {
                    // Rank 0 has none either on a machine without GPUs.
                    right += error.kind() == ErrorKind::unsupported && error.rank() == rank &&
                             error.peer() >= 0;
                  }
                });
              }
              for (std::thread& thread : threads) thread.join();
              return right == 2 ? 0 : 1;
            }),
            0);
}

}  // namespace
}  // namespace ferry::fabric
