// Registered GPU memory between threads and processes, on one GPU and on several, in every way.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ferry/error.hpp>
#include <stdexcept>

#include "fabric/cuda/device_memory.hpp"
#include "fabric/identity.hpp"
#include "shared_ranks.hpp"
#include "touch.hpp"

namespace ferry::test {
namespace {

using namespace std::chrono_literals;
using fabric::DeviceMemory;
using fabric::DeviceMemoryOptions;
using fabric::DeviceWay;
using fabric::Segment;

void need(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

void need_none(const std::string& problem, const std::string& where) {
  if (!problem.empty()) throw std::runtime_error(where + ": " + problem);
}

void barrier(Bootstrap& bootstrap) {
  bootstrap.all_gather({}, 60s);
}

std::unique_ptr<DeviceMemory> make(Bootstrap& bootstrap, DeviceWay way, int gpus) {
  const int device = bootstrap.rank() % gpus;
  need(cudaSetDevice(device) == cudaSuccess, "cudaSetDevice");
  return fabric::make_device_memory(bootstrap, {.device = device, .way = way, .deadline = 30s});
}

struct Sent {
  std::size_t bytes = 0;
  std::size_t handle_bytes = 0;
  std::byte handle[fabric::kMaxHandleBytes]{};
};

/// Registers, and attaches what all peers registered; seals.
Segment exchange(Bootstrap& bootstrap, DeviceMemory& memory, std::size_t bytes) {
  const Segment mine = memory.register_memory(bytes);
  Sent sent{mine.bytes, mine.handle.size(), {}};
  std::memcpy(sent.handle, mine.handle.data(), mine.handle.size());
  const auto all = bootstrap.all_gather(std::as_bytes(std::span(&sent, 1)), 60s);
  for (int peer = 0; peer < memory.size(); ++peer) {
    Sent theirs;
    std::memcpy(&theirs, all[static_cast<std::size_t>(peer)].data(), sizeof theirs);
    memory.attach(peer, mine.id, theirs.bytes, std::span(theirs.handle, theirs.handle_bytes));
  }
  barrier(bootstrap);
  memory.seal(mine.id);
  return mine;
}

constexpr std::size_t kWords = 512;

/// Every rank writes into every peer's segment; every rank finds what all wrote.
void everybody_writes(Bootstrap& bootstrap, DeviceMemory& memory, const Segment& mine) {
  const auto self = static_cast<std::uint64_t>(memory.rank());
  for (int peer = 0; peer < memory.size(); ++peer) {
    std::byte* at = memory.pointer(peer, mine.id);
    need(at != nullptr && memory.bytes(peer, mine.id) > 0, "no pointer");
    need_none(store(at + self * kWords * 8, 1000000 * (self + 1), kWords), "store");
  }
  barrier(bootstrap);
  for (int peer = 0; peer < memory.size(); ++peer) {
    const auto source = static_cast<std::uint64_t>(peer);
    need_none(expect(mine.data + source * kWords * 8, 1000000 * (source + 1), 1, kWords),
              "written by rank " + std::to_string(peer));
  }
  barrier(bootstrap);
}

int open_files() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

std::size_t free_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  need(cudaMemGetInfo(&free, &total) == cudaSuccess, "cudaMemGetInfo");
  return free;
}

struct Shape {
  int ranks = 2;
  int threads = 1;  // in a process
  DeviceWay way = DeviceWay::automatic;
};

/// Why the ranks of this machine cannot share memory by fabric handles; empty: they can.
std::string no_fabric() {
  static const std::string reason = [] {
    const auto problems = run_ranks(
        2, 1, [](Bootstrap& bootstrap) { make(bootstrap, DeviceWay::vmm_fabric, gpu_count()); });
    return problems.empty() ? std::string() : problems[0];
  }();
  return reason;
}

class DeviceMemoryTest : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
    if (GetParam().way == DeviceWay::vmm_fabric && !no_fabric().empty()) {
      GTEST_SKIP() << no_fabric();
    }
  }
  /// Runs on one GPU, then on all.
  static void on_gpus(const Shape& shape, const std::function<void(Bootstrap&, int gpus)>& body) {
    for (const int gpus : {1, gpu_count()}) {
      const auto problems = run_ranks(
          shape.ranks, shape.threads, [&](Bootstrap& bootstrap) { body(bootstrap, gpus); }, 120);
      for (const std::string& problem : problems) ADD_FAILURE() << gpus << " GPUs: " << problem;
      if (gpu_count() == 1) break;
    }
  }
};

