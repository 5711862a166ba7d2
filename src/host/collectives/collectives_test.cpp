// Every collective against its definition, bit for bit: dtypes, operations, sizes around the
// borders of a message, a share and a round, fabrics and domains.
#include "host/collectives/test_collectives.hpp"

namespace ferry::host::test {
namespace {

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
    for (const std::int64_t count : {0, 1, 3, 20'001}) {
      all.push_back({dtype, ReduceOp::sum, count});
    }
  }
  // Several rounds, of the narrowest and the widest elements.
  all.push_back({Dtype::bf16, ReduceOp::sum, kSanitizer ? 600'001 : 2'300'001});
  all.push_back({Dtype::i64, ReduceOp::sum, kSanitizer ? 600'001 : 1'100'001});
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
    if (world.brief && c.count > kBriefCount) continue;
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

struct Moved {
  Dtype dtype = Dtype::e4m3;
  std::int64_t count = 0;
  std::vector<Bytes> inputs{};
};

std::vector<Moved> moves(const World& world) {
  std::vector<Moved> all;
  for (const Dtype dtype : {Dtype::e4m3, Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::e5m2,
                            Dtype::i32, Dtype::i64, Dtype::u8}) {
    for (const std::int64_t count : kSizes) {
      if (count > (dtype == Dtype::e4m3 && !world.brief ? kSizes[4] : kBriefCount)) continue;
      all.push_back({dtype, count, inputs_of(dtype, count, world.ranks, 77)});
    }
  }
  return all;
}

void move_everything(const World& world) {
  const std::vector<Moved> all_moves = moves(world);
  with_collectives(world, [&](Collectives& all) {
    const auto self = static_cast<std::size_t>(all.rank());
    const auto ranks = static_cast<std::size_t>(all.size());
    for (const auto& [dtype, count, inputs] : all_moves) {
      const std::size_t bytes = inputs[0].size();
      const std::string what = std::string(name_of(dtype)) + ", " + std::to_string(count);
      Bytes gathered(ranks * bytes);
      all.all_gather({inputs[self].data(), dtype, {count}},
                     {gathered.data(), dtype, {all.size(), count}});
      for (std::size_t r = 0; r < ranks; ++r) {
        ASSERT_EQ(part(gathered, r * bytes, bytes), inputs[r]) << "all_gather of " << what;
      }
      for (const int root : {0, all.size() - 1}) {
        Bytes mine = inputs[self];
        all.broadcast({mine.data(), dtype, {count}}, root);
        ASSERT_EQ(mine, inputs[static_cast<std::size_t>(root)])
            << "broadcast of " << what << " from " << root;
      }
      const std::int64_t block = count / all.size();
      const auto each = static_cast<std::size_t>(block) * size_of(dtype);
      Bytes out(each * ranks);
      all.all_to_all({inputs[self].data(), dtype, {all.size(), block}},
                     {out.data(), dtype, {all.size(), block}});
      for (std::size_t r = 0; r < ranks; ++r) {
        ASSERT_EQ(part(out, r * each, each), part(inputs[r], self * each, each))
            << "all_to_all of " << what;
      }
    }
  });
}

TEST(Collectives, MoveAsDefined) {
  for (const World& world : worlds()) move_everything(world);
}

// Blocks of any size, some empty, each pair another one; of 3000, some come with the message.
TEST(Collectives, AllToAllOfUnequalBlocks) {
  for (const World& world : worlds()) {
    with_collectives(world, [&](Collectives& all) {
      for (const std::int64_t scale : {1, 3000, 90'000}) {
        if (world.brief && 4 * scale > kBriefCount) continue;
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

/// Row t % kRows of rank t / kRows.
std::vector<std::int32_t> random_table(int ranks, std::int64_t slots, std::int64_t rows,
                                       std::mt19937& random) {
  std::vector<std::int32_t> table;
  for (std::int64_t place = 0; place < ranks * slots; ++place) {
    const auto all = static_cast<std::uint32_t>(ranks * rows);
    table.push_back(static_cast<std::int32_t>(random() % (all + 1)) - 1);
  }
  return table;
}

// Copies and the sums of their gradients, in registered memory of all ranks, of some, of none; of
// short rows, and of rows that take several rounds.
TEST(Collectives, RowsByATable) {
  constexpr std::int64_t kRows = 3, kSlots = 4;
  for (const World& world : worlds()) {
    if (world.domains().count() > 1 || world.brief) continue;
    with_collectives(world, [&](Collectives& all) {
      std::mt19937 random(17);
      for (const std::int64_t columns : {1, 60'001}) {
        for (const int registered : {0, 1, all.size()}) {
          const auto table = random_table(all.size(), kSlots, kRows, random);
          const auto experts = inputs_of(Dtype::f32, kRows * columns, all.size(), 3);
          const auto slots = inputs_of(Dtype::f32, kSlots * columns, all.size(), 90);
          const auto self = static_cast<std::size_t>(all.rank());
          const auto bytes = static_cast<std::size_t>(columns) * sizeof(float);
          const auto row = [&](const Bytes& of, std::int64_t at) {
            return part(of, static_cast<std::size_t>(at) * bytes, bytes);
          };
          const auto in = [&](const Bytes& given, Tensor& place) -> const void* {
            if (all.rank() >= registered) return given.data();
            std::memcpy(place.data(), given.data(), given.size());
            return place.data();
          };
          Tensor place = all.empty({kSlots * columns}, Dtype::f32);
          Bytes got = slots[self], sums = experts[self];
          all.copy_rows({in(experts[self], place), Dtype::f32, {kRows, columns}},
                        {got.data(), Dtype::f32, {kSlots, columns}}, table);
          for (std::int64_t slot = 0; slot < kSlots; ++slot) {
            const std::int32_t from = table[self * kSlots + static_cast<std::size_t>(slot)];
            const Bytes expected =
                from < 0 ? row(slots[self], slot) : row(experts[index(from / kRows)], from % kRows);
            ASSERT_EQ(row(got, slot), expected) << "slot " << slot << ", " << columns;
          }
          all.add_rows({in(slots[self], place), Dtype::f32, {kSlots, columns}},
                       {sums.data(), Dtype::f32, {kRows, columns}}, table);
          for (std::int64_t expert = 0; expert < kRows; ++expert) {
            std::vector<float> expected(static_cast<std::size_t>(columns));
            std::memcpy(expected.data(), row(experts[self], expert).data(), bytes);
            for (std::size_t at = 0; at < table.size(); ++at) {
              if (table[at] != all.rank() * kRows + expert) continue;
              const Bytes grads = row(slots[at / kSlots], static_cast<std::int64_t>(at % kSlots));
              for (std::int64_t i = 0; i < columns; ++i) {  // from +0, as all sums
                float& sum = expected[static_cast<std::size_t>(i)];
                sum = 0.0f + sum + element<float, float>(grads, i);
              }
            }
            Bytes wanted(bytes);
            std::memcpy(wanted.data(), expected.data(), bytes);
            ASSERT_TRUE(same(Dtype::f32, row(sums, expert), wanted)) << "expert " << expert;
          }
        }
      }
    });
  }
}

TEST(Collectives, TablesThatCannotBe) {
  with_collectives({.ranks = 2}, [](Collectives& all) {
    std::vector<float> x(6), out(4);
    const TensorView rows(x.data(), Dtype::f32, {3, 2}), slots(out.data(), Dtype::f32, {2, 2});
    const auto refused = [](const char* words, const std::function<void()>& call) {
      expect_error(ErrorKind::invalid_argument, {words}, call);
    };
    const std::vector<std::int32_t> none(4, -1), unknown{0, 1, 6, 0}, low{-2, 0, 0, 0};
    refused("copy_rows: table: got 3 entries",
            [&] { all.copy_rows(rows, slots, std::span(none).first(3)); });
    refused("copy_rows: table: got 6", [&] { all.copy_rows(rows, slots, unknown); });
    refused("add_rows: table: got -2", [&] { all.add_rows(slots, rows, low); });
    refused("copy_rows: x: got shape",
            [&] { all.copy_rows({x.data(), Dtype::f32, {6}}, slots, none); });
    refused("add_rows: out: got 3 columns",
            [&] { all.add_rows(slots, {x.data(), Dtype::f32, {2, 3}}, none); });
    const std::vector<std::int32_t> mine(4, all.rank());
    expect_error(ErrorKind::mismatch, {"the table (as a hash)"},
                 [&] { all.copy_rows(rows, slots, mine); });
  });
  with_collectives({.ranks = 2, .domain_size = 1}, [](Collectives& all) {
    std::vector<float> x(6), out(4);
    const std::vector<std::int32_t> none(4, -1);
    expect_error(ErrorKind::unsupported, {"copy_rows: got ranks in 2 domains"}, [&] {
      all.copy_rows({x.data(), Dtype::f32, {3, 2}}, {out.data(), Dtype::f32, {2, 2}}, none);
    });
  });
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
      if (world.brief && registered < world.ranks) continue;
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
  constexpr unsigned kMostCount = kSanitizer ? 200'000 : 600'000;  // several rounds
  // Over shm the ranks try both ways to store what they show.
  for (const World& world : {World{.ranks = 4}, World{.ranks = 4, .fabric = FabricKind::shm},
                             World{.ranks = 5, .domain_size = 2},
                             World{.ranks = 4, .domain_size = 2, .network = FabricKind::sim}}) {
    with_collectives(world, [&](Collectives& all) {
      std::mt19937 random(kSeed);  // the same on all ranks
      Stream stream;
      for (int i = 0; i < (kSanitizer ? 30 : 150); ++i) {
        const unsigned call = random() % 4;
        const std::int64_t count = random() % 2 ? random() % 500 : random() % kMostCount;
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
TEST(Collectives, DifferentRowsByATableAreNamed) {
  with_collectives({.ranks = 2}, [](Collectives& all) {
    const int other = all.rank();
    std::vector<float> x(24), out(24);
    const std::vector<std::int32_t> table{0, 1, 2, 3};  // two slots of each rank
    // As many elements on both ranks in each case.
    expect_error(ErrorKind::mismatch, {"columns is"}, [&] {
      all.copy_rows({x.data(), Dtype::f32, {2 + other, 6 - 2 * other}},
                    {out.data(), Dtype::f32, {2, 6 - 2 * other}}, table);
    });
    expect_error(ErrorKind::mismatch, {"the number of rows is"}, [&] {
      all.add_rows({x.data(), Dtype::f32, {2, 6}}, {out.data(), Dtype::f32, {2 + other, 6}}, table);
    });
  });
}

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

// The block of a rank may be where it belongs.
TEST(Collectives, BlocksInPlace) {
  for (const World& world : {World{.ranks = 3}, World{.ranks = 4, .domain_size = 2}}) {
    with_collectives(world, [](Collectives& all) {
      for (const std::int64_t block : {5, 700'000}) {
        const auto b = static_cast<std::size_t>(block);
        const auto first = static_cast<std::size_t>(all.rank()) * b;
        std::vector<std::int32_t> x(b * static_cast<std::size_t>(all.size()), 1 + all.rank());
        const TensorView whole(x.data(), Dtype::i32, {all.size() * block});
        const TensorView mine(x.data() + first, Dtype::i32, {block});
        all.all_gather(mine, whole);
        for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(x[i], 1 + static_cast<int>(i / b));
        all.reduce_scatter(whole, mine);
        ASSERT_EQ(std::vector<std::int32_t>(x.data() + first, x.data() + first + b),
                  std::vector<std::int32_t>(b, all.size() * (1 + all.rank())));
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
      refused("all_to_all: send_counts: got", [&] { all.all_to_all(f32, wrong, other, right); });
      refused("all_to_all: recv_counts: got", [&] { all.all_to_all(f32, right, other, wrong); });
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
