// Exchanges of a latency test: its kernels on all ranks, and one exchange with every byte compared.
#pragma once
#include "latency_case.hpp"

namespace ferry::cuda::test {

GroupOptions options_for(const LatencyCase& c);

/// per_rank for even numbers, else per_slot.
CombinePath path_of(std::uint64_t bit);

void launch_dispatch_all(KernelGroup& group, LatencyRun& run, int handle, Halves halves);
/// `timed`: with a kernel of its own for the waits.
void launch_combine_all(KernelGroup& group, LatencyRun& run, int handle, CombinePath path,
                        Halves halves, bool timed = false);

/// A dispatch and its combine; the seed also chooses handle and path.
void exchange_once(KernelGroup& group, LatencyRun& run, const LatencyCase& c, std::uint64_t seed);

}  // namespace ferry::cuda::test
