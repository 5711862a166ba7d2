#include "fabric/fabric.hpp"

#include <ferry/error.hpp>
#include <string>

namespace ferry::fabric {

Segment Fabric::adopt(const Segment& segment) {
  throw Error(ErrorKind::unsupported,
              "rank " + std::to_string(rank()) + ": fabric " + std::string(name()) +
                  " registers memory of its own alone, not segment " + std::to_string(segment.id) +
                  " of another fabric",
              {.rank = rank()});
}

}  // namespace ferry::fabric
