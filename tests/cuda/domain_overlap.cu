// Whether SMs are free while the network works: two GPUs, two threads, a domain each.
//
//   domain_overlap [copies|ofi]
//
// A "full house" is a kernel that takes every thread of every SM and ends when all of its blocks
// have met: it does so at once where nothing else is resident, and not at all beside a kernel that
// waits. First one rank comes late to a dispatch: in two domains the other's SMs are all free
// meanwhile; in one domain they are not, which shows that the check can fail. Then both dispatch at
// once, beside full houses one after another: the picture shows when all SMs were free.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ferry/ferry.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace ferry;
using namespace std::chrono_literals;

constexpr int kSkipped = 77;
constexpr std::int64_t kTokens = 4096, kHidden = 7168;  // bf16: 58.7 MB cross each way

void check(cudaError_t result) {
  if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
}

__device__ unsigned long long now_ns() {
  unsigned long long value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

struct Meeting {
  unsigned arrived;
  unsigned met;  ///< 1: all blocks were there at the same time
  unsigned long long end;
};

__global__ void __launch_bounds__(1024, 2) full_house(Meeting* meeting, unsigned long long most) {
  if (threadIdx.x == 0) {
    const unsigned long long start = now_ns();
    atomicAdd(&meeting->arrived, 1u);
    volatile unsigned* arrived = &meeting->arrived;
    while (*arrived < gridDim.x && now_ns() - start < most) {
    }
    if (blockIdx.x == 0) {
      meeting->met = *arrived == gridDim.x ? 1 : 0;
      meeting->end = now_ns();
    }
  }
  __syncthreads();
}

__global__ void stamp(unsigned long long* at) {
  *at = now_ns();
}

template <class T>
T* pinned(std::size_t count) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable));
  std::fill_n(static_cast<unsigned char*>(memory), count * sizeof(T), 0);
  return static_cast<T*>(memory);
}

/// One rank with its tokens, every one of which goes to both ranks.
struct Seat {
  int rank;
  Group group;
  cudaStream_t stream = nullptr, beside = nullptr;
  Tensor x, routes;
  int num_sms = 0;
  Meeting* meeting = nullptr;
  Meeting* seen = pinned<Meeting>(1);
  std::vector<void*> owned;

  Seat(std::shared_ptr<Bootstrap> bootstrap, int domain_size, FabricKind network)
      : rank(bootstrap->rank()), group(bootstrap, config(rank, domain_size, network)) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
    check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, rank));
    std::vector<std::int64_t> ids(kTokens * 2);
    for (std::int64_t i = 0; i < kTokens * 2; ++i) ids[static_cast<std::size_t>(i)] = i % 2;
    meeting = static_cast<Meeting*>(memory(nullptr, Dtype::u8, {sizeof(Meeting)}).data());
    x = memory(nullptr, Dtype::bf16, {kTokens, kHidden});
    routes = memory(ids.data(), Dtype::i64, {kTokens, 2});
  }
  ~Seat() {
    group.destroy();
    for (void* data : owned) cudaFree(data);
    cudaStreamDestroy(stream);
    cudaStreamDestroy(beside);
  }

  static GroupConfig config(int rank, int domain_size, FabricKind network) {
    check(cudaSetDevice(rank));
    GroupConfig made;
    made.experts = 2;
    made.backend = Backend::cuda;
    made.device = rank;
    made.fabric = FabricKind::local;
    made.domain_size = domain_size;
    made.network = domain_size == 1 ? network : FabricKind::automatic;
    made.memory_bytes = std::size_t{512} << 20;
    made.deadline = 20s;
    return made;
  }
  Tensor memory(const void* from, Dtype dtype, const Extents& shape) {
    const std::size_t bytes = static_cast<std::size_t>(shape.product()) * size_of(dtype);
    void* data = nullptr;
    check(cudaMalloc(&data, bytes));
    owned.push_back(data);
    check(from == nullptr ? cudaMemset(data, 0, bytes)
                          : cudaMemcpy(data, from, bytes, cudaMemcpyHostToDevice));
    check(cudaDeviceSynchronize());
    return {TensorView(data, dtype, shape, {DeviceKind::cuda, rank}), nullptr};
  }
  Received dispatch(const Plan& plan, Stream& on) {
    DispatchOptions options;
    options.stream = &on;
    return group.dispatch(x, plan, options);
  }
  Combined combine(const Received& rows, const Plan& plan, Stream& on) {
    CombineOptions options;
    options.stream = &on;
    return group.combine(rows.x, plan, options);
  }
  /// Beside the stream; `most` bounds its wait.
  Meeting meet(std::chrono::nanoseconds most) {
    check(cudaMemsetAsync(meeting, 0, sizeof(Meeting), beside));
    full_house<<<2 * num_sms, 1024, 0, beside>>>(meeting,
                                                 static_cast<unsigned long long>(most.count()));
    check(cudaGetLastError());
    check(cudaMemcpyAsync(seen, meeting, sizeof(Meeting), cudaMemcpyDeviceToHost, beside));
    check(cudaStreamSynchronize(beside));
    return *seen;
  }
};

