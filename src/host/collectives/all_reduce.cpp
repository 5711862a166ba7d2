// all_reduce: each element is reduced by one rank, its owner. Inside a domain ranks read each
// other's windows; what a domain has summed crosses to the owner, and the result comes back the
// same way.
#include <algorithm>
#include <array>
#include <utility>

#include "base/hash.hpp"
#include "host/collectives/algorithms.hpp"
#include "host/collectives/lent.hpp"

namespace ferry::host {
namespace {

constexpr const char* kAllReduce = "all_reduce";
constexpr std::int64_t kCrossing = 64 << 10;  // elements that cross as one write

class AllReduce {
 public:
  AllReduce(HostCollectives& all, const TensorView& x, const Reduction& reduction,
            const std::vector<int>& shares, ReduceFormat format, const StepMessage& head)
      : all_(all),
        data_(static_cast<std::byte*>(x.data)),
        count_(x.shape.product()),
        reduction_(reduction),
        format_(format),
        head_(head),
        cutter_(all.domains(), shares),
        round_(round_elements()) {}

  void run() {
    const Lent lent(all_, head_, data_, bytes(count_));
    if (!lends(head_)) write_window(0);
    all_.meet(kAllReduce, head_, std::as_bytes(std::span(&all_.compression_state().last_tally, 1)));
    coded_.emplace(all_, kAllReduce, format_, bytes(count_));
    const Lenders lenders(all_);
    if (lenders.every) return reduce_in_place();
    if (lends(head_)) write_window(0);
    if (lenders.some) all_.meet_members(kAllReduce);  // some ranks wrote their windows only now
    reduce_staged();
  }

 private:
  std::size_t bytes(std::int64_t elements) const { return reduction_.bytes(elements); }
  std::size_t partial(std::int64_t elements) const { return reduction_.partial_bytes(elements); }

  // One domain, all tensors lent: the owner of a share reads it on all ranks and writes the result
  // there. Nobody else touches it meanwhile.
  void reduce_in_place() {
    {
      const Borrowed borrowed(all_, kAllReduce, all_.members(),
                              [this](int) { return bytes(count_); });
      for (const Share& share : cutter_.cut(count_)) {
        if (!handles(share)) continue;
        std::vector<void*> places;
        for (std::byte* tensor : borrowed.tensors()) {
          places.push_back(tensor + bytes(share.first));
        }
        const std::vector<const void*> rows(places.begin(), places.end());
        reduce_all(reduction_, rows, share.count(), places);
      }
    }
    all_.meet_members(kAllReduce);
  }

  bool crosses() const { return all_.domains().count() > 1; }
  std::size_t inbox_bytes() const {
    return all_.staging().inbox_bytes / CollectiveStaging::kInboxes / kLineBytes * kLineBytes;
  }
  /// Of a round. Several domains have two rounds in one window of the staging buffer.
  std::size_t window_bytes() const { return all_.staging().window_bytes / (crosses() ? 2 : 1); }

  /// Elements of a round: the window holds them, and the inbox what crosses to their owners.
  std::int64_t round_elements() const {
    const auto window = static_cast<std::int64_t>(window_bytes() / size_of(reduction_.dtype));
    if (!crosses()) return window / kShareUnit * kShareUnit;
    auto round =
        cutter_.longest_round(window, static_cast<std::int64_t>(inbox_bytes() / partial(1)));
    // Before the formats of `automatic` are known.
    while (format_ != ReduceFormat::exact && round > kShareUnit &&
           CodedPlaces(cutter_.cut(round), all_.domains()).bytes() > inbox_bytes() / 2) {
      round -= (round / 8 + kShareUnit - 1) / kShareUnit * kShareUnit;
    }
    return round;
  }

  /// From now on this is about a round.
  void turn_to(std::int64_t round) {
    first_ = round * round_;
    const std::int64_t elements = std::min(round_, count_ - first_);
    if (elements != std::exchange(elements_, elements)) {
      shares_ = cutter_.cut(elements);
      places_.reset();
    }
    window_ = windows_[index(round) % windows_.size()];
    inbox_ = all_.staging().inbox() + index(round) % CollectiveStaging::kInboxes * inbox_bytes();
  }

