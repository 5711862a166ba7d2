#include "fabric/cuda/sharing.hpp"

#include <algorithm>
#include <cstring>
#include <ferry/error.hpp>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

namespace ferry::fabric {
namespace {

/// Blocks of ranks of this process, so that their peers in it use the mapping itself. A block stays
/// while one of them holds it.
struct Lent {
  using Key = std::pair<JobKey, SegmentId>;  // the first: of the rank (Fixed::socket)
  std::mutex mutex;
  std::map<Key, std::weak_ptr<DeviceBlock>> blocks;
};

Lent& lent() {
  static Lent instance;
  return instance;
}

/// Memory of other processes by classic IPC: a process may open a handle once only for each GPU, so
/// its ranks on one GPU share the mapping. It is closed under the lock, so that nobody opens it
/// meanwhile.
struct Imported {
  using Key = std::tuple<JobKey, SegmentId, int>;  // as above; the last: CUDA ordinal of the user
  struct Entry {
    std::shared_ptr<DeviceBlock> block{};
    int users = 0;
  };
  std::mutex mutex;
  std::map<Key, Entry> blocks;
};

Imported& imported() {
  static Imported instance;
  return instance;
}

/// The block of this key, by `open` for the first that asks; closed with the last owner.
template <typename Open>
std::shared_ptr<DeviceBlock> import_once(const Imported::Key& key, const Open& open) {
  Imported& all = imported();
  const std::lock_guard lock(all.mutex);
  auto at = all.blocks.find(key);
  if (at == all.blocks.end()) at = all.blocks.emplace(key, Imported::Entry{open(), 0}).first;
  ++at->second.users;
  const auto drop = [key](DeviceBlock* block) {
    if (!block->context().usable()) return;  // a forked child: the lock may be held for ever
    Imported& held = imported();
    const std::lock_guard again(held.mutex);
    const auto found = held.blocks.find(key);
    if (--found->second.users == 0) held.blocks.erase(found);
  };
  return {at->second.block.get(), drop};
}

}  // namespace

bool DeviceDomain::one_process(int a, int b) const {
  const Identity& first = of(a).identity;
  const Identity& second = of(b).identity;
  return first.boot_id == second.boot_id && first.host == second.host &&
         first.process == second.process;
}

bool DeviceDomain::one_host(int a, int b) const {
  const Identity& first = of(a).identity;
  const Identity& second = of(b).identity;
  return first.boot_id == second.boot_id && (!first.boot_id.empty() || first.host == second.host);
}

bool DeviceDomain::all_fabric() const {
  return std::all_of(ranks.begin(), ranks.end(),
                     [](const DeviceHandshake& handshake) { return handshake.fixed.fabric != 0; });
}

bool DeviceDomain::all_vmm() const {
  return std::all_of(ranks.begin(), ranks.end(),
                     [](const DeviceHandshake& handshake) { return handshake.fixed.vmm != 0; });
}

std::vector<int> DeviceDomain::users() const {
  std::vector<int> ordinals;
  for (int peer = 0; peer < size(); ++peer) {
    if (one_process(rank, peer)) ordinals.push_back(of(peer).fixed.ordinal);
  }
  std::sort(ordinals.begin(), ordinals.end());
  ordinals.erase(std::unique(ordinals.begin(), ordinals.end()), ordinals.end());
  return ordinals;
}

Sharing::Sharing(DeviceDomain domain, std::shared_ptr<DeviceContext> context, DeviceWay way)
    : domain_(std::move(domain)), context_(std::move(context)), way_(way) {
  if (way == DeviceWay::vmm_socket) {
    server_ = std::make_unique<DescriptorServer>(domain_.of(domain_.rank).fixed.socket);
  }
}

Sharing::~Sharing() {
  if (process_id() != owner_pid_) return;  // a forked child: the locks may be held for ever
  Lent& all = lent();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.blocks,
                [this](const auto& entry) { return entry.first.first == key_of(domain_.rank); });
}

