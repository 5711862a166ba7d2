// Files by which processes of other hosts find a group.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "core/test_errors.hpp"
#include "fabric/domains/shared_doors.hpp"
#include "platform/process.hpp"

namespace ferry::fabric {
namespace {

class SharedDoorsTest : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  SharedDoors doors(int rank, const std::string& name = "experts") const {
    return {folder_, name, rank, 4};
  }
  static SharedDoor door(int rank, std::uint64_t ticket = 0) {
    return {{1, 2},
            {.rank = rank,
             .ticket = ticket,
             .text = "experts=8\n",
             .invitation = {std::byte{3}},
             .card = {std::byte{4}, std::byte{5}},
             .begun = true}};
  }
  std::filesystem::path only_file() const {
    return std::filesystem::directory_iterator(folder_)->path();
  }

  const std::filesystem::path folder_ =
      testing::TempDir() + "ferry_shared_doors_" + std::to_string(process_id());
};

TEST_F(SharedDoorsTest, OthersReadWhatARankShows) {
  doors(2).show(door(2, 9));
  EXPECT_TRUE(doors(2).list().empty()) << "its own";
  EXPECT_EQ(doors(2).list(true).size(), 1u);
  EXPECT_TRUE(doors(1, "another").list().empty());
  EXPECT_TRUE(SharedDoors(folder_, {"experts", "key"}, 1, 4).list().empty());
  const auto all = doors(1).list();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].group, (JobKey{1, 2}));
  EXPECT_EQ(all[0].there.rank, 2);
  EXPECT_EQ(all[0].there.ticket, 9u);
  EXPECT_EQ(all[0].there.text, "experts=8\n");
  EXPECT_TRUE(all[0].there.begun);
  EXPECT_EQ(all[0].there.invitation, door(2).there.invitation);
  EXPECT_EQ(all[0].there.card, door(2).there.card);
  doors(2).show(door(2, 11));
  ASSERT_EQ(doors(1).list().size(), 1u);
  EXPECT_EQ(doors(1).list()[0].there.ticket, 11u) << "the next process has its place";
}

TEST_F(SharedDoorsTest, FilesGoWithTheRanks) {
  for (const int rank : {0, 2, 3}) doors(rank).show(door(rank));
  doors(0).leave(std::vector<int>{3});
  ASSERT_EQ(doors(1).list().size(), 1u);
  EXPECT_EQ(doors(1).list()[0].there.rank, 2);
  doors(0).clear();
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(SharedDoorsTest, WhatOthersMayReadOrHaveDamagedIsLeftOut) {
  doors(2).show(door(2));
  const auto file = only_file();
  EXPECT_EQ(std::filesystem::status(file).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  constexpr auto kOthers = std::filesystem::perms::others_read;
  std::filesystem::permissions(file, kOthers, std::filesystem::perm_options::add);
  EXPECT_TRUE(doors(1).list().empty());
  std::filesystem::permissions(file, kOthers, std::filesystem::perm_options::remove);
  ASSERT_EQ(doors(1).list().size(), 1u);

  std::ifstream in(file, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  const auto put = [&](const std::string& text) {
    std::ofstream(file, std::ios::binary | std::ios::trunc) << text;
    return doors(1).list().size();
  };
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    std::string damaged = whole;
    damaged[bytes] = static_cast<char>(damaged[bytes] ^ 1);
    EXPECT_EQ(put(damaged), 0u) << "byte " << bytes;
    EXPECT_EQ(put(whole.substr(0, bytes)), 0u) << "the first " << bytes;
  }
  EXPECT_EQ(put(whole + "x"), 0u);
  EXPECT_EQ(put(std::string(100'000, 'x')), 0u);
  EXPECT_EQ(put(whole), 1u);
}

TEST_F(SharedDoorsTest, ADirectoryThatIsNotThereIsNamed) {
  std::filesystem::remove_all(folder_);
  test::expect_error(ErrorKind::system, {"rank 2", "ferry-door-", "could not be opened"},
                     [&] { doors(2).show(door(2)); });
  EXPECT_TRUE(doors(1).list().empty());
}

}  // namespace
}  // namespace ferry::fabric
