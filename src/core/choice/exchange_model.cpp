#include "ferry/exchange_model.hpp"

#include <algorithm>
#include <cmath>

namespace ferry {
namespace {

/// Of so many places, how many are named by so many independent draws.
double named(double places, double draws) {
  return places * (1 - std::pow(1 - 1 / places, draws));
}

}  // namespace

ExchangeBytes uniform_bytes(const ExchangeShape& shape, const ExchangeRates& rates) {
  const double all_hosts = std::max(1.0, static_cast<double>(shape.ranks) / shape.host_ranks);
  const double host_ranks = std::min(shape.ranks, shape.host_ranks);
  const double hosts =
      shape.most_hosts > 0 ? std::min<double>(all_hosts, shape.most_hosts) : all_hosts;
  ExchangeBytes bytes;
  bytes.hosts = named(hosts, shape.topk);
  bytes.ranks = shape.each_slot ? shape.topk : named(hosts * host_ranks, shape.topk);
  const double across = (all_hosts - 1) / all_hosts;  // of copies, to other hosts
  const double all = shape.tokens * shape.row_bytes;
  bytes.copy = all * bytes.ranks;
  bytes.nic = all * (shape.hierarchical ? bytes.hosts : bytes.ranks) * across;
  // Inside a host all copies that are not for the rank itself; a direct exchange brings those of
  // other hosts by the NIC.
  const double inside = shape.hierarchical ? 1 : 1 - across;
  bytes.nvlink = all * bytes.ranks * inside * (host_ranks - 1) / host_ranks;
  if (rates.leaf_hosts > 0 && all_hosts > 1) {
    bytes.spine = bytes.nic * std::max(0.0, all_hosts - rates.leaf_hosts) / (all_hosts - 1);
  }
  bytes.peers = shape.hierarchical ? all_hosts - 1 : shape.ranks - host_ranks;
  return bytes;
}

ExchangeBytes bytes_of_rows(ExchangeBytes rows, double row_bytes, double sums) {
  rows.copy += sums;
  for (double* bytes : {&rows.copy, &rows.nvlink, &rows.nic, &rows.spine}) *bytes *= row_bytes;
  return rows;
}

ExchangeTime exchange_time(const ExchangeBytes& bytes, const ExchangeRates& rates) {
  ExchangeTime time;
  time.overlap = rates.overlap;
  time.hidden_latency = rates.hidden_latency;
  time.latency = rates.latency_s;
  time.messages = bytes.peers * rates.message_s;
  time.copy = rates.contention * bytes.copy / rates.copy;
  time.nvlink_out = rates.contention * bytes.nvlink / rates.nvlink_out;
  time.nvlink_in = rates.contention * bytes.nvlink / rates.nvlink_in;
  time.nic_out = bytes.nic / rates.nic_out;
  time.nic_in = bytes.nic / rates.nic_in;
  time.staging = bytes.nic / rates.staging;
  time.spine = bytes.spine * rates.oversubscription / std::min(rates.nic_out, rates.nic_in);
  return time;
}

double ExchangeTime::seconds() const {
  const double links = std::max({nvlink_out, nvlink_in, nic_out, nic_in, staging, spine});
  const double rows =
      overlap == 1
          ? (1 - hidden_latency) * latency + std::max(copy, links)
          : std::pow(std::pow(latency, overlap) + std::pow(copy + links, overlap), 1 / overlap);
  return std::max(latency, messages + rows);
}

Interval predicted_interval(double likely_s, double fast_s, double slow_s) {
  const double own = likely_s * kModelError;
  return {std::max(0.0, likely_s - std::hypot(own, likely_s - fast_s)),
          likely_s + std::hypot(own, slow_s - likely_s)};
}

std::array<std::pair<const char*, double>, 9> ExchangeTime::phases() const {
  return {{{"latency", latency},
           {"messages", messages},
           {"SM copies", copy},
           {"NVLink out", nvlink_out},
           {"NVLink in", nvlink_in},
           {"NIC out", nic_out},
           {"NIC in", nic_in},
           {"PCIe staging", staging},
           {"spine", spine}}};
}

const char* ExchangeTime::bottleneck() const {
  const auto all = phases();
  return std::max_element(all.begin(), all.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

}  // namespace ferry
