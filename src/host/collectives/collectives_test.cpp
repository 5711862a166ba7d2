// Every collective against its definition, bit for bit: dtypes, operations, sizes around the
// borders of a message, a share and a round, fabrics and domains.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "core/domains.hpp"
#include "core/number.hpp"
#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

using Bytes = std::vector<std::byte>;

struct World {
  int ranks = 1;
  FabricKind fabric = FabricKind::local;
  int domain_size = 0;
  FabricKind network = FabricKind::automatic;

  GroupConfig config() const {
    GroupConfig config;
    config.memory_bytes = 1 << 20;
    config.deadline = 20s;
    config.fabric = fabric;
    config.domain_size = domain_size;
    config.network = network;
    return config;
  }
  Domains domains() const {
    const bool alone = fabric == FabricKind::sim || fabric == FabricKind::ofi;
    return Domains::blocks(ranks, alone ? 1 : domain_size);
  }
};

std::string to_string(const World& world) {
  return std::to_string(world.ranks) + " ranks, " + std::string(name_of(world.fabric)) +
         ", domains of " + std::to_string(world.domain_size) + ", network " +
         std::string(name_of(world.network));
}

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;  // which makes these tests twenty times as long
#else
constexpr bool kThreadSanitizer = false;
#endif

/// One domain, equal and unequal ones, one for each rank.
std::vector<World> worlds() {
  std::vector<World> all;
  if (kThreadSanitizer) {
    return {{.ranks = 2}, {.ranks = 3, .domain_size = 2}, {.ranks = 3, .fabric = FabricKind::sim}};
  }
  for (const int ranks : {1, 2, 3, 4, 8}) all.push_back({.ranks = ranks});
  for (const auto& [ranks, size] :
       std::initializer_list<std::pair<int, int>>{{3, 1}, {3, 2}, {4, 2}, {4, 3}, {8, 3}}) {
    all.push_back({.ranks = ranks, .domain_size = size});
  }
  all.push_back({.ranks = 4, .fabric = FabricKind::shm});
  all.push_back({.ranks = 4, .fabric = FabricKind::shm, .domain_size = 2});
  all.push_back({.ranks = 3, .fabric = FabricKind::sim});
  all.push_back({.ranks = 5, .domain_size = 2, .network = FabricKind::sim});
  return all;
}

void with_collectives(const World& world, const std::function<void(Collectives&)>& body) {
  SCOPED_TRACE(to_string(world));
  const auto bootstraps = thread_bootstrap(world.ranks);
  on_ranks(world.ranks, [&](int r) {
    Collectives all(bootstraps[static_cast<std::size_t>(r)], world.config());
    body(all);
  });
}

/// What a rank brings: any bits for integers; for floats also −0, NaN and infinities now and then.
Bytes random_elements(Dtype dtype, std::int64_t count, unsigned seed) {
  std::mt19937 random(kSeed + seed);
  Bytes bytes(static_cast<std::size_t>(count) * size_of(dtype));
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (std::int64_t i = 0; i < count; ++i) {
    std::byte* at = bytes.data() + static_cast<std::size_t>(i) * size_of(dtype);
    if (dtype == Dtype::i32 || dtype == Dtype::i64 || dtype == Dtype::u8 || dtype == Dtype::e4m3) {
      const std::uint64_t bits = (std::uint64_t{random()} << 32) | random();
      std::memcpy(at, &bits, size_of(dtype));
      continue;
    }
    float value = normal(random);
    const unsigned rare = random() % 200;
    if (rare == 0) value = -0.0f;
    if (rare == 1) value = std::numeric_limits<float>::quiet_NaN();
    if (rare == 2) value = std::numeric_limits<float>::infinity();
    if (dtype == Dtype::f32) std::memcpy(at, &value, 4);
    const auto narrow = [&](auto rounded) { std::memcpy(at, &rounded, 2); };
    if (dtype == Dtype::bf16) narrow(from_float<Bf16>(value));
    if (dtype == Dtype::f16) narrow(from_float<Fp16>(value));
  }
  return bytes;
}