TEST_P(DeviceMemoryTest, EveryRankReachesEveryRank) {
  on_gpus(GetParam(), [](Bootstrap& bootstrap, int gpus) {
    auto memory = make(bootstrap, GetParam().way, gpus);
    if (GetParam().way != DeviceWay::automatic)
      need(memory->way() == GetParam().way, "another way");
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{5} << 20, std::size_t{300} << 20}) {
      const Segment mine = exchange(bootstrap, *memory, bytes);
      need(mine.bytes == memory->rounded_bytes(bytes) && mine.bytes >= bytes, "rounded bytes");
      need_none(expect(mine.data, 0, 0, mine.bytes / 8), "zeroed");
      barrier(bootstrap);
      everybody_writes(bootstrap, *memory, mine);
    }
    need(memory->pointer(0, 3) == nullptr && memory->bytes(0, 3) == 0, "a segment that is none");
  });
}

TEST_P(DeviceMemoryTest, NothingStays) {
  on_gpus(GetParam(), [](Bootstrap& bootstrap, int gpus) {
    make(bootstrap, GetParam().way, gpus).reset();
    barrier(bootstrap);
    const int files = open_files();
    const std::size_t free = free_bytes();
    barrier(bootstrap);
    for (int i = 0; i < 5; ++i) {
      auto memory = make(bootstrap, GetParam().way, gpus);
      for (int s = 0; s < 3; ++s) exchange(bootstrap, *memory, std::size_t{64} << 20);
      barrier(bootstrap);  // IPC: peers close before the owner frees, which the engine sees to
      memory.reset();
      barrier(bootstrap);
    }
    const std::size_t now = free_bytes();
    need(open_files() == files, "descriptors: " + std::to_string(files) + " before, " +
                                    std::to_string(open_files()) + " after");
    need(now + (std::size_t{48} << 20) > free,
         "GPU memory: " + std::to_string(free) + " free before, " + std::to_string(now) + " after");
    barrier(bootstrap);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, DeviceMemoryTest,
    testing::Values(Shape{2, 1, DeviceWay::vmm_pidfd}, Shape{4, 1, DeviceWay::vmm_socket},
                    Shape{4, 1, DeviceWay::ipc}, Shape{4, 1, DeviceWay::automatic},
                    Shape{4, 4, DeviceWay::local}, Shape{4, 2, DeviceWay::vmm_socket},
                    Shape{4, 2, DeviceWay::ipc}, Shape{1, 1, DeviceWay::automatic},
                    Shape{4, 1, DeviceWay::vmm_fabric}, Shape{4, 2, DeviceWay::vmm_fabric}),
    [](const testing::TestParamInfo<Shape>& shape) {
      std::string name(fabric::name_of(shape.param.way));
      std::replace(name.begin(), name.end(), '-', '_');
      return name + "_" + std::to_string(shape.param.ranks) + "_ranks_" +
             std::to_string(shape.param.threads) + "_threads";
    });

class DeviceMemoryAlone : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  }
  static void run(int ranks, int threads, const RankBody& body) {
    for (const std::string& problem : run_ranks(ranks, threads, body)) ADD_FAILURE() << problem;
  }
};

/// The error that a call throws; fails if it throws none, or another.
template <typename Call>
Error error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  throw std::runtime_error("nothing was thrown");
}

TEST_F(DeviceMemoryAlone, ThreadsShareTheMapping) {
  run(3, 3, [](Bootstrap& bootstrap) {
    auto memory = make(bootstrap, DeviceWay::automatic, gpu_count());
    need(memory->way() == DeviceWay::local, "way");
    const Segment mine = exchange(bootstrap, *memory, 100);
    const auto data = reinterpret_cast<std::uintptr_t>(mine.data);
    const auto all = bootstrap.all_gather(std::as_bytes(std::span(&data, 1)), 60s);
    for (int peer = 0; peer < 3; ++peer) {
      std::uintptr_t theirs = 0;
      std::memcpy(&theirs, all[static_cast<std::size_t>(peer)].data(), sizeof theirs);
      need(reinterpret_cast<std::uintptr_t>(memory->pointer(peer, 0)) == theirs, "pointer");
    }
    barrier(bootstrap);
  });
}

