#include "host/collectives/lent.hpp"

#include <atomic>
#include <string>
#include <thread>

namespace ferry::host {
namespace {

enum : std::int64_t { kNotLent, kRegistered, kByPointer };  // `rows` of the message

// A word of each rank: whether its tensor is lent by pointer, and how many ranks are at it. Both in
// one word, so that who comes and the owner who leaves see each other.
constexpr std::uint64_t kOpen = std::uint64_t{1} << 63;

std::atomic_ref<std::uint64_t> readers(HostCollectives& all, int member) {
  return std::atomic_ref(
      *reinterpret_cast<std::uint64_t*>(all.staged(member, all.staging().readers())));
}

}  // namespace

Lent::Lent(HostCollectives& all, StepMessage& head, const void* data, std::size_t bytes)
    : all_(all) {
  head.rows = kNotLent;
  all.choose_stores(head.call.kind, bytes);
  if (all.domains().count() > 1) return;  // who is outside does not reach it
  const auto place = all.find(data, bytes);
  if (place && place->offset % sizeof(float) == 0) {  // as the peers check it
    head.rows = kRegistered;
    head.segment = place->segment;
    head.offset = place->offset;
  } else if (all.one_address_space()) {
    head.rows = kByPointer;
    head.offset = reinterpret_cast<std::uintptr_t>(data);
    by_pointer_ = true;
    readers(all, all.rank()).fetch_or(kOpen);
  }
}

Lent::~Lent() {
  if (!by_pointer_) return;
  auto word = readers(all_, all_.rank());
  word.fetch_and(~kOpen);
  while (word.load() != 0) std::this_thread::yield();  // they only copy or sum, and wait for nobody
}

bool lends(const StepMessage& head) {
  return head.rows != kNotLent;
}

Lenders::Lenders(HostCollectives& all) {
  for (int r = 0; r < all.size(); ++r) {
    const bool lent = lends(all.channel().head(r));
    some |= lent;
    every &= lent;
  }
}

Borrowed::Borrowed(HostCollectives& all, const char* call, std::span<const int> members,
                   const std::function<std::size_t(int)>& bytes)
    : all_(all) {
  try {
    for (const int member : members) tensors_.push_back(take(call, member, bytes(member)));
  } catch (...) {
    give_back();
    throw;
  }
}

std::byte* Borrowed::take(const char* call, int member, std::size_t bytes) {
  Channel& channel = all_.channel();
  const StepMessage theirs = channel.head(member);
  if (theirs.rows == kRegistered) {
    return channel.checked(call, member, {theirs.segment, theirs.offset}, bytes);
  }
  if (theirs.rows != kByPointer || !all_.one_address_space()) {
    channel.throw_violation(call, member, "lends a tensor in a way that is not known here");
  }
  taken_.push_back(member);
  if ((readers(all_, member).fetch_add(1) & kOpen) == 0) {
    give_back();
    for (;;) all_.hear(call, member);  // it has failed: what comes from it ends with that
  }
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(theirs.offset));
}

Borrowed::~Borrowed() {
  give_back();
}

void Borrowed::give_back() {
  for (const int member : taken_) readers(all_, member).fetch_sub(1);
  taken_.clear();
}

}  // namespace ferry::host
