// Ranks tell each other which GPU they have; ranks that cannot reach each other find out here.
#include <cstring>
#include <ferry/error.hpp>
#include <stdexcept>
#include <string>
#include <utility>

#include "fabric/cuda/sharing.hpp"
#include "fabric/rendezvous.hpp"

namespace ferry::fabric {
namespace {

std::string describe(const DeviceHandshake& handshake, int rank) {
  return "rank " + std::to_string(rank) + " (pid " +
         std::to_string(handshake.identity.process.pid) + ", GPU " +
         std::to_string(handshake.fixed.ordinal) + ": " + text_of(handshake.fixed.gpu) + ")";
}

/// This rank's GPU; null, and the handshake says why, if it has none.
std::shared_ptr<DeviceContext> open_device(const DeviceMemoryOptions& options,
                                           DeviceHandshake& handshake) {
  DeviceHandshake::Fixed& fixed = handshake.fixed;
  fixed.ordinal = options.device;
  int count = 0;
  std::string problem = driver().problem;
  try {
    if (problem.empty()) check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
    if (problem.empty() && (options.device < 0 || options.device >= count)) {
      problem = "device " + std::to_string(options.device) + " does not exist: this process sees " +
                std::to_string(count) + " (CUDA_VISIBLE_DEVICES)";
    }
    if (problem.empty()) {
      auto context = std::make_shared<DeviceContext>(options.device);
      fixed.uuid = context->uuid();
      fixed.vmm = context->abilities().vmm;
      fixed.ipc = context->abilities().ipc;
      fixed.fabric = context->abilities().fabric;
      put_text(context->name(), fixed.gpu);
      return context;
    }
  } catch (const CallRefused& refused) {
    problem = refused.what();
  }
  put_text(problem, fixed.problem);
  return nullptr;
}

/// Throws what is wrong with the ranks as a whole; every rank finds the same.
void check_ranks(const DeviceDomain& domain) {
  const auto refuse = [&](ErrorKind kind, int peer, const std::string& message) {
    throw Error(kind, message, {.rank = domain.rank, .peer = peer});
  };
  for (int peer = 0; peer < domain.size(); ++peer) {
    const DeviceHandshake& handshake = domain.of(peer);
    if (!text_of(handshake.fixed.problem).empty()) {
      refuse(ErrorKind::unsupported, peer,
             "rank " + std::to_string(peer) +
                 " has no GPU for the CUDA engine: " + text_of(handshake.fixed.problem));
    }
    const DeviceHandshake& first = domain.of(0);
    if (handshake.fixed.forced != first.fixed.forced) {
      refuse(ErrorKind::mismatch, peer,
             "rank 0 wants device memory to be shared by " +
                 std::string(name_of(first.fixed.forced)) + ", rank " + std::to_string(peer) +
                 " by " + std::string(name_of(handshake.fixed.forced)) +
                 "; give all ranks the same options");
    }
    const bool one_host = domain.one_host(0, peer);
    const auto differ = [&](const std::string& how) {
      refuse(ErrorKind::unsupported, peer,
             describe(first, 0) + " and " + describe(handshake, peer) + how);
    };
    if (one_host && first.identity.user != handshake.identity.user) {
      differ(" belong to different users: the CUDA engine joins the ranks of one user");
    }
    if (!one_host && !domain.all_fabric()) {
      differ(
          " run on different hosts, and not every rank's driver offers fabric handles "
          "(NVLink between hosts, IMEX): the CUDA engine needs them; networks come later");
    }
  }
}

/// The peer's GPU in this process, or −1 when it is not visible here.
int visible(const DeviceUuid& uuid) {
  int count = 0;
  if (driver().cuDeviceGetCount(&count) != CUDA_SUCCESS) return -1;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    CUuuid found{};
    if (driver().cuDeviceGet(&device, ordinal) != CUDA_SUCCESS) continue;
    if (driver().cuDeviceGetUuid(&found, device) != CUDA_SUCCESS) continue;
    if (std::memcmp(found.bytes, uuid.data(), uuid.size()) == 0) return device;
  }
  return -1;
}

DeviceOutcome check_peers(const DeviceDomain& domain, const DeviceContext& context) {
  DeviceOutcome outcome;
  for (int peer = 0; peer < domain.size(); ++peer) {
    const DeviceHandshake& other = domain.of(peer);
    if (other.fixed.uuid == context.uuid()) continue;
    const int device = visible(other.fixed.uuid);
    int can = 1;  // not visible here: the probe tells
    if (device >= 0 &&
        driver().cuDeviceCanAccessPeer(&can, context.device(), device) != CUDA_SUCCESS) {
      can = 0;
    }
    if (can != 0) continue;
    outcome.peer = peer;
    put_text(describe(domain.of(domain.rank), domain.rank) + " and " + describe(other, peer) +
                 " have no peer access to each other's memory; `ferry doctor` shows which GPUs "
                 "have. Use GPUs joined by NVLink or PCIe P2P, or give each a domain of its own "
                 "(domain_size = 1)",
             outcome.text);
    return outcome;
  }
  return outcome;
}

}  // namespace

