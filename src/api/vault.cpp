// The public vault: forwards to the group's engine.
#include "ferry/vault.hpp"

#include <string>

#include "base/process_limits.hpp"
#include "core/check.hpp"
#include "core/engine.hpp"
#include "core/vault/table.hpp"

namespace ferry {
namespace {

VaultEngine& there(const std::shared_ptr<VaultEngine>& engine, const char* call) {
  if (!engine) {
    throw Error(ErrorKind::destroyed, std::string(call) + ": the vault was moved from");
  }
  return *engine;
}

}  // namespace

Vault::Vault(Group& group, std::size_t version_bytes) {
  if (group.destroyed()) throw Error(ErrorKind::destroyed, "Vault: the group is destroyed");
  constexpr std::size_t kMost = std::size_t{1} << 50;
  if (version_bytes > kMost) {
    refuse("Vault", "version_bytes", std::to_string(version_bytes),
           "at most " + std::to_string(kMost));
  }
  engine_ = in_words(group.rank(), "Vault",
                     [&] { return Access::engine(group)->make_vault(version_bytes); });
}

std::optional<std::uint64_t> Vault::recover(std::span<const std::int64_t> wanted) {
  return there(engine_, "recover").recover(wanted);
}
std::vector<std::int64_t> Vault::keys() const {
  return there(engine_, "keys").keys();
}
void Vault::get(std::int64_t key, std::span<const VaultTarget> into, const Stream* stream) const {
  there(engine_, "get").get(key, into, stream);
}
void Vault::put(std::uint64_t step, std::span<const VaultPart> parts, const Stream* stream) {
  there(engine_, "put").put(step, parts, stream);
}

std::size_t Vault::bytes_of(std::span<const VaultPart> parts) {
  std::vector<PartOutline> outlines;
  outlines.reserve(parts.size());
  for (const VaultPart& part : parts) {
    const std::size_t bytes =
        checked_bytes("bytes_of", "tensor", part.tensor.shape, part.tensor.dtype);
    outlines.push_back({part.key, bytes, {}});
  }
  return version_bytes(lay_out(outlines));
}

}  // namespace ferry