/// On rank 0: whether all SMs were free while rank 1 did not come.
bool free_while_late(Seat& seat, const Plan& plan, Stream& stream) {
  (void)seat.meet(1s);  // its code is loaded
  seat.group.barrier();
  if (seat.rank == 1) {
    std::this_thread::sleep_for(600ms);
    seat.dispatch(plan, stream).event.wait(20s);
    return true;
  }
  const Received received = seat.dispatch(plan, stream);
  std::this_thread::sleep_for(150ms);  // what it does before it waits is over
  const Meeting got = seat.meet(100ms);
  const bool waited = !received.event.ready();
  received.event.wait(20s);
  if (!waited) throw std::runtime_error("the dispatch did not wait for rank 1");
  return got.met == 1;
}

/// On rank 0: one character for each part of a call, '#' where all SMs were free. `launch` gives
/// its result, which has an event.
template <class Launch>
void draw(Seat& seat, const char* call, Stream& stream, const Launch& launch) {
  constexpr std::size_t kMost = 20000, kWidth = 100;
  std::vector<Meeting> meetings;
  auto* at = pinned<unsigned long long>(2);
  seat.group.barrier();
  stamp<<<1, 1, 0, seat.stream>>>(at);
  const auto result = launch();
  stamp<<<1, 1, 0, seat.stream>>>(at + 1);
  const Event end = stream.record();
  while (seat.rank == 0 && meetings.size() < kMost && !end.ready()) {
    meetings.push_back(seat.meet(20ms));
  }
  result.event.wait(20s);
  end.wait(20s);
  if (seat.rank != 0) return;
  std::string picture(kWidth, '.');
  const double whole = static_cast<double>(at[1] - at[0]);
  std::size_t met = 0;
  for (const Meeting& each : meetings) {
    if (each.met == 0 || each.end < at[0] || each.end > at[1]) continue;
    ++met;
    const double part = static_cast<double>(each.end - at[0]) / whole;
    picture[std::min(kWidth - 1, static_cast<std::size_t>(part * kWidth))] = '#';
  }
  std::printf("  %s of %.1f MB across: %.2f ms, %zu full houses meanwhile\n  |%s|\n", call,
              static_cast<double>(kTokens * kHidden * 2) / 1e6, whole / 1e6, met, picture.c_str());
}

/// A dispatch and a combine, both twice; and how long each takes with nothing beside it.
void draw_both(Seat& seat, const Plan& plan, Stream& stream) {
  constexpr int kTimes = 5;
  const Received rows = seat.dispatch(plan, stream);
  const auto dispatch = [&] { return seat.dispatch(plan, stream); };
  const auto combine = [&] { return seat.combine(rows, plan, stream); };
  combine().event.wait(20s);  // its stage has grown
  for (int i = 0; i < 2; ++i) {
    draw(seat, "dispatch", stream, dispatch);
    draw(seat, "combine", stream, combine);
  }
  const auto time = [&](const char* call, const auto& launch) {
    double best = 1e9;
    for (int i = 0; i < kTimes; ++i) {
      seat.group.barrier();
      const auto start = std::chrono::steady_clock::now();
      launch().event.wait(20s);
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - start;
      best = std::min(best, took.count());
    }
    if (seat.rank == 0) std::printf("  %s alone, best of %d: %.2f ms\n", call, kTimes, best);
  };
  time("dispatch", dispatch);
  time("combine", combine);
  if (seat.rank != 0) return;
  for (const NicStats& nic : seat.group.nics()) {
    std::printf("  by %s %s, %s\n", nic.name.c_str(), nic.address.c_str(), nic.why.c_str());
  }
}

bool run(int domain_size, FabricKind network) {
  const auto bootstraps = thread_bootstrap(2);
  bool free[2] = {false, false};
  std::string problem[2];
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      try {
        Seat seat(bootstraps[static_cast<std::size_t>(r)], domain_size, network);
        Stream stream = Stream::of_cuda(seat.stream, r);
        const Plan plan = seat.group.plan(seat.routes);
        for (int i = 0; i < 3; ++i) seat.dispatch(plan, stream).event.wait(20s);
        free[r] = free_while_late(seat, plan, stream);
        if (domain_size == 1) {
          draw_both(seat, plan, stream);
        }
        seat.group.barrier();
      } catch (const std::exception& thrown) {
        problem[r] = thrown.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < 2; ++r) {
    if (!problem[r].empty()) std::printf("rank %d: %s\n", r, problem[r].c_str());
  }
  const bool good = problem[0].empty() && problem[1].empty();
  std::printf("%s: while rank 1 is late, all SMs of rank 0 are %s\n",
              domain_size == 1 ? "two domains" : "one domain",
              !good     ? "unknown"
              : free[0] ? "free"
                        : "not free");
  return good && free[0] == (domain_size == 1);
}

}  // namespace

int main(int argc, char** argv) {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < 2) {
    std::printf("SKIPPED: FEWER THAN TWO GPUS\n");
    return kSkipped;
  }
  const bool ofi = argc > 1 && std::string(argv[1]) == "ofi";
  const bool two = run(1, ofi ? FabricKind::ofi : FabricKind::automatic);
  const bool one = run(0, FabricKind::automatic);
  std::printf("%s\n", two && one ? "PASSED" : "FAILED");
  return two && one ? 0 : 1;
}
