#include "host/collectives/coded_sums.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "host/collectives/engine.hpp"
#include "host/kernels/kernels.hpp"

namespace ferry::host {

CodedPlaces::CodedPlaces(const std::vector<Share>& shares, const Domains& domains) {
  using Ends = std::vector<std::size_t>;
  Ends sums(static_cast<std::size_t>(domains.ranks()), 0), results = sums;
  const auto take = [&](Ends& ends, int rank, std::size_t bytes) {
    std::size_t& end = ends[static_cast<std::size_t>(rank)];
    const std::size_t place = end;
    end += bytes;
    bytes_ = std::max(bytes_, end);
    return place;
  };
  for (const Share& share : shares) {
    Place place;
    place.each = coded_room(share.count());
    place.domain = share.domain;
    place.sums = take(sums, rank_of(share, share.domain, domains),
                      place.each * static_cast<std::size_t>(domains.count() - 1));
    for (int d = 0; d < domains.count(); ++d) {
      const bool crosses = d != share.domain;
      place.results.push_back(crosses ? take(results, rank_of(share, d, domains), place.each) : 0);
    }
    places_.push_back(std::move(place));
  }
}

std::size_t CodedPlaces::sum(std::size_t share, int domain) const {
  const Place& place = places_[share];
  return place.sums +
         static_cast<std::size_t>(domain < place.domain ? domain : domain - 1) * place.each;
}

std::size_t CodedPlaces::result(std::size_t share, int domain) const {
  return places_[share].results[static_cast<std::size_t>(domain)];
}

CompressionStats Compression::stats() const {
  const std::lock_guard lock(mutex_);
  CompressionStats stats = stats_;
  stats.relative_error = signal_ > 0 ? std::sqrt(error_ / signal_) : 0;
  return stats;
}

void Compression::count(const CompressionStats& call, const CodeTally& tally) {
  const std::lock_guard lock(mutex_);
  ++stats_.calls;
  if (tally.fallbacks > 0) ++stats_.fallen_back;
  stats_.chunks += call.chunks;
  stats_.nonfinite += call.nonfinite;
  stats_.overflows += call.overflows;
  stats_.spikes += call.spikes;
  stats_.exact_bytes += call.exact_bytes;
  stats_.wire_bytes += call.wire_bytes;
  error_ += tally.error;
  signal_ += tally.signal;
}

CodedSums::CodedSums(HostCollectives& all, const char* call, ReduceFormat asked,
                     std::uint64_t bytes)
    : all_(all), call_(call) {
  if (asked == ReduceFormat::exact || all.domains().count() == 1) return;
  if (bytes <= eager_bytes(all.size())) return;  // exact, by whichever algorithm
  Compression& kept = all.compression_state();
  CodeTally sum;
  for (int r = 0; r < all.size(); ++r) {
    CodeTally theirs;
    std::memcpy(&theirs, all.channel().body(r), sizeof(theirs));
    if (!theirs.sensible()) continue;
    sum.error += theirs.error;
    sum.signal += theirs.signal;
    sum.fallbacks += theirs.fallbacks > 0 ? 1 : 0;
  }
  kept.policy.learn(kept.last_formats, sum);
  kept.last_formats = {};
  kept.last_tally = {};
  formats_ = kept.policy.formats(asked, bytes);
  chunk_.resize(coded_room(kCodedChunk));
}

CodedSums::~CodedSums() {
  if (!codes()) return;
  Compression& kept = all_.compression_state();
  kept.count(stats_, tally_);
  kept.last_formats = formats_;
  kept.last_tally = tally_;
}

void CodedSums::encode(const float* values, std::int64_t count) {
  const auto elements = static_cast<std::size_t>(count);
  std::byte* codes = chunk_.data() + sizeof(ChunkHead);
  ReduceFormat format = formats_.measured;
  bool fell_back = false;
  for (bool encoded = false; !encoded && format != ReduceFormat::exact;) {
    const CodeError told = kernels().encode_codes({values, elements, format, codes});
    const FallBack why = judge(formats_, format, told);
    if (format == formats_.measured && !told.nonfinite && !told.overflow) {
      tally_.error += told.error;
      tally_.signal += told.signal;
    }
    stats_.nonfinite += why == FallBack::nonfinite;
    stats_.overflows += why == FallBack::overflow;
    stats_.spikes += why == FallBack::spike;
    fell_back |= why != FallBack::none;
    const ReduceFormat next = format_after(formats_, format, why);
    encoded = next == format;
    format = next;
  }
  if (format == ReduceFormat::exact) std::memcpy(codes, values, sizeof(float) * elements);
  tally_.fallbacks += fell_back;
  const ChunkHead head{static_cast<std::uint32_t>(format)};
  std::memcpy(chunk_.data(), &head, sizeof(head));
  bytes_ = sizeof(head) + code_bytes(format, elements);
  ++stats_.chunks;
  stats_.exact_bytes += sizeof(float) * elements;
  stats_.wire_bytes += bytes_;
}

void CodedSums::send(int peer, std::size_t offset) {
  all_.put(peer, offset, chunk_.data(), bytes_);
  all_.tell(peer, bytes_);
}

void CodedSums::decode(std::int64_t count, float* values) const {
  ChunkHead head;
  std::memcpy(&head, chunk_.data(), sizeof(head));
  decode_chunk(chunk_.data(), static_cast<ReduceFormat>(head.format), count, values);
}

void CodedSums::receive(int peer, std::size_t offset, std::int64_t count, float* values) {
  all_.hear(call_, peer);
  const std::byte* chunk = all_.staged(all_.rank(), offset);
  ChunkHead head;
  std::memcpy(&head, chunk, sizeof(head));
  if (head.format >= static_cast<std::uint32_t>(ReduceFormat::automatic)) {
    all_.channel().throw_violation(
        call_, peer, "sent a chunk in format " + std::to_string(head.format) + ", which is none");
  }
  decode_chunk(chunk, static_cast<ReduceFormat>(head.format), count, values);
}

void CodedSums::send_all(int peer, std::size_t offset, const float* values, std::int64_t count) {
  for (std::int64_t at = 0; at < count; at += kCodedChunk) {
    encode(values + at, std::min(kCodedChunk, count - at));
    send(peer, offset + chunk_offset(at));
  }
}

void CodedSums::receive_all(int peer, std::size_t offset, std::int64_t count, float* values) {
  for (std::int64_t at = 0; at < count; at += kCodedChunk) {
    receive(peer, offset + chunk_offset(at), std::min(kCodedChunk, count - at), values + at);
  }
}

void CodedSums::decode_chunk(const std::byte* chunk, ReduceFormat format, std::int64_t count,
                             float* values) const {
  const std::byte* codes = chunk + sizeof(ChunkHead);
  const auto elements = static_cast<std::size_t>(count);
  if (format == ReduceFormat::exact) {
    return copy_bytes(values, codes, sizeof(float) * elements);
  }
  kernels().decode_codes({codes, elements, format, values});
}

}  // namespace ferry::host
