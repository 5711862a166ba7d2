#include "engine/create.hpp"

#include <algorithm>
#include <exception>
#include <span>
#include <string>
#include <string_view>

#include "base/process_limits.hpp"
#include "base/text.hpp"

namespace ferry::engine {
namespace {

constexpr std::size_t kMostShown = 1000;  // of what another rank says

}  // namespace

Card card_of(const fabric::Segment& segment) {
  Card card;
  card.id = segment.id;
  card.bytes = segment.bytes;
  card.handle_bytes = static_cast<std::uint32_t>(segment.handle.size());
  std::memcpy(card.handle, segment.handle.data(), segment.handle.size());
  return card;
}

std::vector<std::byte> bytes_of(const Cards& cards) {
  const auto bytes = std::as_bytes(std::span(cards));
  return {bytes.begin(), bytes.end()};
}

std::vector<std::vector<std::byte>> together(Bootstrap& bootstrap, const GroupConfig& config,
                                             const char* stage,
                                             const std::function<std::vector<std::byte>()>& step) {
  std::exception_ptr failure;
  std::string message(1, '\0');  // first byte 1: the rest says why this rank failed
  try {
    const std::vector<std::byte> bytes = in_words(bootstrap.rank(), stage, step);
    message.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  } catch (const std::exception& error) {
    failure = std::current_exception();
    message = std::string(1, '\1') + error.what();
  }
  bootstrap.set_stage(stage);
  auto all =
      bootstrap.all_gather(std::as_bytes(std::span(message)), config.deadline, config.on_wait);
  if (failure) std::rethrow_exception(failure);
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    const std::string_view theirs(reinterpret_cast<const char*>(all[peer].data()),
                                  all[peer].size());
    if (theirs.empty() || theirs[0] != '\0') {
      throw Error(ErrorKind::peer_failed,
                  std::string(stage) + ": rank " + std::to_string(peer) + " could not go on: " +
                      printable(theirs.substr(theirs.empty() ? 0 : 1), kMostShown),
                  {bootstrap.rank(), static_cast<int>(peer), stage, 0, 0, 0});
    }
    all[peer].erase(all[peer].begin());
  }
  return all;
}

Cards checked_cards(const std::vector<std::byte>& bytes, int rank, int peer, const Cards& mine) {
  Cards theirs;
  if (bytes.size() != sizeof(theirs)) {
    throw Error(ErrorKind::mismatch,
                "Group: rank " + std::to_string(peer) + " sent " + std::to_string(bytes.size()) +
                    " bytes of segment handles, expected " + std::to_string(sizeof(theirs)));
  }
  std::memcpy(theirs.data(), bytes.data(), sizeof(theirs));
  if (peer == rank) return theirs;
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    if (theirs[i].id != mine[i].id || theirs[i].bytes != mine[i].bytes) {
      throw Error(ErrorKind::mismatch,
                  "Group: rank " + std::to_string(peer) + " registered " +
                      std::to_string(theirs[i].bytes) + " bytes as segment " +
                      std::to_string(theirs[i].id) + ", expected " + std::to_string(mine[i].bytes) +
                      " bytes as segment " + std::to_string(mine[i].id),
                  {rank, peer, "Group: attach", 0, 0, 0});
    }
    if (theirs[i].handle_bytes > sizeof(theirs[i].handle)) {
      throw Error(ErrorKind::mismatch,
                  "Group: rank " + std::to_string(peer) + " sent an impossible handle");
    }
  }
  return theirs;
}

}  // namespace ferry::engine
