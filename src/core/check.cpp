// Checks of the arguments of Group (experts, ranks, deadlines) and of tensors; `refuse` words every
// such error. Those of calls: check_exchange.cpp, check_latency.cpp.
#include "core/check.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "base/text.hpp"

namespace ferry {

using std::to_string;

namespace {

bool known(Dtype dtype) {
  return size_of(dtype) != 0;
}

std::string device_text(const Device& device) {
  return device.kind == DeviceKind::cpu ? "cpu" : "cuda:" + to_string(device.index);
}

}  // namespace

std::string dtype_text(Dtype dtype) {
  return known(dtype) ? std::string(name_of(dtype))
                      : "number " + to_string(static_cast<int>(dtype)) + " (no ferry::Dtype)";
}

bool is_float(Dtype dtype) {
  return dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16;
}

void check_row_bytes(std::string_view call, std::string_view name, std::size_t bytes) {
  if (bytes == 0 || bytes % 16 != 0) {
    refuse(call, name, to_string(bytes) + " bytes a row", "a multiple of 16, at least 16");
  }
  if (bytes > kMaxRowBytes) {
    refuse(call, name, to_string(bytes) + " bytes a row", "at most " + to_string(kMaxRowBytes));
  }
}

void check_view(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                const Device& where) {
  const bool cpu = where.kind == DeviceKind::cpu;
  if (cpu ? tensor.device.kind != DeviceKind::cpu : tensor.device != where) {
    refuse(call, name, "device " + device_text(tensor.device),
           cpu ? "cpu, because this group runs on the host engine"
               : device_text(where) + ", the GPU of this rank");
  }
  if (!known(tensor.dtype)) {
    refuse(call, name, "dtype " + dtype_text(tensor.dtype), "one of ferry::Dtype");
  }
  if (tensor.strides.size() != tensor.shape.size()) {
    refuse(call, name,
           "strides " + to_string(tensor.strides) + " for shape " + to_string(tensor.shape),
           "a stride for each dimension");
  }
}

void check_data(std::string_view call, std::string_view name, const ConstTensorView& tensor) {
  if (tensor.shape.product() == 0) return;
  if (tensor.data == nullptr) {
    refuse(call, name, "a null pointer with shape " + to_string(tensor.shape), "data");
  }
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % size_of(tensor.dtype) != 0) {
    refuse(call, name,
           "a pointer that is not aligned to its " + dtype_text(tensor.dtype) + " elements",
           "a multiple of " + to_string(size_of(tensor.dtype)) + " bytes (copy the tensor first)");
  }
}

void check_stream(std::string_view call, const Stream* stream, const Device& where) {
  if (stream == nullptr) return;
  const Device theirs = stream->device();
  if (where.kind == DeviceKind::cpu ? theirs.kind == DeviceKind::cpu : theirs == where) return;
  refuse(call, "stream", "a stream of " + device_text(theirs),
         where.kind == DeviceKind::cpu
             ? "ferry::Stream(), because this group runs on the host engine"
             : "Stream::of_cuda of " + device_text(where));
}

void refuse(std::string_view call, std::string_view argument, const std::string& got,
            const std::string& expected) {
  throw Error(ErrorKind::invalid_argument, std::string(call) + ": " + std::string(argument) +
                                               ": got " + got + "; expected " + expected);
}

std::size_t checked_bytes(std::string_view call, std::string_view name, const Extents& shape,
                          Dtype dtype) {
  if (!known(dtype)) refuse(call, "dtype", dtype_text(dtype), "one of ferry::Dtype");
  std::int64_t bytes = static_cast<std::int64_t>(size_of(dtype));
  bool empty = false;
  for (std::int64_t extent : shape) {
    if (extent < 0) refuse(call, name, "shape " + to_string(shape), "no negative extent");
    empty = empty || extent == 0;
  }
  for (std::int64_t extent : shape) {
    // Not only the product: strides are products of some of the extents.
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(extent, 1), &bytes) ||
        bytes > (std::int64_t{1} << 62)) {
      refuse(call, name, "shape " + to_string(shape), "at most 2^62 bytes");
    }
  }
  return empty ? 0 : static_cast<std::size_t>(bytes);
}

void check_ranks(int ranks) {
  if (ranks < 1 || ranks > kMaxRanks) {
    refuse("Group", "bootstrap", to_string(ranks) + " ranks", "1 … " + to_string(kMaxRanks));
  }
}

namespace {

void check_tuning(const GroupConfig& config) {
  if (config.fewest_sms < 1 || config.most_sms < config.fewest_sms || config.most_sms > 1024) {
    refuse("Group", "fewest_sms and most_sms",
           to_string(config.fewest_sms) + " and " + to_string(config.most_sms),
           "1 <= fewest_sms <= most_sms <= 1024");
  }
}

void check_elastic(const GroupConfig& config) {
  constexpr std::size_t kMostName = 64;
  if (config.elastic.size() > kMostName) {
    refuse("Group", "elastic", to_string(config.elastic.size()) + " bytes",
           "a name of at most " + to_string(kMostName) + " bytes");
  }
  constexpr std::size_t kMostPath = 1000;
  if (config.arbiter.size() > kMostPath || config.arbiter.find('\0') != std::string::npos) {
    refuse("Group", "arbiter", to_string(config.arbiter.size()) + " bytes",
           "a directory of at most " + to_string(kMostPath) + " bytes, none of them zero");
  }
}

}  // namespace

