#include "cuda/throughput/vault_copies.hpp"

#include <string>

#include "cuda/runtime/event.hpp"
#include "cuda/throughput/engine.hpp"
#include "engine/vault/staged_copies.hpp"

namespace ferry::cuda {
namespace {

/// Of each of the two buffers.
constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

}  // namespace

VaultCopies::VaultCopies(CudaEngine& engine) : engine_(engine) {
  const OnDevice here(engine_.device().index);
  for (std::size_t slot = 0; slot < buffers_.size(); ++slot) {
    pieces_[slot] = {buffers_[slot].take(kPieceBytes), kPieceBytes};
  }
  stream_ = make_urgent_stream();
}

VaultCopies::~VaultCopies() {
  try {
    const OnDevice here(engine_.device().index);
    cudaStreamDestroy(stream_);
  } catch (...) {  // the GPU is going away
  }
}

/// Copies between the GPU and the buffers.
struct VaultCopies::Wire {
  VaultCopies& copies;
  std::array<GpuEvent, 2> ends{};

  void copy(std::size_t slot, void* to, const void* from, std::size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, copies.stream_), "cudaMemcpyAsync");
    ends[slot] = copies.engine_.gpu().events()->take();
    check(cudaEventRecord(ends[slot].get(), copies.stream_), "cudaEventRecord");
  }
  void await(std::size_t slot) {
    poll([&] { return is_done(ends[slot]); }, copies.engine_.config().deadline, {});
  }
};

void VaultCopies::run(std::span<const engine::DeviceCopy> copies, const Stream* stream,
                      const OnWait& on_wait) {
  const OnDevice here(engine_.device().index);
  if (stream != nullptr) await(*stream, on_wait);
  Wire wire{*this};
  try {
    engine::StagedCopies(wire, pieces_).run(copies);
  } catch (...) {
    cudaStreamSynchronize(stream_);  // nothing writes to the buffers any more
    throw;
  }
}

void VaultCopies::await(const Stream& stream, const OnWait& on_wait) const {
  constexpr const char* kCall = "vault";
  auto* raw = static_cast<cudaStream_t>(stream.native());
  if (capture_of(raw).active) {
    throw Error(ErrorKind::unsupported,
                "rank " + std::to_string(engine_.rank()) +
                    ": vault: the stream is captured into a graph, but copies of a vault have "
                    "ended when the call returns; put and get outside of graphs",
                {engine_.rank(), -1, kCall, 0, 0, 0});
  }
  const GpuEvent reached = engine_.gpu().events()->take();
  check(cudaEventRecord(reached.get(), raw), "cudaEventRecord");
  poll([&] { return is_done(reached); }, kUntilItEnds, on_wait);
}

}  // namespace ferry::cuda
