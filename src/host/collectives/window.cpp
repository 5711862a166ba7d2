// window: rows of all ranks, read by each alone. The ranks tell each other once where theirs lie.
#include <cstring>
#include <span>
#include <string>

#include "core/check.hpp"
#include "host/collectives/engine.hpp"

namespace ferry::host {
namespace {

constexpr const char* kWindow = "window";

/// What a rank says of its rows.
struct WindowPlace {
  std::int64_t rows;
  std::uint64_t offset;
  std::uint32_t segment;
  std::uint32_t is_there;  ///< 0: its registered memory does not hold them
};

/// Of this rank; nothing that others may see before their message says so.
WindowPlace place_of(HostCollectives& all, WindowState& state, const Extents& shape, Dtype dtype) {
  const auto& memory = all.memory();
  const std::size_t bytes = index(shape.product()) * size_of(dtype);
  const auto region = memory->arena.allocate(bytes);
  if (!region) return {shape[0], 0, 0, 0};
  if (bytes > 0) std::memset(region->data, 0, bytes);
  state.own = {TensorView(region->data, dtype, shape), engine::lease(memory, *region)};
  return {shape[0], region->address.offset, region->address.segment, 1};
}

void run_window(HostCollectives& all, WindowState& state, const Extents& shape, Dtype dtype) {
  const WindowPlace mine = place_of(all, state, shape, dtype);
  const std::size_t row_bytes = index(shape[1]) * size_of(dtype);
  all.meet(kWindow, head_of(CallKind::window, dtype, shape[1]), std::as_bytes(std::span(&mine, 1)));
  state.first.push_back(0);
  int without = -1;
  for (int rank = 0; rank < all.size(); ++rank) {
    WindowPlace theirs = mine;
    if (rank != all.rank()) std::memcpy(&theirs, all.channel().body(rank), sizeof(theirs));
    if (theirs.rows < 0 || theirs.rows > kMaxRows) {
      all.channel().throw_violation(kWindow, rank, "has " + std::to_string(theirs.rows) + " rows");
    }
    if (theirs.is_there == 0 && without < 0) without = rank;
    const std::byte* rows = nullptr;
    if (theirs.is_there != 0) {
      rows = all.channel().checked(kWindow, rank, {theirs.segment, theirs.offset},
                                   index(theirs.rows) * row_bytes);
    }
    state.rows.push_back(rows);
    state.first.push_back(state.first.back() + theirs.rows);
  }
  if (without < 0) return;
  const auto bytes =
      index(state.first[index(without) + 1] - state.first[index(without)]) * row_bytes;
  all.channel().all_ranks_throw();
  throw Error(ErrorKind::exhausted,
              "window: the registered memory of rank " + std::to_string(without) +
                  " does not hold " + std::to_string(bytes) +
                  " bytes more; expected Collectives with larger memory_bytes",
              {all.rank(), without, kWindow, 0, 0, 0});
}

}  // namespace

std::shared_ptr<const WindowState> HostCollectives::window(std::int64_t rows, std::int64_t columns,
                                                           Dtype dtype) {
  if (domains().count() > 1) {
    throw Error(ErrorKind::unsupported,
                "window: got ranks in " + std::to_string(domains().count()) +
                    " domains; expected one: over a network no rank's memory is read without it");
  }
  auto state = std::make_shared<WindowState>();
  const Event event = enter(kWindow, nullptr, [&](HostCollectives& all) {
    run_window(all, *state, {rows, columns}, dtype);
  });
  engine_->finish(kWindow, event);
  return state;
}

}  // namespace ferry::host
