#include "raw_network.hpp"

#include <array>
#include <chrono>
#include <cstring>
#include <span>
#include <stdexcept>

#include "fabric/ofi/nics/nics.hpp"

namespace ferry::bench {
namespace {

using namespace fabric::ofi;

constexpr auto kDeadline = std::chrono::seconds(60);
constexpr std::size_t kContexts = 4096;

}  // namespace

RawNetwork::RawNetwork(Bootstrap& bootstrap, std::size_t bytes)
    : library_(library(bootstrap.rank())),
      rank_(bootstrap.rank()),
      bytes_(bytes),
      from_(fabric::anonymous_memory(bytes, rank_)),
      to_(fabric::anonymous_memory(bytes, rank_)),
      fi_endpoint_(library_, find_provider(library_, rank_, with_environment({})), rank_),
      exposed_(fi_endpoint_.expose(to_->data(), bytes)),
      local_(fi_endpoint_.local(from_->data(), bytes)),
      contexts_(kContexts) {
  std::memset(from_->data(), 1, bytes);
  std::memset(to_->data(), 0, bytes);
  Card mine{.base = exposed_.base, .key = exposed_.key()};
  const std::vector<std::byte> name = fi_endpoint_.name();
  mine.name_bytes = name.size();
  std::memcpy(mine.name, name.data(), name.size());
  const auto all = bootstrap.all_gather(std::as_bytes(std::span(&mine, 1)), kDeadline);
  std::memcpy(&there_, all[static_cast<std::size_t>(1 - rank_)].data(), sizeof there_);
  peer_ = fi_endpoint_.insert({there_.name, there_.name_bytes});
}

bool RawNetwork::post(std::size_t offset, std::size_t bytes) {
  fi_context2& context = contexts_[posted_ % kContexts];
  const ssize_t code = fi_writedata(fi_endpoint_.ep(), from_->data() + offset, bytes, local_.desc(),
                                    1, peer_, there_.base + offset, there_.key, &context);
  if (code == -FI_EAGAIN) return false;
  if (code != 0) throw_ofi(library_, rank_, "fi_writedata", code);
  ++posted_;
  return true;
}

void RawNetwork::poll() {
  std::array<fi_cq_data_entry, 32> entries;
  const ssize_t got = fi_cq_read(fi_endpoint_.cq(), entries.data(), entries.size());
  if (got == -FI_EAGAIN) return;
  if (got < 0) throw_ofi(library_, rank_, "fi_cq_read", got);
  for (ssize_t i = 0; i < got; ++i) {
    const auto flags = entries[static_cast<std::size_t>(i)].flags;
    (flags & FI_REMOTE_CQ_DATA) != 0 ? ++arrived_ : ++done_;
  }
}

void RawNetwork::await_arrival(std::uint64_t count) {
  const auto end = std::chrono::steady_clock::now() + kDeadline;
  while (arrived_ < count || done_ < posted_) {
    for (int i = 0; i < 64 && (arrived_ < count || done_ < posted_); ++i) poll();
    if (std::chrono::steady_clock::now() > end) throw std::runtime_error("raw writes do not end");
  }
}

void RawNetwork::exchange(std::size_t bytes, std::size_t count, std::size_t window) {
  const std::size_t places = bytes_ / bytes;
  expected_ += count;
  for (std::size_t i = 0; i < count;) {
    if (posted_ - done_ < window && post(i % places * bytes, bytes)) {
      ++i;
    } else {
      poll();
    }
  }
  await_arrival(expected_);
}

}  // namespace ferry::bench
