// Which way of sharing works between all ranks: tried, not guessed.
#include <cstring>
#include <ferry/error.hpp>
#include <functional>

#include "fabric/cuda/sharing.hpp"
#include "fabric/rendezvous.hpp"

namespace ferry::fabric {
namespace {

using Clock = std::chrono::steady_clock;

constexpr SegmentId kProbe = kMaxDeviceSegments;  // no segment of the caller's

/// Runs a step of this rank; what it throws becomes the outcome.
DeviceOutcome tried(const std::function<void(DeviceOutcome&)>& step) {
  DeviceOutcome outcome;
  try {
    step(outcome);
  } catch (const CallRefused& refused) {
    if (refused.result() == CUDA_ERROR_OUT_OF_MEMORY) outcome.kind = ErrorKind::exhausted;
    put_text(refused.what(), outcome.text);
  } catch (const std::exception& error) {
    put_text(error.what(), outcome.text);
  }
  return outcome;
}

std::uint64_t pattern(const DeviceDomain& domain, int rank) {
  return domain.job[0] ^ (domain.job[1] + static_cast<std::uint64_t>(rank));
}

struct Step {
  DeviceOutcome outcome{};
  DeviceHandle handle{};
};

std::vector<Step> gather_steps(Bootstrap& bootstrap, const Step& mine,
                               std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  const auto all = bootstrap.all_gather(std::as_bytes(std::span(&mine, 1)), deadline, on_wait);
  std::vector<Step> steps(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() != sizeof(Step)) {
      throw Error(ErrorKind::mismatch,
                  "rank " + std::to_string(bootstrap.rank()) + ": rank " + std::to_string(r) +
                      " does not create device memory now; make the same calls on all ranks",
                  {.rank = bootstrap.rank(), .peer = static_cast<int>(r)});
    }
    std::memcpy(&steps[r], all[r].data(), sizeof(Step));
  }
  return steps;
}

void expect_word(DeviceContext& context, const DeviceBlock& block, std::uint64_t expected,
                 Clock::time_point until) {
  const Current current(context);
  std::uint64_t seen = 0;
  if (!context.read(block.address(), seen, until)) {
    throw std::runtime_error("reading through the mapping did not end before the deadline");
  }
  if (seen != expected) throw std::runtime_error("the mapping shows other memory");
}

/// Null, and `problem` says why, if the way does not work between some ranks.
std::unique_ptr<Sharing> probe(Bootstrap& bootstrap, const DeviceDomain& domain,
                               const std::shared_ptr<DeviceContext>& context, DeviceWay way,
                               const Countdown& countdown, const OnWait& on_wait,
                               DeviceOutcome& problem) {
  std::unique_ptr<Sharing> sharing;
  Sharing::Made made;
  Step mine;
  mine.outcome = tried([&](DeviceOutcome&) {
    sharing = std::make_unique<Sharing>(domain, context, way);
    made = sharing->make(kProbe, context->granularity());
    const Current current(*context);
    const auto until = Clock::now() + countdown.left();
    if (!context->write(made.block->address(), pattern(domain, domain.rank), until)) {
      throw std::runtime_error("writing to the GPU did not end before the deadline");
    }
  });
  mine.handle = made.handle;
  const auto steps = gather_steps(bootstrap, mine, countdown.left(), on_wait);
  const auto first_failed = [&problem](const auto& outcomes, const auto& get) {
    for (std::size_t r = 0; r < outcomes.size(); ++r) {
      problem = get(outcomes[r]);
      if (!problem.failed()) continue;
      const std::string with =
          problem.peer >= 0 ? " with rank " + std::to_string(problem.peer) : "";
      put_text("rank " + std::to_string(r) + with + ": " + text_of(problem.text), problem.text);
      if (problem.peer < 0) problem.peer = static_cast<int>(r);
      return true;
    }
    return false;
  };
  if (first_failed(steps, [](const Step& step) { return step.outcome; })) return nullptr;
  const DeviceOutcome opened = tried([&](DeviceOutcome& outcome) {
    for (int peer = 0; peer < domain.size(); ++peer) {
      if (peer == domain.rank) continue;
      outcome.peer = peer;
      const DeviceAttachment attachment{
          way,       domain.rank, peer, kProbe, steps[static_cast<std::size_t>(peer)].handle.bytes,
          domain.job};
      const DeviceHandle handle =
          checked_handle(to_bytes(steps[static_cast<std::size_t>(peer)].handle), attachment);
      const auto block = sharing->open(peer, handle, countdown.left());
      expect_word(*context, *block, pattern(domain, peer), Clock::now() + countdown.left());
    }
    outcome.peer = -1;
  });
  // Every rank has let go of the others' memory here, before an owner frees its own.
  const auto outcomes = gather_outcomes(bootstrap, opened, countdown.left(), on_wait);
  if (first_failed(outcomes, [](const DeviceOutcome& outcome) { return outcome; })) return nullptr;
  sharing->forget(kProbe);
  return sharing;
}

/// What to do when no way works.
std::string advice(const DeviceDomain& domain, DeviceWay last) {
  if (last != DeviceWay::vmm_fabric) {
    return "; `ferry doctor` tells what the GPUs can do. In containers: one host, the same user, "
           "--ipc=host and --pid=host. Slices of GPUs (MIG) need a domain each: domain_size = 1";
  }
  return std::string(domain.all_fabric() ? "" : "; not every rank's driver offers fabric handles") +
         "; fabric handles need GPUs of one NVLink domain, nvidia-imex running on every host, and "
         "its channel in every process (/dev/nvidia-caps-imex-channels/channel0)";
}

std::vector<DeviceWay> candidates(const DeviceDomain& domain, const DeviceMemoryOptions& options) {
  if (options.way != DeviceWay::automatic) return {options.way};
  bool local = true;
  bool ipc = true;
  bool one_host = true;
  for (int peer = 0; peer < domain.size(); ++peer) {
    local = local && domain.one_process(0, peer);
    one_host = one_host && domain.one_host(0, peer);
    ipc = ipc && domain.of(peer).fixed.ipc != 0;
  }
  if (local && !options.joinable) return {DeviceWay::local};
  if (!one_host) return {DeviceWay::vmm_fabric};
  std::vector<DeviceWay> ways;
  if (domain.all_vmm()) ways = {DeviceWay::vmm_pidfd, DeviceWay::vmm_socket};
  if (ipc) ways.push_back(DeviceWay::ipc);
  return ways;
}

}  // namespace