template <class T, class Acc>
Acc element(const Bytes& bytes, std::int64_t i) {
  T value;
  std::memcpy(&value, bytes.data() + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  if constexpr (std::is_integral_v<T>)
    return static_cast<Acc>(value);
  else
    return to_float(value);
}

template <class Acc>
Acc apply(ReduceOp op, Acc a, Acc b) {
  switch (op) {
    case ReduceOp::product: return a * b;
    case ReduceOp::min: return std::isnan(double(a)) || a < b ? a : b;
    case ReduceOp::max: return std::isnan(double(a)) || a > b ? a : b;
    default: return a + b;
  }
}

/// By the definition in ferry/collectives.hpp. `Acc`: float, or an integer in which nothing is
/// lost.
template <class T, class Acc>
Bytes reduced_as(ReduceOp op, const std::vector<Bytes>& inputs, const Domains& domains) {
  const auto count = static_cast<std::int64_t>(inputs[0].size() / sizeof(T));
  Bytes out(inputs[0].size());
  const bool adds = op == ReduceOp::sum || op == ReduceOp::mean;
  for (std::int64_t i = 0; i < count; ++i) {
    std::optional<Acc> all;
    for (int d = 0; d < domains.count(); ++d) {
      std::optional<Acc> own;
      for (const int rank : domains.members(d)) {
        const Acc next = element<T, Acc>(inputs[static_cast<std::size_t>(rank)], i);
        own = own ? apply(op, *own, next) : adds ? Acc{} + next : next;
      }
      all = all ? apply(op, *all, *own) : own;
    }
    T result;
    if constexpr (std::is_integral_v<T>) {
      result = static_cast<T>(*all);
    } else {
      if (op == ReduceOp::mean) *all /= static_cast<float>(domains.ranks());
      result = from_float<T>(*all);
    }
    std::memcpy(out.data() + static_cast<std::size_t>(i) * sizeof(T), &result, sizeof(T));
  }
  return out;
}

Bytes reduced(Dtype dtype, ReduceOp op, const std::vector<Bytes>& inputs, const Domains& domains) {
  switch (dtype) {
    case Dtype::bf16: return reduced_as<Bf16, float>(op, inputs, domains);
    case Dtype::f16: return reduced_as<Fp16, float>(op, inputs, domains);
    case Dtype::i32: return reduced_as<std::int32_t, std::uint64_t>(op, inputs, domains);
    case Dtype::i64: return reduced_as<std::int64_t, std::uint64_t>(op, inputs, domains);
    case Dtype::u8: return reduced_as<std::uint8_t, std::uint64_t>(op, inputs, domains);
    default: return reduced_as<float, float>(op, inputs, domains);
  }
}

/// NaNs compare equal.
template <class T>
bool same_floats(const Bytes& a, const Bytes& b) {
  for (std::size_t i = 0; i < a.size() / sizeof(T); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const float x = element<T, float>(a, at), y = element<T, float>(b, at);
    if (std::isnan(x) && std::isnan(y)) continue;
    if (std::memcmp(a.data() + i * sizeof(T), b.data() + i * sizeof(T), sizeof(T)) != 0) {
      return false;
    }
  }
  return a.size() == b.size();
}

bool same(Dtype dtype, const Bytes& a, const Bytes& b) {
  if (dtype == Dtype::f32) return same_floats<float>(a, b);
  if (dtype == Dtype::bf16) return same_floats<Bf16>(a, b);
  if (dtype == Dtype::f16) return same_floats<Fp16>(a, b);
  return a == b;
}

std::vector<Bytes> inputs_of(Dtype dtype, std::int64_t count, int ranks, unsigned seed) {
  std::vector<Bytes> all;
  for (int r = 0; r < ranks; ++r) {
    all.push_back(random_elements(dtype, count, seed + static_cast<unsigned>(r)));
  }
  return all;
}

Bytes part(const Bytes& bytes, std::size_t first, std::size_t count) {
  const auto at = bytes.begin() + static_cast<std::ptrdiff_t>(first);
  return {at, at + static_cast<std::ptrdiff_t>(count)};
}

struct Case {
  Dtype dtype = Dtype::f32;
  ReduceOp op = ReduceOp::sum;
  std::int64_t count = 0;
};

constexpr Dtype kReduced[] = {Dtype::f32, Dtype::bf16, Dtype::f16,
                              Dtype::i32, Dtype::i64,  Dtype::u8};
constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::mean, ReduceOp::product, ReduceOp::min,
                             ReduceOp::max};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Dtype dtype : kReduced) {
    for (const ReduceOp op : kOps) {
      // mean is of floats; min and max of the reference are unsigned.
      const bool integer = dtype == Dtype::i32 || dtype == Dtype::i64 || dtype == Dtype::u8;
      if (integer && op != ReduceOp::sum && op != ReduceOp::product) continue;
      all.push_back({dtype, op, 1000});
      all.push_back({dtype, op, 6000});
    }
    for (const std::int64_t count : {0, 1, 3, 20'001, 600'001}) {
      all.push_back({dtype, ReduceOp::sum, count});
    }
  }
  return all;
}

