// The calls of collectives over several domains, step by step.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/hash.hpp"
#include "core/check.hpp"
#include "cuda/collectives/domains.hpp"

namespace ferry::cuda {
namespace {

constexpr std::int64_t kUnit = 128;

std::int64_t bytes_of(Dtype dtype) {
  return static_cast<std::int64_t>(size_of(dtype));
}
/// Sums of a domain are not rounded.
Dtype summed(Dtype dtype) {
  return dtype == Dtype::bf16 || dtype == Dtype::f16 ? Dtype::f32 : dtype;
}
std::int64_t up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
/// Whole units, if there is one.
std::int64_t down(std::int64_t value) {
  return value < kUnit ? std::max<std::int64_t>(value, 1) : value / kUnit * kUnit;
}
std::int64_t steps_of(std::int64_t count, std::int64_t each) {
  return (count + each - 1) / each;
}
const std::byte* at(const void* data, std::int64_t offset) {
  return static_cast<const std::byte*>(data) + offset;
}
std::byte* at(void* data, std::int64_t offset) {
  return static_cast<std::byte*>(data) + offset;
}

/// What crosses: as asked, but what is already summed in f32 of narrower elements is not encoded.
ReduceOptions crossing_options(const ReduceOptions& asked, Dtype dtype) {
  ReduceOptions options = asked;
  options.stream = nullptr;
  options.num_sms = 0;
  if (dtype != Dtype::f32) options.format = ReduceFormat::exact;
  return options;
}

CallSignature signature_of(CallKind kind, Dtype dtype, std::int64_t elements,
                           const ReduceOptions& options = {}) {
  CallSignature call;
  call.kind = kind;
  call.dtype = static_cast<std::uint32_t>(dtype);
  call.elements = elements;
  call.collective.op = static_cast<std::uint8_t>(options.op);
  call.collective.format = static_cast<std::uint8_t>(options.format);
  call.collective.algorithm = static_cast<std::uint16_t>(options.algorithm);
  call.collective.any_order = options.any_order ? 1 : 0;
  call.collective.shares_hash = hash_of(options.shares);
  return call;
}

}  // namespace

Event DomainCollectives::all_reduce(const TensorView& x, const ReduceOptions& asked) {
  if (asked.algorithm == Algorithm::one_shot) {
    refuse("all_reduce", "algorithm", "one_shot with GPUs in several domains",
           "automatic, direct, hierarchical, ring or tree: small tensors go in one shot anyway");
  }
  if (!asked.shares.empty() && std::ssize(asked.shares) != domains()) {
    refuse("all_reduce", "shares", std::to_string(asked.shares.size()) + " numbers",
           std::to_string(domains()) + ", one for each domain");
  }
  const Dtype dtype = x.dtype, wide = summed(dtype);
  const std::int64_t count = x.shape.product(), element = bytes_of(wide);
  // A few steps, so that they overlap, of which none is short.
  constexpr std::int64_t kSteps = 4, kLeast = 256 << 10;
  const std::int64_t most = rails_ * (room() / element / kUnit * kUnit);
  const std::int64_t least = std::min(most, rails_ * kLeast / element);
  const std::int64_t each =
      std::clamp(up((count + kSteps - 1) / kSteps, rails_ * kUnit), least, most);
  const ReduceOptions options = crossing_options(asked, dtype);
  const auto part = [=](std::int64_t step) { return std::min(each, count - step * each); };
  const auto data = [=](std::int64_t step) {
    return at(x.data, step * each * static_cast<std::int64_t>(size_of(dtype)));
  };
  DomainGpus& gpus = *parts_.gpus;
  Steps steps;
  steps.leave = [=, this, &gpus](std::int64_t step, const DomainRoom& room) {
    ConstTensorView own = gpu(data(step), dtype, part(step));
    if (wide != dtype) {
      const TensorView converted = gpu(room.scratch, wide, part(step));
      gpus.convert(own, converted);
      own = converted;
    }
    gpus.reduce_shares(own, options.op, share_of(part(step)), room.leaving);
  };
  steps.cross = [=, this](std::int64_t step, const DomainRoom& room) {
    const std::int64_t own = own_share(part(step), share_of(part(step)));
    if (!parts_.rail || own == 0) return;
    among(rail_, [&] { parts_.rail->all_reduce(host(room.leaving, wide, own), options); });
  };
  steps.spread = [=, this, &gpus](std::int64_t step, const DomainRoom& room) {
    std::byte* out = wide != dtype ? room.scratch : data(step);
    gpus.gather_shares(room.leaving, part(step) * element, share_of(part(step)) * element, out);
    if (wide != dtype) gpus.convert(gpu(out, wide, part(step)), gpu(data(step), dtype, part(step)));
  };
  return enter(
      {signature_of(CallKind::all_reduce, dtype, count, asked), asked.num_sms, {x.data}},
      asked.stream, [=] { return steps_of(count, each); }, steps);
}

/// The blocks for the ranks of a domain lie one behind the other, padded to those of the largest.
Event DomainCollectives::reduce_scatter(const ConstTensorView& x, const TensorView& out,
                                        const ReduceOptions& asked) {
  const Dtype dtype = x.dtype, wide = summed(dtype);
  const std::int64_t block = out.shape.product(), narrow = bytes_of(dtype),
                     element = bytes_of(wide);
  const std::int64_t most = rails_ * (room() / domains() / element / kUnit * kUnit);
  const std::int64_t each =
      std::min(std::max<std::int64_t>(block, 1), down(most / largest_domain_));
  const ReduceOptions options = crossing_options(asked, dtype);
  const auto part = [=](std::int64_t step) { return std::min(each, block - step * each); };
  const auto padded = [=, this](std::int64_t step) {
    return up(largest_domain_ * part(step), kUnit);
  };
  const auto share = [=, this](std::int64_t step) { return share_of(padded(step)); };
  const auto elements = [=, this](int d, std::int64_t step) {
    return std::ssize(parts_.domains.members(d)) * part(step);
  };
  DomainGpus& gpus = *parts_.gpus;
  Steps steps;
  steps.leave = [=, this, &gpus](std::int64_t step, const DomainRoom& room) {
    const std::int64_t some = part(step);
    for (int d = 0; d < domains(); ++d) {
      std::byte* blocks = room.scratch + d * padded(step) * element;
      for (const int r : parts_.domains.members(d)) {
        gpus.convert(gpu(at(x.data, (r * block + step * each) * narrow), dtype, some),
                     gpu(blocks + parts_.domains.index(r) * some * element, wide, some));
      }
      gpus.reduce_shares(gpu(blocks, wide, elements(d, step)), options.op, share(step),
                         room.leaving + d * share(step) * element);
    }
  };
  steps.cross = [=, this](std::int64_t step, const DomainRoom& room) {
    if (!parts_.rail) return;
    for (int d = 0; d < domains(); ++d) {  // what pads is no number that matters
      const std::int64_t own = own_share(elements(d, step), share(step));
      std::memset(room.leaving + (d * share(step) + own) * element, 0,
                  index((share(step) - own) * element));
    }
    among(rail_, [&] {
      parts_.rail->reduce_scatter(host(room.leaving, wide, domains() * share(step)),
                                  host(room.come, wide, share(step)), options);
    });
  };
  steps.spread = [=, this, &gpus](std::int64_t step, const DomainRoom& room) {
    const std::int64_t some = part(step);
    gpus.gather_shares(room.come, elements(domain(), step) * element, share(step) * element,
                       room.scratch);
    gpus.convert(gpu(room.scratch + place() * some * element, wide, some),
                 gpu(at(out.data, step * each * narrow), dtype, some));
  };
  return enter(
      {signature_of(CallKind::reduce_scatter, dtype, x.shape.product(), asked),
       asked.num_sms,
       {x.data, out.data}},
      asked.stream, [=] { return steps_of(block, each); }, steps);
}

/// The blocks of a domain's ranks lie one behind the other on all of them; each rail carries a
/// share.
Event DomainCollectives::all_gather(const ConstTensorView& x, const TensorView& out,
                                    const CollectiveOptions& options) {
  const auto block = static_cast<std::int64_t>(x.bytes());
  const std::int64_t most = rails_ * (room() / domains() / kUnit * kUnit);
  const std::int64_t each =
      std::min(std::max<std::int64_t>(block, 1), down(most / largest_domain_));
  const auto part = [=](std::int64_t step) { return std::min(each, block - step * each); };
  const auto padded = [=, this](std::int64_t step) {
    return up(largest_domain_ * part(step), kUnit);
  };
  const auto share = [=, this](std::int64_t step) { return share_of(padded(step)); };
  const auto bytes = [=, this](int d, std::int64_t step) {
    return std::ssize(parts_.domains.members(d)) * part(step);
  };
  DomainGpus& gpus = *parts_.gpus;
  const auto copy = [=, this, &gpus](void* to, const void* from, std::int64_t n) {
    gpus.convert(gpu(from, Dtype::u8, n), gpu(to, Dtype::u8, n));
  };
  Steps steps;
  steps.leave = [=, this](std::int64_t step, const DomainRoom& room) {
    std::byte* blocks = room.scratch + domain() * padded(step);
    parts_.gpus->gather_shares(at(x.data, step * each), bytes(domain(), step), part(step), blocks);
    if (parts_.rail) {
      copy(room.leaving, blocks + place() * share(step),
           own_share(bytes(domain(), step), share(step)));
    }
  };
  steps.cross = [=, this](std::int64_t step, const DomainRoom& room) {
    if (!parts_.rail) return;
    among(rail_, [&] {
      parts_.rail->all_gather(host(room.leaving, Dtype::u8, share(step)),
                              host(room.come, Dtype::u8, domains() * share(step)), {});
    });
  };
  steps.spread = [=, this](std::int64_t step, const DomainRoom& room) {
    for (int d = 0; d < domains(); ++d) {
      std::byte* blocks = room.scratch + d * padded(step);
      if (d != domain()) {
        parts_.gpus->gather_shares(room.come + d * share(step), bytes(d, step), share(step),
                                   blocks);
      }
      for (const int r : parts_.domains.members(d)) {
        copy(at(out.data, r * block + step * each), blocks + parts_.domains.index(r) * part(step),
             part(step));
      }
    }
  };
  return enter(
      {signature_of(CallKind::all_gather, x.dtype, x.shape.product()),
       options.num_sms,
       {x.data, out.data}},
      options.stream, [=] { return steps_of(block, each); }, steps);
}

Event DomainCollectives::broadcast(const TensorView& x, int root,
                                   const CollectiveOptions& options) {
  const auto count = static_cast<std::int64_t>(x.bytes());
  const std::int64_t each =
      std::min(std::max<std::int64_t>(count, 1), rails_ * (room() / kUnit * kUnit));
  const int source = parts_.domains.of(root), inside = parts_.domains.index(root);
  const bool sends = source == domain();
  const auto part = [=](std::int64_t step) { return std::min(each, count - step * each); };
  Steps steps;
  steps.leave = [=, this](std::int64_t step, const DomainRoom& room) {
    if (!sends) return;
    std::byte* data = at(x.data, step * each);
    parts_.gpus->broadcast(data, part(step), inside);
    const std::int64_t share = share_of(part(step)), own = own_share(part(step), share);
    if (!parts_.rail || own == 0) return;
    parts_.gpus->convert(gpu(data + place() * share, Dtype::u8, own),
                         gpu(room.leaving, Dtype::u8, own));
  };
  steps.cross = [=, this](std::int64_t step, const DomainRoom& room) {
    const std::int64_t own = own_share(part(step), share_of(part(step)));
    if (!parts_.rail || own == 0) return;
    among(rail_, [&] { parts_.rail->broadcast(host(room.leaving, Dtype::u8, own), source, {}); });
  };
  steps.spread = [=, this](std::int64_t step, const DomainRoom& room) {
    if (sends) return;
    parts_.gpus->gather_shares(room.leaving, part(step), share_of(part(step)),
                               at(x.data, step * each));
  };
  CallSignature call = signature_of(CallKind::broadcast, x.dtype, x.shape.product());
  call.collective.root = static_cast<std::uint32_t>(root);
  return enter(
      {call, options.num_sms, {x.data}}, options.stream, [=] { return steps_of(count, each); },
      steps);
}

namespace {

/// Parts of blocks that lie one behind the other, in a tensor and packed for a step.
class BlockParts {
 public:
  BlockParts(std::vector<std::int64_t> counts, std::int64_t element, std::int64_t each)
      : counts_(std::move(counts)), element_(element), each_(each) {}

