#include "run/prefix.hpp"

#include <gtest/gtest.h>

#include <csignal>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "platform/socket.hpp"

namespace ferry::cli {
namespace {

using Piece = std::pair<std::string, LineEnd>;
constexpr LineEnd kLine = LineEnd::newline;
constexpr LineEnd kBar = LineEnd::carriage_return;

std::vector<Piece> split(const std::vector<std::string>& chunks) {
  std::vector<Piece> pieces;
  LineSplitter splitter;
  const auto sink = [&](std::string_view line, LineEnd end) { pieces.emplace_back(line, end); };
  for (const std::string& chunk : chunks) splitter.feed(chunk, sink);
  splitter.finish(sink);
  return pieces;
}

TEST(LineSplitter, CutsLines) {
  EXPECT_EQ(split({"a\nb\n"}), (std::vector<Piece>{{"a", kLine}, {"b", kLine}}));
  EXPECT_EQ(split({"a", "b", "\nc"}), (std::vector<Piece>{{"ab", kLine}, {"c", kLine}}));
  EXPECT_EQ(split({"\n\n"}), (std::vector<Piece>{{"", kLine}, {"", kLine}}));
  EXPECT_TRUE(split({}).empty());
}

TEST(LineSplitter, TellsBarsFromLines) {
  EXPECT_EQ(split({"1%\r2%\r3%\n"}),
            (std::vector<Piece>{{"1%", kBar}, {"2%", kBar}, {"3%", kLine}}));
  EXPECT_EQ(split({"\r1%\r2%"}), (std::vector<Piece>{{"1%", kBar}, {"2%", kLine}}));
  EXPECT_EQ(split({"a\r\nb\r\n"}), (std::vector<Piece>{{"a", kLine}, {"b", kLine}}));
  EXPECT_EQ(split({"a\r", "\nb"}), (std::vector<Piece>{{"a", kLine}, {"b", kLine}}));
  EXPECT_EQ(split({"\r\n"}), (std::vector<Piece>{{"", kLine}}));
  EXPECT_EQ(split({"a\r"}), (std::vector<Piece>{{"a", kLine}}));
}

TEST(LineSplitter, CutsEndlessLines) {
  const std::string text(2 * LineSplitter::kLongestLine + 5, 'x');
  const std::vector<Piece> pieces = split({text, "y\n"});
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[0].first.size(), LineSplitter::kLongestLine);
  EXPECT_EQ(pieces[1].first.size(), LineSplitter::kLongestLine);
  EXPECT_EQ(pieces[2].first, "xxxxxy");
}

TEST(LineSplitter, GivesTheSameHoweverTheBytesArrive) {
  const unsigned seed = std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 500; ++round) {
    std::string text;
    for (unsigned i = random() % 40; i > 0; --i) text += "ab\r\n"[random() % 4];
    std::vector<std::string> chunks;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t size = 1 + random() % 5;
      chunks.push_back(text.substr(at, size));
      at += size;
    }
    EXPECT_EQ(split(chunks), split({text}));
  }
}

std::string written(const std::vector<Piece>& pieces, int rank, int ranks, bool prefix) {
  int error = 0;
  const auto [reader, writer] = connected_pair(error);
  EXPECT_EQ(error, 0);
  PrefixedOutput::Terminal terminal;
  PrefixedOutput output(writer.get(), ranks, prefix, terminal);
  PrefixedOutput::Source source{rank, {}};
  for (const auto& [text, end] : pieces) output.add(source, text, end);
  EXPECT_TRUE(output.flush());
  std::string result(4096, '\0');
  result.resize(read_from(reader, std::as_writable_bytes(std::span(result))).bytes);
  return result;
}

TEST(PrefixedOutput, PutsTheRankInFront) {
  EXPECT_EQ(written({{"x", kLine}, {"", kLine}}, 1, 2, true), "[1] x\n[1] \n");
  EXPECT_EQ(written({{"x", kLine}}, 1, 12, true), "[ 1] x\n");
  EXPECT_EQ(written({{"x", kLine}}, 1, 2, false), "x\n");
}

TEST(PrefixedOutput, ThinsOutBarsInFiles) {
  EXPECT_EQ(written({{"1%", kBar}, {"2%", kBar}, {"3%", kBar}, {"4%", kLine}}, 0, 1, true),
            "[0] 1%\n[0] 4%\n");
}

TEST(PrefixedOutput, SaysWhenNobodyReads) {
  std::signal(SIGPIPE, SIG_IGN);
  int error = 0;
  auto [reader, writer] = connected_pair(error);
  ASSERT_EQ(error, 0);
  reader.reset();
  PrefixedOutput::Terminal terminal;
  PrefixedOutput output(writer.get(), 1, true, terminal);
  output.add_message("x");
  EXPECT_FALSE(output.flush());
}

}  // namespace
}  // namespace ferry::cli