void reduce_everything(const World& world) {
  struct Known {
    Case c;
    std::vector<Bytes> inputs;
    Bytes expected;
  };
  std::vector<Known> all_known;
  for (const Case& c : cases()) {
    // Several rounds, of the narrowest and the widest elements.
    if (c.count > 100'000 && c.dtype != Dtype::bf16 && c.dtype != Dtype::i64) continue;
    Known known{c, inputs_of(c.dtype, c.count, world.ranks, 1), {}};
    known.expected = reduced(c.dtype, c.op, known.inputs, world.domains());
    all_known.push_back(std::move(known));
  }
  with_collectives(world, [&](Collectives& all) {
    for (const auto& [c, inputs, expected] : all_known) {
      Bytes mine = inputs[static_cast<std::size_t>(all.rank())];
      all.all_reduce({mine.data(), c.dtype, {c.count}}, {.op = c.op});
      ASSERT_TRUE(same(c.dtype, mine, expected))
          << "all_reduce, rank " << all.rank() << ": " << name_of(c.dtype) << " " << name_of(c.op)
          << " of " << c.count;

      const std::int64_t block = c.count / all.size();
      const std::int64_t whole = block * all.size();
      const std::size_t bytes = static_cast<std::size_t>(block) * size_of(c.dtype);
      Bytes out(bytes);
      all.reduce_scatter({inputs[static_cast<std::size_t>(all.rank())].data(), c.dtype, {whole}},
                         {out.data(), c.dtype, {block}}, {.op = c.op});
      ASSERT_TRUE(
          same(c.dtype, out, part(expected, static_cast<std::size_t>(all.rank()) * bytes, bytes)))
          << "reduce_scatter, rank " << all.rank() << ": " << name_of(c.dtype) << " "
          << name_of(c.op) << " of " << block;
    }
  });
}

TEST(Collectives, ReduceAsDefined) {
  for (const World& world : worlds()) reduce_everything(world);
}

constexpr std::int64_t kSizes[] = {0, 1, 100, 5000, 1'300'001};

void move_everything(const World& world) {
  std::vector<std::vector<Bytes>> all_inputs;
  for (const std::int64_t count : kSizes) {
    all_inputs.push_back(inputs_of(Dtype::e4m3, count, world.ranks, 77));
  }
  with_collectives(world, [&](Collectives& all) {
    const auto self = static_cast<std::size_t>(all.rank());
    const auto ranks = static_cast<std::size_t>(all.size());
    for (const std::vector<Bytes>& inputs : all_inputs) {
      const std::size_t bytes = inputs[0].size();
      const auto count = static_cast<std::int64_t>(bytes);
      Bytes gathered(ranks * bytes);
      all.all_gather({inputs[self].data(), Dtype::e4m3, {count}},
                     {gathered.data(), Dtype::e4m3, {all.size(), count}});
      for (std::size_t r = 0; r < ranks; ++r) {
        ASSERT_EQ(part(gathered, r * bytes, bytes), inputs[r]) << "all_gather of " << count;
      }
      for (const int root : {0, all.size() - 1}) {
        Bytes mine = inputs[self];
        all.broadcast({mine.data(), Dtype::e4m3, {count}}, root);
        ASSERT_EQ(mine, inputs[static_cast<std::size_t>(root)])
            << "broadcast of " << count << " from " << root;
      }
      const std::int64_t block = count / all.size();
      const auto each = static_cast<std::size_t>(block);
      Bytes out(each * ranks);
      all.all_to_all({inputs[self].data(), Dtype::e4m3, {all.size(), block}},
                     {out.data(), Dtype::e4m3, {all.size(), block}});
      for (std::size_t r = 0; r < ranks; ++r) {
        ASSERT_EQ(part(out, r * each, each), part(inputs[r], self * each, each))
            << "all_to_all of " << block;
      }
    }
  });
}

TEST(Collectives, MoveAsDefined) {
  for (const World& world : worlds()) move_everything(world);
}

// Blocks of any size, some empty, each pair another one.
TEST(Collectives, AllToAllOfUnequalBlocks) {
  for (const World& world : worlds()) {
    with_collectives(world, [&](Collectives& all) {
      for (const std::int64_t scale : {1, 1000, 90'000}) {
        const auto count = [&](int from, int to) { return (from * 7 + to * 3) % 5 * scale; };
        std::vector<std::int64_t> to, from;
        Bytes input, expected;
        const auto block = [&](int source, int target) {
          return random_elements(Dtype::i32, count(source, target),
                                 static_cast<unsigned>(source * 64 + target));
        };
        for (int r = 0; r < all.size(); ++r) {
          to.push_back(count(all.rank(), r));
          from.push_back(count(r, all.rank()));
          const Bytes sent = block(all.rank(), r), got = block(r, all.rank());
          input.insert(input.end(), sent.begin(), sent.end());
          expected.insert(expected.end(), got.begin(), got.end());
        }
        Bytes out(expected.size());
        const auto elements = [](const Bytes& b) {
          return static_cast<std::int64_t>(b.size() / 4);
        };
        all.all_to_all({input.data(), Dtype::i32, {elements(input)}}, to,
                       {out.data(), Dtype::i32, {elements(out)}}, from);
        ASSERT_EQ(out, expected) << "rank " << all.rank() << ", scale " << scale;
      }
    });
  }
}

// A rank without elements has no memory either, while the others need several rounds.
TEST(Collectives, ARankMayBringNothing) {
  for (const World& world : {World{.ranks = 3}, World{.ranks = 4, .domain_size = 2}}) {
    with_collectives(world, [](Collectives& all) {
      constexpr std::int64_t kLong = 600'000;
      const auto ranks = static_cast<std::size_t>(all.size());
      const bool sends = all.rank() == 1, receives = all.rank() == 0;
      std::vector<std::int64_t> to(ranks, 0), from(ranks, 0);
      if (sends) to[0] = kLong;
      if (receives) from[1] = kLong;
      std::vector<std::int32_t> x(sends ? kLong : 0, 7), out(receives ? kLong : 0);
      const auto elements = [](const auto& v) { return static_cast<std::int64_t>(v.size()); };
      all.all_to_all({x.data(), Dtype::i32, {elements(x)}}, to,
                     {out.data(), Dtype::i32, {elements(out)}}, from);
      EXPECT_EQ(out, std::vector<std::int32_t>(receives ? kLong : 0, 7));
    });
  }
}

// Registered on all ranks, on some, on none: the same bits.
TEST(Collectives, InPlaceInRegisteredMemory) {
  for (const World& world : worlds()) {
    for (const int registered : {0, 1, 100}) {
      with_collectives(world, [&](Collectives& all) {
        for (const std::int64_t count : {8'000, 100'003}) {
          const auto inputs = inputs_of(Dtype::bf16, count, all.size(), 5);
          const Bytes expected = reduced(Dtype::bf16, ReduceOp::sum, inputs, world.domains());
          Tensor place = all.empty({count}, Dtype::bf16);
          Bytes ordinary(expected.size());
          const bool in_place = all.rank() < registered;
          void* data = in_place ? place.data() : ordinary.data();
          for (int i = 0; i < 3; ++i) {
            std::memcpy(data, inputs[static_cast<std::size_t>(all.rank())].data(), expected.size());
            all.all_reduce({data, Dtype::bf16, {count}});
            std::memcpy(ordinary.data(), data, expected.size());
            ASSERT_TRUE(same(Dtype::bf16, ordinary, expected)) << "rank " << all.rank();
          }
        }
      });
    }
  }
}

TEST(Collectives, MinAndMaxOfNegativeIntegers) {
  with_collectives({.ranks = 3}, [](Collectives& all) {
    for (const bool most : {false, true}) {
      std::vector<std::int64_t> x{-5 + all.rank(), 7 - all.rank(), 0};
      all.all_reduce({x.data(), Dtype::i64, {3}}, {.op = most ? ReduceOp::max : ReduceOp::min});
      EXPECT_EQ(x,
                (most ? std::vector<std::int64_t>{-3, 7, 0} : std::vector<std::int64_t>{-5, 5, 0}));
    }
  });
}

// Random calls in a row, on a stream or not: windows, inboxes and flags are used again and again.
TEST(Collectives, AnyCallsInARow) {
  for (const World& world : {World{.ranks = 4}, World{.ranks = 5, .domain_size = 2},
                             World{.ranks = 4, .domain_size = 2, .network = FabricKind::sim}}) {
    with_collectives(world, [&](Collectives& all) {
      std::mt19937 random(kSeed);  // the same on all ranks
      Stream stream;
      for (int i = 0; i < (kThreadSanitizer ? 30 : 150); ++i) {
        const unsigned call = random() % 4;
        const std::int64_t count = random() % 2 ? random() % 500 : random() % 600'000;
        Stream* on = random() % 2 ? &stream : nullptr;
        const int root = static_cast<int>(random() % static_cast<unsigned>(all.size()));
        const auto n = static_cast<std::size_t>(count),
                   ranks = static_cast<std::size_t>(all.size());
        std::vector<std::int32_t> x(n, i + all.rank()), out(n * ranks);
        const int sum = all.size() * i + all.size() * (all.size() - 1) / 2;
        Event event;
        if (call == 0) event = all.all_reduce({x.data(), Dtype::i32, {count}}, {.stream = on});
        if (call == 1) event = all.broadcast({x.data(), Dtype::i32, {count}}, root, {on});
        if (call == 2) {
          event = all.all_gather({x.data(), Dtype::i32, {count}},
                                 {out.data(), Dtype::i32, {all.size() * count}}, {on});
        }
        if (call == 3) {
          std::vector<std::int32_t> many(n * ranks, i + all.rank());
          event = all.reduce_scatter({many.data(), Dtype::i32, {all.size() * count}},
                                     {x.data(), Dtype::i32, {count}}, {.stream = on});
          event.wait();
        }
        event.wait();
        if (count == 0) continue;
        const std::size_t middle = n / 2;
        if (call == 0 || call == 3) {
          ASSERT_EQ(x[middle], sum) << i;
        }
        if (call == 1) {
          ASSERT_EQ(x[middle], i + root) << i;
        }
        for (std::size_t r = 0; call == 2 && r < ranks; ++r) {
          ASSERT_EQ(out[r * n + middle], i + static_cast<int>(r)) << i;
        }
      }
    });
  }
}

// A call that differs is refused on all ranks, and the collectives go on.
TEST(Collectives, DifferentCallsAreNamed) {
  for (const World& world : {World{.ranks = 3}, World{.ranks = 4, .domain_size = 2}}) {
    with_collectives(world, [&](Collectives& all) {
      const bool other = all.rank() == 1;
      Bytes x(4 << 20), out(x.size());
      const auto f32 = [&](std::int64_t count) {
        return TensorView(x.data(), Dtype::f32, {count});
      };
      expect_error(ErrorKind::mismatch, {"the number of elements is"},
                   [&] { all.all_reduce(f32(other ? 200'000 : 200'001)); });
      expect_error(ErrorKind::mismatch, {"the number of elements is"},
                   [&] { all.all_reduce(f32(other ? 7 : 200'001)); });
      expect_error(ErrorKind::mismatch, {"op is"},
                   [&] { all.all_reduce(f32(10), {.op = other ? ReduceOp::max : ReduceOp::sum}); });
      expect_error(ErrorKind::mismatch, {"root is"},
                   [&] { all.broadcast(f32(10), other ? 1 : 0); });
      expect_error(ErrorKind::mismatch, {"the call is"}, [&] {
        if (other) {
          all.barrier();
        } else {
          all.all_reduce(f32(200'001));
        }
      });
      const auto ranks = static_cast<std::size_t>(all.size());
      std::vector<std::int64_t> to(ranks, 5), from(ranks, 5);
      std::int64_t total = 5 * all.size();
      if (other) {
        from[0] = 6;
        ++total;
      }
      expect_error(ErrorKind::mismatch,
                   {"all_to_all: rank 0 sends 5 elements to rank 1, which expects 6"}, [&] {
                     all.all_to_all({x.data(), Dtype::u8, {5 * all.size()}}, to,
                                    {out.data(), Dtype::u8, {total}}, from);
                   });
      for (int i = 0; i < 3; ++i) {
        std::vector<float> ones(500'000, 1.0f);
        all.all_reduce({ones.data(), Dtype::f32, {500'000}});
        EXPECT_EQ(ones, std::vector<float>(500'000, static_cast<float>(all.size())));
      }
    });
  }
}

TEST(Collectives, RefusesWhatCannotBe) {
  with_collectives({.ranks = 2}, [](Collectives& all) {
    std::vector<float> x(16), out(16);
    const TensorView f32(x.data(), Dtype::f32, {16}), other(out.data(), Dtype::f32, {16});
    const auto refused = [](const char* words, const std::function<void()>& call) {
      expect_error(ErrorKind::invalid_argument, {words}, call);
    };
    refused("all_reduce: x: got dtype e4m3",
            [&] { all.all_reduce({x.data(), Dtype::e4m3, {16}}); });
    refused("all_reduce: op: got mean of i32",
            [&] { all.all_reduce({x.data(), Dtype::i32, {16}}, {.op = ReduceOp::mean}); });
    refused("all_reduce: x: got strides",
            [&] { all.all_reduce({x.data(), Dtype::f32, {2, 4}, {8, 1}, {}}); });
    refused("all_reduce: x: got a null pointer",
            [&] { all.all_reduce({nullptr, Dtype::f32, {1}}); });
    refused("broadcast: root: got 2", [&] { all.broadcast(f32, 2); });
    refused("all_gather: out: got 16 elements", [&] { all.all_gather(f32, other); });
    refused("reduce_scatter: x: got 16 elements", [&] { all.reduce_scatter(f32, other); });
    refused("all_to_all: out: got memory that overlaps x", [&] { all.all_to_all(f32, f32); });
    const std::vector<std::int64_t> right{8, 8}, less{8, 7}, more{8, 9}, negative{17, -1}, one{16};
    for (const auto& wrong : {less, more, negative, one}) {
      refused("all_to_all: to: got", [&] { all.all_to_all(f32, wrong, other, right); });
      refused("all_to_all: from: got", [&] { all.all_to_all(f32, right, other, wrong); });
    }
    all.barrier();
  });
}

// A rank that leaves is named by all others, in any call.
TEST(Collectives, ARankThatLeavesIsNamed) {
  for (const World& world : {World{.ranks = 3}, World{.ranks = 4, .domain_size = 2}}) {
    with_collectives(world, [](Collectives& all) {
      std::vector<float> x(300'000, 1.0f);
      for (int i = 0; i < 3; ++i) all.all_reduce({x.data(), Dtype::f32, {300'000}});
      if (all.rank() == 1) return;
      try {
        all.all_reduce({x.data(), Dtype::f32, {300'000}});
        ADD_FAILURE() << "nothing thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::peer_left) << error.what();
        EXPECT_EQ(error.peer(), 1) << error.what();
      }
    });
  }
}

TEST(Collectives, BesideAGroup) {
  const auto bootstraps = thread_bootstrap(2);
  on_ranks(2, [&](int r) {
    GroupConfig config;
    config.experts = 4;
    Group group(bootstraps[static_cast<std::size_t>(r)], config);
    Collectives all(bootstraps[static_cast<std::size_t>(r)], config);
    Stream stream;
    std::vector<float> gradients(1 << 20, 1.0f);
    const Event reduced =
        all.all_reduce({gradients.data(), Dtype::f32, {1 << 20}}, {.stream = &stream});
    const Batch batch(r, 7, 64, (r + 1) % 4);
    const Received got = group.dispatch(batch.x(), batch.ids());
    EXPECT_TRUE(same_rows(group.combine(got.x, got.plan).x, batch, 1));
    reduced.wait();
    EXPECT_EQ(gradients, std::vector<float>(1 << 20, 2.0f));
    EXPECT_GT(all.memory().arena_bytes, config.memory_bytes);
  });
}

}  // namespace
}  // namespace ferry::host::test