TEST_F(DeviceMemoryAlone, HandlesAreChecked) {
  run(2, 1, [](Bootstrap& bootstrap) {
    auto memory = make(bootstrap, DeviceWay::automatic, 1);
    auto other = make(bootstrap, DeviceWay::automatic, 1);
    const Segment mine = memory->register_memory(1);
    const auto all = bootstrap.all_gather(mine.handle, 60s);
    const int peer = 1 - bootstrap.rank();
    const auto& handle = all[static_cast<std::size_t>(peer)];
    const auto refused = [&](const std::string& what, auto&& call) {
      const Error error = error_of(call);
      need(error.kind() == ErrorKind::system && error.peer() == peer, what + ": " + error.what());
    };
    refused("short", [&] { memory->attach(peer, 0, mine.bytes, std::span(handle).first(20)); });
    refused("size", [&] { memory->attach(peer, 0, mine.bytes * 2, handle); });
    refused("segment", [&] { memory->attach(peer, 1, mine.bytes, handle); });
    refused("number", [&] { memory->attach(peer, 64, mine.bytes, handle); });
    refused("group", [&] { other->attach(peer, 0, mine.bytes, handle); });
    auto forged = handle;  // says twice the size, and so does the caller: the memory is smaller
    const std::uint64_t bytes = std::uint64_t{mine.bytes} * 2;
    std::memcpy(forged.data() + 16, &bytes, sizeof bytes);
    refused("forged", [&] { memory->attach(peer, 0, mine.bytes * 2, forged); });
    memory->attach(peer, 0, mine.bytes, handle);
    refused("twice", [&] { memory->attach(peer, 0, mine.bytes, handle); });
    barrier(bootstrap);
    memory->seal(0);
    barrier(bootstrap);
  });
}

TEST_F(DeviceMemoryAlone, AFullGpuLeavesTheGroupUsable) {
  run(2, 1, [](Bootstrap& bootstrap) {
    auto memory = make(bootstrap, DeviceWay::automatic, 1);
    const Error error = error_of([&] { memory->register_memory(std::size_t{1} << 42); });
    need(error.kind() == ErrorKind::exhausted, error.what());
    need(error_of([&] { memory->register_memory(0); }).kind() == ErrorKind::invalid_argument, "0");
    const Segment mine = exchange(bootstrap, *memory, 1);
    need(mine.id == 0, "the failed segment took a number");
    everybody_writes(bootstrap, *memory, mine);
  });
}

TEST_F(DeviceMemoryAlone, RanksThatDisagreeHearItAlike) {
  run(2, 1, [](Bootstrap& bootstrap) {
    const DeviceWay way = bootstrap.rank() == 0 ? DeviceWay::ipc : DeviceWay::vmm_socket;
    const Error mismatch = error_of([&] { make(bootstrap, way, 1); });
    need(mismatch.kind() == ErrorKind::mismatch && mismatch.peer() == 1, mismatch.what());
    const Error absent = error_of([&] {
      fabric::make_device_memory(bootstrap, {.device = bootstrap.rank() == 1 ? 4096 : 0});
    });
    need(absent.kind() == ErrorKind::unsupported && absent.peer() == 1, absent.what());
    const Error local = error_of([&] { make(bootstrap, DeviceWay::local, 1); });
    need(local.kind() == ErrorKind::unsupported, local.what());
    auto memory = make(bootstrap, DeviceWay::automatic, 1);
    const Segment mine = exchange(bootstrap, *memory, 1);
    everybody_writes(bootstrap, *memory, mine);
  });
}

/// Lets a rank say that it runs on another host.
class ElsewhereBootstrap final : public Bootstrap {
 public:
  ElsewhereBootstrap(Bootstrap& real, bool elsewhere) : real_(real), elsewhere_(elsewhere) {}
  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine,
                                                 std::chrono::nanoseconds deadline,
                                                 const OnWait& on_wait) override {
    std::vector<std::byte> sent(mine.begin(), mine.end());
    const std::string boot = fabric::this_identity().boot_id;
    const auto* text = reinterpret_cast<const std::byte*>(boot.data());
    const auto at = std::search(sent.begin(), sent.end(), text, text + boot.size());
    if (elsewhere_ && !boot.empty() && at != sent.end()) *at = std::byte{'x'};
    return real_.all_gather(sent, deadline, on_wait);
  }

 private:
  Bootstrap& real_;
  bool elsewhere_;
};

