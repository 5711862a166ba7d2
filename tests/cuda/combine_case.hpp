// Random combines for tests and benchmarks of the kernel.
#pragma once
#include <string>
#include <vector>

#include "cuda/kernels/throughput/sum_shape.hpp"
#include "kernel_exchange.hpp"

namespace ferry::cuda::test {

struct CombineCase {
  ExchangeShape shape;
  Dtype dtype = Dtype::bf16;
  std::int64_t columns = 8;
  bool bias[2] = {false, false};
  bool weights = false;
  int num_sms = 1;
  SumTuning tuning;

  std::int64_t row_bytes() const { return columns * static_cast<std::int64_t>(size_of(dtype)); }
  std::string text() const;
};

/// All ranks' arguments and what must come out.
struct CombineSetup {
  Exchange exchange;
  std::vector<CombineParameters> parameters;
  std::vector<Bytes> rows;                  // [ranks] at the ranks that hold them
  std::vector<std::vector<float>> weights;  // the same
  std::vector<Bytes> biases[2];
};

CombineSetup make_combine(KernelGroup& group, const CombineCase& c, Random& random);

}  // namespace ferry::cuda::test
