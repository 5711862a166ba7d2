#include "kernel_group.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace ferry::cuda::test {

namespace {

__global__ void hold_stream(const volatile std::uint32_t* word) {
  std::uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (*word == 0 && now - start < 1'000'000'000ull);
}

/// $FERRY_TEST_PATIENCE: how many times longer every deadline is, where kernels run slowly (under
/// compute-sanitizer).
double time_factor() {
  static const double times = [] {
    const char* word = std::getenv("FERRY_TEST_PATIENCE");
    const double value = word != nullptr ? std::atof(word) : 1;
    return value > 1 ? value : 1;
  }();
  return times;
}

std::uint64_t stretched(std::uint64_t ns) {
  return static_cast<std::uint64_t>(static_cast<double>(ns) * time_factor());
}

template <class T>
T* pinned(std::size_t bytes) {
  void* memory = nullptr;
  FERRY_CUDA_CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  std::memset(memory, 0, bytes);
  return static_cast<T*>(memory);
}

}  // namespace

void stop(const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "FAILED: %s\n", message.c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

void check_cuda(cudaError_t error, const char* what, const char* file, int line) {
  if (error == cudaSuccess) return;
  stop(std::string(what) + ": " + cudaGetErrorString(error) + " at " + file + ":" +
       std::to_string(line));
}

void prepare_process() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
}

int gpu_count() {
  static const int count = [] {
    int found = 0;
    const cudaError_t asked = cudaGetDeviceCount(&found);
    const bool none = asked == cudaErrorNoDevice || asked == cudaErrorInsufficientDriver;
    if (!none) FERRY_CUDA_CHECK(asked);
    if (none || found == 0) {
      std::printf("SKIPPED: NO GPU\n");
      std::exit(77);  // CTest: skipped
    }
    for (int i = 0; i < found; ++i) {
      FERRY_CUDA_CHECK(cudaSetDevice(i));
      for (int j = 0; j < found; ++j) {
        if (i == j) continue;
        const cudaError_t error = cudaDeviceEnablePeerAccess(j, 0);
        if (error != cudaErrorPeerAccessAlreadyEnabled) FERRY_CUDA_CHECK(error);
      }
    }
    return found;
  }();
  return count;
}

KernelGroup::KernelGroup(const GroupOptions& options)
    : options_(options), members_(index(options.ranks)) {
  gpu_count();
  pinned_ = pinned<std::byte>(kPinnedBytes);
  layout_ = make_device_control_layout(options_.ranks, options_.body_bytes);
  for (int rank = 0; rank < options_.ranks; ++rank) make_member(rank);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    Member& m = members_[index(rank)];
    std::vector<PeerSegment> table(index(options_.ranks) * kMaxSegments);
    for (int peer = 0; peer < options_.ranks; ++peer) {
      const Member& p = members_[index(peer)];
      table[index(peer) * kMaxSegments] = {p.control, layout_.bytes};
      table[index(peer) * kMaxSegments + 1] = {p.arena, options_.arena_bytes};
    }
    const std::size_t bytes = table.size() * sizeof(PeerSegment);
    FERRY_CUDA_CHECK(cudaSetDevice(device(rank)));
    FERRY_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&m.table), bytes));
    FERRY_CUDA_CHECK(cudaMemcpy(m.table, table.data(), bytes, cudaMemcpyHostToDevice));
    m.view = {rank,    options_.ranks, m.control, layout_,
              m.table, m.fatal,        m.abort,   stretched(options_.deadline_ns)};
  }
}

void KernelGroup::make_member(int rank) {
  Member& m = members_[index(rank)];
  FERRY_CUDA_CHECK(cudaSetDevice(device(rank)));
  FERRY_CUDA_CHECK(cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking));
  FERRY_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&m.control), layout_.bytes));
  FERRY_CUDA_CHECK(cudaMemset(m.control, 0, layout_.bytes));
  FERRY_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&m.arena), options_.arena_bytes));
  FERRY_CUDA_CHECK(cudaMemset(m.arena, 0xCB, options_.arena_bytes));
  FERRY_CUDA_CHECK(cudaDeviceSynchronize());
  m.fatal = pinned<Failure>(sizeof(Failure));
  m.failure = pinned<Failure>(sizeof(Failure));
  m.abort = pinned<std::uint32_t>(sizeof(std::uint32_t));
  *m.fatal = Failure{};
  *m.failure = Failure{};
}

KernelGroup::~KernelGroup() {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    Member& m = members_[index(rank)];
    cudaSetDevice(device(rank));
    cudaStreamSynchronize(m.stream);
  }
  for (int rank = 0; rank < options_.ranks; ++rank) {
    Member& m = members_[index(rank)];
    cudaSetDevice(device(rank));
    cudaStreamDestroy(m.stream);
    cudaFree(m.control);
    cudaFree(m.arena);
    cudaFree(m.table);
    cudaFreeHost(m.fatal);
    cudaFreeHost(m.failure);
    cudaFreeHost(m.abort);
  }
  cudaFreeHost(pinned_);
}