  /// Elements of the block of a rank in a step.
  std::int64_t count(int rank, std::int64_t step) const {
    return std::clamp<std::int64_t>(counts_[index(rank)] - step * each_, 0, each_);
  }
  /// Where they lie in the tensor, in bytes.
  std::int64_t offset(int rank, std::int64_t step) const {
    std::int64_t before = 0;
    for (int r = 0; r < rank; ++r) before += counts_[index(r)];
    return (before + std::min(counts_[index(rank)], step * each_)) * element_;
  }
  std::int64_t bytes(int rank, std::int64_t step) const { return count(rank, step) * element_; }

 private:
  std::vector<std::int64_t> counts_;
  std::int64_t element_;
  std::int64_t each_;
};

std::int64_t sum(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

/// Of a domain: what its ranks exchange with each other, and this one with those of others.
struct BlockSteps {
  const Domains& domains;
  int domain;
  BlockParts to;
  BlockParts from;

  bool inside(int rank) const { return domains.of(rank) == domain; }
  BlockCounts within(std::int64_t step) const {
    BlockCounts counts;
    for (const int member : domains.members(domain)) {
      counts.to.push_back(to.count(member, step));
      counts.from.push_back(from.count(member, step));
    }
    return counts;
  }
  BlockCounts beyond(std::int64_t step) const {
    BlockCounts counts;
    for (int r = 0; r < domains.ranks(); ++r) {
      counts.to.push_back(inside(r) ? 0 : to.count(r, step));
      counts.from.push_back(inside(r) ? 0 : from.count(r, step));
    }
    return counts;
  }
};

}  // namespace

/// Blocks for other domains cross between the ranks themselves, through no rail.
Event DomainCollectives::all_to_all(const ConstTensorView& x, const TensorView& out,
                                    BlockCounts counts, const CollectiveOptions& options) {
  const Dtype dtype = x.dtype;
  const std::int64_t element = bytes_of(dtype);
  const std::int64_t each = std::max<std::int64_t>(1, room() / size() / element);
  const BlockSteps blocks{
      parts_.domains, domain(), {counts.to, element, each}, {counts.from, element, each}};
  const auto copy = [this, dtype](void* target, const void* source, std::int64_t n) {
    parts_.gpus->convert(gpu(source, dtype, n), gpu(target, dtype, n));
  };
  const auto received = [this](const DomainRoom& room) { return room.scratch + this->room(); };
  Steps steps;
  steps.leave = [=, this](std::int64_t step, const DomainRoom& room) {
    std::byte *here = room.scratch, *beyond = room.leaving;
    for (int r = 0; r < size(); ++r) {
      std::byte*& end = blocks.inside(r) ? here : beyond;
      copy(end, at(x.data, blocks.to.offset(r, step)), blocks.to.count(r, step));
      end += blocks.to.bytes(r, step);
    }
    const BlockCounts within = blocks.within(step);
    parts_.gpus->all_to_all(gpu(room.scratch, dtype, sum(within.to)),
                            gpu(received(room), dtype, sum(within.from)), within);
  };
  steps.cross = [=, this](std::int64_t step, const DomainRoom& room) {
    const BlockCounts beyond = blocks.beyond(step);
    parts_.all->all_to_all(host(room.leaving, dtype, sum(beyond.to)),
                           host(room.come, dtype, sum(beyond.from)), beyond, {});
  };
  steps.spread = [=, this](std::int64_t step, const DomainRoom& room) {
    const std::byte *here = received(room), *beyond = room.come;
    for (int r = 0; r < size(); ++r) {
      const std::byte*& end = blocks.inside(r) ? here : beyond;
      copy(at(out.data, blocks.from.offset(r, step)), end, blocks.from.count(r, step));
      end += blocks.from.bytes(r, step);
    }
  };
  Call call{
      signature_of(CallKind::all_to_all, dtype, 0), options.num_sms, {x.data, out.data}, counts.to};
  call.counts.insert(call.counts.end(), counts.from.begin(), counts.from.end());
  return enter(call, options.stream, [=, this] { return steps_of(longest_block_, each); }, steps);
}

}  // namespace ferry::cuda
