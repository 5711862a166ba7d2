// State that survives its rank: versions of tensors, kept in the memory of another rank.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/group.hpp"
#include "ferry/stream.hpp"
#include "ferry/tensor.hpp"

namespace ferry {

class VaultEngine;

/// A tensor in a version. Parts of one key belong together, in the order in which they are put:
/// for example the weights and the moments of one expert.
struct VaultPart {
  std::int64_t key = 0;
  ConstTensorView tensor{};  ///< dense, in CPU memory or on the group's GPU
  /// What `get` must say again, at most 103 characters; empty: dtype and shape of the tensor. For
  /// elements that Ferry has no dtype for.
  std::string type{};
};

/// Where a part goes.
struct VaultTarget {
  TensorView tensor{};
  std::string type{};
};

/// Versions of the state of all ranks of a group. What a rank puts lies in the registered memory of
/// the next rank of the view, which keeps it when the rank dies; in a group of several domains a
/// copy lies in the next domain, so that a host may vanish. In a group on GPUs it lies in CPU
/// memory of its host, so it outlives the process and its GPU's memory. On all ranks:
///
///   1. `recover` once at first, and after each `Group::regroup`, also in a process that joined. It
///      says which version all have whole; each rank takes its tensors from there with `get`.
///   2. After `Group::commit(s)`, and when the tensors are those of step s: `put(s, …)`, on all
///      ranks at the same steps, as often as the program wants.
///
/// A rank that dies while it puts leaves the version before, on all ranks alike. Two versions of
/// each rank are kept: 2 · version_bytes, rounded up to 64, + 64 bytes of registered memory on each
/// rank (twice that in several domains, and more where a smaller domain keeps for a larger one),
/// and as much again on the keeper of a lost rank as long as its state is kept. The memory grows if
/// need be. A rank that dies together with the one that keeps its state takes it along. One vault a
/// group; the versions stay with the group when the object is dropped, and a new one of the same
/// version_bytes takes them up. Where groups can regroup: others are Error(unsupported).
class Vault {
 public:
  /// Not collective. `version_bytes`: the most that one rank puts (`bytes_of`), the same on all.
  Vault(Group& group, std::size_t version_bytes);

  /// Collective. The newest step for which all ranks, those lost since too, have put all they had;
  /// from here on it is the group's committed step. Nothing: there is none. The state of a rank
  /// that is lost is kept for those that put it from now on; it goes with the second version after
  /// this. Throws Error(mismatch) on all ranks, and drops nothing, when ranks have skipped puts and
  /// no version is left that all have.
  /// `wanted`: keys that this rank will `get`. Those that lie in other domains come over the
  /// network now, into registered memory that is free again from the next put on; without several
  /// domains it changes nothing. Keys that nobody has put are ignored.
  std::optional<std::uint64_t> recover(std::span<const std::int64_t> wanted = {});
  /// The keys of the version that `recover` named, of all ranks, ascending.
  std::vector<std::int64_t> keys() const;
  /// Copies the parts of a key of that version, whichever rank put them; this rank's own first,
  /// else the lowest's (of its own domain, if one there has any). Not collective; between `recover`
  /// and this rank's next `commit`. Throws Error(invalid_argument) unless there are as many tensors
  /// as parts, of their types and sizes, and for a key of another domain that `recover` was not
  /// given.
  /// Tensors on the GPU: the copies come after what is on `stream`, as in `put`.
  void get(std::int64_t key, std::span<const VaultTarget> into,
           const Stream* stream = nullptr) const;
  /// Copies the tensors to the rank that keeps them: one pass over their bytes. Not collective, and
  /// waits for nobody. In several domains it is collective: it copies them here, then to the
  /// keeper, and returns when the copies that this rank keeps have come. `step` is the one that was
  /// committed last, or 0 before any. Throws Error(exhausted) when they are more than
  /// version_bytes.
  /// `stream`: of tensors on the GPU, which are copied after what is on it now (null: at once);
  /// the copies have ended on return. Not one that is captured into a graph.
  void put(std::uint64_t step, std::span<const VaultPart> parts, const Stream* stream = nullptr);

  /// Of a version with these parts: 64 + Σ (128 + bytes rounded up to 64).
  static std::size_t bytes_of(std::span<const VaultPart> parts);

 private:
  std::shared_ptr<VaultEngine> engine_;
};

}  // namespace ferry
