#include "doctor/build.hpp"

#include <sstream>

#include "ferry/group.hpp"

namespace ferry::cli {

Build look_at_build() {
  Build build;
  for (const FabricKind kind :
       {FabricKind::local, FabricKind::shm, FabricKind::sim, FabricKind::ofi}) {
    if (Group::has_fabric(kind)) build.fabrics.emplace_back(name_of(kind));
  }
  if (!Group::has_backend(Backend::cuda)) return build;
  build.engines.emplace_back("cuda");
  std::istringstream kinds(FERRY_CUDA_ARCHITECTURES);  // "80-real,100": the latter as PTX, too
  for (std::string kind; std::getline(kinds, kind, ',');) {
    const bool only_real = kind.find('-') != std::string::npos;
    build.gpus.push_back("sm_" + kind.substr(0, kind.find('-')) + (only_real ? "" : " and newer"));
  }
  return build;
}

}  // namespace ferry::cli
