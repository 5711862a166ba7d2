// What an endpoint set carries: rows in chunks, by the endpoint that has the least to do.
#include <algorithm>
#include <cstring>
#include <utility>

#include "fabric/ofi/endpoint_set.hpp"

namespace ferry::fabric::ofi {
namespace {

constexpr auto kLook = std::chrono::milliseconds(50);

}  // namespace

EndpointSet::Tagged& EndpointSet::tagged(Target& target, std::uint64_t tag) {
  const auto [entry, is_new] = target.tags.try_emplace(tag);
  if (is_new) entry->second.stream = target.streams.next();
  return entry->second;
}

void EndpointSet::put(int rank, Address to, std::span<const Piece> pieces, std::uint64_t tag,
                      const LookUp& look_up) {
  std::unique_lock lock(mutex_);
  for (const Piece& piece : pieces) {
    if (!copy_in(lock, rank, to, piece, tag, look_up)) return;
    to.offset += piece.bytes;
  }
  Tagged& all = tagged(target_of(rank), tag);
  if (all.held.empty() || all.bytes < all.held.front().bytes) return;
  const Held held = all.held.front();
  all.held.erase(all.held.begin());
  send_signal(rank, held, tag);
}

/// False: the peer is gone.
bool EndpointSet::copy_in(std::unique_lock<std::mutex>& lock, int rank, Address to,
                          const Piece& piece, std::uint64_t tag, const LookUp& look_up) {
  Target& target = target_of(rank);
  const auto* from = static_cast<const std::byte*>(piece.data);
  std::size_t bytes = piece.bytes;
  while (bytes > 0) {
    if (gone(rank)) {
      abandon(target);
      return false;
    }
    const Open& open = target.open;
    const bool fits = open.chunk != nullptr && open.tag == tag &&
                      open.chunk->bytes < open.endpoint->chunk_bytes() &&
                      open.chunk->to.segment == to.segment &&
                      open.chunk->to.offset + open.chunk->bytes == to.offset;
    if (!fits) {
      flush(target);
      // While this one waits another thread may put.
      if (!open_chunk(rank, to, tag)) await_chunk(lock, rank, look_up);
      continue;
    }
    Endpoint::Op& chunk = *open.chunk;
    const std::size_t now = std::min(bytes, open.endpoint->chunk_bytes() - chunk.bytes);
    std::memcpy(chunk.buffer.data + chunk.bytes, from, now);
    chunk.bytes += now;
    open.tagged->bytes += now;
    from += now;
    bytes -= now;
    to.offset += now;
  }
  return true;
}

/// The endpoints in turn, but for the first bytes of a tag, for what is small goes one way; unless
/// another endpoint has a whole chunk less to do.
std::size_t EndpointSet::endpoint_for(const Target& target, const Tagged& of_tag) {
  const std::size_t count = target.endpoints.size();
  std::size_t best = of_tag.pieces == 0 ? 0 : (target.last + 1) % count;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t chunk = target.endpoints[i]->chunk_bytes();
    if (target.endpoints[i]->load() + chunk <= target.endpoints[best]->load()) best = i;
  }
  return best;
}

/// False: no endpoint has room for that peer.
bool EndpointSet::open_chunk(int rank, Address to, std::uint64_t tag) {
  Target& target = target_of(rank);
  Tagged& of_tag = tagged(target, tag);
  const std::size_t first = endpoint_for(target, of_tag);
  for (std::size_t i = 0; i < target.endpoints.size(); ++i) {
    const std::size_t at = (first + i) % target.endpoints.size();
    Endpoint* endpoint = target.endpoints[at];
    Endpoint::Op* chunk = endpoint->take_chunk(rank);
    if (chunk == nullptr) continue;
    chunk->to = to;
    chunk->stream = of_tag.stream;
    target.open = {endpoint, chunk, tag, &of_tag};
    target.last = at;
    return true;
  }
  return false;
}

/// Until some endpoint may have room for the peer again, or nearly so.
void EndpointSet::await_chunk(std::unique_lock<std::mutex>& lock, int rank, const LookUp& look_up) {
  Target& target = target_of(rank);
  Endpoint* endpoint = target.endpoints[target.turn++ % target.endpoints.size()];
  // By the clock: room may come and go faster than that for as long as a call takes.
  const bool look = look_up && Clock::now() - looked_up_ >= kLook;
  if (look) looked_up_ = Clock::now();
  lock.unlock();
  endpoint->await_chunk(rank, kLook);
  if (look) look_up(rank);
  lock.lock();
}

void EndpointSet::flush(Target& target) {
  const Open open = std::exchange(target.open, {});
  if (open.chunk == nullptr) return;
  open.tagged->pieces++;
  const bool large = open.chunk->bytes > open.endpoint->chunk_bytes() / 2;
  open.endpoint->write_chunk(open.chunk);
  if (large) open.endpoint->help();  // between two of them it disturbs least
}

void EndpointSet::abandon(Target& target) {
  const Open open = std::exchange(target.open, {});
  if (open.chunk != nullptr) open.endpoint->drop_chunk(open.chunk);
  target.tags.clear();
}

}  // namespace ferry::fabric::ofi
