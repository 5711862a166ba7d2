// The bootstrap of a process that meets nobody.
#pragma once
#include <ferry/bootstrap.hpp>
#include <memory>
#include <string>

namespace ferry::bootstrap {

/// `job.join` or `job.begin`, not both.
std::shared_ptr<Bootstrap> lone_bootstrap(int rank, int size, CustomJob job,
                                          std::string own_address = {});

}  // namespace ferry::bootstrap
