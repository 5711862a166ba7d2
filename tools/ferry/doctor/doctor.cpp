// `ferry doctor`: what is here, what Ferry will use, what is missing and how to get it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/plot.hpp"
#include "command.hpp"
#include "doctor/build.hpp"
#include "doctor/machine.hpp"
#include "doctor/net.hpp"
#include "doctor/self_test.hpp"
#include "doctor/waits.hpp"
#include "ferry/group.hpp"
#include "ferry/version.hpp"

namespace ferry::cli {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kSmallSharedMemory = std::uint64_t{1} << 30;
constexpr std::uint64_t kSmallOpenFiles = 1024;

enum class Weight {
  error,    // Ferry cannot work
  warning,  // it works, but not everything or not well
  note,     // not needed now
};

constexpr const char* name_of(Weight weight) {
  switch (weight) {
    case Weight::error: return "error";
    case Weight::warning: return "warning";
    case Weight::note: return "note";
  }
  return "";
}

struct Finding {
  Weight weight = Weight::note;
  std::string what{};
  std::string remedy{};
};

struct Use {
  std::string threads{};    // fabric of ranks as threads
  std::string processes{};  // of ranks as processes; "" if there is none
  std::string backend{};
  bool cuda = false;  // there is a GPU, and this Ferry has the engine for it
};

struct Diagnosis {
  Build build{};
  Machine machine{};
  Use use{};
  std::vector<Finding> findings{};
  std::vector<SelfTest> tests{};
  bool usable() const {
    for (const Finding& finding : findings) {
      if (finding.weight == Weight::error) return false;
    }
    return true;
  }
};

void judge_shared_memory(const Machine& m, std::vector<Finding>& findings) {
  const Machine::SharedMemory& shm = m.shared_memory;
  if (!shm.present || !shm.writable) {
    findings.push_back({Weight::error,
                        shm.present ? "/dev/shm cannot be written: ranks as processes cannot meet"
                                    : "there is no /dev/shm: ranks as processes cannot meet",
                        "mount -t tmpfs -o mode=1777 tmpfs /dev/shm (as root); ranks as threads "
                        "work without"});
  } else if (shm.free_bytes < kSmallSharedMemory) {
    findings.push_back(
        {Weight::warning,
         fmt::format("/dev/shm has only {} free of {}: large exchanges between processes will not "
                     "fit",
                     format_bytes(shm.free_bytes), format_bytes(shm.total_bytes)),
         m.container.empty() ? "free some, or mount -o remount,size=8G /dev/shm (as root)"
                             : "start the container with --shm-size=8g or --ipc=host; under "
                               "Kubernetes mount an emptyDir with medium: Memory on /dev/shm"});
  }
}

void judge_cores(const Machine& m, std::vector<Finding>& findings) {
  const double usable = m.cpu.quota_cores > 0 ? m.cpu.quota_cores : m.cpu.usable_cores;
  if (usable < 2) {
    findings.push_back({Weight::warning, fmt::format("{} core to run on: ranks take turns", usable),
                        "more cores, or a larger CPU limit of the container"});
  }
}

void judge_kernel(const Machine& m, std::vector<Finding>& findings) {
  if (!m.kernel.futex) {
    findings.push_back({Weight::error, "the kernel or a sandbox refuses futex: ranks cannot wait",
                        "allow the futex system call in the sandbox (seccomp profile)"});
  }
  if (!m.kernel.pidfd) {
    findings.push_back(
        {Weight::warning, "no pidfd: the death of a process may be noticed only at the deadline",
         "Linux 5.3 or newer; in a container allow pidfd_open in the seccomp profile"});
  }
  if (m.limits.open_files < kSmallOpenFiles) {
    findings.push_back(
        {Weight::warning,
         fmt::format("only {} open files a process are allowed", m.limits.open_files),
         "ulimit -n 4096"});
  }
}

void judge_devices(const Machine& m, std::vector<Finding>& findings) {
  if (m.gpus.count > 0 && !m.gpus.library) {
    findings.push_back({Weight::note, "NVIDIA GPUs are here, but libcuda.so.1 cannot be loaded",
                        m.container.empty()
                            ? "install the user part of the driver (Debian: libcuda1)"
                            : "start the container with --gpus all (NVIDIA Container Toolkit)"});
  }
  if ((m.gpus.count > 0 || m.gpus.library) && !Group::has_backend(Backend::cuda)) {
    findings.push_back({Weight::note,
                        "this Ferry was built without the CUDA engine: tensors on the CPU only",
                        "build it where there is an nvcc, or with FERRY_CUDA=1 (docs/guide.md, "
                        "Building for GPUs); or copy tensors to the CPU"});
  }
  if (!Group::has_fabric(FabricKind::ofi)) {
    findings.push_back({Weight::note,
                        "this Ferry was built without the headers of libfabric: ranks of one "
                        "machine only",
                        "for ranks of several, install them (Debian: libfabric-dev) and build it "
                        "again"});
  }
  if (!m.libfabric) {
    findings.push_back({Weight::note, "no libfabric.so.1: ranks of one machine only",
                        "for ranks of several, install it (Debian: libfabric1)"});
  }
}

void judge_slices(const Machine::Gpus& gpus, std::vector<Finding>& findings) {
  const bool slices = std::any_of(gpus.all.begin(), gpus.all.end(),
                                  [](const Machine::Gpu& gpu) { return gpu.slice; });
  if (slices) {
    findings.push_back(
        {Weight::note,
         "slices of GPUs (MIG): none reaches the memory of another one by pointer or NVLink, also "
         "not of the same GPU",
         "give each rank a slice (CUDA_VISIBLE_DEVICES=MIG-..., nvidia-smi -L lists them) and a "
         "domain of its own (domain_size = 1): rows go through CPU memory"});
  } else if (gpus.in_mig > 0) {
    findings.push_back(
        {Weight::note,
         fmt::format("MIG is on for {} GPU{}, and this process is given no slice: "
                     "CUDA does not see what is sliced",
                     gpus.in_mig, gpus.in_mig == 1 ? "" : "s"),
         "make slices (nvidia-smi mig -cgi ... -C), or turn MIG off (nvidia-smi -mig 0)"});
  }
}

Diagnosis diagnose(bool self_test) {
  Diagnosis d;
  // Before look_at_machine, which loads libraries that may start threads.
  const int gpus = gpu_count();
  if (self_test) d.tests = run_self_tests(gpus);
  d.build = look_at_build();
  d.machine = look_at_machine();
  judge_cores(d.machine, d.findings);
  if (d.machine.kernel.name == "Windows") {
    d.findings.push_back({Weight::note, "on Windows: ranks of one machine, tensors on the CPU only",
                          "Linux, or WSL, for GPUs and several machines"});
  } else {
    judge_shared_memory(d.machine, d.findings);
    judge_kernel(d.machine, d.findings);
    judge_devices(d.machine, d.findings);
    judge_slices(d.machine.gpus, d.findings);
  }
  for (const SelfTest& test : d.tests) {
    if (test.failure.empty()) continue;
    d.findings.push_back({Weight::error, fmt::format("{}: {}", test.name, test.failure),
                          "see the errors above; else report it with `ferry doctor --json`"});
  }
  const Machine::SharedMemory& shm = d.machine.shared_memory;
  d.use = {"local", shm.present && shm.writable ? "shm" : "", "host", gpus > 0};
  return d;
}

nlohmann::json diagnosis_json(const Diagnosis& d) {
  nlohmann::json findings = nlohmann::json::array();
  for (const Finding& finding : d.findings) {
    findings.push_back(
        {{"weight", name_of(finding.weight)}, {"what", finding.what}, {"remedy", finding.remedy}});
  }
  nlohmann::json tests = nlohmann::json::array();
  for (const SelfTest& test : d.tests) {
    tests.push_back({{"name", test.name},
                     {"fabric", test.fabric},
                     {"seconds", test.seconds},
                     {"passed", test.failure.empty()},
                     {"failure", test.failure}});
  }
  return {{"version", version()},
          {"usable", d.usable()},
          {"build",
           {{"engines", d.build.engines}, {"fabrics", d.build.fabrics}, {"gpus", d.build.gpus}}},
          {"machine", to_json(d.machine)},
          {"uses",
           {{"threads", d.use.threads},
            {"processes", d.use.processes},
            {"backend", d.use.backend},
            {"cuda", d.use.cuda}}},
          {"findings", findings},
          {"self_tests", tests}};
}

std::string limit(std::uint64_t value, bool bytes) {
  if (value == kUnlimited) return "unlimited";
  return bytes ? format_bytes(value) : std::to_string(value);
}

std::string yes_no(bool value) {
  return value ? "yes" : "no";
}

void print_line(const char* name, const std::string& value) {
  fmt::print("  {:<14} {}\n", name, value);
}

void print_machine(const Machine& m) {
  fmt::print("This machine\n");
  print_line("system", fmt::format("{}, {} {}{}", m.system.empty() ? "unknown" : m.system,
                                   m.kernel.name, m.kernel.release,
                                   m.container.empty() ? "" : ", in a container: " + m.container));
  print_line("processor", fmt::format("{} ({})", m.cpu.model.empty() ? "unknown" : m.cpu.model,
                                      m.cpu.architecture));
  print_line("cores", fmt::format("{}, {} usable{}", m.cpu.cores, m.cpu.usable_cores,
                                  m.cpu.quota_cores > 0
                                      ? fmt::format(", limited to {:.3g}", m.cpu.quota_cores)
                                      : ""));
  print_line("memory", fmt::format("{}, {} available{}", format_bytes(m.memory.total_bytes),
                                   format_bytes(m.memory.available_bytes),
                                   m.memory.limit_bytes > 0
                                       ? ", limited to " + format_bytes(m.memory.limit_bytes)
                                       : ""));
  if (m.kernel.name == "Windows") return;
  print_line("/dev/shm",
             !m.shared_memory.present
                 ? "absent"
                 : fmt::format("{}, {} free{}", format_bytes(m.shared_memory.total_bytes),
                               format_bytes(m.shared_memory.free_bytes),
                               m.shared_memory.writable ? "" : ", not writable"));
  print_line(
      "limits",
      fmt::format("open files {} (at most {}), locked memory {}", limit(m.limits.open_files, false),
                  limit(m.limits.open_files_most, false), limit(m.limits.locked_bytes, true)));
  print_line("kernel", fmt::format("futex {}, pidfd {}, memfd {}", yes_no(m.kernel.futex),
                                   yes_no(m.kernel.pidfd), yes_no(m.kernel.memfd)));
  print_line("GPUs", m.gpus.count == 0
                         ? fmt::format("none seen, libcuda.so.1 {}", yes_no(m.gpus.library))
                         : fmt::format("{} ({}), driver {}, CUDA {}, libcuda.so.1 {}", m.gpus.count,
                                       fmt::join(m.gpus.names, ", "),
                                       m.gpus.driver.empty() ? "?" : m.gpus.driver,
                                       m.gpus.cuda.empty() ? "does not start" : m.gpus.cuda,
                                       yes_no(m.gpus.library)));
  for (const std::string& line : describe(m.gpus)) print_line("", line);
  print_line("network", fmt::format("RDMA devices: {}; libfabric.so.1 {}",
                                    m.rdma_devices.empty()
                                        ? "none"
                                        : fmt::format("{}", fmt::join(m.rdma_devices, ", ")),
                                    yes_no(m.libfabric)));
}

void print(const Diagnosis& d) {
  fmt::print("ferry {}\n\n", version());
  fmt::print("This build\n");
  print_line("engines", fmt::format("{}{}", fmt::join(d.build.engines, ", "),
                                    d.build.gpus.empty()
                                        ? ""
                                        : fmt::format(" (for {})", fmt::join(d.build.gpus, ", "))));
  print_line("fabrics", fmt::format("{}", fmt::join(d.build.fabrics, ", ")));
  fmt::print("\n");
  print_machine(d.machine);
  fmt::print("\nFerry will use\n");
  print_line("backend", d.use.backend + " (tensors in CPU memory)");
  if (d.use.cuda) {
    print_line("", "cuda (tensors in GPU memory) when asked: --backend cuda, Backend::cuda");
  }
  print_line("kernels", d.machine.simd);
  print_line("threads", "fabric " + d.use.threads);
  print_line("processes", d.use.processes.empty() ? "no fabric" : "fabric " + d.use.processes);
  if (!d.tests.empty()) fmt::print("\nSelf-test\n");
  for (const SelfTest& test : d.tests) {
    fmt::print("  {:<22} fabric {:<6} {} ({:.2f} s)\n", test.name, test.fabric,
               test.failure.empty() ? "passed" : "FAILED", test.seconds);
  }
  if (!d.findings.empty()) fmt::print("\nWhat is missing\n");
  for (const Finding& finding : d.findings) {
    fmt::print("  {}: {}\n      -> {}\n", name_of(finding.weight), finding.what, finding.remedy);
  }
  fmt::print("\n{}\n", d.usable() ? "Ferry works on this machine."
                                  : "Ferry does not work here: see the errors above.");
}

int tell_waits(const std::vector<std::string>& files, const std::string& image) {
  if (!may_draw("doctor --waits", image)) return 1;
  try {
    const WaitMatrix waits = read_waits(files);
    const std::string said = describe_waits(waits);
    fmt::print("{}\n", said);
    if (image.empty()) return 0;
    const nlohmann::json found{{"waits_ns", waits}, {"odd", nlohmann::json::array({said})}};
    return draw_text(kMatrixPlot, found.dump(), image) ? 0 : 1;
  } catch (const std::runtime_error& error) {
    fmt::print(stderr, "ferry doctor --waits: {}\n", error.what());
    return kUsageError;
  }
}

}  // namespace

