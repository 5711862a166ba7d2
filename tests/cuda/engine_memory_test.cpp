// The CUDA engine's memory: who is waited for before it is used again or unmapped. Skips
// without a GPU.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <numeric>

#include "engine_graph.hpp"
#include "engine_seat.hpp"
#include "touch.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kMemorySeed = 20261124;
using Clock = std::chrono::steady_clock;

/// A pinned word.
class Word {
 public:
  Word() {
    need(cudaHostAlloc(&word_, sizeof(std::uint32_t), cudaHostAllocDefault), "cudaHostAlloc");
  }
  ~Word() { cudaFreeHost(word_); }
  Word(const Word&) = delete;
  Word& operator=(const Word&) = delete;
  std::uint32_t* get() const { return static_cast<std::uint32_t*>(word_); }

 private:
  void* word_ = nullptr;
};

/// A tensor whose first words a kernel adds up later.
struct Reader {
  const Copier& copier;
  Word sum{};
  std::uint32_t expected = 0;
  static constexpr std::size_t kWords = 256;

  explicit Reader(const Copier& with) : copier(with) {
    read_later(nullptr, 0ms);  // loads the kernel
    need(cudaDeviceSynchronize(), "read_later");
  }
  void start(cudaStream_t stream, std::chrono::milliseconds wait, const Tensor& tensor) {
    const auto words = copier.get<std::uint32_t>(tensor, 1);
    need(words.size() == kWords, "one row");
    expected = std::accumulate(words.begin(), words.end(), std::uint32_t{0});
    read_later(stream, wait, tensor.data(), kWords, sum.get());
  }
  void check(cudaStream_t stream) const {
    need(cudaStreamSynchronize(stream), "the reader");
    need(*sum.get() == expected, "the reader found other rows");
  }
};

void tensors_outlive(std::chrono::milliseconds deadline, std::chrono::milliseconds reads,
                     const std::function<void(Clock::duration, bool ended)>& judge) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  const Shape shape;
  const auto problems = run_on_crew(1, 1, [&](Bootstrap& bootstrap) {
    need(cudaSetDevice(0), "cudaSetDevice");
    const Copier copier;
    Reader reader(copier);
    const World world(1, shape, kMemorySeed);
    const OnGpu mine(world.inputs[0], shape, 0, copier);
    OwnStream own(0);
    Received received;
    {
      GroupConfig config = config_for(shape);
      config.deadline = deadline;
      Group group(borrowed(bootstrap), config);
      DispatchOptions options{.stream = &own.stream};
      received = group.dispatch(mine.x_view(), group.plan(mine.routes_view()), options);
      received.event.wait();
    }
    reader.start(own.raw, reads, received.x);
    // The call's pinned memory goes with its event, and CUDA waits for the GPU then.
    const Event call = received.event;
    const auto start = Clock::now();
    received = {};
    const auto took = Clock::now() - start;
    judge(took, cudaStreamQuery(own.raw) == cudaSuccess);
    reader.check(own.raw);
  });
  for (const std::string& problem : problems) ADD_FAILURE() << problem;
}

TEST(EngineMemoryTest, TheLastTensorWaitsForItsReaders) {
  tensors_outlive(20s, 500ms, [](Clock::duration, bool ended) {
    need(ended, "the memory went while a kernel read it");
  });
}

TEST(EngineMemoryTest, TheLastTensorWaitsNoLongerThanTheDeadline) {
  tensors_outlive(500ms, 3000ms, [](Clock::duration took, bool ended) {
    need(took > 400ms && took < 2s && !ended, "it waited " + std::to_string(took / 1ms) +
                                                  " ms, and its reader has " +
                                                  (ended ? "ended" : "not ended"));
  });
}

