// The conformance matrix, and more, on GPUs. See docs/testing.md.
//
//   conformance_cuda [--ranks 1,2,3,4,8] [--cases sample|cover|full] [--seconds 120] [--seed N]
//                    [--repeat 10000] [--parts matrix,repeat,...] [--case NUMBER] [--gpus N]
//                    [--engine cuda|host] [--network copies|ofi]
//
// --seconds: for the matrix, shared among the numbers of ranks; `full` stops there, in a random
// order. --case NUMBER: one case of the full product. --gpus N: use only the first N. --engine
// host: what of this can be done without a GPU, on the host engine: a check of this program.
// --network: what joins the domains of processes, in part domains.
// Without a GPU, or without the CUDA engine, it says so and skips.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "cuda/engine.hpp"
#include "cuda_parts.hpp"
#include "device.hpp"
#include "random.hpp"

namespace ferry::conformance {
namespace {

constexpr int kSkipped = 77;

struct Part {
  const char* name;
  bool (*run)(const CudaOptions&);
  bool needs_gpu = false;
};
constexpr Part kParts[] = {
    {"matrix", run_matrix},     {"latency", run_latency_cases},
    {"repeat", run_repeated},   {"interleaved", run_interleaved},
    {"groups", run_groups},     {"graph", run_graph, true},
    {"deadline", run_deadline}, {"kill", run_kill},
    {"leaks", run_leaks},       {"large", run_large, true},
    {"domains", run_domains},   {"domain_latency", run_domain_latency},
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) words.push_back(word);
  return words;
}

struct Arguments {
  CudaOptions options{};
  std::vector<std::string> parts{};
  bool host = false;
};

bool read(Arguments& given, const std::string& name, const std::string& value) {
  CudaOptions& o = given.options;
  if (name == "--ranks") {
    o.ranks.clear();
    for (const std::string& word : split(value)) o.ranks.push_back(std::atoi(word.c_str()));
    for (const int ranks : o.ranks) {
      if (ranks < 1 || ranks > 16) return false;
    }
  } else if (name == "--cases") {
    if (value == "sample")
      o.cases = Cases::sample;
    else if (value == "cover")
      o.cases = Cases::cover;
    else if (value == "full")
      o.cases = Cases::full;
    else
      return false;
  } else if (name == "--seconds") {
    o.seconds = std::atof(value.c_str());
  } else if (name == "--seed") {
    o.seed = std::strtoull(value.c_str(), nullptr, 0);
  } else if (name == "--repeat") {
    o.repeat = std::atoi(value.c_str());
  } else if (name == "--case") {
    o.only_case = std::atoll(value.c_str());
  } else if (name == "--gpus") {
    o.gpus = std::atoi(value.c_str());
  } else if (name == "--network") {
    o.network = value == "ofi" ? FabricKind::ofi : FabricKind::automatic;
    return value == "ofi" || value == "copies";
  } else if (name == "--parts") {
    given.parts = split(value);
  } else if (name == "--engine") {
    given.host = value == "host";
    return given.host || value == "cuda";
  } else {
    return false;
  }
  return true;
}

bool wanted(const Arguments& given, const char* part) {
  if (given.parts.empty()) return true;
  for (const std::string& name : given.parts) {
    if (name == part) return true;
  }
  return false;
}

/// False: there is nothing to run on, and it was said.
bool find_gpus(Arguments& given) {
  CudaOptions& options = given.options;
  if (given.host) {
    options.gpus = 0;
    return true;
  }
  if (!cuda::available()) return std::printf("SKIPPED: THIS BUILD HAS NO CUDA ENGINE\n"), false;
  const int gpus = gpu_count();
  if (gpus == 0) return std::printf("SKIPPED: NO GPU\n"), false;
  options.gpus = options.gpus > 0 ? std::min(options.gpus, gpus) : gpus;
  return true;
}

int run(Arguments& given) {
  CudaOptions& options = given.options;
  if (!find_gpus(given)) return kSkipped;
  std::printf("conformance_cuda: %d GPUs, --seed %llu\n", options.gpus,
              static_cast<unsigned long long>(options.seed));
  std::fflush(stdout);
  std::string failed;
  int ran = 0;
  for (const Part& part : kParts) {
    if (!wanted(given, part.name) || (given.host && part.needs_gpu)) continue;
    ++ran;
    if (!part.run(options)) failed += std::string(" ") + part.name;
    std::fflush(stdout);
  }
  if (failed.empty() && ran > 0) return std::printf("ALL PASSED\n"), 0;
  return std::printf("FAILED:%s\n", ran == 0 ? " there is no such part" : failed.c_str()), 1;
}

}  // namespace
}  // namespace ferry::conformance

int main(int argc, char** argv) {
  using namespace ferry::conformance;
  Arguments given;
  given.options.gpus = 0;
  given.options.seed = base_seed();
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc || !read(given, argv[i], argv[i + 1])) {
      return std::fprintf(stderr, "conformance_cuda: cannot use %s\n", argv[i]), 2;
    }
  }
  return run(given);
}
