// The table of segments: what it refuses, and lookups while another thread adds.
#include <atomic>
#include <thread>
#include <vector>

#include "fabric/segment_table.hpp"
#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

TEST(SegmentTable, FindsWhatWasAddedAndNothingElse) {
  SegmentTable table(0, 2);
  EXPECT_EQ(table.next(), 0u);
  EXPECT_EQ(table.bytes(0, 0), 0u);
  table.add(0, 0, anonymous_memory(100, 0), 100);
  table.add(1, 3, anonymous_memory(64, 0), 64);  // numbers may have gaps
  EXPECT_EQ(table.next(), 1u);
  EXPECT_EQ(table.count(1), 4u);
  EXPECT_EQ(table.bytes(0, 0), 100u);
  EXPECT_EQ(table.bytes(1, 3), 64u);
  EXPECT_EQ(table.find(1, 2), nullptr);
  EXPECT_EQ(table.find(1, kMaxSegments), nullptr);
  EXPECT_EQ(table.find(2, 0), nullptr);
  EXPECT_EQ(table.find(-1, 0), nullptr);
}

TEST(SegmentTable, RefusesASecondOneAndOneTooMany) {
  SegmentTable table(0, 1);
  const auto memory = anonymous_memory(8, 0);
  for (SegmentId id = 0; id < kMaxSegments; ++id) table.add(0, table.next(), memory, 8);
  expect_error(ErrorKind::exhausted, {"256 segments", "memory_bytes"}, [&] { table.next(); });
  expect_error(ErrorKind::system, {"attached already"}, [&] { table.add(0, 5, memory, 8); });
  expect_error(ErrorKind::system, {"beyond"}, [&] { table.add(0, kMaxSegments, memory, 8); });
}

TEST(SegmentTable, LooksUpWhileAnotherThreadAdds) {
  SegmentTable table(0, 1);
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!done) {
        for (SegmentId id = 0; id < kMaxSegments; ++id) {
          const auto* entry = table.find(0, id);
          if (entry != nullptr &&
              (entry->bytes != id + 1 || *entry->memory->data() != static_cast<std::byte>(id))) {
            ++wrong;
          }
        }
      }
    });
  }
  for (SegmentId id = 0; id < kMaxSegments; ++id) {
    auto memory = anonymous_memory(id + 1, 0);
    *memory->data() = static_cast<std::byte>(id);
    table.add(0, id, std::move(memory), id + 1);
  }
  done = true;
  for (auto& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace ferry::fabric::test
