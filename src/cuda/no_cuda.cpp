#include "cuda/engine.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

bool available() {
  return false;
}

std::shared_ptr<Engine> make_cuda_engine(Bootstrap& bootstrap, const GroupConfig&,
                                         std::unique_ptr<fabric::Fabric>) {
  throw Error(ErrorKind::unsupported,
              "Group: backend: got cuda; this build of Ferry has the host engine only (the CUDA "
              "engine is not there yet); expected host or automatic",
              {bootstrap.rank(), -1, "Group: backend", 0, 0, 0});
}

}  // namespace ferry::cuda
