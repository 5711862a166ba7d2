// The arbiter of a group of several hosts: a file that all of them share decides which half of the
// ranks goes on when the network is split. It is one more acceptor (protocol/membership.hpp).
#pragma once
#include <cstdint>
#include <string>

#include "engine/seating.hpp"
#include "fabric/segment_handle.hpp"

namespace ferry::engine {

class Arbiter {
 public:
  using Said = Member::Said;

  /// `directory`: GroupConfig::arbiter; the file in it is of this job alone.
  Arbiter(const std::string& directory, const fabric::JobKey& job, int rank, int ranks);

  /// Of rank 0: makes the file. Throws Error(system).
  void create() const { change(true, {}); }
  /// Of all: whether they see it, perhaps after others have looked. Throws Error(system).
  void await() const;
  /// Hands in a statement; what the arbiter says then. Throws Error(system) when it cannot be asked
  /// now, for one when another rank asks.
  Said ask(const Said& asked) const { return change(false, asked); }

 private:
  Said change(bool create, const Said& asked) const;
  Said said_in(const std::string& text) const;
  [[noreturn]] void refuse(const std::string& what) const;

  std::string path_;
  int rank_;
  int ranks_;
};

}  // namespace ferry::engine
