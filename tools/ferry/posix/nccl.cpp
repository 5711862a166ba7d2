#include "bench/nccl.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <type_traits>

#include "platform/library.hpp"
#include "platform/posix/process_group.hpp"
#include "run/shared_array.hpp"

namespace ferry::cli {
// Types and numbers of NCCL's stable binary interface, the same in all of its versions 2.
struct UniqueId {
  char internal[128];
};

namespace {

constexpr int kUint8 = 1;
constexpr auto kMeet = std::chrono::seconds(60);

struct Answer {
  int version;  // 0: not usable
  char reason[512];
};

void search(const std::string& library, Answer& answer) {
  Library nccl(library.c_str());
  std::string reason;
  using GetVersion = int (*)(int*);
  if (const auto get = reinterpret_cast<GetVersion>(nccl.symbol("ncclGetVersion"))) {
    int version = 0;
    if (get(&version) == 0 && version > 0) {
      answer.version = version;
    } else {
      reason = library + ": ncclGetVersion failed";
    }
  } else {
    reason = nccl.error();
  }
  std::strncpy(answer.reason, reason.c_str(), sizeof answer.reason - 1);
}

}  // namespace

std::string nccl_version(int code) {
  const int unit = code < 10000 ? 1000 : 10000;  // up to 2.8 and after
  return fmt::format("{}.{}.{}", code / unit, code % unit / 100, code % 100);
}

Nccl find_nccl(const std::string& asked) {
  if (asked == "off") return {"", "", "--nccl off"};
  // Unless the user has said otherwise: an all-to-all uses no multicast, and NCCL may hang while it
  // sets that up.
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  const char* named = std::getenv("FERRY_NCCL");
  const bool by_name = asked == "auto" && (named == nullptr || *named == '\0');
  const std::string library = asked != "auto" ? asked : by_name ? "libnccl.so.2" : named;
  const SharedArray<Answer> answer(1);
  const bool ended = !reap(fork_process([&] {
                        search(library, answer[0]);
                        return 0;
                      })).failed();
  if (ended && answer[0].version > 0) return {library, nccl_version(answer[0].version), ""};
  const std::string reason = ended ? answer[0].reason : library + ": loading it killed a process";
  if (!by_name) throw std::runtime_error((asked == "auto" ? "FERRY_NCCL: " : "--nccl: ") + reason);
  return {"", "", reason};
}

struct NcclRank::Functions {
  int (*get_unique_id)(UniqueId*);
  int (*init_rank)(void**, int, UniqueId, int);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void*, std::size_t, int, int, void*, void*);
  int (*receive)(void*, std::size_t, int, int, void*, void*);
  int (*destroy)(void*);
  const char* (*error_string)(int);

  static std::unique_ptr<const Functions> load(const std::string& library) {
    Library nccl(library.c_str());
    if (!nccl) throw std::runtime_error(nccl.error());
    auto functions = std::make_unique<Functions>();
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(nccl.symbol(name));
      if (function == nullptr) throw std::runtime_error(nccl.error());
    };
    find(functions->get_unique_id, "ncclGetUniqueId");
    find(functions->init_rank, "ncclCommInitRank");
    find(functions->group_start, "ncclGroupStart");
    find(functions->group_end, "ncclGroupEnd");
    find(functions->send, "ncclSend");
    find(functions->receive, "ncclRecv");
    find(functions->destroy, "ncclCommDestroy");
    find(functions->error_string, "ncclGetErrorString");
    return functions;
  }
};

NcclRank::NcclRank(const Nccl& nccl, Bootstrap& bootstrap)
    : functions_(Functions::load(nccl.library)) {
  UniqueId id{};
  if (bootstrap.rank() == 0) need(functions_->get_unique_id(&id), "ncclGetUniqueId");
  // Also keeps a rank from waiting in NCCL for one that could not load it.
  const auto ids = bootstrap.all_gather(std::as_bytes(std::span(id.internal)), kMeet);
  std::memcpy(id.internal, ids.at(0).data(), sizeof id.internal);
  need(functions_->init_rank(&communicator_, bootstrap.size(), id, bootstrap.rank()),
       "ncclCommInitRank");
}

NcclRank::~NcclRank() {
  functions_->destroy(communicator_);
}

void NcclRank::need(int result, const char* call) const {
  if (result != 0) {
    throw std::runtime_error(fmt::format("{}: {}", call, functions_->error_string(result)));
  }
}

void NcclRank::all_to_all(const void* from, void* to, const std::vector<NcclBlock>& blocks,
                          void* stream) const {
  need(functions_->group_start(), "ncclGroupStart");
  for (std::size_t peer = 0; peer < blocks.size(); ++peer) {
    const NcclBlock& block = blocks[peer];
    const int rank = static_cast<int>(peer);
    need(functions_->send(static_cast<const std::byte*>(from) + block.send_offset, block.send_bytes,
                          kUint8, rank, communicator_, stream),
         "ncclSend");
    need(functions_->receive(static_cast<std::byte*>(to) + block.receive_offset,
                             block.receive_bytes, kUint8, rank, communicator_, stream),
         "ncclRecv");
  }
  need(functions_->group_end(), "ncclGroupEnd");
}

}  // namespace ferry::cli