void add_doctor(CLI::App& app, int& exit_code) {
  struct Arguments {
    bool json = false;
    bool no_self_test = false;
    std::vector<std::string> waits{};
    bool net = false;
    FabricKind fabric = FabricKind::automatic;
    std::string plot{};
  };
  auto given = std::make_shared<Arguments>();
  CLI::App* doctor = app.add_subcommand(
      "doctor", "What is on this machine, what Ferry will use, what is missing and how to get it");
  doctor->add_flag("--json", given->json, "The same for programs");
  doctor->add_flag("--no-self-test", given->no_self_test,
                   "Only look; do not exchange a few rows between two ranks");
  doctor
      ->add_option("--waits", given->waits,
                   "Only say who is slow, from how long ranks waited for each other in latency "
                   "mode: a file with the R x R matrix in nanoseconds (row: who waits), or one for "
                   "each rank with its row; text, JSON or .npy. On the diagonal: how long that "
                   "rank was ready to run and had no CPU")
      ->excludes("--json")
      ->excludes("--no-self-test");
  CLI::Option* net = doctor->add_flag(
      "--net", given->net,
      "As a rank of a job (`ferry run -n 4 -- ferry doctor --net`): measure latency and rate "
      "between all pairs of ranks, and say what is odd");
  net->excludes("--no-self-test")->excludes("--waits");
  const std::map<std::string, FabricKind> kinds{
      {"automatic", FabricKind::automatic}, {"shm", FabricKind::shm}, {"ofi", FabricKind::ofi}};
  doctor->add_option("--fabric", given->fabric, "Of --net: automatic, shm or ofi")
      ->transform(CLI::CheckedTransformer(kinds).description(""))
      ->needs(net);
  doctor
      ->add_option("--plot", given->plot,
                   "Of --net and --waits: draw them as heat maps (python3 with matplotlib)")
      ->type_name("FILE");
  doctor->footer("\nExit codes: 0 Ferry works here; 1 it does not; 2 wrong command line.");
  doctor->callback([given, &exit_code] {
    if (!given->waits.empty()) {
      exit_code = tell_waits(given->waits, given->plot);
      return;
    }
    if (given->net) {
      exit_code = run_net(given->fabric, given->json, given->plot);
      return;
    }
    if (!given->plot.empty()) {
      throw CLI::ValidationError("--plot: draws what --net or --waits found; give one of them");
    }
    const Diagnosis diagnosis = diagnose(!given->no_self_test);
    if (given->json) {
      fmt::print("{}\n", diagnosis_json(diagnosis).dump(2, ' ', false,
                                                        nlohmann::json::error_handler_t::replace));
    } else {
      print(diagnosis);
    }
    exit_code = diagnosis.usable() ? 0 : 1;
  });
}

}  // namespace ferry::cli
