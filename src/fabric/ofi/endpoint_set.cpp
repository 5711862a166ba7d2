// What an endpoint set carries: rows in chunks, by the endpoint that has the least to do, and what
// it says behind them: signals, each by itself or pre-announced.
#include "fabric/ofi/endpoint_set.hpp"

#include <algorithm>
#include <cstring>
#include <ferry/error.hpp>
#include <string>
#include <utility>

namespace ferry::fabric::ofi {

namespace {

constexpr auto kPeerPollPeriod = std::chrono::milliseconds(50);
/// So much of a tag goes first where nothing is on its way, while the rest is still made.
constexpr std::size_t kEarly = std::size_t{32} << 10;

}  // namespace

EndpointSet::EndpointSet(const Library& library, int index, std::span<const Info> infos,
                         const EndpointSetting& setting)
    : rank_(setting.rank),
      index_(index),
      arrivals_(setting.size),
      targets_(static_cast<std::size_t>(setting.size)) {
  for (int peer = 0; peer < setting.size; ++peer) set_target(peer, {}, {});
  for (const Info& info : infos) {
    endpoints_.push_back(std::make_unique<Endpoint>(library, info, setting, arrivals_));
  }
}

std::vector<std::vector<std::byte>> EndpointSet::names() const {
  std::vector<std::vector<std::byte>> names;
  for (const auto& endpoint : endpoints_) names.push_back(endpoint->name());
  return names;
}

std::vector<Link> EndpointSet::set_target(int rank, const std::vector<Partner>& partners,
                                          const JobKey& job) {
  std::vector<Link> links(endpoints_.size());
  auto target = std::make_unique<Target>();
  for (std::size_t way = 0; way < partners.size(); ++way) {
    const int place = index_ * kMaxOfiEndpoints + static_cast<int>(way);
    const Partner& partner = partners[way];
    links[partner.mine] = {partner.name, make_way_key(job, rank_, rank, place),
                           make_way_key(job, rank, rank_, place)};
    target->endpoints.push_back(endpoints_[partner.mine].get());
    target->theirs.push_back(partner.theirs);
  }
  ever_targets_.push_back(std::move(target));
  targets_[static_cast<std::size_t>(rank)] = ever_targets_.back().get();
  return links;
}

void EndpointSet::start(const JobKey& job, const std::vector<std::vector<Partner>>& partners,
                        std::chrono::nanoseconds spin) {
  job_ = job;
  std::vector<std::vector<Link>> links(endpoints_.size(), std::vector<Link>(partners.size()));
  for (std::size_t peer = 0; peer < partners.size(); ++peer) {
    const auto of_peer = set_target(static_cast<int>(peer), partners[peer], job);
    for (std::size_t i = 0; i < endpoints_.size(); ++i) links[i][peer] = of_peer[i];
  }
  for (std::size_t i = 0; i < endpoints_.size(); ++i) endpoints_[i]->start(job, links[i], spin);
}

void EndpointSet::link(int rank, const std::vector<Partner>& partners, std::uint64_t since) {
  const std::lock_guard lock(mutex_);
  for (Endpoint* endpoint : target_of(rank).endpoints) endpoint->exclude(rank);
  abandon(target_of(rank));
  const std::vector<Link> links = set_target(rank, partners, job_since(job_, since));
  for (std::size_t i = 0; i < endpoints_.size(); ++i) endpoints_[i]->link(rank, links[i]);
  arrivals_.begin_anew(rank);
}

void EndpointSet::send_link_message(int rank, std::uint64_t since,
                                    const Fabric::LinkMessage& link_message) {
  target_of(rank).endpoints.front()->send_text(
      rank,
      {.kind = MessageKind::link_message,
       .payload = static_cast<std::uint32_t>(link_message.card.size()),
       .sequence = link_message.words[0],
       .value = since,
       .pieces = link_message.words[1]},
      link_message.card);
}

void EndpointSet::leave() {
  for (const auto& endpoint : endpoints_) endpoint->leave();
}

std::uint64_t EndpointSet::expose(SegmentId segment, std::byte* data, std::size_t bytes,
                                  std::span<std::uint64_t> keys) {
  arrivals_.expose(segment, data, bytes);
  std::uint64_t base = 0;  // the same on all endpoints: an address or nothing
  for (std::size_t i = 0; i < endpoints_.size(); ++i) {
    const Remote remote = endpoints_[i]->expose(segment, data, bytes);
    base = remote.base;
    keys[i] = remote.key;
  }
  return base;
}

void EndpointSet::withdraw(SegmentId segment) {
  for (const auto& endpoint : endpoints_) endpoint->withdraw(segment);
  arrivals_.expose(segment, nullptr, 0);
}

void EndpointSet::attach(int peer, SegmentId segment, std::uint64_t base,
                         std::span<const std::uint64_t> keys) {
  const Target& target = target_of(peer);
  for (std::size_t way = 0; way < target.endpoints.size(); ++way) {
    target.endpoints[way]->attach(peer, segment, {base, keys[target.theirs[way]]});
  }
}

void EndpointSet::help() noexcept {
  for (const auto& endpoint : endpoints_) endpoint->help();
}

void EndpointSet::hand_over() noexcept {
  for (const auto& endpoint : endpoints_) endpoint->hand_over();
}

void EndpointSet::rest() noexcept {
  for (const auto& endpoint : endpoints_) endpoint->rest();
}

bool EndpointSet::lost(int peer) const noexcept {
  const auto& endpoints = target_of(peer).endpoints;
  return !left(peer) &&
         std::any_of(endpoints.begin(), endpoints.end(),
                     [peer](const Endpoint* endpoint) { return endpoint->lost(peer); });
}

bool EndpointSet::left(int peer) const noexcept {
  const auto& endpoints = target_of(peer).endpoints;
  return std::any_of(endpoints.begin(), endpoints.end(),
                     [peer](const Endpoint* endpoint) { return endpoint->left(peer); });
}

bool EndpointSet::gone(int rank) const noexcept {
  const auto& endpoints = target_of(rank).endpoints;
  return endpoints.empty() ||
         std::any_of(endpoints.begin(), endpoints.end(), [rank](const Endpoint* endpoint) {
           return endpoint->lost(rank) || endpoint->left(rank);
         });
}

std::chrono::nanoseconds EndpointSet::silent_for(int peer) const noexcept {
  std::chrono::nanoseconds silent{};
  const bool cut = cut_off();
  for (const Endpoint* endpoint : target_of(peer).endpoints) {
    if (!cut || !endpoint->isolated()) silent = std::max(silent, endpoint->silent_for(peer));
  }
  return silent;
}

bool EndpointSet::cut_off() const noexcept {
  if (endpoints_.size() == 1) return false;
  const auto isolated = std::count_if(endpoints_.begin(), endpoints_.end(),
                                      [](const auto& endpoint) { return endpoint->isolated(); });
  return isolated > 0 && isolated < static_cast<std::ptrdiff_t>(endpoints_.size());
}

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
    const bool fits =
        open.chunk != nullptr && open.tag == tag &&
        open.chunk->bytes < open.endpoint->chunk_bytes() && open.chunk->to.segment == to.segment &&
        open.chunk->to.offset + open.chunk->bytes == to.offset && !goes_early(open, rank);
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

/// A link that has nothing to carry does not wait until a chunk is full.
bool EndpointSet::goes_early(const Open& open, int rank) {
  return open.tagged->pieces == 0 && open.chunk->bytes >= kEarly && open.endpoint->is_idle(rank);
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
  const bool poll = look_up && Clock::now() - looked_up_ >= kPeerPollPeriod;
  if (poll) looked_up_ = Clock::now();
  lock.unlock();
  endpoint->await_chunk(rank, kPeerPollPeriod);
  if (poll) look_up(rank);
  lock.lock();
}

void EndpointSet::flush(Target& target) {
  const Open open = std::exchange(target.open, {});
  if (open.chunk == nullptr) return;
  open.tagged->pieces++;
  target.pieces++;
  const bool large = open.chunk->bytes > open.endpoint->chunk_bytes() / 2;
  open.endpoint->write_chunk(open.chunk);
  if (large) open.endpoint->help();  // between two of them it disturbs least
}

void EndpointSet::abandon(Target& target) {
  const Open open = std::exchange(target.open, {});
  if (open.chunk != nullptr) open.endpoint->drop_chunk(open.chunk);
  target.tags.clear();
}

void EndpointSet::publish(int rank, Address flag, std::uint64_t value, std::uint64_t bytes,
                          std::uint64_t tag) {
  const std::lock_guard lock(mutex_);
  Target& target = target_of(rank);
  if (gone(rank)) return abandon(target);
  const Held held{flag, value, bytes};
  if (bytes > 0) {
    Tagged& put = tagged(target, tag);
    if (put.bytes < bytes) {
      put.held.push_back(held);
      return;
    }
    if (put.bytes > bytes) {
      throw Error(ErrorKind::invalid_argument,
                  "publish: rank " + std::to_string(rank_) + " to rank " + std::to_string(rank) +
                      ": " + std::to_string(bytes) + " bytes, but " + std::to_string(put.bytes) +
                      " were put with this tag",
                  {.rank = rank_, .peer = rank});
    }
  }
  send_signal(rank, held, tag);
}

void EndpointSet::send_text(int rank, std::span<const std::byte> text) {
  if (gone(rank)) return;
  target_of(rank).endpoints.front()->send_text(
      rank, {.kind = MessageKind::text, .payload = static_cast<std::uint32_t>(text.size())}, text);
}

void EndpointSet::fence(int rank, std::uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  Target& target = target_of(rank);
  if (gone(rank)) return abandon(target);
  const Open open = std::exchange(target.open, {});
  if (open.chunk != nullptr) open.endpoint->drop_chunk(open.chunk);
  Endpoint& endpoint = *target.endpoints.front();
  for (const auto& [tag, put] : target.tags) {
    if (put.pieces == 0) continue;
    endpoint.send(rank,
                  {.kind = MessageKind::cancel,
                   .sequence = ++target.cancelled,
                   .stream = put.stream,
                   .pieces = put.pieces},
                  nullptr);
  }
  target.tags.clear();
  endpoint.send(rank, {.kind = MessageKind::fence, .value = epoch, .pieces = target.pieces},
                nullptr);
}

bool EndpointSet::fenced(int rank, std::uint64_t epoch) {
  if (target_of(rank).endpoints.empty()) return false;
  if (const auto complete = arrivals_.complete_fence(rank)) {
    target_of(rank).endpoints.front()->send(rank, {.kind = MessageKind::fenced, .value = *complete},
                                            nullptr);
  }
  return arrivals_.has_fence(rank, epoch) && arrivals_.is_fenced(rank, epoch);
}

void EndpointSet::exclude(int rank) {
  const std::lock_guard lock(mutex_);
  for (Endpoint* endpoint : target_of(rank).endpoints) endpoint->exclude(rank);
  abandon(target_of(rank));
}

EndpointSet::Flag& EndpointSet::flag_at(Target& target, const Address& at) {
  Flag& flag = target.flags[{at.segment, at.offset}];
  flag.at = at;
  return flag;
}

/// Until more is said: behind nothing.
Message EndpointSet::signal_message(const Held& held, std::uint64_t sequence) {
  return {.kind = MessageKind::signal,
          .sequence = sequence,
          .value = held.value,
          .flag_offset = held.flag.offset,
          .flag_segment = held.flag.segment,
          .stream = kNoStream};
}

/// Of no bytes.
void EndpointSet::send_alone(int rank, const Held& held) {
  Target& target = target_of(rank);
  Flag& flag = flag_at(target, held.flag);
  if (target.company.size() < 2) target.company.push_back(&flag);
  const protocol::SignalNumber number = flag.signals.next(held.value, true);
  std::uint32_t companion = kNoStream;
  if (number.tag && (*number.tag & kCompanion) != 0) {
    companion = static_cast<std::uint32_t>(*number.tag) & kStreamMask;
  }
  target.endpoints.front()->send_soon(rank, signal_message(held, number.sequence), companion);
}

/// All its bytes were put.
void EndpointSet::send_signal(int rank, const Held& held, std::uint64_t tag) {
  if (held.bytes == 0) return send_alone(rank, held);
  Target& target = target_of(rank);
  Flag& flag = flag_at(target, held.flag);
  const Open open = target.open;
  const bool ours = open.chunk != nullptr && open.tag == tag;
  const Tagged& put = tagged(target, tag);
  const bool one_write = ours && put.pieces == 0 && open.chunk->bytes == put.bytes;
  const protocol::SignalNumber number = flag.signals.next(held.value, one_write);
  const std::vector<Flag*> company = std::exchange(target.company, {});
  if (number.tag && (*number.tag & kCompanion) == 0) {
    open.chunk->stream = static_cast<std::uint32_t>(*number.tag);
    flush(target);
    return forget(target, tag);
  }
  Message message = signal_message(held, number.sequence);
  if (one_write && open.chunk->bytes <= kMaxPayload) {  // few bytes: they ride in the message
    message.payload = static_cast<std::uint32_t>(open.chunk->bytes);
    message.payload_segment = open.chunk->to.segment;
    message.payload_offset = open.chunk->to.offset;
    target.open = {};
    target.pieces++;
    forecast(rank, *open.endpoint, flag, company);
    open.endpoint->send(rank, message, open.chunk);
  } else {
    if (ours) flush(target);
    message.stream = put.stream;
    message.pieces = put.pieces;
    forecast(rank, *target.endpoints.front(), flag, company);
    target.endpoints.front()->send(rank, message, nullptr);
  }
  forget(target, tag);
}

/// The tag's next bytes are a stream of their own.
void EndpointSet::forget(Target& target, std::uint64_t tag) {
  const auto taken = target.tags.extract(tag);
  if (!taken.mapped().held.empty()) tagged(target, tag).held = taken.mapped().held;
}

/// Tells the next signals of a flag where they can be foreseen, and those of the flag without bytes
/// that rises with it: what says both is one write. For the message that the endpoint sends next.
void EndpointSet::forecast(int rank, Endpoint& endpoint, Flag& flag,
                           const std::vector<Flag*>& company) {
  Target& target = target_of(rank);
  if (!flag.signals.ready()) return;
  const auto streams = target.streams.tell();
  if (!streams) return;
  tell(rank, endpoint, flag, *streams);
  if (company.size() == 1 && company.front()->signals.ready()) {
    target.streams.share(*streams);
    tell(rank, endpoint, *company.front(), *streams | kCompanion);
  }
}

void EndpointSet::tell(int rank, Endpoint& endpoint, Flag& flag, std::uint32_t stream) {
  Target& target = target_of(rank);
  if (flag.told) target.streams.give_back(*flag.told);
  flag.told = stream & kStreamMask;
  const protocol::PreAnnouncement told = flag.signals.tell(stream);
  endpoint.send_soon(rank, {.kind = MessageKind::forecast,
                            .sequence = told.sequence,
                            .value = told.value,
                            .flag_offset = flag.at.offset,
                            .flag_segment = flag.at.segment,
                            .stream = stream,
                            .step = static_cast<std::uint32_t>(told.step)});
}

}  // namespace ferry::fabric::ofi