void check_config(const GroupConfig& config) {
  if (config.experts < 1 || config.experts > (1 << 20)) {
    refuse("Group", "experts", to_string(config.experts), "1 … 1048576");
  }
  if (config.deadline <= std::chrono::nanoseconds(0) || config.deadline > std::chrono::hours(24)) {
    refuse("Group", "deadline", exact_seconds(config.deadline), "more than 0 and at most 24 hours");
  }
  if (config.memory_bytes > (std::size_t{1} << 46)) {
    refuse("Group", "memory_bytes", to_string(config.memory_bytes), "at most 64 TiB");
  }
  if (config.fabric > FabricKind::ofi) {
    refuse("Group", "fabric", "number " + to_string(static_cast<int>(config.fabric)),
           "automatic, local, shm, sim or ofi");
  }
  if (config.domain_size < 0) {
    refuse("Group", "domain_size", to_string(config.domain_size),
           "0 (the ranks of one host), or the ranks of a domain");
  }
  if (config.network != FabricKind::automatic && config.network != FabricKind::sim &&
      config.network != FabricKind::ofi) {
    refuse("Group", "network", std::string(name_of(config.network)), "automatic, sim or ofi");
  }
  const bool shares_nothing = config.fabric == FabricKind::sim || config.fabric == FabricKind::ofi;
  if (shares_nothing && config.domain_size != 0) {
    const std::string name(name_of(config.fabric));
    refuse("Group", "domain_size", to_string(config.domain_size) + " with fabric " + name,
           "0, because ranks share no memory there; or fabric " +
               std::string(config.fabric == FabricKind::sim ? "local" : "shm") + " and network " +
               name);
  }
  if (config.ofi.endpoints < 0 || config.ofi.endpoints > kMaxOfiEndpoints) {
    refuse("Group", "ofi.endpoints", to_string(config.ofi.endpoints),
           "1 … " + to_string(kMaxOfiEndpoints) + ", or 0: FERRY_OFI_ENDPOINTS or 1");
  }
  if (config.ofi.nics_per_rank < 0 || config.ofi.nics_per_rank > kMaxOfiEndpoints) {
    refuse("Group", "ofi.nics_per_rank", to_string(config.ofi.nics_per_rank),
           "1 … " + to_string(kMaxOfiEndpoints) + ", or 0: FERRY_OFI_NICS_PER_RANK or those near");
  }
  if (config.crossing > Crossing::hierarchical) {
    refuse("Group", "crossing", "number " + to_string(static_cast<int>(config.crossing)),
           "automatic, direct or hierarchical");
  }
  check_tuning(config);
  if (config.device < -1) {
    refuse("Group", "device", to_string(config.device), "a CUDA ordinal, or -1: the current one");
  }
  if (config.backend > Backend::cuda) {
    refuse("Group", "backend", "number " + to_string(static_cast<int>(config.backend)),
           "automatic, host or cuda");
  }
  check_elastic(config);
}

void check_config(const LatencyConfig& config) {
  constexpr std::string_view kCall = "LatencyExchange";
  if (config.capacity < 1 || config.capacity > (1 << 20)) {
    refuse(kCall, "capacity", to_string(config.capacity), "1 … 1048576 tokens");
  }
  if (!is_float(config.dtype)) refuse(kCall, "dtype", dtype_text(config.dtype), "f32, bf16 or f16");
  if (config.hidden < 1 || config.hidden > (1 << 24)) {
    refuse(kCall, "hidden", to_string(config.hidden), "1 … 16777216 channels");
  }
  check_row_bytes(kCall, "hidden", static_cast<std::size_t>(config.hidden) * size_of(config.dtype));
  if (config.topk < 1 || config.topk > kMaxTopk) {
    refuse(kCall, "topk", to_string(config.topk), "1 … 64");
  }
  if (config.order > RowOrder::expert_major) {
    refuse(kCall, "order", "number " + to_string(static_cast<int>(config.order)),
           "rank_major or expert_major");
  }
}

void check_size(const LatencyConfig& config, std::int64_t local_experts, int ranks) {
  // In doubles: the product of the four has no place in 64 bits.
  const double rows = static_cast<double>(ranks) * static_cast<double>(config.capacity);
  const double bytes = 2 * rows * static_cast<double>(local_experts + config.topk + 1) *
                       (static_cast<double>(config.hidden) * 4.5 + 1024);
  if (rows > static_cast<double>(kMaxRows) || bytes > static_cast<double>(1ull << 46)) {
    refuse("LatencyExchange", "capacity",
           to_string(config.capacity) + " tokens of " + to_string(config.hidden) + " channels on " +
               to_string(ranks) + " ranks with " + to_string(local_experts) + " experts each",
           "buffers of less than 64 TiB and 2^31 rows an expert; use a smaller capacity");
  }
}

void check_tensor(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                  int dims, const Device& where) {
  check_view(call, name, tensor, where);
  if (tensor.dims() != dims) {
    refuse(call, name, "shape " + to_string(tensor.shape), to_string(dims) + " dimensions");
  }
  checked_bytes(call, name, tensor.shape, tensor.dtype);
  if (!tensor.is_dense()) {
    refuse(call, name,
           "strides " + to_string(tensor.strides) + " for shape " + to_string(tensor.shape),
           "a dense row-major tensor (call contiguous() first)");
  }
  check_data(call, name, tensor);
}

void check_exact(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                 Dtype dtype, const Extents& shape, const Device& where) {
  if (tensor.dtype != dtype)
    refuse(call, name, "dtype " + dtype_text(tensor.dtype), dtype_text(dtype));
  if (tensor.shape != shape) {
    refuse(call, name, "shape " + to_string(tensor.shape), to_string(shape));
  }
  check_tensor(call, name, tensor, shape.size(), where);
}

}  // namespace ferry
