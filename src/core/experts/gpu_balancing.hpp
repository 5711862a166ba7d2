// What a GpuBalancer asks of an engine. Arguments are checked.
#pragma once
#include <cstdint>

#include "ferry/stream.hpp"
#include "ferry/tensor.hpp"

namespace ferry {

class GpuBalancing {
 public:
  virtual ~GpuBalancing() = default;
  virtual void counts(const ConstTensorView& topk_idx, const TensorView& out, Stream& stream) = 0;
  virtual void plan(const ConstTensorView& counts, std::uint64_t changed, bool again,
                    Stream& stream) = 0;
  virtual void fetched(Stream& stream) = 0;
  virtual void places(const ConstTensorView& topk_idx, int rank, const TensorView& out,
                      Stream& stream) = 0;
};

}  // namespace ferry
