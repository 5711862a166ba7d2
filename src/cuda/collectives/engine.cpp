#include "cuda/collectives/engine.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/check.hpp"
#include "core/check_collectives.hpp"
#include "cuda/throughput/call.hpp"

namespace ferry::cuda {
namespace {

constexpr std::int64_t kShareBytes = 128;  // shares of all_reduce begin at a multiple
/// An all_reduce of so much pushes its pieces, from wherever they lie: faster on 4 H200.
constexpr std::int64_t kPushBytes = 16 << 20;
constexpr int kPushingSms = 64;  // by default

Stage stage_of(CallKind kind) {
  switch (kind) {
    case CallKind::all_reduce: return Stage::all_reduce;
    case CallKind::reduce_scatter: return Stage::reduce_scatter;
    case CallKind::all_gather: return Stage::all_gather;
    case CallKind::broadcast: return Stage::broadcast;
    case CallKind::copy_rows: return Stage::copy_rows;
    case CallKind::add_rows: return Stage::add_rows;
    default: return Stage::all_to_all;
  }
}

std::int64_t bytes_of(const ConstTensorView& tensor) {
  return tensor.shape.product() * static_cast<std::int64_t>(size_of(tensor.dtype));
}

std::int64_t rounded_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// For a slot of pinned words: offsets, then bytes of blocks that follow each other.
void write_table(const std::vector<std::int64_t>& counts, std::int64_t element,
                 std::int64_t* table) {
  std::int64_t at = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    table[r] = at;
    table[counts.size() + r] = counts[r] * element;
    at += counts[r] * element;
  }
}

}  // namespace

std::size_t collective_body_bytes(int ranks) {
  return 2 * static_cast<std::size_t>(ranks) * sizeof(std::int64_t);
}

CudaCollectives::CudaCollectives(std::shared_ptr<CudaEngine> engine, const fabric::Segment& memory,
                                 int most_blocks)
    : engine_(std::move(engine)),
      layout_(make_collective_layout(engine_->size())),
      segment_(memory.id),
      most_blocks_(std::clamp(most_blocks, 1, static_cast<int>(layout_.round_bytes / kInboxUnit))) {
  const auto ranks = static_cast<std::size_t>(engine_->size());
  constexpr std::size_t kCalls = 16;  // on their way; more come when they are needed
  offers_.resize(ranks);
  counts_ = PinnedPool::make(3 * 2 * ranks * sizeof(std::int64_t), kCalls);
}

CollectiveParameters CudaCollectives::parameters(CallKind kind, Dtype dtype, std::int64_t elements,
                                                 int num_sms, int default_sms) {
  CollectiveParameters p;
  p.group = engine_->view();
  p.call.kind = kind;
  p.call.dtype = static_cast<std::uint32_t>(dtype);
  p.call.elements = elements;
  p.stage = stage_of(kind);
  p.layout = layout_;
  p.segment = segment_;
  p.element_bytes = static_cast<std::int64_t>(size_of(dtype));
  p.dtype = dtype;
  p.blocks = std::min(engine_->sms_for(name_of(kind), num_sms, default_sms), most_blocks_);
  return p;
}

