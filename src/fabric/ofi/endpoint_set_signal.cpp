// What an endpoint set says behind the rows: signals, each by itself or pre-announced.
#include <ferry/error.hpp>
#include <string>
#include <utility>

#include "fabric/ofi/endpoint_set.hpp"

namespace ferry::fabric::ofi {

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
