// A vault of ranks whose calls run elsewhere, as on GPUs: their CPUs only swap for the vault, and
// some tensors lie on a device. Ranks are threads.
#include <array>
#include <latch>
#include <memory>
#include <optional>
#include <vector>

#include "core/layout.hpp"
#include "engine/membership/regroup.hpp"
#include "engine/test_groups.hpp"
#include "engine/vault/staged_copies.hpp"
#include "engine/vault/test_wire.hpp"
#include "engine/vault/vault.hpp"
#include "fabric/local/local.hpp"

namespace ferry::engine::test {
namespace {

constexpr std::size_t kSwapBytes = sizeof(StepMessage) + fabric::kMaxHandleBytes;
constexpr Device kDevice{DeviceKind::cuda, 3};

/// A rank's side of the group, as the CUDA engine has it.
class Beside final : public VaultGroup, public std::enable_shared_from_this<Beside> {
 public:
  explicit Beside(Bootstrap& bootstrap)
      : topology_(Domains::blocks(bootstrap.size(), 0)), now_(bootstrap.rank(), bootstrap.size()) {
    config_.deadline = 20s;
    memory_ = std::make_shared<Memory>(fabric::make_local_fabric(bootstrap, 20s));
    layout_ = make_control_layout(bootstrap.size(), kSwapBytes);
    const fabric::Segment control = memory_->fabric->register_memory(layout_.bytes);
    const auto handles = bootstrap.all_gather(control.handle, 20s);
    for (int peer = 0; peer < bootstrap.size(); ++peer) {
      if (peer == bootstrap.rank()) continue;
      memory_->fabric->attach(peer, 0, layout_.bytes, handles[static_cast<std::size_t>(peer)]);
    }
    bootstrap.all_gather({}, 20s);
    channel_.emplace(memory_, config_, control, layout_);
    channel_->swap_beside_calls();
  }

  std::shared_ptr<void> kept() override { return shared_from_this(); }
  Channel& channel() override { return *channel_; }
  const std::shared_ptr<Memory>& shared_memory() const override { return memory_; }
  int domains() const override { return 1; }
  const Domains& topology() const override { return topology_; }
  CurrentView& now() override { return now_; }
  Regroup* membership_if_changed() override { return regroup_.get(); }
  void in_turn(const char* /*call*/, const std::function<void()>& work) override { work(); }
  Device device() const override { return kDevice; }
  void copy(std::span<const DeviceCopy> copies, const Stream* /*stream*/) override {
    LateWire wire;
    StagedCopies(wire, {std::span(buffers_[0]), std::span(buffers_[1])}).run(copies);
  }

  std::shared_ptr<VaultEngine> open(std::size_t version_bytes) {
    return vault_.open(*this, version_bytes);
  }
  /// All ranks have come here, as in a commit of theirs on the GPU.
  void commit(std::uint64_t step) {
    channel_->swap("commit", {});
    now_.commit(step);
  }
  /// On other ranks it may be others.
  void calls(std::uint64_t count) { channel_->count(count); }
  void regroup() {
    if (!regroup_) {
      regroup_ = std::make_unique<Regroup>(memory_, nullptr, *channel_, config_, layout_);
    }
    const Epoch next = regroup_->run(now_.step());
    now_.begin(next, {});
  }

 private:
  GroupConfig config_{};
  Domains topology_;
  CurrentView now_;
  std::shared_ptr<Memory> memory_{};
  ControlLayout layout_{};
  std::optional<Channel> channel_{};
  std::unique_ptr<Regroup> regroup_{};
  GroupVault vault_{};
  std::array<std::array<std::byte, 96>, 2> buffers_{};
};

void on_besides(int ranks, const std::function<void(Beside&)>& body) {
  const auto bootstraps = thread_bootstrap(ranks);
  std::latch over(ranks);
  on_ranks(ranks, [&](int r) {
    const auto beside = std::make_shared<Beside>(*bootstraps[static_cast<std::size_t>(r)]);
    body(*beside);
    over.arrive_and_wait();
  });
}

/// What a rank has after a step: weights on the device, a moment in CPU memory.
struct Experts {
  std::vector<float> weights = std::vector<float>(77);
  std::vector<std::int64_t> moment = std::vector<std::int64_t>(5);

