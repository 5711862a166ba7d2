#include "fabric/ofi/nics/provider.hpp"

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <ferry/error.hpp>
#include <utility>

#include "base/text.hpp"

namespace ferry::fabric::ofi {
namespace {

constexpr std::uint32_t kApi = FI_VERSION(1, 15);
constexpr std::size_t kMostOfProviderShown = 80;

[[noreturn]] void refuse_option(int rank, const std::string& what) {
  throw Error(ErrorKind::invalid_argument, "rank " + std::to_string(rank) + ": " + what,
              {.rank = rank});
}

}  // namespace

std::uint32_t traffic_class(const std::string& name, int rank) {
  constexpr std::array<std::pair<const char*, std::uint32_t>, 7> kClasses{
      {{"", FI_TC_UNSPEC},
       {"best_effort", FI_TC_BEST_EFFORT},
       {"low_latency", FI_TC_LOW_LATENCY},
       {"dedicated_access", FI_TC_DEDICATED_ACCESS},
       {"bulk_data", FI_TC_BULK_DATA},
       {"scavenger", FI_TC_SCAVENGER},
       {"network_ctrl", FI_TC_NETWORK_CTRL}}};
  std::string known;
  for (const auto& [text, value] : kClasses) {
    if (name == text) return value;
    if (*text != '\0') known += (known.empty() ? "" : ", ") + std::string(text);
  }
  refuse_option(rank, "the network's traffic class is \"" + printable(name, kMostOfProviderShown) +
                          "\", expected one of " + known + ", or nothing");
}

bool is_tcp(std::string_view provider) {
  return provider.starts_with("tcp") || provider.starts_with("net") ||
         provider.starts_with("sockets");
}

void check_counts(int rank, const OfiOptions& options) {
  const auto check = [&](const char* what, int number) {
    if (number >= 0 && number <= kMaxOfiEndpoints) return;
    refuse_option(rank, std::string("the network's ") + what + " are " + std::to_string(number) +
                            ", expected 1 to " + std::to_string(kMaxOfiEndpoints));
  };
  check("endpoints", options.endpoints);
  check("NICs of a rank", options.nics_per_rank);
  const int endpoints = std::max(options.endpoints, 1);
  if (options.nics_per_rank * endpoints <= kMaxOfiEndpoints) return;
  refuse_option(rank, "the network has " + std::to_string(options.nics_per_rank) +
                          " NICs of a rank with " + std::to_string(endpoints) +
                          " endpoints on each, expected " + std::to_string(kMaxOfiEndpoints) +
                          " endpoints at most (FERRY_OFI_NICS_PER_RANK, FERRY_OFI_ENDPOINTS)");
}

Info ask(const Library& library, const std::string& provider, const std::string& address,
         std::uint32_t tclass, int& code) {
  const Info hints(library.dupinfo(nullptr), library.freeinfo);
  if (!hints) {
    code = -FI_ENOMEM;
    return nullptr;
  }
  hints->caps = FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;  // an endpoint's lock guards its domain
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;  // by the endpoint's thread
  hints->domain_attr->cq_data_size = sizeof(std::uint32_t);
  hints->tx_attr->tclass = tclass;
  hints->fabric_attr->prov_name = strdup(provider.c_str());  // freed with the hints
  fi_info* found = nullptr;
  code = address.empty()
             ? library.getinfo(kApi, nullptr, nullptr, 0, hints.get(), &found)
             : library.getinfo(kApi, address.c_str(), nullptr, FI_SOURCE, hints.get(), &found);
  if (code != 0) return nullptr;
  Info info(found, library.freeinfo);
  // Names of memory, not addresses (shm): no network, and none of its calls expects one.
  if (info->addr_format == FI_ADDR_STR) {
    code = -FI_ENODATA;
    return nullptr;
  }
  return info;
}

Info ask_any_class(const Library& library, const std::string& provider, const std::string& address,
                   std::uint32_t tclass, int& code) {
  Info info = ask(library, provider, address, tclass, code);
  if (!info && tclass != FI_TC_UNSPEC) info = ask(library, provider, address, FI_TC_UNSPEC, code);
  return info;
}

}  // namespace ferry::fabric::ofi
