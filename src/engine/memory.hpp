// This rank's registered memory, shared by the engine and by every tensor that lies in it.
#pragma once
#include <memory>
#include <utility>

#include "engine/arena.hpp"
#include "fabric/fabric.hpp"

namespace ferry::engine {

/// Tensors keep it alive, so they stay valid after the group is destroyed.
struct Memory {
  std::unique_ptr<fabric::Fabric> fabric;
  Arena arena{};

  explicit Memory(std::unique_ptr<fabric::Fabric> made) : fabric(std::move(made)) {}
};

/// Ownership of a region: it goes back to the arena with the last copy.
inline std::shared_ptr<void> lease(const std::shared_ptr<Memory>& memory, const Region& region) {
  return {region.data, [memory, region](void*) { memory->arena.release(region); }};
}

}  // namespace ferry::engine