  Experts() = default;
  Experts(int rank, std::uint64_t step) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      weights[i] = float(1000 * rank) + float(step) + float(i) / 128;
    }
    moment.assign(moment.size(), std::int64_t(step) - rank);
  }
  std::vector<VaultPart> parts(int rank) const {
    const ConstTensorView on_device(weights.data(), Dtype::f32, {7, 11}, kDevice);
    return {{rank, on_device}, {rank, {moment.data(), Dtype::i64, {5}}}};
  }
  std::vector<VaultTarget> targets(const Device& device = kDevice) {
    const TensorView on_device(weights.data(), Dtype::f32, {7, 11}, device);
    return {{on_device}, {{moment.data(), Dtype::i64, {5}}}};
  }
  friend bool operator==(const Experts&, const Experts&) = default;
};

std::size_t bytes_of_one() {
  return Vault::bytes_of(Experts().parts(0));
}

Experts got(const VaultEngine& vault, int key) {
  Experts experts;
  vault.get(key, experts.targets(), nullptr);
  return experts;
}

void put(VaultEngine& vault, int rank, std::uint64_t step) {
  vault.put(step, Experts(rank, step).parts(rank), nullptr);
}

TEST(VaultBesideCalls, HasTheStateOfARankThatLeft) {
  std::latch put_once(3);
  on_besides(3, [&](Beside& group) {
    const int rank = group.channel().rank();
    const auto own_number = static_cast<std::uint64_t>(rank + 1);
    const auto vault = group.open(bytes_of_one());
    EXPECT_EQ(vault->recover({}), std::nullopt);
    for (std::uint64_t step = 0; step <= 3; ++step) {
      group.calls(own_number * (step + 3));  // whose number has nothing to do with swaps
      if (step > 0) group.commit(step);
      put(*vault, rank, step);
      EXPECT_EQ(vault->recover({}), step) << "without a loss";
    }
    put_once.arrive_and_wait();
    if (rank == 1) {
      group.channel().leave();
      return;
    }
    expect_error(ErrorKind::peer_left, {"rank 1", "recover"}, [&] { (void)vault->recover({}); });
    group.regroup();
    EXPECT_EQ(vault->recover({}), 3u);
    EXPECT_EQ(vault->keys(), (std::vector<std::int64_t>{0, 1, 2}));
    for (int key = 0; key < 3; ++key) EXPECT_EQ(got(*vault, key), Experts(key, 3)) << key;
    for (std::uint64_t step = 4; step <= 6; ++step) {
      group.calls(own_number * 50 + step);
      group.commit(step);
      put(*vault, rank, step);
    }
    EXPECT_EQ(vault->recover({}), 6u);
    EXPECT_EQ(vault->keys(), (std::vector<std::int64_t>{0, 2}));
    EXPECT_EQ(got(*vault, rank), Experts(rank, 6));
  });
}

TEST(VaultBesideCalls, TensorsOfOtherDevicesAreRefused) {
  on_besides(2, [&](Beside& group) {
    const auto vault = group.open(bytes_of_one());
    EXPECT_EQ(vault->recover({}), std::nullopt);
    put(*vault, group.channel().rank(), 0);
    EXPECT_EQ(vault->recover({}), 0u);
    Experts experts;
    const auto elsewhere = experts.targets({DeviceKind::cuda, 1});
    expect_error(ErrorKind::invalid_argument, {"get: key 0, tensor 0", "cuda:1", "cuda:3"},
                 [&] { vault->get(0, elsewhere, nullptr); });
    auto parts = experts.parts(0);
    parts[0].tensor.device = {DeviceKind::cuda, 1};
    group.commit(1);
    expect_error(ErrorKind::invalid_argument, {"put: key 0", "cuda:1", "cuda:3"},
                 [&] { vault->put(1, parts, nullptr); });
    Stream worker;
    expect_error(ErrorKind::invalid_argument, {"put: stream", "cpu", "cuda:3"},
                 [&] { vault->put(1, {}, &worker); });
  });
}

}  // namespace
}  // namespace ferry::engine::test