TEST_P(EngineTest, CapturedTensorsWaitForRecordedStreams) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    Reader reader(seat.copier);
    const World world(seat.size(), shape, kMemorySeed + 1);
    const OnGpu mine = seat.on_gpu(world);
    OwnStream own(seat.device), other(seat.device);
    seat.meet();
    Plan plan = seat.group.plan(mine.routes_view());
    DispatchOptions options;
    options.max_recv_rows = 150;
    options.stream = &own.stream;
    const std::size_t before = seat.group.memory().arena_used_bytes;
    Received received;
    auto graph = std::make_unique<Graph>(
        own.raw, [&] { received = seat.group.dispatch(mine.x_view(), plan, options); });
    seat.meet();
    graph->run();
    reader.start(other.raw, 2000ms, received.x);
    seat.group.record_stream(received.x.data(), other.stream);
    received = {};
    graph.reset();
    const auto start = Clock::now();
    while (seat.group.memory().arena_used_bytes > before && Clock::now() - start < 1500ms) {
      std::this_thread::sleep_for(1ms);
    }
    need(seat.group.memory().arena_used_bytes <= before, "the graph keeps its memory");
    std::vector<Tensor> all;  // every free piece, ready for all streams
    try {
      for (;;) all.push_back(seat.group.empty({1 << 16}, Dtype::f32));
    } catch (const Error& error) {
      need(error.kind() == ErrorKind::exhausted, error.what());
    }
    need(cudaStreamQuery(other.raw) == cudaSuccess, "memory was used again under a reader");
    reader.check(other.raw);
    seat.meet();
  });
}

TEST(EngineMemoryTest, ACaptureThatWaitsForMemoryCanBeStopped) {
  const Shape shape;
  GroupConfig config = config_for(shape);
  static std::atomic<bool> stop{false};
  config.on_wait = [] {
    if (stop.load()) throw std::runtime_error("stopped");
  };
  on_ranks(1, false, config, [&](Seat& seat) {
    Reader reader(seat.copier);
    const World world(1, shape, kMemorySeed + 2);
    const OnGpu mine = seat.on_gpu(world);
    OwnStream first(seat.device), second(seat.device);
    const Plan plan = seat.group.plan(mine.routes_view());
    DispatchOptions options;
    options.max_recv_rows = 100;
    options.stream = &first.stream;
    Received received = seat.group.dispatch(mine.x_view(), plan, options);
    received.event.wait();
    reader.start(first.raw, 2000ms, received.x);
    received = {};
    options.stream = &second.stream;
    stop = true;
    cudaGraph_t graph = nullptr;
    need(cudaStreamBeginCapture(second.raw, cudaStreamCaptureModeThreadLocal), "capture");
    const auto start = Clock::now();
    bool stopped = false;
    try {
      received = seat.group.dispatch(mine.x_view(), plan, options);
    } catch (const std::runtime_error& error) {
      stopped = std::string(error.what()).find("stopped") != std::string::npos;
    }
    const auto took = Clock::now() - start;
    stop = false;
    (void)cudaStreamEndCapture(second.raw, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    need(stopped && took < 1s, "the wait was not stopped");
    reader.check(first.raw);
    round_trip(seat.group, world, mine, plan, {}, seat.copier);
  });
}

TEST(EngineMemoryTest, ThreadsOnOneGpuNeedQueuesOfTheirOwn) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  const auto problems = run_on_crew(2, 2, [](Bootstrap& bootstrap) {
    need(cudaSetDevice(0), "cudaSetDevice");
    if (bootstrap.rank() == 0) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1);
    bootstrap.all_gather({}, 60s);
    const Error error =
        need_error(ErrorKind::unsupported, "two threads on one GPU with eight queues",
                   [&] { Group group(borrowed(bootstrap), config_for({})); });
    need(std::string(error.what()).find("CUDA_DEVICE_MAX_CONNECTIONS=16") != std::string::npos,
         error.what());
    bootstrap.all_gather({}, 60s);
    if (bootstrap.rank() == 0) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  });
  for (const std::string& problem : problems) ADD_FAILURE() << problem;
}

}  // namespace
}  // namespace ferry::test
