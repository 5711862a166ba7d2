#include "fabric/rendezvous.hpp"

#include <cstring>
#include <ferry/error.hpp>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace ferry::fabric {
namespace {

struct Handshake {
  std::uint32_t magic = SegmentHandle::kMagic;
  Wire wire{};
  JobKey key{};  // rank 0's; the others send zeros
};

/// Objects on offer, for as long as their rank 0 is inside share_between_threads. A pointer in the
/// handshake would do as well, but could not be checked before it is followed.
struct Offers {
  std::mutex mutex;
  std::map<JobKey, std::shared_ptr<void>> objects;
};

Offers& offers() {
  static Offers all;
  return all;
}

class Offer {
 public:
  Offer(const JobKey& key, const std::shared_ptr<void>& object) : key_(key) {
    const std::lock_guard lock(offers().mutex);
    offers().objects.emplace(key, object);
  }
  ~Offer() {
    const std::lock_guard lock(offers().mutex);
    offers().objects.erase(key_);
  }
  Offer(const Offer&) = delete;
  Offer& operator=(const Offer&) = delete;

 private:
  JobKey key_;
};

std::shared_ptr<void> taken(const JobKey& key) {
  const std::lock_guard lock(offers().mutex);
  const auto it = offers().objects.find(key);
  return it == offers().objects.end() ? nullptr : it->second;
}

std::vector<Handshake> gather(Bootstrap& bootstrap, const Handshake& mine,
                              const Countdown& countdown, const OnWait& on_wait) {
  const auto all =
      bootstrap.all_gather(std::as_bytes(std::span(&mine, 1)), countdown.left(), on_wait);
  std::vector<Handshake> handshakes(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() == sizeof(Handshake)) {
      std::memcpy(&handshakes[r], all[r].data(), sizeof(Handshake));
    }
    if (all[r].size() != sizeof(Handshake) || handshakes[r].magic != mine.magic ||
        handshakes[r].wire != mine.wire) {
      throw Error(ErrorKind::mismatch,
                  "rank " + std::to_string(bootstrap.rank()) + " and rank " + std::to_string(r) +
                      " do not create the same kind of fabric; give all ranks the same options",
                  {.rank = bootstrap.rank(), .peer = static_cast<int>(r)});
    }
  }
  return handshakes;
}

}  // namespace

std::shared_ptr<void> share_between_threads(Wire wire, Bootstrap& bootstrap,
                                            std::chrono::nanoseconds deadline,
                                            const OnWait& on_wait,
                                            const std::function<std::shared_ptr<void>()>& make) {
  const Countdown countdown(deadline);
  const int rank = bootstrap.rank();
  Handshake mine{.wire = wire};
  std::shared_ptr<void> object;
  std::unique_ptr<Offer> offer;
  if (rank == 0) {
    mine.key = random_key(rank);
    object = make();
    offer = std::make_unique<Offer>(mine.key, object);
  }
  const JobKey key = gather(bootstrap, mine, countdown, on_wait).front().key;
  if (rank != 0) object = taken(key);
  // Nobody goes before all have taken their share: rank 0 might be gone by then. A rank that found
  // nothing says so, so that the others do not wait for it.
  mine.key = object ? key : JobKey{};
  const auto taken_by = gather(bootstrap, mine, countdown, on_wait);
  for (std::size_t r = 0; r < taken_by.size(); ++r) {
    if (taken_by[r].key == key) continue;
    throw Error(ErrorKind::unsupported,
                "rank " + std::to_string(r) +
                    " is not in the process of rank 0: this fabric joins the threads of one "
                    "process; use shm between processes",
                {.rank = rank, .peer = static_cast<int>(r)});
  }
  return object;
}

}  // namespace ferry::fabric
