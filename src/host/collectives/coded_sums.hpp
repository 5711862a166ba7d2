// How the sums of one call cross between domains in codes: where a chunk lies in the inbox of its
// receiver, what it says about itself, and in which format it is encoded.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "core/collective_shares.hpp"
#include "core/domains.hpp"
#include "host/collectives/compression.hpp"

namespace ferry::host {

class HostCollectives;

/// Elements of a chunk. A multiple of kShareUnit, which is a block of codes.
inline constexpr std::int64_t kCodedChunk = 32 << 10;
static_assert(kShareUnit == kScaleBlock);

/// Before the codes of a chunk. Its elements are known to both sides, never read from here.
struct alignas(64) ChunkHead {
  std::uint32_t format = 0;  ///< a ReduceFormat other than automatic
};

/// Inbox bytes of `count` elements in chunks, whatever the formats.
constexpr std::size_t coded_room(std::int64_t count) {
  const std::int64_t chunks = (count + kCodedChunk - 1) / kCodedChunk;
  const std::int64_t units = (count + kShareUnit - 1) / kShareUnit;
  return static_cast<std::size_t>(chunks) * sizeof(ChunkHead) +
         static_cast<std::size_t>(units * kShareUnit) * sizeof(float);
}

/// Of the chunk that begins at this element of a share, from where the share begins.
constexpr std::size_t chunk_offset(std::int64_t at) {
  return coded_room(at / kCodedChunk * kCodedChunk);
}

/// Where the chunks of an all_reduce's shares lie in the inboxes. One half is for the sums of other
/// domains, at the owner of a share, the other for results, at the ranks that handle it: a peer may
/// be a round ahead and send sums while results are still read here, never the same kind twice.
class CodedPlaces {
 public:
  CodedPlaces(const std::vector<Share>& shares, const Domains& domains);

  /// From where its half begins: the sum of `domain`, at the share's owner.
  std::size_t sum(std::size_t share, int domain) const;
  /// The result, at the rank that handles the share in `domain`, another one than the owner's.
  std::size_t result(std::size_t share, int domain) const;
  /// What the fullest half takes.
  std::size_t bytes() const { return bytes_; }

 private:
  struct Place {
    std::size_t sums = 0;
    std::size_t each = 0;  ///< bytes of a domain's sum
    int domain = 0;        ///< the owner's
    std::vector<std::size_t> results{};
  };
  std::vector<Place> places_{};
  std::size_t bytes_ = 0;
};

/// The policy of these collectives, and what this rank has encoded. Calls run one at a time;
/// `stats` may be asked meanwhile.
class Compression {
 public:
  CompressionPolicy policy{};
  CodeFormats last_formats{};  ///< of the last coded call
  CodeTally last_tally{};      ///< of this rank in it

  CompressionStats stats() const;
  void count(const CompressionStats& call, const CodeTally& tally);

 private:
  mutable std::mutex mutex_;
  CompressionStats stats_{};
  double error_ = 0, signal_ = 0;
};

/// Of one call on one rank. Its message carries `last_tally`.
class CodedSums {
 public:
  /// After the messages of the call came: learns from them and picks the formats. `call`: for
  /// errors.
  CodedSums(HostCollectives& all, const char* call, ReduceFormat asked, std::uint64_t bytes);
  ~CodedSums();
  CodedSums(const CodedSums&) = delete;
  CodedSums& operator=(const CodedSums&) = delete;

  /// False: the call crosses as f32, without chunk heads.
  bool codes() const { return formats_.codes(); }

  /// Encodes a chunk (at most kCodedChunk values); it stays in this object until the next.
  void encode(const float* values, std::int64_t count);
  /// Puts that chunk at an offset of the peer's staging memory, and tells it.
  void send(int peer, std::size_t offset);
  /// The values of that chunk as every other rank gets them.
  void decode(std::int64_t count, float* values) const;
  /// Waits for a chunk of `peer`, at an offset of the own staging memory.
  void receive(int peer, std::size_t offset, std::int64_t count, float* values);
  /// Chunk by chunk, which lie one behind the other from `offset` on.
  void send_all(int peer, std::size_t offset, const float* values, std::int64_t count);
  void receive_all(int peer, std::size_t offset, std::int64_t count, float* values);

 private:
  void decode_chunk(const std::byte* chunk, ReduceFormat format, std::int64_t count,
                    float* values) const;

  HostCollectives& all_;
  const char* call_;
  CodeFormats formats_{};
  std::vector<std::byte> chunk_{};  // head and codes
  std::size_t bytes_ = 0;           // of them
  CodeTally tally_{};
  CompressionStats stats_{};
};

}  // namespace ferry::host
