// How much memory a bench on the host engine takes: known before it is killed for want of it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bench/settings.hpp"
#include "platform/machine.hpp"

namespace ferry::cli {

/// Room of a rank in throughput mode for the rows of a dispatch, those of a combine, and a copy of
/// them, when all tokens of all ranks come to it. Pages that nobody touches cost nothing.
std::size_t throughput_memory(const BenchSettings& settings);
/// Room of a rank in latency mode, beside the exchange's own.
std::size_t latency_memory(const BenchSettings& settings);

/// What all ranks of one run take together, about: what they touch; of memory that processes share
/// all of it, for it is reserved.
double bench_memory(const BenchSettings& run);

/// Why these runs, one after another, find too little memory here, and which options make the
/// largest of them smaller; empty: they find enough.
std::string too_large(const std::vector<BenchSettings>& runs, const SystemFacts::Memory& here);

}  // namespace ferry::cli