Sharing::Made Sharing::make(SegmentId segment, std::size_t bytes) {
  Made made;
  made.handle = {
      .way = way_, .rank = domain_.rank, .segment = segment, .bytes = bytes, .job = domain_.job};
  if (way_ == DeviceWay::ipc) {
    CUipcMemHandle ipc{};
    made.block = DeviceBlock::make_classic(context_, bytes, &ipc);
    static_assert(sizeof ipc == sizeof made.handle.exported);
    std::memcpy(made.handle.exported.data(), &ipc, sizeof ipc);
  } else if (way_ == DeviceWay::vmm_fabric) {
    CUmemFabricHandle handle{};
    made.block = DeviceBlock::make_fabric(context_, bytes, domain_.users(), handle);
    static_assert(sizeof handle == sizeof made.handle.exported);
    std::memcpy(made.handle.exported.data(), &handle, sizeof handle);
  } else if (way_ == DeviceWay::local) {
    made.block = domain_.all_vmm()
                     ? DeviceBlock::make_vmm(context_, bytes, domain_.users(), nullptr)
                     : DeviceBlock::make_classic(context_, bytes, nullptr);
  } else {
    int number = -1;
    made.block = DeviceBlock::make_vmm(context_, bytes, domain_.users(), &number);
    descriptors_[segment] = UniqueDescriptor(number);
    if (way_ == DeviceWay::vmm_pidfd) made.handle.descriptor = number;
    if (server_) server_->offer(segment, number);
  }
  Lent& all = lent();
  const std::lock_guard lock(all.mutex);
  all.blocks[{key_of(domain_.rank), segment}] = made.block;
  return made;
}

void Sharing::seal(SegmentId segment) noexcept {
  if (process_id() != owner_pid_) return;
  if (server_) server_->withdraw(segment);
  descriptors_.erase(segment);
}

void Sharing::forget(SegmentId segment) noexcept {
  seal(segment);
  Lent& all = lent();
  const std::lock_guard lock(all.mutex);
  all.blocks.erase({key_of(domain_.rank), segment});
}

std::shared_ptr<DeviceBlock> Sharing::borrow(int peer, SegmentId segment) const {
  std::shared_ptr<DeviceBlock> block;
  {
    Lent& all = lent();
    const std::lock_guard lock(all.mutex);
    const auto found = all.blocks.find({key_of(peer), segment});
    if (found != all.blocks.end()) block = found->second.lock();
  }
  if (!block) throw std::runtime_error("its memory is gone");
  if (!block->vmm()) enable_peer(*context_, block->context());
  return block;
}

std::shared_ptr<DeviceBlock> Sharing::import_ipc(int peer, const DeviceHandle& handle) const {
  const Imported::Key key{key_of(peer), handle.segment, context_->ordinal()};
  auto block = import_once(key, [&] {
    CUipcMemHandle ipc{};
    std::memcpy(&ipc, handle.exported.data(), sizeof ipc);
    return DeviceBlock::open_ipc(context_, handle.bytes, ipc);
  });
  if (block->bytes() != handle.bytes) throw std::runtime_error("its memory has another size");
  return block;
}

std::shared_ptr<DeviceBlock> Sharing::open(int peer, const DeviceHandle& handle,
                                           std::chrono::nanoseconds deadline) const {
  if (domain_.one_process(domain_.rank, peer)) {
    auto block = borrow(peer, handle.segment);
    if (block->bytes() != handle.bytes) throw std::runtime_error("its memory has another size");
    return block;
  }
  const DeviceHandshake& owner = domain_.of(peer);
  if (way_ == DeviceWay::ipc) {
    return import_ipc(peer, handle);
  }
  if (way_ == DeviceWay::vmm_fabric) {
    CUmemFabricHandle fabric{};
    std::memcpy(&fabric, handle.exported.data(), sizeof fabric);
    return DeviceBlock::map_fabric(context_, handle.bytes, fabric);
  }
  const UniqueDescriptor descriptor =
      way_ == DeviceWay::vmm_pidfd
          ? take_descriptor(owner.identity.process, handle.descriptor)
          : ask_for_descriptor(owner.fixed.socket, handle.segment, deadline);
  return DeviceBlock::map_vmm(context_, handle.bytes, descriptor.get());
}

DeviceHandshake Sharing::card() const {
  DeviceHandshake mine = domain_.of(domain_.rank);
  mine.fixed.forced = way_;
  mine.fixed.job = domain_.job;
  return mine;
}

bool Sharing::seat(int peer, const DeviceHandshake& card) {
  const auto refuse = [&](ErrorKind kind, const std::string& what) {
    throw Error(kind,
                "rank " + std::to_string(domain_.rank) + " and the process of rank " +
                    std::to_string(peer) + what,
                {.rank = domain_.rank, .peer = peer});
  };
  if (card.fixed.job != domain_.job || card.fixed.forced != way_) {
    refuse(ErrorKind::mismatch, " belong to different groups, or share memory in different ways");
  }
  if (card.fixed.socket == key_of(peer)) return false;
  if (card.identity.process == domain_.of(domain_.rank).identity.process) {
    refuse(ErrorKind::unsupported,
           " are threads of one process, but GPUs share memory with who comes later if that is a "
           "process of its own");
  }
  domain_.ranks[static_cast<std::size_t>(peer)] = card;
  return true;
}

}  // namespace ferry::fabric
