// send and recv between two GPUs of a domain (kernels/collectives/transfer.hpp). What is not in
// registered memory is copied there first.
#include <algorithm>
#include <string>

#include "cuda/collectives/engine.hpp"
#include "cuda/kernels/collectives/transfer.hpp"
#include "cuda/throughput/call.hpp"
#include "cuda/throughput/failure.hpp"

namespace ferry::cuda {

/// Where the peer finds the bytes until it has answered.
CollectivePlace CudaCollectives::shown(Launch& launch, const void* data, std::int64_t bytes) {
  CollectiveParameters p;
  place(p, data, bytes);
  if (p.place.bytes >= 0 || bytes == 0) return p.place;
  const auto size = static_cast<std::size_t>(bytes);
  auto pieces = engine_->take_registered(launch, {size});
  if (!pieces) {
    throw Error(ErrorKind::exhausted,
                "send: the GPU has no " + std::to_string(bytes) +
                    " bytes left, through which x goes to its peer; free some of its memory, or "
                    "send tensors of Collectives.empty()",
                {engine_->rank(), engine_->rank(), "send", 0, 0, 0});
  }
  const fabric::Address at = pieces->front().region.address;
  std::byte* copy = launch.temporary(std::move(pieces->front()));
  check(cudaMemcpyAsync(copy, data, size, cudaMemcpyDeviceToDevice, launch.stream()),
        "cudaMemcpyAsync");
  return {bytes, at.offset, at.segment};
}

Event CudaCollectives::transfer(Stage stage, const ConstTensorView& x, int peer, int tag,
                                const CollectiveOptions& options) {
  constexpr std::int64_t kBytesOfBlock = 16 << 10;  // at least
  const char* name = stage_name(stage);
  TransferParameters p;
  p.group = engine_->view();
  p.layout = layout_;
  p.segment = segment_;
  p.stage = stage;
  p.peer = peer;
  p.tag = tag;
  p.bytes = x.shape.product() * static_cast<std::int64_t>(size_of(x.dtype));
  const int most = std::min(engine_->sms_for(name, options.num_sms, kDefaultSms), most_blocks_);
  p.blocks = static_cast<int>(std::clamp<std::int64_t>(p.bytes / kBytesOfBlock, 1, most));
  Launch launch(*engine_, name, options.stream, peer);
  if (launch.capture().active) {
    throw Error(ErrorKind::unsupported,
                std::string(name) +
                    ": the stream is being captured into a CUDA graph; expected one that is not, "
                    "or a call of all ranks, such as all_to_all",
                {engine_->rank(), -1, name, 0, 0, 0});
  }
  launch.use(x.data, {});  // the caller holds it
  if (stage == Stage::send) {
    p.place = shown(launch, x.data, p.bytes);
    p.number = ++offers_[static_cast<std::size_t>(peer)];
  } else {
    p.out = static_cast<std::byte*>(const_cast<void*>(x.data));
  }
  p.failure = launch.record()->failure;
  launch.enter_beside();
  launch.run(launch_transfer(p, launch.stream()), name);
  const bool blocking = launch.blocking();
  Event event = launch.finish();
  if (!blocking) return event;
  engine_->finish(name, event);
  return {};
}

Event CudaCollectives::send(const ConstTensorView& x, int peer, int tag,
                            const CollectiveOptions& options) {
  return transfer(Stage::send, x, peer, tag, options);
}

Event CudaCollectives::recv(const TensorView& x, int peer, int tag,
                            const CollectiveOptions& options) {
  return transfer(Stage::recv, x, peer, tag, options);
}

}  // namespace ferry::cuda
