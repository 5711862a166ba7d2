// Streams and events: order, errors, and the end of a stream.
#include <atomic>
#include <future>
#include <memory>
#include <stdexcept>

#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

TEST(Stream, WorkRunsInOrderAndErrorsStayWithTheirEvents) {
  Stream stream;
  std::vector<int> order;
  const Event first = stream.submit([&] { order.push_back(1); });
  const Event bad = stream.submit([&] {
    order.push_back(2);
    throw std::runtime_error("two");
  });
  const Event last = stream.submit([&] { order.push_back(3); });
  last.wait(20s);
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_NO_THROW(first.wait());
  EXPECT_THROW(bad.wait(), std::runtime_error);
  EXPECT_THROW(bad.wait(), std::runtime_error);  // as often as one asks
  EXPECT_THROW(stream.synchronize(), std::runtime_error);
  EXPECT_NO_THROW(stream.synchronize());  // once
}

/// Who asks may read it while another thread frees its own.
TEST(Stream, WhoeverAsksForAnErrorGetsOneOfItsOwn) {
  Stream stream;
  const Event bad = stream.submit(
      [] { throw Error(ErrorKind::peer_failed, "rank 3 died", {0, 3, "test", 1, 0, 0}); });
  try {
    bad.wait(20s);
    FAIL();
  } catch (const Error& first) {
    try {
      bad.wait(20s);
      FAIL();
    } catch (const Error& second) {
      EXPECT_STREQ(first.what(), second.what());
      EXPECT_NE(first.what(), second.what());
      EXPECT_EQ(second.kind(), ErrorKind::peer_failed);
      EXPECT_EQ(second.peer(), 3);
      EXPECT_EQ(second.context().stage, "test");
    }
  }
  EXPECT_THROW(stream.synchronize(), Error);
}

TEST(Stream, AnEventWaitsNoLongerThanItsDeadline) {
  Stream stream;
  std::promise<void> release;
  const Event event = stream.submit([&] { release.get_future().wait(); });
  EXPECT_FALSE(event.ready());
  expect_error(ErrorKind::deadline, {"event", "50 ms"}, [&] { event.wait(50ms); });
  int asked = 0;
  EXPECT_THROW(event.wait(20s,
                          [&] {
                            if (++asked == 2) throw std::runtime_error("stop");
                          }),
               std::runtime_error);
  release.set_value();
  EXPECT_NO_THROW(event.wait(20s));
  EXPECT_TRUE(Event().ready());
  EXPECT_NO_THROW(Event().wait());
}

TEST(Stream, WaitsForAnEventOfAnotherStreamAlsoAFailedOne) {
  Stream a, b;
  std::promise<void> release;
  std::atomic<bool> done{false};
  const Event event = a.submit([&] {
    release.get_future().wait();
    done = true;
    throw std::runtime_error("failed");
  });
  b.wait(event);
  const Event after = b.submit([&] { EXPECT_TRUE(done); });
  EXPECT_FALSE(after.ready());
  release.set_value();
  EXPECT_NO_THROW(after.wait(20s));
  EXPECT_NO_THROW(b.synchronize());
}

TEST(Stream, TheLastCopyWaitsForTheQueue) {
  std::atomic<int> ran{0};
  {
    Stream stream;
    const Stream copy = stream;
    for (int i = 0; i < 20; ++i) {
      stream.submit([&] {
        std::this_thread::sleep_for(1ms);
        ++ran;
      });
    }
  }
  EXPECT_EQ(ran, 20);
}

TEST(Stream, MayBeDroppedByItsOwnWork) {
  std::promise<void> dropped;
  {
    auto stream = std::make_shared<Stream>();
    std::promise<void> go;
    auto ready = go.get_future().share();
    stream->submit([stream, ready] { ready.wait(); });
    stream->submit([&] { dropped.set_value(); });
    stream.reset();
    go.set_value();
  }
  EXPECT_EQ(dropped.get_future().wait_for(20s), std::future_status::ready);
}

TEST(Stream, WhatWorkHoldsIsDroppedBeforeItsEventSaysSo) {
  Stream stream;
  for (int i = 0; i < 50; ++i) {
    auto held = std::make_shared<int>(i);
    const std::weak_ptr<int> watch = held;
    const Event event = stream.submit([held = std::move(held)] {});
    event.wait(20s);
    EXPECT_TRUE(watch.expired());
  }
}

}  // namespace
}  // namespace ferry::host::test
