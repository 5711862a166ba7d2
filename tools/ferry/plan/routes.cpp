#include "plan/routes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <stdexcept>

namespace ferry::cli {
namespace {

constexpr char kMagic[] = "FERRYRT1";
constexpr std::uint32_t kMostRanks = 4096, kMostTopk = 64;
constexpr std::uint64_t kMostExperts = 1 << 20;

struct RouteFileHead {
  char magic[8];
  std::uint32_t rank, ranks;
  std::uint64_t experts;
};
struct RouteCallHead {
  std::uint32_t tokens, topk;
};

/// A number at a time; false at the end of the file.
template <typename T>
bool take(std::istream& in, T* to, std::size_t count = 1) {
  in.read(reinterpret_cast<char*>(to), static_cast<std::streamsize>(count * sizeof(T)));
  return in.gcount() == static_cast<std::streamsize>(count * sizeof(T));
}

RankRoutes take_call(std::istream& in, const RouteCallHead& head, std::uint64_t experts,
                     const std::string& path) {
  RankRoutes ids;
  // A piece at a time: the file may say more than it has.
  constexpr std::size_t kPiece = 1 << 20;
  const std::size_t all = static_cast<std::size_t>(head.tokens) * head.topk;
  while (ids.size() < all) {
    const std::size_t first = ids.size(), count = std::min(kPiece, all - first);
    ids.resize(first + count);
    if (!take(in, ids.data() + first, count)) {
      throw std::runtime_error(path + ": ends inside a call");
    }
  }
  for (const std::int32_t id : ids) {
    if (id < -1 || id >= static_cast<std::int64_t>(experts)) {
      throw std::runtime_error(
          fmt::format("{}: names expert {}, but has {} experts", path, id, experts));
    }
  }
  return ids;
}

std::vector<RankRoutes> take_calls(const std::string& path, std::uint32_t rank, RouteFileHead& head,
                                   int& topk) {
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    throw std::runtime_error(fmt::format(
        "{}: cannot be read; expected what rank {} recorded: --routes takes FILE of FILE.0, "
        "FILE.1, ..., without the rank's number",
        path, rank));
  }
  const bool whole = take(in, &head) && std::memcmp(head.magic, kMagic, sizeof(head.magic)) == 0;
  if (!whole || head.rank != rank || head.ranks <= rank || head.ranks > kMostRanks ||
      head.experts < 1 || head.experts > kMostExperts) {
    throw std::runtime_error(
        fmt::format("{}: not what Group.record_routes writes on rank {}", path, rank));
  }
  std::vector<RankRoutes> calls;
  for (RouteCallHead call{}; in.peek() != std::char_traits<char>::eof();) {
    if (!take(in, &call) || call.topk < 1 || call.topk > kMostTopk) {
      throw std::runtime_error(fmt::format("{}: call {} cannot be read", path, calls.size()));
    }
    if (topk == 0) topk = static_cast<int>(call.topk);
    if (topk != static_cast<int>(call.topk)) {
      throw std::runtime_error(fmt::format("{}: routes of {} and of {} slots; record them apart",
                                           path, topk, call.topk));
    }
    calls.push_back(take_call(in, call, head.experts, path));
  }
  return calls;
}

}  // namespace

RecordedRoutes RecordedRoutes::load(const std::string& file) {
  RecordedRoutes made;
  std::uint32_t ranks = 1;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    const std::string path = fmt::format("{}.{}", file, rank);
    RouteFileHead head{};
    made.calls.push_back(take_calls(path, rank, head, made.topk));
    if (rank == 0) {
      ranks = head.ranks;
      made.experts = static_cast<std::int64_t>(head.experts);
    }
    if (head.ranks != ranks || static_cast<std::int64_t>(head.experts) != made.experts ||
        made.calls.back().size() != made.calls.front().size()) {
      throw std::runtime_error(fmt::format(
          "{}: other ranks, experts or calls than {}.0; all ranks record together", path, file));
    }
  }
  if (made.calls.front().empty()) throw std::runtime_error(file + ".0: no call was recorded");
  const auto is_named = [](std::int32_t id) { return id >= 0; };
  const auto moves = [&](const RankRoutes& call) {
    return std::any_of(call.begin(), call.end(), is_named);
  };
  if (std::none_of(made.calls.begin(), made.calls.end(), [&](const auto& rank) {
        return std::any_of(rank.begin(), rank.end(), moves);
      })) {
    throw std::runtime_error(
        file + ": no token names an expert; record calls that send rows (Group.record_routes)");
  }
  return made;
}

double RecordedRoutes::mean_tokens() const {
  double slots = 0;
  for (const auto& rank : calls) {
    for (const RankRoutes& call : rank) slots += static_cast<double>(call.size());
  }
  return slots / topk / ranks() / count();
}

RankRoutes RecordedRoutes::of(int rank, int call, int copies) const {
  const auto source = static_cast<std::size_t>(rank % ranks());
  const auto which = static_cast<std::size_t>((call + rank / ranks()) % count());
  RankRoutes ids = calls[source][which];
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto copy = static_cast<std::int32_t>(
        (i / static_cast<std::size_t>(topk) + static_cast<std::size_t>(rank)) %
        static_cast<std::size_t>(copies));
    if (ids[i] >= 0) ids[i] += copy * static_cast<std::int32_t>(experts);
  }
  return ids;
}

}  // namespace ferry::cli