DeviceDomain exchange_handshakes(Bootstrap& bootstrap, const DeviceMemoryOptions& options,
                                 std::shared_ptr<DeviceContext>& context) {
  const Countdown countdown(options.deadline);
  DeviceDomain domain;
  domain.rank = bootstrap.rank();
  DeviceHandshake mine;
  mine.identity = this_identity();
  mine.fixed.forced = options.way;
  mine.fixed.socket = random_key(domain.rank);
  if (domain.rank == 0) mine.fixed.job = random_key(domain.rank);
  context = open_device(options, mine);
  const auto all = bootstrap.all_gather(to_bytes(mine), countdown.left(), options.on_wait);
  for (std::size_t r = 0; r < all.size(); ++r) {
    domain.ranks.push_back(device_handshake_from(all[r], domain.rank, static_cast<int>(r)));
  }
  domain.job = domain.of(0).fixed.job;
  check_ranks(domain);
  const auto outcomes =
      gather_outcomes(bootstrap, check_peers(domain, *context), countdown.left(), options.on_wait);
  for (const DeviceOutcome& outcome : outcomes) {
    if (!outcome.failed()) continue;
    throw Error(ErrorKind::unsupported, text_of(outcome.text),
                {.rank = domain.rank, .peer = outcome.peer});
  }
  return domain;
}

namespace {

/// The card of a group that this process begins: nobody is there with whom a way could be tried.
/// Descriptors over a socket need the fewest rights.
DeviceHandshake::Fixed founded_by(const DeviceHandshake& mine, int rank) {
  DeviceHandshake::Fixed card = mine.fixed;
  card.forced = mine.fixed.vmm != 0 ? DeviceWay::vmm_socket : DeviceWay::ipc;
  card.job = random_key(rank);
  return card;
}

}  // namespace

std::unique_ptr<Sharing> join_sharing(int rank, int size, const DeviceMemoryOptions& options,
                                      std::span<const std::byte> card) {
  DeviceHandshake mine;
  mine.identity = this_identity();
  mine.fixed.socket = random_key(rank);
  auto context = open_device(options, mine);
  const DeviceHandshake::Fixed theirs =
      card.empty() ? founded_by(mine, rank) : device_handshake_from(card, rank, -1).fixed;
  const DeviceWay way = theirs.forced;
  const bool can = way == DeviceWay::ipc ? mine.fixed.ipc != 0 : mine.fixed.vmm != 0;
  if (!context || !can || way == DeviceWay::local || way == DeviceWay::vmm_fabric) {
    const std::string why = text_of(mine.fixed.problem);
    throw Error(ErrorKind::unsupported,
                describe(mine, rank) + (card.empty() ? " cannot begin: " : " cannot join: ") +
                    (why.empty() ? "the group shares memory by " + std::string(name_of(way)) +
                                       ", which this process cannot"
                                 : "it has no GPU for the CUDA engine: " + why),
                {.rank = rank});
  }
  DeviceDomain domain{.rank = rank, .job = theirs.job, .ranks = {}};
  domain.ranks.resize(static_cast<std::size_t>(size));
  domain.ranks[static_cast<std::size_t>(rank)] = mine;
  try {
    return std::make_unique<Sharing>(std::move(domain), std::move(context), way);
  } catch (const std::runtime_error& error) {
    throw Error(ErrorKind::system, describe(mine, rank) + " cannot join: " + error.what(),
                {.rank = rank});
  }
}

}  // namespace ferry::fabric
