// One cell of the conformance matrix.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ferry/dtype.hpp"
#include "ferry/group.hpp"
#include "ferry/latency.hpp"

namespace ferry::conformance {

enum class Mode : std::uint8_t {
  throughput,
  latency,
  device,  ///< throughput mode on GPUs: axes of its own; its cases have mode `throughput`
};
enum class RouteKind : std::uint8_t {
  uniform,
  zipf,
  one_rank,    ///< every slot of every token names an expert of one rank
  some_empty,  ///< some ranks have no tokens
  zero,        ///< no rank has tokens
  holes,       ///< many −1, some tokens go nowhere
  duplicates,  ///< ids repeat inside a route
  uneven,      ///< 0 to 2 N tokens
};
enum class ExpertKind : std::uint8_t {
  even,
  odd,
  many,
  few,   ///< fewer than ranks
  huge,  ///< 384
};
enum class RowsKind : std::uint8_t {
  ordinary,  ///< combine's input in ordinary memory
  received,  ///< written over the received tensor
  empty,     ///< in memory of Group::empty
};
enum class WeightKind : std::uint8_t { none, carried, applied };
enum class SizeKind : std::uint8_t { exact, worst_case_full, worst_case_loose };
enum class IndexKind : std::uint8_t { i64, i32, strided };
enum class WireKind : std::uint8_t { as_is, scale_f32, scale_pow2, scale_packed };
enum class HookKind : std::uint8_t { none, dispatch, combine, both };

struct Case {
  Mode mode = Mode::throughput;
  FabricKind fabric = FabricKind::local;
  int ranks = 1;
  std::int64_t hidden = 16;
  int topk = 1;
  RouteKind routes = RouteKind::uniform;
  ExpertKind expert_kind = ExpertKind::even;
  IndexKind index = IndexKind::i64;
  Dtype dtype = Dtype::f32;  ///< of the tokens; e4m3 comes with scales
  bool stream = false;
  bool own_output = false;  ///< `out` is given
  bool special_values = false;
  WireKind wire = WireKind::as_is;  ///< throughput mode has no packed scales

  // Throughput mode.
  RowOrder order = RowOrder::rank_major;
  std::int64_t alignment = 1;
  Dtype combine_dtype = Dtype::f32;
  RowsKind rows = RowsKind::ordinary;
  WeightKind weights = WeightKind::none;
  int biases = 0;
  SizeKind size = SizeKind::exact;
  bool small_memory = false;  ///< the arena has to grow
  int num_sms = 0;            ///< at most those of the GPU

  // Latency mode.
  HookKind hook = HookKind::none;
  bool two_alive = false;  ///< a second dispatch before the first result is dropped
  RowOrder results = RowOrder::expert_major;
  CombinePath path = CombinePath::per_slot;
  CombineFormat combine_format = CombineFormat::as_is;
  bool weights_ahead = false;  ///< they come with dispatch

  std::int64_t tokens = 4;    ///< N, of a rank
  std::int64_t capacity = 8;  ///< latency: at least 2 N
  std::uint64_t seed = 1;

  std::int64_t experts() const;
};

/// One line that says everything about a case.
std::string to_string(const Case& c);

/// A case as one choice for each axis; what its fields mean depends on the mode.
struct Axis {
  const char* name;
  int choices;
};
const std::vector<Axis>& axes(Mode mode);
/// True when these two choices cannot meet in one case.
bool excluded(Mode mode, int axis_a, int a, int axis_b, int b);
Case make_case(Mode mode, const std::vector<int>& choice);

/// Cases that contain every pair of choices that can meet, found greedily.
std::vector<std::vector<int>> pairwise_cover(Mode mode, std::uint64_t seed);
/// `count` cases drawn at random.
std::vector<std::vector<int>> random_choices(Mode mode, int count, std::uint64_t seed);

/// Cases of the product over the main axes (fabric, ranks, hidden, topk, routes, dtype, layout,
/// wire, hook).
std::int64_t product(Mode mode);
/// Case `number` of it: its main axes count up, the others and the sizes follow from the seed.
Case numbered_case(Mode mode, std::int64_t number, std::uint64_t seed);
/// Gives a case its own seed, and few tokens where rows are long.
void size_case(Case& c, std::uint64_t seed);

}  // namespace ferry::conformance
