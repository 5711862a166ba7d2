#include "bootstrap/store_messages.hpp"

#include <algorithm>

#include "bootstrap/byte_order.hpp"

namespace ferry::bootstrap {
namespace {

void append(std::vector<std::byte>& out, const RankList& list) {
  bootstrap::append(out, list.total);
  bootstrap::append(out, std::uint32_t(list.listed.size()));
  for (int rank : list.listed) bootstrap::append(out, std::uint32_t(rank));
}

RankList read_list(ByteReader& reader) {
  RankList list;
  list.total = reader.read<std::uint32_t>();
  const auto listed = std::min<std::size_t>(reader.read<std::uint32_t>(), RankList::kListed);
  for (std::size_t i = 0; i < listed; ++i) {
    list.listed.push_back(int(reader.read<std::uint32_t>() & 0x7fffffff));
  }
  return list;
}

void append(std::vector<std::byte>& out, const Absences& absences) {
  append(out, absences.absent);
  append(out, absences.silent);
  bootstrap::append(out, absences.refused);
  bootstrap::append(out, std::uint32_t(absences.last_refusal));
}

Absences read_absences(ByteReader& reader) {
  Absences absences;
  absences.absent = read_list(reader);
  absences.silent = read_list(reader);
  absences.refused = reader.read<std::uint32_t>();
  absences.last_refusal = RefusalCode(reader.read<std::uint32_t>());
  return absences;
}

}  // namespace

std::vector<std::byte> encode(const Hello& hello) {
  std::vector<std::byte> out;
  append(out, hello.size);
  append(out, hello.nonce);
  return out;
}

std::optional<Hello> decode_hello(std::span<const std::byte> payload) {
  ByteReader reader(payload);
  Hello hello;
  hello.size = reader.read<std::uint32_t>();
  hello.nonce = reader.read_bytes<sizeof(Nonce)>();
  if (!reader.complete()) return std::nullopt;
  return hello;
}

std::vector<std::byte> encode(const Refusal& refusal) {
  std::vector<std::byte> out;
  append(out, std::uint32_t(refusal.code));
  append(out, refusal.expected);
  append(out, refusal.got);
  return out;
}

std::optional<Refusal> decode_refusal(std::span<const std::byte> payload) {
  ByteReader reader(payload);
  Refusal refusal;
  refusal.code = RefusalCode(reader.read<std::uint32_t>());
  refusal.expected = reader.read<std::uint64_t>();
  refusal.got = reader.read<std::uint64_t>();
  if (!reader.complete()) return std::nullopt;
  return refusal;
}

void RankList::add(int rank) {
  ++total;
  if (listed.size() < kListed) listed.push_back(rank);
}

int Absences::first() const {
  int lowest = -1;
  for (const RankList* list : {&absent, &silent}) {
    if (!list->listed.empty() && (lowest < 0 || list->listed.front() < lowest)) {
      lowest = list->listed.front();
    }
  }
  return lowest;
}

bool Absences::lists(int rank) const {
  const auto in = [rank](const RankList& list) {
    return std::find(list.listed.begin(), list.listed.end(), rank) != list.listed.end();
  };
  return in(absent) || in(silent);
}

std::vector<std::byte> encode(const Absences& absences) {
  std::vector<std::byte> out;
  append(out, absences);
  return out;
}

std::optional<Absences> decode_absences(std::span<const std::byte> payload) {
  ByteReader reader(payload);
  Absences absences = read_absences(reader);
  if (!reader.complete()) return std::nullopt;
  return absences;
}

std::vector<std::byte> encode(const Failure& failure) {
  std::vector<std::byte> out;
  append(out, std::uint32_t(failure.kind));
  append(out, failure.peer);
  append(out, failure.by);
  append(out, failure.expected);
  append(out, failure.got);
  append(out, failure.absences);
  return out;
}

std::optional<Failure> decode_failure(std::span<const std::byte> payload) {
  ByteReader reader(payload);
  Failure failure;
  failure.kind = FailureKind(reader.read<std::uint32_t>());
  failure.peer = reader.read<std::uint32_t>();
  failure.by = reader.read<std::uint32_t>();
  failure.expected = reader.read<std::uint64_t>();
  failure.got = reader.read<std::uint64_t>();
  failure.absences = read_absences(reader);
  if (!reader.complete()) return std::nullopt;
  return failure;
}

std::vector<std::byte> encode(Farewell farewell) {
  std::vector<std::byte> out;
  append(out, std::uint32_t(farewell));
  return out;
}

std::optional<Farewell> decode_farewell(std::span<const std::byte> payload) {
  ByteReader reader(payload);
  const auto farewell = Farewell(reader.read<std::uint32_t>());
  if (!reader.complete() || farewell > Farewell::interrupted) return std::nullopt;
  return farewell;
}

}  // namespace ferry::bootstrap