  /// Writes this rank's elements of a round into its window. Several domains: into the first half
  /// of the next window, then into the second.
  void write_window(std::int64_t round) {
    const bool second = crosses() && round % 2 == 1;
    windows_[index(round) % windows_.size()] =
        second ? windows_[index(round - 1) % windows_.size()] + window_bytes() : all_.next_window();
    turn_to(round);
    for (const Share& share : shares_) {
      if (handles(share)) continue;  // nobody else reads it
      all_.show(window(all_.rank(), share.first), own(share.first), bytes(share.count()));
    }
  }
  /// The ranks of the domain have met since.
  void begin_round(std::int64_t round) {
    if (!crosses() || round % 2 == 0) all_.begin_round();
  }

  /// Elements of this round, in the tensor and in a window.
  std::byte* own(std::int64_t element) { return data_ + bytes(first_ + element); }
  std::byte* window(int member, std::int64_t element) {
    return all_.staged(member, window_ + bytes(element));
  }

  // While the ranks reduce a round, what they send for the next one is under way, and the results
  // of the one before: both directions of a link are used at once. Every rank sends to a peer, and
  // hears from it, partial results of round k + 1 before results of round k. A rank has the results
  // of round k − 2 when it sends partial results of round k + 1: so the inbox of three rounds
  // before has been used. The ranks of a domain have copied results of round k − 2 before they meet
  // for round k + 1, so the window of four rounds before is free.
  void reduce_staged() {
    const std::int64_t rounds = std::max((count_ + round_ - 1) / round_, std::int64_t{1});
    const std::int64_t ahead = crosses() ? 1 : 0;
    begin_round(0);
    if (ahead > 0) send_partials(0);
    for (std::int64_t k = 0; k < rounds + ahead; ++k) {
      if (const std::int64_t next = k + ahead; next > 0 && next < rounds) {
        write_window(next);
        all_.meet_members(kAllReduce);
        begin_round(next);
        if (ahead > 0) send_partials(next);
      }
      if (k < rounds) finish_shares(k);
      if (k >= ahead) take_results(k - ahead);
    }
  }

  bool handles(const Share& share) const {
    return rank_of(share, all_.domain(), all_.domains()) == all_.rank();
  }

  void send_partials(std::int64_t round) {
    turn_to(round);
    for (const Share& share : shares_) {
      if (handles(share) && share.domain != all_.domain()) send_partial(share);
    }
  }

  void finish_shares(std::int64_t round) {
    turn_to(round);
    for (const Share& share : shares_) {
      if (handles(share) && share.domain == all_.domain()) finish(share);
    }
  }

  void take_results(std::int64_t round) {
    turn_to(round);
    const Domains& domains = all_.domains();
    for (const Share& share : shares_) {
      if (handles(share) && share.domain != all_.domain()) hear_result(share);
    }
    all_.meet_members(kAllReduce);
    for (const Share& share : shares_) {
      if (handles(share) && share.domain == all_.domain()) continue;  // finished there
      copy_bytes(own(share.first), window(rank_of(share, all_.domain(), domains), share.first),
                 bytes(share.count()));
    }
  }

  /// From element `at` of a share that this rank handles, of the ranks of its domain.
  std::vector<const void*> rows(std::int64_t at) {
    std::vector<const void*> rows;
    for (const int member : all_.members()) {
      rows.push_back(member == all_.rank() ? own(at) : window(member, at));
    }
    return rows;
  }

  /// Where the partial result of `domain` lies in the inbox of the share's owner.
  std::size_t inbox(const Share& share, int domain) const {
    return inbox_ + partial(cutter_.inbox_place(share, domain, round_));
  }

  /// Elements that cross as one write.
  std::int64_t crossing() const { return coded_->codes() ? kCodedChunk : kCrossing; }

  /// Codes lie in the inbox of their round: sums in its first half, results in its second.
  std::size_t coded_sum(const Share& share, int domain, std::int64_t at) {
    return inbox_ + places().sum(index(&share - shares_.data()), domain) +
           chunk_offset(at - share.first);
  }
  std::size_t coded_result(const Share& share, int domain, std::int64_t at) {
    return inbox_ + inbox_bytes() / 2 + places().result(index(&share - shares_.data()), domain) +
           chunk_offset(at - share.first);
  }
  /// Of the shares of this round.
  const CodedPlaces& places() {
    if (!places_) places_.emplace(shares_, all_.domains());
    return *places_;
  }

