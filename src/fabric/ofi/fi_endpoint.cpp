#include "fabric/ofi/fi_endpoint.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <ferry/error.hpp>
#include <string_view>
#include <utility>

#include "fabric/segment_handle.hpp"

namespace ferry::fabric::ofi {
namespace {

/// Takes what an opening call made, or throws.
template <class Fid, class Open>
Owned<Fid> opened(const Library& library, int rank, const char* what, Open open) {
  Fid* made = nullptr;
  const int code = open(&made);
  if (code != 0) throw_ofi(library, rank, what, code);
  return Owned<Fid>(made);
}

}  // namespace

FiEndpoint::FiEndpoint(const Library& library, Info info, int rank)
    : library_(library), info_(std::move(info)), rank_(rank) {
  fabric_ = opened<fid_fabric>(library, rank, "fi_fabric", [&](fid_fabric** made) {
    return library.fabric(info_->fabric_attr, made, nullptr);
  });
  domain_ = opened<fid_domain>(library, rank, "fi_domain", [&](fid_domain** made) {
    return fi_domain(fabric_.get(), info_.get(), made, nullptr);
  });
  open_queue();
  fi_av_attr av{};
  av.type = FI_AV_TABLE;
  av_ = opened<fid_av>(library, rank, "fi_av_open", [&](fid_av** made) {
    return fi_av_open(domain_.get(), &av, made, nullptr);
  });
  ep_ = opened<fid_ep>(library, rank, "fi_endpoint", [&](fid_ep** made) {
    return fi_endpoint(domain_.get(), info_.get(), made, nullptr);
  });
  const auto checked = [&](const char* what, int code) {
    if (code != 0) throw_ofi(library, rank, what, code);
  };
  checked("fi_ep_bind", fi_ep_bind(ep_.get(), &av_->fid, 0));
  checked("fi_ep_bind", fi_ep_bind(ep_.get(), &cq_->fid, FI_TRANSMIT | FI_RECV));
  checked("fi_enable", fi_enable(ep_.get()));
  renew_wait_fds();
}

void FiEndpoint::open_queue() {
  fi_cq_attr attributes{};
  attributes.size = info_->tx_attr->size + 2 * info_->rx_attr->size;
  attributes.format = FI_CQ_FORMAT_DATA;
  // TCP without a layer above it never takes back the signal of its one descriptor (libfabric
  // 1.17): its descriptors one by one, then.
  const std::string_view provider = info_->fabric_attr->prov_name;
  const bool one_by_one = provider == "net" || provider == "tcp";
  int code = -FI_ENOSYS;
  for (const fi_wait_obj wait : {one_by_one ? FI_WAIT_POLLFD : FI_WAIT_FD, FI_WAIT_NONE}) {
    attributes.wait_obj = wait_ = wait;
    fid_cq* made = nullptr;
    code = fi_cq_open(domain_.get(), &attributes, &made, nullptr);
    if (code == 0) {
      cq_.reset(made);
      return;
    }
  }
  throw_ofi(library_, rank_, "fi_cq_open", code);
}

std::vector<int> FiEndpoint::wait_fds() const {
  std::vector<int> fds;
  if (wait_ == FI_WAIT_FD) {
    int fd = -1;
    if (fi_control(&cq_->fid, FI_GETWAIT, &fd) == 0) fds.push_back(fd);
  } else if (wait_ == FI_WAIT_POLLFD) {
    std::array<pollfd, 16> list{};
    fi_wait_pollfd wait{.change_index = 0, .nfds = list.size(), .fd = list.data()};
    if (fi_control(&cq_->fid, FI_GETWAIT, &wait) == 0) {
      for (std::size_t i = 0; i < wait.nfds; ++i) fds.push_back(list[i].fd);
    }
  }
  return fds;
}

bool FiEndpoint::renew_wait_fds() {
  if (wait_ != FI_WAIT_POLLFD) return false;
  // libfabric 1.17 puts a new connection's descriptor on its list when somebody waits: till then
  // the list has only the one that says so, readable all the while.
  const std::vector<int> before = wait_fds();
  fi_cq_data_entry none{};
  (void)fi_cq_sread(cq_.get(), &none, 0, nullptr, 1);
  return wait_fds() != before;
}

std::vector<std::byte> FiEndpoint::name() const {
  std::vector<std::byte> name(kMaxEndpointName);
  std::size_t bytes = name.size();
  const int code = fi_getname(&ep_->fid, name.data(), &bytes);
  if (code != 0) throw_ofi(library_, rank_, "fi_getname", code);
  name.resize(bytes);
  return name;
}

fi_addr_t FiEndpoint::insert(std::span<const std::byte> name) {
  fi_addr_t address = FI_ADDR_UNSPEC;
  // libfabric takes no length: it reads what the name's own family says.
  std::array<std::byte, std::max(kMaxEndpointName, sizeof(sockaddr_storage))> whole{};
  if (name.size() > whole.size()) throw_ofi(library_, rank_, "fi_av_insert", -FI_EINVAL);
  std::copy(name.begin(), name.end(), whole.begin());
  const int inserted = fi_av_insert(av_.get(), whole.data(), 1, &address, 0, nullptr);
  if (inserted != 1)
    throw_ofi(library_, rank_, "fi_av_insert", inserted < 0 ? inserted : -FI_EINVAL);
  return address;
}

Registration FiEndpoint::registered(std::byte* data, std::size_t bytes, std::uint64_t access) {
  const int mode = info_->domain_attr->mr_mode;
  const std::size_t key_bytes = info_->domain_attr->mr_key_size;
  const std::uint64_t mask =
      key_bytes < sizeof(std::uint64_t) ? (std::uint64_t{1} << (8 * key_bytes)) - 1 : ~0ull;
  Registration made;
  made.mr = opened<fid_mr>(library_, rank_, "fi_mr_reg", [&](fid_mr** mr) {
    int code = -FI_ENOKEY;
    // A key that is taken already: another one. Keys of a few bytes are soon found again.
    for (int attempt = 0; attempt < 16 && code == -FI_ENOKEY; ++attempt) {
      code = fi_mr_reg(domain_.get(), data, bytes, access, 0, random_key(rank_)[0] & mask, 0, mr,
                       nullptr);
    }
    return code;
  });
  if ((mode & FI_MR_ENDPOINT) != 0) {
    int code = fi_mr_bind(made.mr.get(), &ep_->fid, 0);
    if (code == 0) code = fi_mr_enable(made.mr.get());
    if (code != 0) throw_ofi(library_, rank_, "fi_mr_enable", code);
  }
  made.base = (mode & FI_MR_VIRT_ADDR) != 0 ? reinterpret_cast<std::uintptr_t>(data) : 0;
  return made;
}

Registration FiEndpoint::expose(std::byte* data, std::size_t bytes) {
  return registered(data, bytes, FI_REMOTE_WRITE);
}

Registration FiEndpoint::local(std::byte* data, std::size_t bytes) {
  if ((info_->domain_attr->mr_mode & FI_MR_LOCAL) == 0) return {};
  return registered(data, bytes, FI_SEND | FI_RECV | FI_WRITE);
}

bool FiEndpoint::may_wait() {
  fid* const fids[] = {&cq_->fid};
  return fi_trywait(fabric_.get(), const_cast<fid**>(fids), 1) == 0;
}

}  // namespace ferry::fabric::ofi
