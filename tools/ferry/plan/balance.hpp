// What copies of busy experts would do for recorded routes.
#pragma once
#include "plan/routes.hpp"

namespace ferry::cli {

/// Of all recorded calls. Loads are those of the heaviest rank over the mean.
struct BalanceGain {
  int ranks = 0;
  double before = 0, worst_before = 0;  ///< mean and largest
  double after = 0, worst_after = 0;
  double copies = 0;   ///< of a call, mean; in a training each is fetched and reduced
  double fetched = 0;  ///< of them, where weights do not change between calls
};

struct BalanceTerms {
  int slots = 1;        ///< of a rank
  int copies = 1;       ///< of each expert, as of RecordedRoutes::of
  int domain_size = 0;  ///< ranks
  int copy_rows = 0;    ///< as of BatchBalancer
};

/// By BatchBalancer, call after call.
BalanceGain gain_of_balance(const RecordedRoutes& routes, int ranks, const BalanceTerms& terms);

}  // namespace ferry::cli