  void send_partial(const Share& share) {
    const int owner = rank_of(share, share.domain, all_.domains());
    const std::size_t to = inbox(share, all_.domain());
    scratch_.resize(partial(kCrossing));
    for (std::int64_t at = share.first; at < share.end; at += crossing()) {
      const std::int64_t some = std::min(crossing(), share.end - at);
      reduce_ranks(reduction_, rows(at), some, scratch_.data());
      if (coded_->codes()) {
        coded_->encode(floats(scratch_.data()), some);
        coded_->send(owner, coded_sum(share, all_.domain(), at));
        continue;
      }
      all_.put(owner, to + partial(at - share.first), scratch_.data(), partial(some));
      all_.tell(owner, partial(some));
    }
  }

  /// Into the tensor, into this rank's window, and into that of the rank that handles the share in
  /// each other domain.
  void finish(const Share& share) {
    const Domains& domains = all_.domains();
    const auto results = [this](std::int64_t at) {
      return std::array<void*, 2>{own(at), window(all_.rank(), at)};
    };
    if (domains.count() == 1 && all_.stores_past_caches()) return finish_past_caches(share);
    if (domains.count() == 1) {
      return reduce_all(reduction_, rows(share.first), share.count(), results(share.first));
    }
    scratch_.resize(partial(kCrossing));
    for (std::int64_t at = share.first; at < share.end; at += crossing()) {
      const std::int64_t some = std::min(crossing(), share.end - at);
      std::byte* result = window(all_.rank(), at);
      reduce_domains(reduction_, partials(share, at, some), some, results(at));
      if (coded_->codes()) {
        send_coded(share, at, some);
        continue;
      }
      for (int d = 0; d < domains.count(); ++d) {
        if (d == all_.domain()) continue;
        const int peer = rank_of(share, d, domains);
        all_.put(peer, window_ + bytes(at), result, bytes(some));
        all_.tell(peer, bytes(some));
      }
    }
  }

  /// A piece is still in the nearest cache when it is copied into the window.
  void finish_past_caches(const Share& share) {
    constexpr std::int64_t kPiece = 2048;
    for (std::int64_t at = share.first; at < share.end; at += kPiece) {
      const std::int64_t some = std::min(kPiece, share.end - at);
      void* const out[] = {own(at)};
      reduce_all(reduction_, rows(at), some, out);
      all_.show(window(all_.rank(), at), own(at), bytes(some));
    }
  }

  /// Elements [at, at + some) of a share that this rank owns, as each domain has summed them.
  std::vector<const void*> partials(const Share& share, std::int64_t at, std::int64_t some) {
    std::vector<const void*> partials(index(all_.domains().count()));
    decoded_.resize(partials.size());
    reduce_ranks(reduction_, rows(at), some, scratch_.data());
    partials[index(all_.domain())] = scratch_.data();
    for (int d = 0; d < all_.domains().count(); ++d) {
      if (d == all_.domain()) continue;
      if (coded_->codes()) {
        std::vector<float>& values = decoded_[index(d)];
        values.resize(index(kCodedChunk));
        coded_->receive(rank_of(share, d, all_.domains()), coded_sum(share, d, at), some,
                        values.data());
        partials[index(d)] = values.data();
        continue;
      }
      all_.hear(kAllReduce, rank_of(share, d, all_.domains()));
      const std::size_t place = inbox(share, d) + partial(at - share.first);
      partials[index(d)] = all_.staged(all_.rank(), place);
    }
    return partials;
  }

  /// Encodes the result once for all domains; this one gets what the others decode.
  void send_coded(const Share& share, std::int64_t at, std::int64_t some) {
    float* result = floats(window(all_.rank(), at));
    coded_->encode(result, some);
    for (int d = 0; d < all_.domains().count(); ++d) {
      if (d == all_.domain()) continue;
      coded_->send(rank_of(share, d, all_.domains()), coded_result(share, d, at));
    }
    coded_->decode(some, result);
    copy_bytes(own(at), result, bytes(some));
  }

  /// Until a share that another domain owns lies in this rank's window.
  void hear_result(const Share& share) {
    const int owner = rank_of(share, share.domain, all_.domains());
    if (coded_->codes()) {
      coded_->receive_all(owner, coded_result(share, all_.domain(), share.first), share.count(),
                          floats(window(all_.rank(), share.first)));
      return;
    }
    for (std::int64_t at = share.first; at < share.end; at += kCrossing)
      all_.hear(kAllReduce, owner);
  }

