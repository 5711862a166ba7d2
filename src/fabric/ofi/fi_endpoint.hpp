// One endpoint of libfabric with all that it needs, closed in the right order.
#pragma once
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fabric/ofi/library.hpp"
#include "fabric/ofi/nics/provider.hpp"

namespace ferry::fabric::ofi {

template <class Fid>
struct Close {
  void operator()(Fid* fid) const { fi_close(&fid->fid); }
};
template <class Fid>
using Owned = std::unique_ptr<Fid, Close<Fid>>;

inline constexpr std::size_t kMaxEndpointName = 64;

/// Memory that the endpoint may read or that peers may write. Ends before its endpoint.
struct Registration {
  Owned<fid_mr> mr{};
  std::uint64_t base = 0;  ///< what peers add offsets to
  std::uint64_t key() const { return mr ? fi_mr_key(mr.get()) : 0; }
  void* desc() const { return mr ? fi_mr_desc(mr.get()) : nullptr; }
};

/// Its calls need a lock around all of them: FI_THREAD_DOMAIN.
class FiEndpoint {
 public:
  /// Opens and enables it. Throws Error(system) or Error(exhausted) naming `rank`.
  FiEndpoint(const Library& library, Info info, int rank);

  const fi_info& info() const { return *info_; }
  std::vector<std::byte> name() const;
  /// The handle of a peer's address. Throws Error(system).
  fi_addr_t insert(std::span<const std::byte> name);

  /// For remote writes, under a key that nobody can guess where the provider lets us choose it.
  Registration expose(std::byte* data, std::size_t bytes);
  /// For sends, receives and the near side of writes: nothing where the provider needs none.
  Registration local(std::byte* data, std::size_t bytes);

  /// Whether registrations belong to the endpoint: then they end before close().
  bool binds_memory() const { return (info_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0; }
  /// Ends all traffic: what is under way neither reads nor writes memory any more.
  void close() { ep_.reset(); }

  fid_ep* ep() const { return ep_.get(); }
  fid_cq* cq() const { return cq_.get(); }
  /// Whether a thread may sleep on wait_fds() now: nothing is ready that would not wake it.
  bool may_wait();
  /// They are readable whenever a packet comes, not only for completions.
  bool wakes_for_packets() const { return wait_ == FI_WAIT_POLLFD; }
  /// One of them is readable when there is progress to make. None: the provider must be polled.
  std::vector<int> wait_fds() const;
  /// Has libfabric bring wait_fds() up to date, which takes up to 1 ms; whether it has changed.
  bool renew_wait_fds();

 private:
  void open_queue();
  Registration registered(std::byte* data, std::size_t bytes, std::uint64_t access);

  const Library& library_;
  Info info_;
  int rank_;
  Owned<fid_fabric> fabric_{};
  Owned<fid_domain> domain_{};
  Owned<fid_cq> cq_{};
  Owned<fid_av> av_{};
  Owned<fid_ep> ep_{};
  fi_wait_obj wait_ = FI_WAIT_NONE;
};

}  // namespace ferry::fabric::ofi
