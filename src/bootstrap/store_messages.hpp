// What the payloads of the store's frames mean. Codes and numbers only: a text from the other side
// never reaches a message or a terminal.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <ferry/error.hpp>

#include "bootstrap/handshake.hpp"

namespace ferry::bootstrap {

struct Hello {
  std::uint32_t size = 0;
  Nonce nonce{};
};
std::vector<std::byte> encode(const Hello& hello);
std::optional<Hello> decode_hello(std::span<const std::byte> payload);

enum class RefusalCode : std::uint32_t {
  none = 0,
  wrong_secret = 1,
  other_version = 2,      ///< expected, got: versions
  other_size = 3,         ///< expected, got: numbers of ranks
  rank_out_of_range = 4,  ///< expected: number of ranks, got: rank
  rank_taken = 5,         ///< got: rank
  rank_gone = 6,          ///< got: rank; it was here and left or died
  group_over = 7,         ///< got: the rank that the failure names
};
struct Refusal {
  RefusalCode code = RefusalCode::none;
  std::uint64_t expected = 0;
  std::uint64_t got = 0;
};
std::vector<std::byte> encode(const Refusal& refusal);
std::optional<Refusal> decode_refusal(std::span<const std::byte> payload);

/// Ranks of which at most kListed are listed; the rest is only counted.
struct RankList {
  static constexpr std::size_t kListed = 32;
  std::vector<int> listed;
  std::uint32_t total = 0;
  void add(int rank);
};

/// Who has not given yet in the current gather.
struct Absences {
  RankList absent;            ///< never reached the store
  RankList silent;            ///< reached it and did not call all_gather
  std::uint32_t refused = 0;  ///< connections that were refused so far
  RefusalCode last_refusal = RefusalCode::none;
  bool any() const { return absent.total + silent.total > 0; }
  int first() const;  ///< the lowest rank listed, or -1
  bool lists(int rank) const;
};
std::vector<std::byte> encode(const Absences& absences);
std::optional<Absences> decode_absences(std::span<const std::byte> payload);

enum class FailureKind : std::uint32_t {
  died = 1,            ///< connection lost without a goodbye
  left = 2,            ///< destroyed its bootstrap while others waited
  deadline = 3,        ///< `by` gave up waiting; see absences
  interrupted = 4,     ///< its on_wait threw
  wrong_sequence = 5,  ///< expected, got: numbers of the gather
  broken_frame = 6,    ///< sent what is no frame
  too_much = 7,        ///< expected: limit, got: bytes of all ranks together
};
struct Failure {
  FailureKind kind = FailureKind::died;
  std::uint32_t peer = 0;
  std::uint32_t by = 0;
  std::uint64_t expected = 0;
  std::uint64_t got = 0;
  Absences absences{};
};
std::vector<std::byte> encode(const Failure& failure);
std::optional<Failure> decode_failure(std::span<const std::byte> payload);

enum class Farewell : std::uint32_t { left = 0, deadline = 1, interrupted = 2 };
std::vector<std::byte> encode(Farewell farewell);
std::optional<Farewell> decode_farewell(std::span<const std::byte> payload);

}  // namespace ferry::bootstrap
