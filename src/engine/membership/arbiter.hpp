// The arbiter of a group of several hosts: a file that all of them share decides which half of the
// ranks goes on when the network is split. It is one more acceptor (protocol/membership.hpp).
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "engine/membership/aside.hpp"
#include "engine/membership/seating.hpp"
#include "fabric/segment_handle.hpp"
#include "platform/locked_file.hpp"

namespace ferry::engine {

/// Whoever has it locked reads what the arbiter said last, and writes what it says now. All
/// functions throw Error(system) that names the file, and may hang as long as its server does.
class ArbiterFile {
 public:
  using Said = Member::Said;

  /// `directory`: GroupConfig::arbiter; the file in it is of this group alone.
  ArbiterFile(const std::string& directory, const fabric::JobKey& group, int rank, int ranks);

  /// Of rank 0: makes the file, and has it locked until the result is dropped.
  LockedFile create() const;
  /// Of the others, meanwhile: whether they see the file and its lock.
  void check_locked() const;
  /// Of a process that joins: whether it sees the file.
  void check_there() const;
  /// Hands in a statement; what the arbiter says then. It refuses for one when another rank asks.
  Said decide(const Said& asked) const;
  /// This rank leaves; the last one of the view that does so removes the file.
  void leave(const Member::Seats& view) const;

 private:
  struct Record;
  Record read(LockedFile& file) const;
  void write(LockedFile& file, Record& record) const;
  [[noreturn]] void refuse(const std::string& what) const;
  [[noreturn]] void refuse(const LockedFile& file, const char* what_to_do) const;

  std::string path_;
  int rank_;
  int ranks_;
};

/// Asks the arbiter and does not wait for it.
class Arbiter {
 public:
  using Said = Member::Said;
  using Decide = std::function<Said(const Said&)>;

  explicit Arbiter(Decide decide) : decide_(std::move(decide)) {}
  /// The answer to what was asked before, if it is there; asks this if there is no question open.
  /// Throws what deciding threw.
  std::optional<Said> ask(const Said& asked);

 private:
  Decide decide_;
  Aside<Said> answer_{};
};

}  // namespace ferry::engine