/// Where peers touch this tensor, if they can: whole vectors of registered memory.
void CudaCollectives::place(CollectiveParameters& parameters, const void* data,
                            std::int64_t bytes) const {
  if (bytes == 0 || reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return;
  const auto found = engine_->gpu().registered().find(data, static_cast<std::size_t>(bytes));
  if (found) parameters.place = {bytes, found->offset, found->segment};
}

/// What a block moves of a piece in a round: as much as its inboxes hold, but two rounds of a short
/// piece, so that one is on its way while the other is summed. The same on all ranks.
std::int64_t CudaCollectives::chunk_of(const CollectiveParameters& p, std::int64_t piece) const {
  constexpr std::int64_t kUnit = kInboxUnit, kLeast = 8 << 10, kRounds = 2;
  const std::int64_t most =
      static_cast<std::int64_t>(layout_.round_bytes) / p.blocks / kUnit * kUnit;
  if (p.counts != nullptr) return most;
  const std::int64_t each = (piece + kRounds * p.blocks - 1) / (kRounds * p.blocks);
  return std::min(most, std::max(kLeast, rounded_up(each, kUnit)));
}

Event CudaCollectives::run(CollectiveParameters& p, std::int64_t largest, bool one_shot,
                           const Stream* stream, std::shared_ptr<std::byte> slot) {
  constexpr std::int64_t kBytesOfBlock = 16 << 10;  // at least
  constexpr std::int64_t kBytesOfOneShotBlock = 8 << 10;
  if (p.counts == nullptr) {
    const std::int64_t each = one_shot ? kBytesOfOneShotBlock : kBytesOfBlock;
    const std::int64_t useful = std::max<std::int64_t>(1, (largest + each - 1) / each);
    p.blocks = static_cast<int>(std::min<std::int64_t>(p.blocks, useful));
  }
  p.chunk = chunk_of(p, p.spreads ? p.to.bytes : largest);
  p.call.collective.blocks = p.blocks;  // every block talks to that of the same number elsewhere
  const char* name = name_of(p.call.kind);
  Launch launch(*engine_, name, stream);
  if (slot) launch.keep(std::move(slot));
  launch.use(p.x, {});  // the caller holds it
  if (p.out != p.x) launch.use(p.out, {});
  p.failure = launch.record()->failure;
  launch.enter(p.call);
  launch.run(one_shot ? launch_one_shot(p, launch.stream()) : launch_large(p, launch.stream()),
             name);
  const bool blocking = launch.blocking();
  Event event = launch.finish();
  if (!blocking) return event;
  engine_->finish(name, event);
  return {};
}

Event CudaCollectives::all_reduce(const TensorView& x, const ReduceOptions& options) {
  const std::int64_t bytes = bytes_of(x);
  const bool pushes = bytes >= kPushBytes;
  CollectiveParameters p = parameters(CallKind::all_reduce, x.dtype, x.shape.product(),
                                      options.num_sms, pushes ? kPushingSms : kDefaultSms);
  const auto most = static_cast<std::int64_t>(layout_.one_shot_bytes);
  const Algorithm algorithm = gpu_algorithm(options, bytes, most);
  const bool one_shot = algorithm == Algorithm::one_shot;
  p.call.collective.op = static_cast<std::uint8_t>(options.op);
  p.call.collective.algorithm = static_cast<std::uint16_t>(options.algorithm);
  p.call.collective.chosen = static_cast<std::uint32_t>(algorithm);
  p.op = options.op;
  p.reduces = p.spreads = true;
  p.x = p.out = static_cast<std::byte*>(x.data);
  if (one_shot) {
    p.to = {.bytes = bytes};
  } else {
    const std::int64_t ranks = engine_->size();
    const std::int64_t share = rounded_up((bytes + ranks - 1) / ranks, kShareBytes);
    p.to = {.stride = share, .bytes = share, .end = bytes};
    p.pushes = pushes;
    place(p, x.data, bytes);
  }
  return run(p, bytes, one_shot, options.stream);
}

Event CudaCollectives::reduce_scatter(const ConstTensorView& x, const TensorView& out,
                                      const ReduceOptions& options) {
  CollectiveParameters p =
      parameters(CallKind::reduce_scatter, x.dtype, x.shape.product(), options.num_sms);
  const std::int64_t block = bytes_of(out);
  p.call.collective.op = static_cast<std::uint8_t>(options.op);
  p.op = options.op;
  p.reduces = true;
  p.x = static_cast<const std::byte*>(x.data);
  p.out = static_cast<std::byte*>(out.data);
  p.to = {.stride = block, .bytes = block};
  if (block % 16 == 0) place(p, x.data, bytes_of(x));  // every block begins with a whole vector
  return run(p, block, is_small(block), options.stream);
}

Event CudaCollectives::all_gather(const ConstTensorView& x, const TensorView& out,
                                  const CollectiveOptions& options) {
  CollectiveParameters p =
      parameters(CallKind::all_gather, x.dtype, x.shape.product(), options.num_sms);
  const std::int64_t bytes = bytes_of(x);
  p.x = static_cast<const std::byte*>(x.data);
  p.out = static_cast<std::byte*>(out.data);
  p.to = {.bytes = bytes};
  p.from = {.stride = bytes, .bytes = bytes};
  place(p, out.data, bytes_of(out));
  return run(p, bytes, is_small(bytes), options.stream);
}

Event CudaCollectives::broadcast(const TensorView& x, int root, const CollectiveOptions& options) {
  CollectiveParameters p =
      parameters(CallKind::broadcast, x.dtype, x.shape.product(), options.num_sms);
  const std::int64_t bytes = bytes_of(x);
  const bool sends = root == engine_->rank();
  p.call.collective.root = static_cast<std::uint32_t>(root);
  p.x = p.out = static_cast<std::byte*>(x.data);
  p.to = {.bytes = sends ? bytes : 0};
  p.from = {.bytes = sends ? 0 : bytes, .only = root};
  place(p, x.data, bytes);
  return run(p, bytes, is_small(bytes), options.stream);
}

Event CudaCollectives::all_to_all(const ConstTensorView& x, const TensorView& out,
                                  BlockCounts counts, const CollectiveOptions& options) {
  // With counts each pair has a number of its own.
  CollectiveParameters p = parameters(CallKind::all_to_all, x.dtype,
                                      counts.equal ? x.shape.product() : 0, options.num_sms);
  p.x = static_cast<const std::byte*>(x.data);
  p.out = static_cast<std::byte*>(out.data);
  place(p, out.data, bytes_of(out));
  if (counts.equal) {
    const std::int64_t block = bytes_of(x) / engine_->size();
    p.to = p.from = {.stride = block, .bytes = block};
    return run(p, block, is_small(block), options.stream);
  }
  p.call.collective.has_counts = 1;
  // A rank that receives nothing has no place that peers could miss.
  if (bytes_of(out) == 0) p.place = {0, 0, 0};
  const OnDevice here(engine_->device().index);
  std::shared_ptr<std::byte> slot = counts_->take();
  split(p, counts, slot.get());
  return run(p, 0, false, options.stream, std::move(slot));
}

Event CudaCollectives::reduce_shares(const ConstTensorView& x, ReduceOp op, std::int64_t share,
                                     void* own, const CollectiveOptions& options) {
  const std::int64_t bytes = bytes_of(x), element = static_cast<std::int64_t>(size_of(x.dtype));
  CollectiveParameters p =
      parameters(CallKind::reduce_scatter, x.dtype, x.shape.product(), options.num_sms);
  p.op = op == ReduceOp::mean ? ReduceOp::sum : op;
  p.call.collective.op = static_cast<std::uint8_t>(p.op);
  p.reduces = true;
  p.x = static_cast<const std::byte*>(x.data);
  p.out = static_cast<std::byte*>(own);
  p.to = {.stride = share * element, .bytes = share * element, .end = bytes};
  if (share * element % 16 == 0) place(p, x.data, bytes);  // shares begin with whole vectors
  return run(p, share * element, is_small(share * element), options.stream);
}

Event CudaCollectives::gather_shares(const void* own, std::int64_t bytes, std::int64_t share,
                                     void* out, const CollectiveOptions& options) {
  CollectiveParameters p = parameters(CallKind::all_gather, Dtype::u8, bytes, options.num_sms);
  p.x = static_cast<const std::byte*>(own);
  p.out = static_cast<std::byte*>(out);
  p.from = {.stride = share, .bytes = share, .end = bytes};
  p.to = {.bytes = p.from.size(engine_->rank(), engine_->size())};
  place(p, out, bytes);
  return run(p, share, is_small(share), options.stream);
}

Event CudaCollectives::move_rows(const ConstTensorView& x, const TensorView& out,
                                 const GpuRowTable& table, const CollectiveOptions& options) {
  const CallKind kind = table.adds ? CallKind::add_rows : CallKind::copy_rows;
  const char* name = name_of(kind);
  RowsParameters rows;
  rows.base = parameters(kind, x.dtype, x.columns(), options.num_sms, kPushingSms);
  rows.table = table.table;
  rows.rows = static_cast<std::int32_t>(table.rows);
  rows.slots = static_cast<std::int32_t>(table.slots);
  rows.row_bytes = static_cast<std::int64_t>(x.row_bytes());
  rows.adds = table.adds;
  CollectiveParameters& p = rows.base;
  p.call.rows = {table.rows, table.slots, 0, 0};
  p.x = static_cast<const std::byte*>(x.data);
  p.out = static_cast<std::byte*>(out.data);
  p.reduces = true;  // peers touch all of the tensor
  const ConstTensorView shown = table.adds ? x : ConstTensorView(out);
  place(p, shown.data, bytes_of(shown));
  if (p.place.bytes < 0) {
    refuse(name, table.adds ? "x" : "out", "memory that peers cannot reach",
           "a tensor of Collectives.empty(), at a multiple of 16 bytes");
  }
  constexpr std::int64_t kBytesOfBlock = 16 << 10;  // at least
  const std::int64_t useful = (table.slots * rows.row_bytes + kBytesOfBlock - 1) / kBytesOfBlock;
  p.blocks = static_cast<int>(std::clamp<std::int64_t>(useful, 1, p.blocks));
  Launch launch(*engine_, name, options.stream);
  launch.use(p.x, {});  // the caller holds them
  launch.use(p.out, {});
  launch.use(rows.table, {});
  p.failure = launch.record()->failure;
  launch.enter(p.call);
  launch.run(launch_rows(rows, launch.stream()), name);
  const bool blocking = launch.blocking();
  Event event = launch.finish();
  if (!blocking) return event;
  engine_->finish(name, event);
  return {};
}

void CudaCollectives::split(CollectiveParameters& p, const BlockCounts& counts,
                            std::byte* slot) const {
  const auto ranks = static_cast<std::size_t>(engine_->size());
  auto* words = reinterpret_cast<std::int64_t*>(slot);
  std::copy(counts.to.begin(), counts.to.end(), words);
  std::copy(counts.from.begin(), counts.from.end(), words + ranks);
  write_table(counts.to, p.element_bytes, words + 2 * ranks);
  write_table(counts.from, p.element_bytes, words + 4 * ranks);
  p.counts = words;
  p.to.table = words + 2 * ranks;
  p.from.table = words + 4 * ranks;
}

}  // namespace ferry::cuda
