#include "engine/vault/vault_group.hpp"

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

}  // namespace ferry::engine