void KernelGroup::clear_failures() {
  for (Member& m : members_) *m.failure = Failure{};
}

void KernelGroup::set_deadline(std::uint64_t ns) {
  for (Member& m : members_) m.view.deadline_ns = stretched(ns);
}

Piece KernelGroup::take(int rank, std::size_t bytes, int poison) {
  Member& m = members_[index(rank)];
  Piece piece;
  piece.offset = m.used;
  piece.data = m.arena + m.used;
  piece.bytes = bytes;
  m.used = round_up(m.used + bytes, 256);
  if (m.used > options_.arena_bytes) stop("the test's arena is too small");
  FERRY_CUDA_CHECK(cudaSetDevice(device(rank)));
  if (bytes > 0) FERRY_CUDA_CHECK(cudaMemsetAsync(piece.data, poison, bytes, m.stream));
  return piece;
}

void KernelGroup::reset_arena() {
  for (Member& m : members_) m.used = 0;
  pinned_used_ = 0;
}

void KernelGroup::copy_in(int rank, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  FERRY_CUDA_CHECK(cudaSetDevice(device(rank)));
  FERRY_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream(rank)));
}

void KernelGroup::copy_out(int rank, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  FERRY_CUDA_CHECK(cudaSetDevice(device(rank)));
  FERRY_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream(rank)));
  FERRY_CUDA_CHECK(cudaStreamSynchronize(stream(rank)));
}

std::byte* KernelGroup::take_pinned(std::size_t bytes) {
  if (pinned_used_ + bytes > kPinnedBytes) stop("the test's pinned memory is too small");
  std::byte* memory = pinned_ + pinned_used_;
  pinned_used_ = round_up(pinned_used_ + bytes, 256);
  std::memset(memory, 0, bytes);
  return memory;
}

void KernelGroup::launch(const std::function<void(int)>& call) {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    FERRY_CUDA_CHECK(cudaSetDevice(device(rank)));
    call(rank);
  }
}

void KernelGroup::wait(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds * time_factor());
  for (int rank = 0; rank < options_.ranks; ++rank) {
    FERRY_CUDA_CHECK(cudaSetDevice(device(rank)));
    for (;;) {
      const cudaError_t state = cudaStreamQuery(stream(rank));
      if (state == cudaSuccess) break;
      if (state != cudaErrorNotReady) FERRY_CUDA_CHECK(state);
      if (Clock::now() > end) stop("rank " + std::to_string(rank) + " does not end");
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

void KernelGroup::wait_well(double seconds) {
  wait(seconds);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (fatal(rank).written != 0) {
      stop("rank " + std::to_string(rank) + " fatal: " + describe(fatal(rank)));
    }
    if (failure(rank)->written != 0) {
      stop("rank " + std::to_string(rank) + ": " + describe(*failure(rank)));
    }
  }
}

std::string describe(const Failure& failure) {
  return "reason " + std::to_string(static_cast<int>(failure.reason)) + ", stage " +
         std::to_string(static_cast<int>(failure.stage)) + ", peer " +
         std::to_string(failure.peer) + ", generation " + std::to_string(failure.written) +
         ", expected " + std::to_string(failure.expected) + ", seen " +
         std::to_string(failure.seen) + ", detail " + std::to_string(failure.detail);
}

Gate::Gate() {
  word_ = pinned<std::uint32_t>(sizeof(std::uint32_t));
}
Gate::~Gate() {
  cudaFreeHost(word_);
}
void Gate::close() {
  *static_cast<volatile std::uint32_t*>(word_) = 0;
}
void Gate::open() {
  *static_cast<volatile std::uint32_t*>(word_) = 1;
}
void Gate::hold(cudaStream_t stream) const {
  hold_stream<<<1, 1, 0, stream>>>(word_);
  FERRY_CUDA_CHECK(cudaGetLastError());
}

bool has_option(int argc, char** argv, const char* name) {
  return std::any_of(argv + 1, argv + argc, [&](const char* a) { return std::string(a) == name; });
}

std::int64_t option(int argc, char** argv, const char* name, std::int64_t otherwise) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string(argv[i]) == name) return std::atoll(argv[i + 1]);
  }
  return otherwise;
}

std::vector<int> option_list(int argc, char** argv, const char* name, std::vector<int> otherwise) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string(argv[i]) != name) continue;
    std::vector<int> values;
    for (const char* p = argv[i + 1]; *p != 0;) {
      char* end = nullptr;
      values.push_back(static_cast<int>(std::strtol(p, &end, 10)));
      if (end == p) stop(std::string("not a list of numbers: ") + argv[i + 1]);
      p = *end == ',' ? end + 1 : end;
    }
    return values;
  }
  return otherwise;
}

}  // namespace ferry::cuda::test
