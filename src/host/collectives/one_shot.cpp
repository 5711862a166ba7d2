// all_reduce in one shot: the data ride in the messages that the ranks give each other, and every
// rank reduces them all.
#include "host/collectives/algorithms.hpp"

namespace ferry::host {

void reduce_in_one_shot(HostCollectives& all, const TensorView& x, const Reduction& reduction,
                        const StepMessage& head) {
  const std::int64_t count = x.shape.product();
  all.meet("all_reduce", head, {static_cast<const std::byte*>(x.data), x.bytes()});
  const Domains& domains = all.domains();
  void* const result[] = {x.data};
  std::vector<std::vector<std::byte>> partials;
  std::vector<const void*> sums;
  for (int d = 0; d < domains.count(); ++d) {
    std::vector<const void*> rows;
    for (const int rank : domains.members(d)) rows.push_back(all.channel().body(rank));
    if (domains.count() == 1) return reduce_all(reduction, rows, count, result);
    partials.emplace_back(reduction.partial_bytes(count));
    reduce_ranks(reduction, rows, count, partials.back().data());
    sums.push_back(partials.back().data());
  }
  reduce_domains(reduction, sums, count, result);
}

}  // namespace ferry::host
