#include "engine/vault/vault_group.hpp"

#include "base/process_limits.hpp"

namespace ferry::engine {

void VaultGroup::go_on_from(std::uint64_t step) {
  // It has state now.
  if (channel().joined_at(channel().rank()) != 0) channel().say_joined(0);
  if (Regroup* membership = membership_if_changed()) membership->forget_joined();
  now().commit(step);
}

void VaultGroup::free_held() {
  if (Regroup* membership = membership_if_changed()) membership->free_held();
}

void VaultGroup::run_call(const char* call, const std::function<void()>& work) {
  const auto failed = [&](const std::exception& thrown, ErrorKind kind) {
    if (channel().all_ranks_threw()) return channel().enter_call({});
    channel().fail(call, thrown.what(), kind);
  };
  channel().all_ranks_threw();
  channel().enter_call({call_named(call), 0});
  try {
    in_words(channel().rank(), call, work);
    channel().check_evicted(call);
  } catch (const Error& error) {
    failed(error, error.kind());
    throw;
  } catch (const std::exception& error) {
    failed(error, ErrorKind::system);
    throw;
  }
  channel().enter_call({});
}

}  // namespace ferry::engine
