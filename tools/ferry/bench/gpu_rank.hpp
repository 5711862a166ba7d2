// One rank of `ferry bench --backend cuda`: its arrays on the GPU, its calls, the checks.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bench/data.hpp"
#include "bench/nccl.hpp"
#include "ferry/ferry.hpp"

namespace ferry::cli {

/// Throws std::runtime_error unless the call succeeded.
void need(cudaError_t result, const char* call);
/// Throws std::runtime_error, which names the row, unless it is right.
void need_equal(bool equal, const char* what, std::int64_t row);

/// Makes the GPU of `rank` the current one, all in turn. What its group is: memory_bytes is left.
GroupConfig choose_gpu(const BenchSettings& settings, int rank);

/// Memory of the current GPU.
class GpuBuffer {
 public:
  explicit GpuBuffer(std::size_t bytes);
  ~GpuBuffer() { cudaFree(data_); }
  GpuBuffer(const GpuBuffer&) = delete;
  GpuBuffer& operator=(const GpuBuffer&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

/// The stream that all calls are made on.
struct GpuStream {
  explicit GpuStream(int device);
  ~GpuStream() { cudaStreamDestroy(raw); }
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;
  void upload(void* to, const void* from, std::size_t bytes) const;
  void download(void* to, const void* from, std::size_t bytes) const;
  template <class T>
  std::vector<T> get(const Tensor& tensor) const {
    std::vector<T> values(static_cast<std::size_t>(tensor.shape().product()));
    download(values.data(), tensor.data(), values.size() * sizeof(T));
    return values;
  }

  cudaStream_t raw = nullptr;
  std::optional<Stream> stream{};
};

/// The scale that a token carries for a block of channels.
float scale_of(int rank, std::int64_t token, std::int64_t column);

/// What a call makes; dropped outside the measured time.
struct GpuMade {
  Plan plan{};
  Received received{};
  Combined combined{};
};

/// The rows of a dispatch by NCCL: gathered beforehand, each with its scales behind it.
class NcclExchange {
 public:
  NcclExchange(const NcclRank& nccl, const BenchSettings& one, std::uint64_t data_seed, int rank,
               const GpuStream& stream);

  void call() const;
  /// One exchange, all bytes compared. Throws std::runtime_error.
  void check() const;

 private:
  const NcclRank& nccl_;
  const GpuStream& stream_;
  std::vector<NcclBlock> blocks_{};
  std::vector<std::byte> expected_{};
  std::unique_ptr<GpuBuffer> send_{}, receive_{};
};

/// One configuration on one rank.
class GpuExchange {
 public:
  /// `nccl` may be null.
  GpuExchange(const BenchSettings& one, Group& group, GpuStream& stream, int device,
              const NcclRank* nccl);

  /// Every kind of call once, all bytes compared. Throws std::runtime_error.
  void check(bool combines);
  /// One call of that kind, on the stream.
  GpuMade call(BenchCase which, int num_sms);
  BenchRows rows() const;
  std::int64_t max_recv_rows() const { return s_.ranks * s_.tokens; }

 private:
  Plan plan();
  ConstTensorView x_view() const;
  ConstTensorView routes_view() const;
  DispatchOptions dispatch_options(std::int64_t max_recv_rows, int num_sms);
  Received dispatch(const Plan& with, RowOrder order, int num_sms);
  void check_ranks(const Received& received);
  void check_experts(const Received& received);
  void make_unquantized();
  Received dispatch_quantized(int num_sms);
  void check_quantized(const Received& received);
  void check_combined(const Combined& combined, bool every_slot);
  void make_combine_rows(const Received& by_rank, const Received& by_expert);
  int value(int rank, std::int64_t token, std::int64_t column) const;

  const BenchSettings s_;
  Group& group_;
  GpuStream& stream_;
  Device device_;
  std::vector<std::int64_t> routes_;
  GpuBuffer x_, ids_, scales_, weights_;
  Plan plan_{};
  std::vector<int> source_of_row_{};
  std::unique_ptr<GpuBuffer> unquantized_{};
  Tensor registered_{};
  std::unique_ptr<GpuBuffer> ordinary_{};
  Tensor expert_rows_{};
  std::unique_ptr<GpuBuffer> slot_weights_{};
  std::unique_ptr<NcclExchange> nccl_{};
};

}  // namespace ferry::cli
