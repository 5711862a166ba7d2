#include <gtest/gtest.h>

#include "bootstrap/frame_queue.hpp"
#include "bootstrap/test_ranks.hpp"

namespace ferry::bootstrap {
namespace {

std::vector<std::byte> drained(FrameQueue& queue) {
  std::vector<std::byte> out;
  while (!queue.empty()) {
    const auto piece = queue.front();
    out.insert(out.end(), piece.begin(), piece.end());
    queue.written(piece.size());
  }
  return out;
}

// Feeds pieces of `step` bytes (0: all at once); the frames that came out.
std::vector<Frame> parsed(FrameParser& parser, std::span<const std::byte> bytes, std::size_t step) {
  std::vector<Frame> out;
  while (!bytes.empty() && parser.error() == FrameError::none) {
    auto piece = bytes.first(step == 0 ? bytes.size() : std::min(step, bytes.size()));
    bytes = bytes.subspan(parser.feed(piece));
    if (auto frame = parser.take()) out.push_back(std::move(*frame));
  }
  return out;
}

FrameError error_of(std::span<const std::byte> bytes, bool authenticated = false) {
  FrameParser parser;
  if (authenticated) parser.authenticate({});
  parsed(parser, bytes, 0);
  return parser.error();
}

std::vector<std::byte> header_bytes(FrameHeader header) {
  const auto bytes = encode_header(header);
  return {bytes.begin(), bytes.end()};
}

TEST(Frame, HeaderIsLittleEndianAndFixed) {
  const auto bytes = encode_header(
      {.type = FrameType::part, .sequence = 0x1122334455667788, .rank = 0x01020304, .length = 5});
  EXPECT_EQ(text_of({bytes.begin(), bytes.end()}),
            std::string(
                "FRRY\x01\0\x07\0\x88\x77\x66\x55\x44\x33\x22\x11\x04\x03\x02\x01\x05\0\0\0", 24));
}

TEST(Frame, AnyCutGivesTheSameFrames) {
  for (bool authenticated : {false, true}) {
    FrameQueue queue;
    if (authenticated) queue.authenticate(sha256(bytes_of("key")));
    if (authenticated) {
      queue.push({.type = FrameType::give, .sequence = 1, .rank = 2}, bytes_of("hello"));
      queue.push({.type = FrameType::ask, .sequence = 1, .rank = 2});
      queue.push({.type = FrameType::give, .sequence = 2, .rank = 2}, bytes_of(""));
    } else {
      queue.push({.type = FrameType::hello, .rank = 2}, std::vector<std::byte>(36));
      queue.push({.type = FrameType::proof, .rank = 2}, std::vector<std::byte>(32));
    }
    const std::vector<std::byte> bytes = drained(queue);
    for (std::size_t step : {0u, 1u, 2u, 23u, 24u, 25u, 31u, 57u}) {
      FrameParser parser;
      if (authenticated) parser.authenticate(sha256(bytes_of("key")));
      const auto frames = parsed(parser, bytes, step);
      EXPECT_EQ(parser.error(), FrameError::none);
      ASSERT_EQ(frames.size(), authenticated ? 3u : 2u) << step;
      EXPECT_EQ(frames[0].payload.size(), authenticated ? 5u : 36u);
      EXPECT_EQ(frames[1].header.rank, 2u);
    }
  }
}

TEST(Frame, GarbageIsSeenAtTheFourthByte) {
  EXPECT_EQ(error_of(bytes_of("GET")), FrameError::none);
  EXPECT_EQ(error_of(bytes_of("GET ")), FrameError::bad_magic);
}

TEST(Frame, RefusesOtherVersionsButReadsTheirRefusals) {
  FrameHeader header{.type = FrameType::hello, .length = 36};
  header.version = 9;
  EXPECT_EQ(error_of(header_bytes(header)), FrameError::bad_version);
  header.type = FrameType::refused;
  header.length = 20;
  EXPECT_EQ(error_of(header_bytes(header)), FrameError::none);
}

TEST(Frame, LengthsAreBoundedByType) {
  for (std::uint32_t length : {0u, 35u, 37u, 0xffffffffu}) {
    EXPECT_EQ(error_of(header_bytes({.type = FrameType::hello, .length = length})),
              FrameError::bad_length);
  }
  const auto give = [](std::uint32_t length) {
    return error_of(header_bytes({.type = FrameType::give, .length = length}), true);
  };
  EXPECT_EQ(give(std::uint32_t(kMaxMessageBytes)), FrameError::none);
  EXPECT_EQ(give(std::uint32_t(kMaxMessageBytes) + 1), FrameError::bad_length);
}

TEST(Frame, TypesBelongToTheirPhase) {
  EXPECT_EQ(error_of(header_bytes({.type = FrameType::give, .length = 0})), FrameError::bad_type);
  EXPECT_EQ(error_of(header_bytes({.type = FrameType::hello, .length = 36}), true),
            FrameError::bad_type);
  EXPECT_EQ(error_of(header_bytes({.type = FrameType(0)})), FrameError::bad_type);
  EXPECT_EQ(error_of(header_bytes({.type = FrameType(13)})), FrameError::bad_type);
  EXPECT_EQ(error_of(header_bytes({.type = FrameType(0xffff)})), FrameError::bad_type);
}

// Every single changed bit, a repeated and an omitted frame are found.
TEST(Frame, ForgedChangedRepeatedAndOmittedFramesAreFound) {
  const Digest key = sha256(bytes_of("key"));
  FrameQueue queue;
  queue.authenticate(key);
  queue.push({.type = FrameType::give, .sequence = 1, .rank = 2}, bytes_of("one"));
  const std::vector<std::byte> first = drained(queue);
  queue.push({.type = FrameType::give, .sequence = 2, .rank = 2}, bytes_of("two"));
  const std::vector<std::byte> second = drained(queue);
  const auto error_after = [&](std::vector<std::byte> bytes, const Digest& with) {
    FrameParser parser;
    parser.authenticate(with);
    const auto frames = parsed(parser, bytes, 0);
    return frames.size() * 100 + std::size_t(parser.error());
  };
  EXPECT_EQ(error_after(first, key), 100u);
  EXPECT_EQ(error_after(first, sha256(bytes_of("other"))), std::size_t(FrameError::bad_mac));
  EXPECT_EQ(error_after(second, key), std::size_t(FrameError::bad_mac));
  std::vector<std::byte> twice = first;
  twice.insert(twice.end(), first.begin(), first.end());
  EXPECT_EQ(error_after(twice, key), 100 + std::size_t(FrameError::bad_mac));
  for (std::size_t bit = 0; bit < 8 * first.size(); ++bit) {
    std::vector<std::byte> changed = first;
    changed[bit / 8] ^= std::byte(1 << bit % 8);
    // A length that grew waits for more: feed it.
    const bool in_length = bit / 8 >= 20 && bit / 8 < 24;
    changed.resize(changed.size() + (in_length ? kMaxMessageBytes : 0));
    const std::size_t got = error_after(changed, key);
    EXPECT_LT(got, 100u) << "bit " << bit;
    EXPECT_NE(got, 0u) << "bit " << bit;
    if (in_length) bit += 3;  // slow to feed: a sample
  }
}

TEST(Frame, MemoryFollowsWhatCameNotWhatWasAnnounced) {
  FrameParser parser;
  parser.authenticate({});
  parser.feed(header_bytes({.type = FrameType::give, .length = std::uint32_t(kMaxMessageBytes)}));
  EXPECT_EQ(parser.announced(), kMaxMessageBytes);
  EXPECT_FALSE(parser.take());
}

}  // namespace
}  // namespace ferry::bootstrap
