#include "api/domain_bootstrap.hpp"

#include <algorithm>
#include <string>

#include "base/text.hpp"

namespace ferry {
namespace {

enum class State : unsigned char { busy, done, failed };

State state_of(const std::vector<std::byte>& message) {
  return message.empty() ? State::failed : static_cast<State>(message.front());
}

std::vector<std::byte> message_of(State state, std::span<const std::byte> body) {
  std::vector<std::byte> message(1 + body.size());
  message.front() = static_cast<std::byte>(state);
  std::copy(body.begin(), body.end(), message.begin() + 1);
  return message;
}

}  // namespace

std::vector<std::vector<std::byte>> DomainBootstrap::all_gather(std::span<const std::byte> mine,
                                                                std::chrono::nanoseconds deadline,
                                                                const OnWait& on_wait) {
  whole_.set_stage(stage());
  const auto all = whole_.all_gather(message_of(State::busy, mine), deadline, on_wait);
  std::vector<std::vector<std::byte>> of_members;
  for (const int member : members_) {
    const std::vector<std::byte>& message = all[static_cast<std::size_t>(member)];
    if (state_of(message) != State::busy) {
      throw Error(ErrorKind::peer_failed,
                  "Group: domains: rank " + std::to_string(member) +
                      " ended the creation of its domain before this rank did",
                  {whole_.rank(), member, "Group: domains", 0, 0, 0});
    }
    of_members.emplace_back(message.begin() + 1, message.end());
  }
  return of_members;
}

void DomainBootstrap::finish(const std::optional<Error>& failed, std::chrono::nanoseconds deadline,
                             const OnWait& on_wait) {
  constexpr std::size_t kMost = 1000;
  const std::string words = failed ? failed->what() : "";
  const auto mine =
      message_of(failed ? State::failed : State::done, std::as_bytes(std::span(words)));
  std::vector<std::vector<std::byte>> all;
  const auto busy = [](const auto& message) { return state_of(message) == State::busy; };
  whole_.set_stage("Group: domains");
  do {
    all = whole_.all_gather(mine, deadline, on_wait);
  } while (std::any_of(all.begin(), all.end(), busy));
  if (failed) throw *failed;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (state_of(all[r]) != State::failed) continue;
    const std::string_view text(reinterpret_cast<const char*>(all[r].data()), all[r].size());
    throw Error(ErrorKind::peer_failed,
                "Group: domains: rank " + std::to_string(r) +
                    " could not go on: " + printable(text.substr(text.empty() ? 0 : 1), kMost),
                {whole_.rank(), static_cast<int>(r), "Group: domains", 0, 0, 0});
  }
}

}  // namespace ferry
