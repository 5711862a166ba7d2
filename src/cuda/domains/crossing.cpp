// How the rows of a call go to the proxy, and where they lie in the stages.
#include <algorithm>
#include <atomic>
#include <utility>

#include "cuda/domains/engine.hpp"
#include "cuda/runtime/stream_wait.hpp"

namespace ferry::cuda {

std::size_t CrossingWay::place(int target, int source) const {
  std::size_t bytes = 0;
  for (int s = 0; s < source; ++s) {
    bytes +=
        layout.block_bytes(back ? crossing_rows(plan->exchange, plan->crossing, how, target, s)
                                : crossing_rows(plan->exchange, plan->crossing, how, s, target));
  }
  return bytes;
}

/// Every rank knows who needs more, so all do this together or none.
void DomainEngine::make_room(const CrossingWay& way, const CrossingTables& tables) {
  std::vector<std::size_t> needs;
  for (int r = 0; r < size(); ++r) needs.push_back(way.place(r, size()));
  std::size_t out = 0;
  for (const CrossingBlock& block : way.sent(tables)) out += way.layout.block_bytes(block.rows);
  if (stage_.has(DomainStage::kIn, needs) && stage_.has_out(out)) return;
  proxy_->run(
      [this, needs, out, stage = way.stage] {
        if (!stage_.has_out(out)) stage_.grow_out(out);
        if (!stage_.has(DomainStage::kIn, needs)) stage_.grow(stage, DomainStage::kIn, needs);
      },
      config_.on_wait);
}

void DomainCall::order(cudaStream_t before, cudaStream_t behind) {
  const GpuEvent event = engine_.inside().gpu().events()->take();
  check(cudaEventRecord(event.get(), before), "cudaEventRecord");
  check(cudaStreamWaitEvent(behind, event.get(), 0), "cudaStreamWaitEvent");
}

void DomainCall::send(const CrossingWay& way, const CrossingTables& tables, const StepMessage& head,
                      PackParameters pack, std::function<void(engine::Channel&)> agree) {
  DomainEngine& engine = engine_;
  auto call = std::make_shared<engine::CrossingCall>();
  call->stage = way.stage;
  call->head = head;
  call->head.stage_segment = engine.stage_.segment(DomainStage::kIn);
  call->from = engine.stage_.data(DomainStage::kOut);
  call->agree = std::move(agree);
  std::uint64_t from = 0;
  for (const CrossingBlock& block : way.sent(tables)) {
    const std::size_t bytes = way.layout.block_bytes(block.rows);
    call->windows.push_back({block.rank, from, way.place(block.rank, engine.rank()), bytes});
    from += bytes;
    call->puts += static_cast<std::uint64_t>(way.layout.chunks(block.rows));
  }
  std::int64_t most = 0;
  for (const CrossingBlock& block : way.received(tables)) {
    call->sources.push_back({block.rank, way.layout.chunks(block.rows)});
    most = std::max(most, call->sources.back().chunks);
  }
  call->pieces = crossing_pieces(most);
  if (!way.back) call->together = engine.parts_.domains.members(engine.domain_of(engine.rank()));
  call->first = engine.commands_;
  call->number = engine.pieces_ += static_cast<std::uint64_t>(call->pieces);
  engine.commands_ += 1 + call->puts;
  engine.proxy_->submit(call);
  crossing_ = call;
  pack.layout = way.layout;
  pack.blocks = way.back ? tables.in : tables.out;
  pack.index = way.back ? tables.returned : tables.sent;
  pack.stage = engine.stage_.data(DomainStage::kOut);
  try {
    order(native_, engine.beside_);
    pack_in_pieces(*call, pack);
  } catch (const Error& error) {
    engine.fail(name_, error);  // the peers are in this call, or will be
    throw;
  }
}

void DomainCall::await_piece(int piece) {
  const auto behind = static_cast<std::uint64_t>(crossing_->pieces - 1 - piece);
  wait_for_word(engine_.beside_, engine_.words_.arrived, crossing_->number - behind);
}

void DomainCall::receive(const std::function<void(int piece, cudaStream_t stream)>& use) {
  received_ = true;
  try {
    order(native_, engine_.beside_);
    for (int piece = use ? 0 : pieces() - 1; piece < pieces(); ++piece) {
      await_piece(piece);
      if (use) use(piece, engine_.beside_);
    }
    order(engine_.beside_, native_);
  } catch (const Error& error) {
    engine_.fail(name_, error);
    // Whatever was launched ends now, and before what comes next.
    if (const GpuEvent end = engine_.inside().gpu().events()->record(engine_.beside_)) {
      (void)cudaStreamWaitEvent(native_, end.get(), 0);
    }
    throw;
  }
}

/// The ring never overflows: a piece is started when its last command has room.
void DomainCall::pack_in_pieces(const engine::CrossingCall& call, PackParameters pack) {
  pack.ring = reinterpret_cast<protocol::CommandSlot*>(engine_.ring_memory_.get());
  pack.ring_size = kRingSlots;
  pack.first_command = call.first;
  const std::uint64_t* taken = engine_.words_.taken;
  const protocol::CommandRing<> ring(pack.ring, kRingSlots, engine_.words_.taken);
  const auto chunks = static_cast<std::int64_t>(call.puts);
  constexpr auto kPiece = static_cast<std::int64_t>(kRingSlots / 2);
  for (std::int64_t first = 0; first == 0 || first < chunks; first += kPiece) {
    pack.first_chunk = first;
    pack.end_chunk = std::min(chunks, first + kPiece);
    const std::uint64_t needed =
        ring.needed(call.first + static_cast<std::uint64_t>(pack.end_chunk));
    const std::atomic_ref word(*engine_.words_.taken);
    if (word.load(std::memory_order_acquire) < needed) {
      wait_for_word(engine_.beside_, taken, needed);
    }
    check(launch_pack(pack, engine_.beside_), "launch_pack");
  }
}

}  // namespace ferry::cuda
