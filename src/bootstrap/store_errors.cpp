#include "bootstrap/store_errors.hpp"

#include "base/open_files.hpp"
#include "base/process_limits.hpp"
#include "base/text.hpp"
#include "bootstrap/socket.hpp"
#include "bootstrap/wait.hpp"

namespace ferry::bootstrap {
namespace {

std::string number(std::uint64_t n) {
  return std::to_string(n);
}

Error gather_error(ErrorKind kind, const Speaker& who, const GatherState& gather, int peer,
                   const std::string& text) {
  return Error(kind,
               "rank " + std::to_string(who.rank) + ": all_gather " + number(gather.sequence) +
                   " over the store at " + who.store + ": " + text,
               {.rank = who.rank,
                .peer = peer,
                .stage = "bootstrap: all_gather",
                .generation = gather.sequence,
                .expected = std::uint64_t(who.size),
                .seen = gather.arrived});
}

/// What a refused visitor did, after "it".
const char* fault_of(RefusalCode code) {
  switch (code) {
    case RefusalCode::wrong_secret: return "had a wrong secret";
    case RefusalCode::other_version: return "spoke another version of the protocol";
    case RefusalCode::other_size: return "was started for another number of ranks";
    case RefusalCode::rank_out_of_range: return "had a rank out of range";
    case RefusalCode::rank_taken: return "had a rank that was already there";
    case RefusalCode::rank_gone: return "had a rank that had been there before";
    case RefusalCode::group_over: return "came after the ranks had failed to meet";
    case RefusalCode::none: break;
  }
  return "was refused for an unknown reason";
}

std::string reason_in_words(const Refusal& refusal) {
  const std::string got = number(refusal.got);
  const std::string expected = number(refusal.expected);
  switch (refusal.code) {
    case RefusalCode::wrong_secret:
      return "this process has another secret than rank 0; give all ranks of the job the same "
             "secret (FERRY_SECRET), or another port if two jobs share this one";
    case RefusalCode::other_version:
      return "this process speaks version " + got + " of the protocol, expected " + expected +
             "; install the same Ferry for all ranks";
    case RefusalCode::other_size:
      return "this process was started for " + got + " ranks, expected " + expected +
             " as rank 0 was; give all ranks the same size (WORLD_SIZE)";
    case RefusalCode::rank_out_of_range:
      return "rank is " + got + ", expected 0 to " + number(refusal.expected - 1) +
             "; check RANK and WORLD_SIZE";
    case RefusalCode::rank_taken:
      return "another process is already there as rank " + got +
             ", expected each rank once; check RANK, or give another job another port and secret";
    case RefusalCode::rank_gone:
      return "rank " + got +
             " was already there and left or died, expected each rank once in the life of a "
             "group; start all ranks anew";
    case RefusalCode::group_over:
      return "the ranks have already failed to meet (see the error of rank " + got +
             "); start all ranks anew";
    case RefusalCode::none: break;
  }
  return "for a reason that this version does not know (code " +
         number(std::uint64_t(refusal.code)) + "); install the same Ferry for all ranks";
}

std::string spell_absences(const Absences& absences) {
  std::string text;
  if (absences.absent.total > 0) {
    text += spell_ranks(absences.absent.listed, absences.absent.total) + " never reached the store";
  }
  if (absences.silent.total > 0) {
    text += (text.empty() ? "" : ", ") +
            spell_ranks(absences.silent.listed, absences.silent.total) +
            " reached it but did not call all_gather";
  }
  if (absences.refused > 0) {
    text += "; the store refused " + number(absences.refused) + " connection" +
            (absences.refused == 1 ? ": it " : "s: the last one ") +
            fault_of(absences.last_refusal);
  }
  return text;
}

}  // namespace

Error refusal_error(const Speaker& who, const Refusal& refusal) {
  return Error(ErrorKind::refused,
               "rank " + std::to_string(who.rank) + ": the store at " + who.store +
                   " refused this process: " + reason_in_words(refusal),
               {.rank = who.rank,
                .peer = 0,
                .stage = "bootstrap: connect",
                .expected = refusal.expected,
                .seen = refusal.got});
}

Error failure_error(const Speaker& who, const GatherState& gather, const Failure& failure) {
  const int peer = int(failure.peer);
  const std::string name = "rank " + std::to_string(peer);
  switch (failure.kind) {
    case FailureKind::died:
      return gather_error(ErrorKind::peer_failed, who, gather, peer,
                          name + " died: its connection ended without a goodbye; see its output");
    case FailureKind::left:
      return gather_error(ErrorKind::peer_left, who, gather, peer,
                          name + " left: its bootstrap was destroyed");
    case FailureKind::deadline:
      if (failure.absences.lists(who.rank)) {
        return gather_error(ErrorKind::peer_failed, who, gather, int(failure.by),
                            "this rank came too late: rank " + number(failure.by) +
                                " reached its deadline; give a longer deadline, or see what held "
                                "this rank up");
      }
      return gather_error(ErrorKind::deadline, who, gather, peer,
                          spell_absences(failure.absences) + " (deadline of rank " +
                              number(failure.by) +
                              "); see whether they still run, or give a longer deadline");
    case FailureKind::interrupted:
      return gather_error(ErrorKind::peer_failed, who, gather, peer,
                          name + " was interrupted while it waited");
    case FailureKind::wrong_sequence:
      return gather_error(ErrorKind::mismatch, who, gather, peer,
                          name + " came with its gather number " + number(failure.got) +
                              ", expected " + number(failure.expected) +
                              "; all ranks must make the same calls in the same order");
    case FailureKind::broken_frame:
      return gather_error(ErrorKind::peer_failed, who, gather, peer,
                          name +
                              " sent something that is no frame of this protocol; its process "
                              "or the network in between damages data");
    case FailureKind::too_much:
      return gather_error(ErrorKind::exhausted, who, gather, peer,
                          "the ranks gave " + number(failure.got) + " bytes together with " + name +
                              ", expected at most " + number(failure.expected) +
                              "; give less in one all_gather");
  }
  return gather_error(ErrorKind::peer_failed, who, gather, peer, name + " failed");
}

Error deadline_error(const Speaker& who, const GatherState& gather,
                     std::chrono::nanoseconds deadline, const std::optional<Absences>& absences,
                     int accept_error) {
  if (accept_error != 0) {
    return gather_error(ErrorKind::exhausted, who, gather, who.rank,
                        "the store on this rank could not let all ranks in within " +
                            spell(deadline) + ": " + error_text(accept_error));
  }
  const std::string after = " within " + spell(deadline);
  if (!absences) {
    return gather_error(ErrorKind::deadline, who, gather, 0,
                        "rank 0, which runs the store, did not answer" + after +
                            "; see whether it still runs, or give a longer deadline");
  }
  if (!absences->any()) {
    return gather_error(ErrorKind::deadline, who, gather, -1,
                        "the answers did not arrive" + after + "; give a longer deadline");
  }
  return gather_error(ErrorKind::deadline, who, gather, absences->first(),
                      spell_absences(*absences) + after +
                          "; see whether they still run, or give a longer deadline");
}

std::string missing_text(const std::optional<Absences>& absences, int accept_error) {
  if (accept_error != 0) {
    return "the store on this rank cannot let them in: " + error_text(accept_error);
  }
  if (!absences) return "rank 0, which runs the store, has not said who is missing";
  return absences->any() ? spell_absences(*absences)
                         : "all have come, the answers are on their way";
}

Error store_full_error(const Speaker& who, const GatherState& gather) {
  return gather_error(ErrorKind::exhausted, who, gather, who.rank,
                      "the store on this rank had no memory and ended" + memory_limit_text(0));
}

Error store_gone_error(const Speaker& who, const GatherState& gather, bool in_good_order) {
  if (in_good_order) {
    return gather_error(ErrorKind::peer_left, who, gather, 0,
                        "rank 0, which runs the store, left: its bootstrap was destroyed");
  }
  return gather_error(
      ErrorKind::peer_failed, who, gather, 0,
      "rank 0, which runs the store, died: the connection ended without a goodbye; see its output");
}

}  // namespace ferry::bootstrap
