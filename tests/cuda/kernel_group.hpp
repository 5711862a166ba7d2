// A group of ranks in one process, to run kernels without the engine: rank r is a stream on GPU
// r mod GPUs. Several ranks may share a GPU: keep the sum of their blocks below its SMs.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "conformance/random.hpp"
#include "cuda/kernels/base/group_view.hpp"

namespace ferry::cuda::test {

/// Stops the program with the place when a CUDA call fails.
#define FERRY_CUDA_CHECK(call) ::ferry::cuda::test::check_cuda((call), #call, __FILE__, __LINE__)
void check_cuda(cudaError_t error, const char* what, const char* file, int line);
[[noreturn]] void stop(const std::string& message);

/// Call before the first CUDA call of the process: streams of ranks that share a GPU must not wait
/// for each other in one hardware queue.
void prepare_process();

int gpu_count();

struct GroupOptions {
  int ranks = 1;
  std::size_t arena_bytes = std::size_t{64} << 20;  ///< segment 1 of each rank
  std::size_t body_bytes = 0;                       ///< of the largest message, without the head
  std::uint64_t deadline_ns = 10'000'000'000;
};

/// A piece of a rank's arena.
struct Piece {
  std::byte* data = nullptr;  ///< as the own GPU sees it
  std::uint32_t segment = 1;
  std::uint64_t offset = 0;
  std::size_t bytes = 0;
};

class KernelGroup {
 public:
  explicit KernelGroup(const GroupOptions& options);
  ~KernelGroup();
  KernelGroup(const KernelGroup&) = delete;
  KernelGroup& operator=(const KernelGroup&) = delete;

  int ranks() const { return options_.ranks; }
  int device(int rank) const { return rank % gpu_count(); }
  cudaStream_t stream(int rank) const { return members_[index(rank)].stream; }
  GroupView view(int rank) const { return members_[index(rank)].view; }
  /// The first fatal failure of the rank; pinned.
  const Failure& fatal(int rank) const { return *members_[index(rank)].fatal; }
  /// A pinned record for one call's failure: cleared by each call of `clear_failures`.
  Failure* failure(int rank) const { return members_[index(rank)].failure; }
  void clear_failures();
  void set_abort(int rank, std::uint32_t value) { *members_[index(rank)].abort = value; }
  void set_deadline(std::uint64_t ns);

  /// Arena memory, 256-byte aligned, poisoned on the rank's stream (`settle` before peers write to
  /// it); all of it comes back at `reset_arena`.
  Piece take(int rank, std::size_t bytes, int poison = 0xCB);
  void reset_arena();
  /// The same, filled with `data`.
  template <class T>
  Piece upload(int rank, const std::vector<T>& data) {
    const Piece piece = take(rank, data.size() * sizeof(T));
    copy_in(rank, piece.data, data.data(), data.size() * sizeof(T));
    return piece;
  }
  template <class T>
  std::vector<T> download(int rank, const void* from, std::size_t count) {
    std::vector<T> data(count);
    copy_out(rank, data.data(), from, count * sizeof(T));
    return data;
  }
  void copy_in(int rank, void* to, const void* from, std::size_t bytes);
  void copy_out(int rank, void* to, const void* from, std::size_t bytes);
  /// Pinned host memory, zeroed, until `reset_arena`.
  std::byte* take_pinned(std::size_t bytes);

  /// Runs `call(rank)` for all ranks (or those that `only` names), each with its GPU current.
  void launch(const std::function<void(int)>& call);
  /// Waits until all streams are idle; stops the program after `seconds` or at a CUDA error.
  void wait(double seconds = 30);
  /// The same, then stops the program unless no rank has a failure of any kind.
  void wait_well(double seconds = 30);
  /// Waits for memory set-up on all streams (upload, take).
  void settle() { wait(); }

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

 private:
  struct Member {
    cudaStream_t stream = nullptr;
    std::byte* control = nullptr;
    std::byte* arena = nullptr;
    PeerSegment* table = nullptr;
    Failure* fatal = nullptr;
    Failure* failure = nullptr;
    std::uint32_t* abort = nullptr;
    std::size_t used = 0;
    GroupView view{};
  };
  void make_member(int rank);

  GroupOptions options_;
  DeviceControlLayout layout_{};
  std::vector<Member> members_;
  static constexpr std::size_t kPinnedBytes = std::size_t{32} << 20;
  std::byte* pinned_ = nullptr;
  std::size_t pinned_used_ = 0;
};

/// Text of a failure, for messages.
std::string describe(const Failure& failure);

/// A kernel that holds each stream until `open()`, so that all ranks start together and the CPU's
/// launches cost nothing; gives up after a second.
class Gate {
 public:
  Gate();
  ~Gate();
  void close();
  void hold(cudaStream_t stream) const;
  void open();

 private:
  std::uint32_t* word_ = nullptr;
};

/// --name value, and lists of numbers "4,8,16".
std::int64_t option(int argc, char** argv, const char* name, std::int64_t otherwise);
std::vector<int> option_list(int argc, char** argv, const char* name, std::vector<int> otherwise);
bool has_option(int argc, char** argv, const char* name);

/// As an index, or a number of bytes.
inline std::size_t at(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

using conformance::Random;

/// One of the values.
template <class T, std::size_t N>
T pick(Random& random, const T (&values)[N]) {
  return values[random.below(static_cast<std::int64_t>(N))];
}

}  // namespace ferry::cuda::test
