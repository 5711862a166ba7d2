// What kernels tell of a failure, as errors.
#pragma once
#include <mutex>
#include <optional>

#include "cuda/kernels/base/group_view.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

class CudaEngine;
struct CallRecord;
struct GroupWords;

/// Where a call gave up, in the host engine's words.
const char* stage_name(Stage stage);

/// The words for a failure that every rank sees.
Error refusal(const CudaEngine& engine, const CallRecord& record, const Failure& failure);
/// Of a dispatch that was refused for its plan: why the plan was.
Error refusal(const CudaEngine& engine, const CallRecord& record);

/// Throws how the call ended, if not well. The call has ended on the GPU.
void check_ended(CudaEngine& engine, CallRecord& record);

/// The failure that ends a group, which its kernels have told of.
class FatalFailure {
 public:
  /// Made once; the peers are told.
  Error error(CudaEngine& engine);
  /// Before `regroup` ends what still runs: if nothing else is known of it, that is why it ended.
  void cut_off(CudaEngine& engine);
  /// The failure is of an epoch that is over, and no kernel runs.
  void begin_epoch(const GroupWords& words);
  /// It is on the account of a rank beyond this engine, of the larger group; or not.
  std::optional<Failure> beyond() const {
    std::scoped_lock lock(mutex_);
    return beyond_;
  }

 private:
  std::optional<Error> told(CudaEngine& engine, const Failure& failure) const;
  bool is_beyond(CudaEngine& engine, Failure& failure);

  mutable std::mutex mutex_;
  std::optional<Error> error_{};
  std::optional<Error> cut_off_{};
  std::optional<Failure> beyond_{};
};

}  // namespace ferry::cuda
