// Shared memory objects: a full /dev/shm, objects that are not the peer's, names.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "fabric/shm/door.hpp"
#include "fabric/shm/names.hpp"
#include "fabric/shm/object.hpp"
#include "fabric/test_names.hpp"
#include "fabric/test_ranks.hpp"
#include "platform/pages.hpp"
#include "platform/posix/test_rights.hpp"

namespace ferry::fabric::test {
namespace {

constexpr Setting kShm{"shm", "shm", true};

TEST(ShmObject, MoreThanDevShmHoldsIsRefused) {
  run_ranks(kShm, 2, [](Rank& me) {
    const std::size_t total = std::filesystem::space("/dev/shm").capacity;
    if (total == 0) GTEST_SKIP() << "/dev/shm has no limit";
    const auto fabric = me.make();
    expect_error(ErrorKind::exhausted,
                 {"/dev/shm", "needed " + std::to_string(total + 4096), "free ", "--shm-size"},
                 [&] { fabric->register_memory(total + 4096); });
    EXPECT_TRUE(own_names().empty());
    EXPECT_EQ(fabric->register_memory(4096).id, 0u);  // the failure took no number
    me.barrier();
  });
}

/// A small /dev/shm for this process alone; false without the right to mount.
bool private_dev_shm(const char* options) {
  if (ferry::test::own_mounts() && ferry::test::mount_memory("/dev/shm", options)) return true;
  std::printf("not shown: this test needs the right to mount\n");
  return false;
}

TEST(ShmObject, AFullDevShmIsAnError) {
  run_ranks(kShm, 1, [](Rank& me) {
    if (!private_dev_shm("size=4m")) return;
    const auto fabric = me.make();
    std::vector<Segment> segments;
    expect_error(ErrorKind::exhausted, {"rank 0", "/dev/shm", "needed 602112", "free 581632"}, [&] {
      for (int i = 0; i < 100; ++i) {
        segments.push_back(fabric->register_memory(600'000));
        std::memset(segments.back().data, 1, 600'000);
      }
    });
    EXPECT_EQ(segments.size(), 6u);
  });
  run_ranks(kShm, 2, [](Rank& me) {
    if (!private_dev_shm("size=4m,nr_inodes=3")) return;  // the folder and two files
    if (me.rank() == 1) return;
    const std::string name = object_name({1, 2}, this_process(), 0, 0);
    create_object(name + "a", 4096, 0);
    create_object(name + "b", 4096, 0);
    expect_error(ErrorKind::exhausted, {"shm_open"}, [&] { create_object(name + "c", 4096, 0); });
  });
}

// Free space looks sufficient to both, and is not: the reservation decides, nobody gets SIGBUS.
TEST(ShmObject, TwoThatFillDevShmTogetherGetNoSignal) {
  run_ranks(kShm, 1, [](Rank&) {
    if (!private_dev_shm("size=4m")) return;
    const std::string name = object_name({1, 2}, this_process(), 0, 0);
    const auto fill = [](const std::string& own) {
      for (int i = 0; i < 100; ++i) {
        try {
          const SharedObject object = create_object(own, 3 << 20, 0);
          std::memset(object.memory->data(), 1, 3 << 20);
          remove_section(own);
        } catch (const Error& e) {
          if (e.kind() != ErrorKind::exhausted) return 2;
          if (section_exists(own)) return 3;  // a name is left
        }
      }
      return 0;
    };
    ferry::test::Child a([&] { return fill(name + "a"); }), b([&] { return fill(name + "b"); });
    for (ferry::test::Child* child : {&a, &b}) EXPECT_TRUE(child->wait().good());
  });
}

/// Pages of which this process has page table entries: bit 63 of proc_pid_pagemap(5).
std::size_t mapped_pages(const Memory& memory) {
  std::ifstream map;
  map.rdbuf()->pubsetbuf(nullptr, 0);  // it is read by whole entries alone
  map.open("/proc/self/pagemap", std::ios::binary);
  std::vector<std::uint64_t> entries(memory.mapped() / 4096);
  const auto first = reinterpret_cast<std::uintptr_t>(memory.data()) / 4096;
  map.seekg(static_cast<std::streamoff>(first * 8));
  EXPECT_TRUE(map.read(reinterpret_cast<char*>(entries.data()),
                       static_cast<std::streamsize>(entries.size() * 8)));
  return static_cast<std::size_t>(
      std::count_if(entries.begin(), entries.end(), [](auto entry) { return entry >> 63 != 0; }));
}

TEST(ShmObject, PagesOfAPeerAreTouchedAtOnceOnlyOnDemand) {
  constexpr std::size_t kPages = 256;
  const std::string name = object_name({1, 3}, this_process(), 0, 0);
  const SharedObject object = create_object(name, kPages * 4096, 0);
  const Attachment attachment{Wire::shm, 1, 0, 0, kPages * 4096, {}};
  EXPECT_EQ(mapped_pages(*open_object(name, attachment, object.inode, false)), 0u);
  EXPECT_EQ(mapped_pages(*open_object(name, attachment, object.inode, true)), kPages);
  remove_section(name);
}

TEST(ShmObject, AnObjectThatIsNotThePeersIsRefused) {
  const std::string name = object_name({1, 2}, this_process(), 0, 0);
  const SharedObject object = create_object(name, 8192, 0);
  const Attachment attachment{Wire::shm, 1, 0, 0, 8192, {}};
  EXPECT_NE(open_object(name, attachment, object.inode), nullptr);
  expect_error(ErrorKind::system, {"rank 0", "is not the object"},
               [&] { open_object(name, attachment, object.inode + 1); });
  Attachment larger = attachment;
  larger.bytes = 8193;
  expect_error(ErrorKind::system, {"has only 8192 bytes"},
               [&] { open_object(name, larger, object.inode); });
  std::filesystem::permissions("/dev/shm" + name, static_cast<std::filesystem::perms>(0660));
  expect_error(ErrorKind::system, {"is not the object"},
               [&] { open_object(name, attachment, object.inode); });
  // A name that is there is never taken over.
  expect_error(ErrorKind::system, {"shm_open", "exists"}, [&] { create_object(name, 4096, 0); });
  EXPECT_TRUE(section_exists(name));
  remove_section(name);
  expect_error(ErrorKind::system, {"died or left"},
               [&] { open_object(name, attachment, object.inode); });
}

TEST(ShmObject, NamesCannotBeGuessedFromOneAnother) {
  std::set<std::string> names;
  for (int rank = 0; rank < 8; ++rank) {
    for (SegmentId segment = 0; segment < 8; ++segment) {
      for (std::uint64_t key = 0; key < 8; ++key) {
        const auto name = object_name({key, 0}, this_process(), rank, segment);
        names.insert(name.substr(name.size() - 32));
        EXPECT_EQ(owner_of(name.substr(1)), [] {
          ProcessName owner = this_process();
          owner.time_namespace = 0;  // not part of the name
          return owner;
        }());
      }
    }
  }
  EXPECT_EQ(names.size(), 512u);
  // The first vector of the reference implementation with 16 bytes of input, 00 01 .. 0f.
  EXPECT_EQ(
      siphash({0x0706050403020100, 0x0f0e0d0c0b0a0908}, 0x0706050403020100, 0x0f0e0d0c0b0a0908),
      0x3f2acc7f57c29bdbu);
}

TEST(ShmObject, OtherNamesAreNotOurs) {
  for (const char* name :
       {"", "ferry-", "ferry-1.2.3", "ferry-1.2.3-", "ferry-1.2.3-0123456789abcdef0123456789abcde",
        "ferry-1.2.3-0123456789abcdef0123456789abcdeg",
        "ferry-1.0.3-0123456789abcdef0123456789abcdef",
        "ferry-1.-2.3-0123456789abcdef0123456789abcdef", "sem.ferry", "xferry-1.2.3-00"}) {
    EXPECT_FALSE(owner_of(name)) << name;
  }
}

/// What another user may put under a name that it foresees: opening it must not wait for a writer.
TEST(ShmDoors, AFifoHoldsUpNobody) {
  const JobKey key = door_key("of the fifo " + std::to_string(process_id()));
  const std::string file = "/dev/shm" + object_name(key, this_process(), 1, 0);
  ASSERT_TRUE(ferry::test::make_fifo(file));
  const bool none = Doors(key, 0, 2).list().empty();
  std::filesystem::remove(file);
  EXPECT_TRUE(none);
}

}  // namespace
}  // namespace ferry::fabric::test