  static float* floats(std::byte* bytes) { return static_cast<float*>(static_cast<void*>(bytes)); }

  HostCollectives& all_;
  std::byte* data_;
  std::int64_t count_;
  Reduction reduction_;
  ReduceFormat format_;
  StepMessage head_;
  std::optional<CodedSums> coded_{};
  ShareCutter cutter_;
  std::int64_t round_;                    // elements of a round, but the last
  std::array<std::size_t, 4> windows_{};  // of rounds, in the staging buffer
  std::int64_t first_ = 0;                // of the tensor, in this round
  std::int64_t elements_ = 0;             // of this round
  std::size_t window_ = 0, inbox_ = 0;    // of this round, in the staging buffer
  std::vector<std::byte> scratch_{};
  std::vector<Share> shares_{};                // of this round
  std::optional<CodedPlaces> places_{};        // of their codes
  std::vector<std::vector<float>> decoded_{};  // sums of the domains
};

/// What crosses between domains, as far as is known before the call.
ReduceVolume volume_of(HostCollectives& all, const Reduction& reduction, std::int64_t count,
                       ReduceFormat format) {
  ReduceVolume volume{static_cast<double>(reduction.partial_bytes(count)),
                      static_cast<double>(reduction.bytes(count)),
                      static_cast<double>(all.staging().window_bytes) / 2};
  if (format == ReduceFormat::exact) return volume;
  const CodeFormats formats =
      all.compression_state().policy.formats(format, reduction.bytes(count));
  if (!formats.codes()) return volume;
  const auto bytes = static_cast<double>(code_bytes(formats.sent, static_cast<std::size_t>(count)));
  return {bytes, bytes, volume.round_bytes * bytes / volume.down_bytes, true};
}

/// The same on all ranks.
ReduceWay way_of(HostCollectives& all, const ReduceVolume& volume, const ReduceOptions& options,
                 const Reduction& reduction, bool small) {
  if (options.algorithm != Algorithm::automatic) return {options.algorithm, options.shares};
  if (small) return {Algorithm::one_shot, {}};
  if (all.domains().count() == 1) return {Algorithm::direct, options.shares};
  const bool rounds = reduction.partial_dtype() == Dtype::f32;  // so the order of the sum matters
  const bool any_order = !rounds || options.any_order;
  // Ring and tree would round codes at every hop.
  ReduceWay way = all.next_way(volume, any_order && options.format == ReduceFormat::exact);
  if (!options.shares.empty()) way.shares = options.shares;
  return way;
}

}  // namespace

void run_all_reduce(HostCollectives& all, const TensorView& x, const ReduceOptions& asked) {
  ReduceOptions options = asked;
  options.format = usable_format(asked, x.dtype);
  const std::int64_t count = x.shape.product();
  const Reduction reduction{options.op, x.dtype, all.mean_ranks()};
  StepMessage head = head_of(CallKind::all_reduce, x.dtype, count, options.op, asked.format);
  head.call.collective.algorithm = static_cast<std::uint16_t>(options.algorithm);
  head.call.collective.any_order = options.any_order ? 1 : 0;
  const bool small = reduction.bytes(count) <= eager_bytes(all.size());
  if (!small && all.links_due()) all.measure_links(kAllReduce, head);
  const ReduceVolume volume =
      volume_of(all, reduction, count, small ? ReduceFormat::exact : options.format);
  const ReduceWay way = way_of(all, volume, options, reduction, small);
  head.call.collective.chosen = static_cast<std::uint32_t>(way.algorithm);
  head.call.collective.shares_hash = hash_of(way.shares);
  const bool alone = all.size() == 1;
  if (way.algorithm == Algorithm::one_shot) {
    reduce_in_one_shot(all, x, reduction, head);
  } else if (!alone && way.algorithm == Algorithm::ring) {
    all.meet(kAllReduce, head);
    reduce_along_ring(all, x, options.op);
  } else if (!alone && way.algorithm == Algorithm::tree) {
    all.meet(kAllReduce, head);
    reduce_by_tree(all, x, options.op);
  } else {
    AllReduce(all, x, reduction, way.shares, options.format, head).run();
  }
  all.end_reduce(way, volume, options.algorithm == Algorithm::automatic);
}

}  // namespace ferry::host
