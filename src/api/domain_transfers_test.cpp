// send and recv of GPUs in several domains, with the host in the place of the GPUs: the bytes, in
// the order of tags and streams, beside calls of all ranks; sizes that differ; ranks that stay
// away, leave, or are destroyed.
#include <gtest/gtest.h>

#include <numeric>

#include "api/test_domain_ranks.hpp"

namespace ferry {
namespace {

using namespace test;

// Ranks 0 and 2 are together, and 1 and 3.
const Shape kShape{"", {0, 1, 0, 1}};

void each(const std::function<void(cuda::DomainCollectives&)>& body) {
  const auto bootstraps = thread_bootstrap(4);
  on_ranks(4, [&](int r) {
    const auto all = make(*bootstraps[index(r)], kShape);
    body(*all);
    all->barrier();
  });
}

using Numbers = std::vector<std::int32_t>;

Numbers numbers(int rank, int tag, std::size_t count) {
  Numbers x(count);
  std::iota(x.begin(), x.end(), 100'000 * rank + 1000 * tag);
  return x;
}
TensorView view(Numbers& x) {
  return {x.data(), Dtype::i32, {std::ssize(x)}};
}

TEST(DomainTransfers, EveryRankSendsToEveryOther) {
  each([&](cuda::DomainCollectives& all) {
    Stream stream;
    for (const std::size_t count : {0, 1, 5000, 300'000}) {
      for (const bool waits : {true, false}) {
        for (int step = 1; step < all.size(); ++step) {
          const int to = (all.rank() + step) % all.size();
          const int from = (all.rank() + all.size() - step) % all.size();
          Numbers x = numbers(all.rank(), step, count), got(count);
          const CollectiveOptions options{.stream = waits ? nullptr : &stream};
          // On a stream all send first; else one of two that send to each other receives first.
          const bool first = !waits || (step == 2 ? all.rank() < 2 : all.rank() % 2 == 0);
          Event sent;
          if (first) sent = all.send(view(x), to, step, options);
          const Event received = all.recv(view(got), from, step, options);
          if (!first) sent = all.send(view(x), to, step, options);
          received.wait(20s);
          sent.wait(20s);
          EXPECT_EQ(got, numbers(from, step, count)) << step << " to " << all.rank();
        }
      }
    }
  });
}

// The receives of the second stream come first, and a sum passes between; what is sent is
// overwritten behind the send.
TEST(DomainTransfers, TagsMatchInTheOrderOfStreams) {
  each([&](cuda::DomainCollectives& all) {
    const int peer = all.rank() ^ 1;
    Stream streams[2], third;
    constexpr std::size_t kCount = 20'000;
    std::vector<Numbers> x, got(6, Numbers(kCount));
    std::vector<Event> ends;
    for (int i = 0; i < 6; ++i) x.push_back(numbers(all.rank(), i, kCount));
    for (int i = 0; i < 6; ++i) {
      Stream& stream = streams[i % 2];
      ends.push_back(all.send(view(x[index(i)]), peer, i % 2, {.stream = &stream}));
      (void)stream.submit([&x, i] { x[index(i)].assign(kCount, -1); });
    }
    std::vector<float> sum(1000, 1.0f);
    all.all_reduce({sum.data(), Dtype::f32, {1000}}, {.stream = &third}).wait(20s);
    EXPECT_EQ(sum[999], 4.0f);
    for (const int i : {1, 3, 5, 0, 2, 4}) {
      ends.push_back(all.recv(view(got[index(i)]), peer, i % 2, {.stream = &streams[i % 2]}));
    }
    for (const Event& end : ends) end.wait(20s);
    for (int i = 0; i < 6; ++i) EXPECT_EQ(got[index(i)], numbers(peer, i, kCount)) << i;
  });
}

// The thread may see the word of the second before that of the first.
TEST(DomainTransfers, ThoseOfOneTagKeepTheOrderOfCalls) {
  each([&](cuda::DomainCollectives& all) {
    const int peer = all.rank() ^ 1;
    Stream late, early, receives;
    std::atomic<bool> go{false};
    Numbers first = numbers(all.rank(), 0, 100), second = numbers(all.rank(), 1, 100), got(100);
    (void)late.submit([&] {
      while (!go) std::this_thread::yield();
    });
    const Event ends[] = {all.send(view(first), peer, 0, {.stream = &late}),
                          all.send(view(second), peer, 0, {.stream = &early})};
    early.synchronize();
    std::this_thread::sleep_for(10ms);
    go = true;
    for (int i = 0; i < 2; ++i) {
      all.recv(view(got), peer, 0, {.stream = &receives}).wait(20s);
      EXPECT_EQ(got, numbers(peer, i, 100));
    }
    for (const Event& end : ends) end.wait(20s);
  });
}

TEST(DomainTransfers, SizesThatDifferAreNamedOnBothSides) {
  each([&](cuda::DomainCollectives& all) {
    const int peer = all.rank() ^ 1;
    Stream made;
    for (Stream* stream : {static_cast<Stream*>(nullptr), &made}) {
      Numbers x(all.rank() % 2 == 0 ? 5 : 4);
      const auto error = error_of([&] {
        const bool sends = all.rank() % 2 == 0;
        (sends ? all.send(view(x), peer, -7, {.stream = stream})
               : all.recv(view(x), peer, -7, {.stream = stream}))
            .wait(20s);
      });
      ASSERT_TRUE(error.has_value());
      EXPECT_EQ(error->kind(), ErrorKind::mismatch) << error->what();
      EXPECT_EQ(error->peer(), peer);
      EXPECT_NE(std::string(error->what()).find("sends 20 bytes to rank"), std::string::npos)
          << error->what();
    }
    std::vector<float> sum(10, 1.0f);  // all goes on
    all.all_reduce({sum.data(), Dtype::f32, {10}}, {});
    EXPECT_EQ(sum[0], 4.0f);
  });
}

// Inside a domain and to another one: the error counts the ranks of all.
TEST(DomainTransfers, ARankThatStaysAwayIsNamed) {
  for (const auto& [away, streamed] : {std::pair{2, true}, {1, true}, {2, false}, {1, false}}) {
    const auto bootstraps = thread_bootstrap(4);
    on_ranks(4, [&](int r) {
      const auto all = make(*bootstraps[index(r)], kShape, 1s);
      bootstraps[index(r)]->all_gather({}, 20s);
      if (r == 0) {
        Stream stream;
        Numbers x(250);
        const auto error = error_of([&] {
          const CollectiveOptions options{.stream = streamed ? &stream : nullptr};
          (away == 2 ? all->send(view(x), away, 5, options) : all->recv(view(x), away, 5, options))
              .wait(20s);
        });
        ASSERT_TRUE(error.has_value());
        EXPECT_EQ(error->kind(), ErrorKind::deadline) << error->what();
        EXPECT_EQ(error->peer(), away) << error->what();
        EXPECT_NE(std::string(error->what()).find("1000 bytes (tag 5)"), std::string::npos)
            << error->what();
        (void)error_of([&] { stream.synchronize(); });  // nothing is held any more
      }
      bootstraps[index(r)]->all_gather({}, 20s);
    });
  }
}

// Calls of all ranks fail with what a transfer met, and transfers with what calls met.
TEST(DomainTransfers, TransfersAndCallsFailTogether) {
  const auto bootstraps = thread_bootstrap(4);
  on_ranks(4, [&](int r) {
    const auto all = make(*bootstraps[index(r)], kShape);
    Stream stream;
    Numbers x(30'000);
    all->barrier();
    if (r == 3) return all->destroy();
    const Event received = all->recv(view(x), r == 2 ? 3 : r ^ 1, 0, {.stream = &stream});
    std::vector<float> sum(10, 1.0f);
    for (const auto& call :
         {std::function<void()>([&] { all->all_reduce({sum.data(), Dtype::f32, {10}}, {}); }),
          std::function<void()>([&] { received.wait(20s); })}) {
      const auto error = error_of(call);
      ASSERT_TRUE(error.has_value()) << r;
      EXPECT_EQ(error->kind(), ErrorKind::peer_left) << error->what();
      EXPECT_EQ(error->peer(), 3) << error->what();
    }
    (void)error_of([&] { stream.synchronize(); });
  });
}

// One whose stream has come to it is waited for a moment; the rest end.
TEST(DomainTransfers, DestroyedWhileUnderWay) {
  const auto bootstraps = thread_bootstrap(4);
  on_ranks(4, [&](int r) {
    const auto all = make(*bootstraps[index(r)], kShape);
    Stream stream, held;
    Numbers x = numbers(r, 0, 5000), got(5000);
    std::atomic<bool> go{false};
    if (r == 0) {
      const Event sent = all->send(view(x), 1, 0, {.stream = &stream});
      stream.synchronize();
      (void)held.submit([&] {
        while (!go) std::this_thread::yield();
      });
      const Event never = all->send(view(x), 1, 1, {.stream = &held});
      all->destroy();
      EXPECT_FALSE(error_of([&] { sent.wait(20s); }).has_value());
      go = true;
      const auto error = error_of([&] { never.wait(20s); });
      ASSERT_TRUE(error.has_value());
      EXPECT_EQ(error->kind(), ErrorKind::destroyed) << error->what();
    }
    if (r == 1) {
      all->recv(view(got), 0, 0, {.stream = &stream}).wait(20s);
      EXPECT_EQ(got, numbers(0, 0, 5000));
    }
    bootstraps[index(r)]->all_gather({}, 20s);
  });
}

}  // namespace
}  // namespace ferry
