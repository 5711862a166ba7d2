#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>

#include "bootstrap/test_ranks.hpp"

namespace ferry::bootstrap {
namespace {

using namespace std::chrono_literals;

std::shared_ptr<Bootstrap> answering(Parts parts) {
  return custom_bootstrap(1, 3, [parts](std::span<const std::byte>) { return parts; });
}

Error refusal_of(Parts parts) {
  auto boot = answering(std::move(parts));
  return error_from([&] { boot->all_gather(bytes_of("me"), 1s); });
}

TEST(CustomBootstrap, PassesTheAnswerThrough) {
  auto boot = answering({bytes_of("a"), bytes_of("me"), {}});
  EXPECT_EQ(boot->rank(), 1);
  EXPECT_EQ(boot->size(), 3);
  int polls = 0;
  const Parts parts = boot->all_gather(bytes_of("me"), 1s, [&] { ++polls; });
  EXPECT_EQ(text_of(parts[0]), "a");
  EXPECT_TRUE(parts[2].empty());
  EXPECT_GE(polls, 1);
}

TEST(CustomBootstrap, SaysWhatIsWrongWithTheAnswer) {
  const Error count = refusal_of({bytes_of("me")});
  EXPECT_EQ(count.kind(), ErrorKind::invalid_argument);
  EXPECT_EQ(count.rank(), 1);
  EXPECT_TRUE(contains(count, "returned 1 entries, expected 3")) << count.what();

  const Error order = refusal_of({bytes_of("me"), bytes_of("b"), bytes_of("c")});
  EXPECT_TRUE(contains(order, "as entry 0, expected entry 1")) << order.what();

  const Error padded = refusal_of({bytes_of("a"), bytes_of("me\0\0"), bytes_of("c")});
  EXPECT_TRUE(contains(refusal_of({{}, bytes_of("me__"), {}}), "4 bytes")) << padded.what();
}

TEST(CustomBootstrap, LetsTheFunctionsExceptionThrough) {
  auto boot = custom_bootstrap(
      0, 1, [](std::span<const std::byte>) -> Parts { throw std::runtime_error("from torch"); });
  EXPECT_THROW(boot->all_gather({}, 1s), std::runtime_error);
}

TEST(CustomBootstrap, ThoseThatComeLaterAreOfTheSameJob) {
  const AllGather nobody = [](std::span<const std::byte>) -> Parts { throw 0; };
  const auto boot = [&](bool join, bool begin) {
    return custom_bootstrap(
        1, 3, nobody, "10.0.0.1",
        {.name = "a\nstore", .key = [] { return "key"; }, .join = join, .begin = begin});
  };
  for (const auto& [join, begin] : {std::pair(false, false), {true, false}, {false, true}}) {
    const auto one = boot(join, begin);
    EXPECT_EQ(one->joins(), join);
    EXPECT_EQ(one->begins(), begin);
    EXPECT_EQ(one->job(), "a store");
    EXPECT_EQ(one->job_key(), "key");
    EXPECT_EQ(one->own_address(), "10.0.0.1");
    EXPECT_EQ(one->rank(), 1);
    if (!join && !begin) continue;
    EXPECT_EQ(error_from([&] { one->all_gather({}, 1s); }).kind(), ErrorKind::unsupported);
  }
  EXPECT_TRUE(contains(error_from([&] { boot(true, true); }), "both join and begin"));
}

TEST(CustomBootstrap, RefusesBadArguments) {
  const AllGather echo = [](std::span<const std::byte> mine) {
    return Parts{{mine.begin(), mine.end()}};
  };
  EXPECT_TRUE(contains(error_from([&] { custom_bootstrap(3, 3, echo); }), "expected 0 to 2"));
  EXPECT_TRUE(contains(error_from([&] { custom_bootstrap(-1, 3, echo); }), "rank is -1"));
  EXPECT_TRUE(contains(error_from([&] { custom_bootstrap(0, 0, echo); }), "size is 0"));
  EXPECT_TRUE(contains(error_from([&] { custom_bootstrap(0, 1, {}); }), "all_gather is empty"));
}

}  // namespace
}  // namespace ferry::bootstrap
