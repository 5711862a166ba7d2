// send and recv between two GPUs of a domain, beside the order of calls. The sender offers what
// lies in registered memory; the receiver looks for an offer with its tag, reads the bytes and
// answers. Each of the two has one kernel, which waits for the other's. Nothing here needs nvcc.
//
// An offer lies in the receiver's segment, the answer to it in the sender's. Offers to a rank are
// numbered from 1 on; the place of offer n is used again by n + kMostOffers, once n is answered:
// before it answers, the receiver clears the place. Of offers with its tag a receiver takes the one
// with the lowest number; all its blocks find the same, since a sender makes the next one with this
// tag, on this stream, when this one is answered. tests/model/transfer_model_test.cpp explores it.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/collectives/collective.hpp"

namespace ferry::cuda {

struct TransferParameters {
  GroupView group{};
  CollectiveLayout layout{};
  std::uint32_t segment = 0;  ///< of that layout, on all ranks
  Failure* failure = nullptr;
  Stage stage = Stage::send;  ///< or recv
  std::int32_t peer = -1;
  std::int64_t tag = 0;
  std::int64_t bytes = 0;
  std::uint64_t number = 0;  ///< send: of the offer
  CollectivePlace place{};   ///< send: where the bytes are
  std::byte* out = nullptr;  ///< recv
  int blocks = 1;            ///< recv: they wait for no block
};

cudaError_t launch_transfer(const TransferParameters& parameters, cudaStream_t stream);

}  // namespace ferry::cuda
