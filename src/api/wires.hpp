// By which wires the ranks of a group reach each other: chosen once, when it is created.
#pragma once
#include <memory>

#include "api/domain_bootstrap.hpp"
#include "core/domains.hpp"
#include "cuda/engine.hpp"
#include "fabric/fabric.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/group.hpp"

namespace ferry {

/// What joins the ranks of one domain, and which ranks form one.
struct Inside {
  FabricKind kind = FabricKind::local;
  Domains domains;
  bool hosts = false;  ///< each domain is a host
};

/// Collective. A configuration that is valid and the same on all ranks: `agree_on` them.
Inside agree_on_wires(Bootstrap& bootstrap, GroupConfig& config);

/// Collective. What reaches the ranks of the own domain, and over `network` those of the others.
std::unique_ptr<fabric::Fabric> make_wires(Bootstrap& bootstrap, const GroupConfig& config,
                                           const Inside& inside);

/// How GPUs of a domain meet; all arguments outlive the result.
cuda::DomainWires wires_inside(DomainBootstrap& part, const GroupConfig& config,
                               const Inside& inside);

}  // namespace ferry
