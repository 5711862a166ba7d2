// Everything that a program needs to use Ferry.
#pragma once
#include "ferry/bootstrap.hpp"
#include "ferry/collectives.hpp"
#include "ferry/dtype.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "ferry/latency.hpp"
#include "ferry/links.hpp"
#include "ferry/network.hpp"
#include "ferry/plan.hpp"
#include "ferry/stream.hpp"
#include "ferry/tensor.hpp"
#include "ferry/version.hpp"
