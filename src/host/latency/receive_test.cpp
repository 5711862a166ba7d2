// Latency mode with hooks: receive() that failed and is called again, or is never called.
#include <atomic>
#include <barrier>
#include <stdexcept>

#include "host/latency/test_masked_load.hpp"

namespace ferry::host::test {
namespace {

TEST(HostReceive, AReceiveOfAnEvictedRankMayBeCalledAgain) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    LatencyReceived received = latency.dispatch(load.x(1), load.ids(), {.hook = true});
    all.arrive_and_wait();
    if (group.rank() == 1) latency.set_mask(0, true);
    all.arrive_and_wait();
    if (group.rank() == 0) {
      expect_error(ErrorKind::evicted, {"rank 1"}, [&] { received.receive(); });
    }
    all.arrive_and_wait();
    if (group.rank() == 1) latency.clear_masks();
    all.arrive_and_wait();
    if (group.rank() == 0) {
      expect_error(ErrorKind::invalid_argument, {"hook", "receive()"},
                   [&] { load.combine(received); });
    }
    received.receive();
    load.expect_received(received, 1, {});
    load.expect_sums(load.combine(received).x, 1, {});
  });
}

TEST(HostReceive, AReceiveThatTheCallerBrokeOffMayBeCalledAgain) {
  static thread_local bool interrupted = false;
  GroupConfig config = with_deadline(30s);
  config.on_wait = [] {
    if (interrupted) throw std::runtime_error("interrupted");
  };
  std::barrier all(kRanks);
  with_groups(kRanks, config, [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    LatencyReceived received;
    if (group.rank() == 0) {
      received = latency.dispatch(load.x(1), load.ids(), {.hook = true});
      interrupted = true;
      EXPECT_THROW(received.receive(), std::runtime_error);
      interrupted = false;
      expect_error(ErrorKind::invalid_argument, {"hook", "receive()"},
                   [&] { load.combine(received); });
    }
    all.arrive_and_wait();
    if (group.rank() != 0) received = latency.dispatch(load.x(1), load.ids(), {.hook = true});
    received.receive();
    load.expect_received(received, 1, {});
    LatencyCombineOptions options{.path = CombinePath::per_rank, .hook = true};
    LatencyCombined sums = latency.combine(received.x, received, load.weights(), options);
    sums.receive();
    load.expect_sums(sums.x, 1, {});
    EXPECT_THROW(received.receive(), Error);
    EXPECT_THROW(sums.receive(), Error);
  });
}

TEST(HostReceive, NothingIsCombinedOfADispatchThatFailedOnItsStream) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    Stream stream;
    std::atomic<bool> masked = false;
    LatencyReceived received;
    if (group.rank() == 0) {
      stream.submit([&] { masked.wait(false); });
      LatencyDispatchOptions options{.topk_weights = load.weights(), .stream = &stream};
      received = latency.dispatch(load.x(1), load.ids(), options);
    }
    all.arrive_and_wait();
    if (group.rank() == 1) latency.set_mask(0, true);
    all.arrive_and_wait();
    if (group.rank() == 0) {
      masked = true;
      masked.notify_all();
      expect_error(ErrorKind::evicted, {"rank 1"}, [&] { received.event.wait(); });
    }
    all.arrive_and_wait();
    if (group.rank() == 1) latency.clear_masks();
    all.arrive_and_wait();
    if (group.rank() == 0) {
      LatencyCombineOptions options{.path = CombinePath::per_rank, .stream = &stream};
      const LatencyCombined sums = latency.combine(received.x, received, options);
      expect_error(ErrorKind::invalid_argument, {"received", "failed"}, [&] { sums.event.wait(); });
    }
    all.arrive_and_wait();
  });
}

TEST(HostReceive, UnreceivedResultsMayBeDropped) {
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    for (int round = 1; round <= 20; round += 2) {
      latency.dispatch(load.x(round), load.ids(), {.hook = true});
      load.round(round + 1, {});
      if (round % 7 == 0) latency.rejoin();
    }
    group.barrier();
  });
}

}  // namespace
}  // namespace ferry::host::test