std::vector<DeviceOutcome> gather_outcomes(Bootstrap& bootstrap, const DeviceOutcome& mine,
                                           std::chrono::nanoseconds deadline,
                                           const OnWait& on_wait) {
  std::vector<DeviceOutcome> outcomes;
  for (const Step& step : gather_steps(bootstrap, {mine, {}}, deadline, on_wait)) {
    outcomes.push_back(step.outcome);
  }
  return outcomes;
}

std::unique_ptr<Sharing> choose_sharing(Bootstrap& bootstrap, const DeviceDomain& domain,
                                        const std::shared_ptr<DeviceContext>& context,
                                        const DeviceMemoryOptions& options) {
  const Countdown countdown(options.deadline);
  std::string tried_ways;
  DeviceOutcome problem;
  DeviceWay last = options.way;
  for (const DeviceWay way : candidates(domain, options)) {
    last = way;
    auto sharing = probe(bootstrap, domain, context, way, countdown, options.on_wait, problem);
    if (sharing) return sharing;
    tried_ways +=
        (tried_ways.empty() ? "" : "; ") + std::string(name_of(way)) + ": " + text_of(problem.text);
  }
  throw Error(problem.kind,
              "the ranks' GPUs cannot share memory (" +
                  (tried_ways.empty() ? "none has VMM or CUDA IPC" : tried_ways) + ")" +
                  advice(domain, last),
              {.rank = domain.rank, .peer = problem.peer});
}

}  // namespace ferry::fabric