TEST_F(DeviceMemoryAlone, RanksOnDifferentHostsShareByFabricHandles) {
  const bool possible = no_fabric().empty();
  run(2, 1, [&](Bootstrap& bootstrap) {
    ElsewhereBootstrap hosts(bootstrap, bootstrap.rank() == 1);
    if (possible) {
      auto memory = make(hosts, DeviceWay::automatic, gpu_count());
      need(memory->way() == DeviceWay::vmm_fabric, "another way");
      const Segment mine = exchange(bootstrap, *memory, 1);
      everybody_writes(bootstrap, *memory, mine);
      return;
    }
    const Error error = error_of([&] { make(hosts, DeviceWay::automatic, gpu_count()); });
    need(error.kind() == ErrorKind::unsupported, error.what());
    need(std::string(error.what()).find("fabric handles") != std::string::npos, error.what());
  });
}

TEST_F(DeviceMemoryAlone, FabricHandlesAreRefusedInWords) {
  if (no_fabric().empty()) GTEST_SKIP() << "this machine has them";
  run(2, 1, [](Bootstrap& bootstrap) {
    const Error error = error_of([&] { make(bootstrap, DeviceWay::vmm_fabric, gpu_count()); });
    need(error.kind() == ErrorKind::unsupported, error.what());
    need(std::string(error.what()).find("nvidia-imex") != std::string::npos, error.what());
    auto memory = make(bootstrap, DeviceWay::automatic, gpu_count());
    everybody_writes(bootstrap, *memory, exchange(bootstrap, *memory, 1));
  });
}

TEST_F(DeviceMemoryAlone, TheMemoryOutlivesItsOwner) {
  // Rank 0's process ends; what rank 1 mapped stays, whatever its kernels still do.
  const auto problems = run_ranks(2, 1, [](Bootstrap& bootstrap) {
    auto memory = make(bootstrap, DeviceWay::vmm_socket, gpu_count());
    const Segment mine = exchange(bootstrap, *memory, 1);
    need_none(store(mine.data, 77, kWords), "store");
    barrier(bootstrap);
    if (bootstrap.rank() == 0) _exit(0);
    usleep(500000);
    need_none(expect(memory->pointer(0, 0), 77, 1, kWords), "after the end of its owner");
  });
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find("ended before"), std::string::npos) << problems[0];
}

TEST_F(DeviceMemoryAlone, TheEndInAForkedChildDoesNothing) {
  run(2, 1, [](Bootstrap& bootstrap) {
    auto memory = make(bootstrap, DeviceWay::vmm_socket, gpu_count());
    const Segment mine = exchange(bootstrap, *memory, 1);
    const pid_t child = fork();
    if (child == 0) {
      memory.reset();
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    need(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child");
    everybody_writes(bootstrap, *memory, mine);
  });
}

TEST_F(DeviceMemoryAlone, RegisteringNeedsNoFreeSm) {
  // A kernel that waits for this rank may have all of them.
  run(1, 1, [](Bootstrap& bootstrap) {
    auto memory = make(bootstrap, DeviceWay::automatic, 1);
    memory->register_memory(1);
    void* pinned = nullptr;
    cudaStream_t stream = nullptr;
    need(cudaHostAlloc(&pinned, 4, cudaHostAllocDefault) == cudaSuccess, "cudaHostAlloc");
    auto* end = static_cast<volatile std::uint32_t*>(pinned);
    need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "stream");
    *end = 1;
    take_all_sms(stream, end);
    need(cudaStreamSynchronize(stream) == cudaSuccess, "take_all_sms");
    *end = 0;
    take_all_sms(stream, end);
    const auto start = std::chrono::steady_clock::now();
    const Segment more = memory->register_memory(std::size_t{100} << 20);
    const auto took = std::chrono::steady_clock::now() - start;
    *end = 1;
    need(took < 5s, "it waited for the kernel");
    need_none(expect(more.data, 0, 0, more.bytes / 8), "zeroed");
  });
}

TEST_F(DeviceMemoryAlone, TheCurrentDeviceStays) {
  run(1, 1, [](Bootstrap& bootstrap) {
    const int last = gpu_count() - 1;
    need(cudaSetDevice(last) == cudaSuccess, "cudaSetDevice");
    auto memory = fabric::make_device_memory(bootstrap, {.device = 0});
    memory->register_memory(1);
    int now = -1;
    need(cudaGetDevice(&now) == cudaSuccess && now == last, "device " + std::to_string(now));
  });
}

}  // namespace
}  // namespace ferry::test
