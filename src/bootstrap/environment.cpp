// TcpOptions from the environment. The bootstrap reads environment variables here and nowhere else:
//
//   RANK, WORLD_SIZE   this process and how many there are (torchrun and `ferry run` set them); or
//   OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE           the same under Open MPI's mpirun; or
//   PMI_RANK, PMI_SIZE the same under mpiexec of MPICH and what comes from it; or
//   SLURM_PROCID, SLURM_STEP_NUM_TASKS (SLURM_NTASKS)    the same under srun: SLURM_STEP_ID is that
//                      of a step, not of the batch script, which is no task itself
//   MASTER_ADDR        rank 0's machine. Rank 0 listens exactly there. If unset: under srun the
//   first
//                      host of SLURM_STEP_NODELIST (SLURM_JOB_NODELIST), otherwise 127.0.0.1
//   FERRY_PORT         the store's port; MASTER_PORT if unset. There torchrun has its own store
//                      (TORCHELASTIC_RUN_ID): the port beside it. Under srun, if both are unset, a
//                      port that follows from SLURM_JOB_ID and SLURM_STEP_ID
//   FERRY_SECRET       the job's secret, the same on all ranks; or
//   FERRY_SECRET_FILE  a file that holds it, which only its owner may read (secret_file.hpp)
//   LOCAL_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_SIZE, MPI_LOCALNRANKS, SLURM_STEP_NUM_NODES
//                      whether all ranks are on one host: then, without a secret, they meet at a
//                      Unix socket of this user, and the address is not used. Its name holds the
//                      launcher's name for the job (TORCHELASTIC_RUN_ID, SLURM_JOB_ID and
//                      SLURM_STEP_ID, PMIX_NAMESPACE, PMI_JOBID), where there is one
//   FERRY_BEGIN        1: this process begins a group alone, which the others join
//   FERRY_JOIN         1: this process takes the place of a rank that has ended (`ferry run` sets
//   it)
#include <ferry/bootstrap.hpp>
#include <ferry/error.hpp>

#include <charconv>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "bootstrap/secret_file.hpp"
#include "bootstrap/sha256.hpp"
#include "platform/host.hpp"
#include "platform/socket.hpp"

namespace ferry {
namespace {

constexpr const char* kStart =
    "start with `ferry run -n 4 -- prog`, torchrun, srun or mpirun, or set it yourself";

constexpr auto* variable = environment_variable;

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw Error(ErrorKind::invalid_argument, "environment variable " + name + " " + what);
}

// What is shown of a value that is no number: short, and nothing that a terminal obeys.
std::string in_quotes(std::string_view value) {
  std::string out = "\"";
  for (char c : value.substr(0, 40)) out += c >= ' ' && c <= '~' ? c : '?';
  return out + (value.size() > 40 ? "...\"" : "\"");
}

int integer(const char* name, int lowest, int highest, const std::string& what_to_do) {
  const std::optional<std::string> value = variable(name);
  const std::string expected =
      "expected an integer from " + std::to_string(lowest) + " to " + std::to_string(highest);
  if (!value) refuse(name, "is not set, " + expected + "; " + what_to_do);
  int number = 0;
  const char* const end = value->data() + value->size();
  const auto [stop, error] = std::from_chars(value->data(), end, number);
  if (error != std::errc() || stop != end || number < lowest || number > highest) {
    refuse(name, "is " + in_quotes(*value) + ", " + expected + "; " + what_to_do);
  }
  return number;
}

/// The variables in which a launcher says who this process is.
struct Launcher {
  const char* rank;
  const char* size;
  const char* here = "LOCAL_WORLD_SIZE";  ///< how many of them are on this host, if it is set
  bool slurm = false;
  const char* mpi = nullptr;  ///< its name
};

/// Whether srun started this process. A batch script and an interactive shell have SLURM_PROCID,
/// too, but no tasks beside them: they have no step, or one of the numbers kept for such.
bool in_slurm_step() {
  constexpr std::int64_t kFirstKept = 0xfffffff0;
  const auto step = variable("SLURM_STEP_ID");
  if (!variable("SLURM_PROCID") || !step) return false;
  std::int64_t number = -1;
  std::from_chars(step->data(), step->data() + step->size(), number);
  return number >= 0 && number < kFirstKept;
}

Launcher launcher() {
  constexpr const char* kStep = "SLURM_STEP_NUM_TASKS";
  if (variable("RANK") || variable("WORLD_SIZE")) return {"RANK", "WORLD_SIZE"};
  if (variable("OMPI_COMM_WORLD_RANK")) {  // inside a Slurm job, mpirun's daemons are the tasks
    return {.rank = "OMPI_COMM_WORLD_RANK",
            .size = "OMPI_COMM_WORLD_SIZE",
            .here = "OMPI_COMM_WORLD_LOCAL_SIZE",
            .mpi = "Open MPI"};
  }
  if (variable("PMI_RANK") && variable("PMI_SIZE")) {  // of srun, too, when it is asked for PMI-2
    return {.rank = "PMI_RANK",
            .size = "PMI_SIZE",
            .here = "MPI_LOCALNRANKS",
            .slurm = in_slurm_step(),
            .mpi = "MPICH"};
  }
  if (in_slurm_step()) {
    return {
        .rank = "SLURM_PROCID", .size = variable(kStep) ? kStep : "SLURM_NTASKS", .slurm = true};
  }
  return {"RANK", "WORLD_SIZE"};
}

/// Whether the launcher says that all ranks are on this host.
bool on_one_host(const Launcher& by) {
  if (const auto here = variable(by.here)) return *here == variable(by.size);
  return by.slurm && variable("SLURM_STEP_NUM_NODES") == "1";
}

/// "node[003-010,12]-ib,x7" -> "node003-ib": Slurm numbers tasks from the first node on.
std::string first_host(const char* name, const std::string& list) {
  const std::size_t open = list.find_first_of("[,");
  if (open == std::string::npos || list[open] == ',') return list.substr(0, open);
  const std::size_t close = list.find(']', open);
  const std::size_t end = list.find_first_of("-,]", open);
  if (close == std::string::npos) refuse(name, "is " + in_quotes(list) + ", expected Slurm's form");
  const std::string rest = list.substr(close + 1, list.find(',', close) - close - 1);
  if (rest.find('[') != std::string::npos) {
    refuse(name, "is " + in_quotes(list) + ", whose first host Ferry cannot read; set MASTER_ADDR");
  }
  return list.substr(0, open) + list.substr(open + 1, end - open - 1) + rest;
}

std::string address(const Launcher& by) {
  if (const auto given = variable("MASTER_ADDR")) {
    if (given->empty()) refuse("MASTER_ADDR", "is empty, expected rank 0's host name or number");
    return *given;
  }
  if (by.slurm) {
    for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
      const auto list = variable(name);
      if (list && !list->empty()) return first_host(name, *list);
    }
  }
  const auto here = variable(by.here);
  if (by.mpi != nullptr && here && *here != variable(by.size)) {
    refuse("MASTER_ADDR", "is not set, but " + std::string(by.mpi) +
                              "'s ranks are on several hosts, expected rank 0's host name or "
                              "number: `mpirun -x MASTER_ADDR=node1 -x FERRY_PORT=29500 -x "
                              "FERRY_SECRET ...` (MPICH: `-genv MASTER_ADDR node1`)");
  }
  return "127.0.0.1";
}

std::uint16_t port(const Launcher& by) {
  constexpr int kFirst = 20000, kPorts = 10000;  // below the range that kernels give out themselves
  constexpr int kStepApart = 7919;               // no divisor in common: steps of a job differ
  const char* name = variable("FERRY_PORT") ? "FERRY_PORT" : "MASTER_PORT";
  if (by.slurm && !variable(name) && variable("SLURM_JOB_ID")) {
    const int job = integer("SLURM_JOB_ID", 0, 2147483647, "it is Slurm's; or set FERRY_PORT");
    const int step = integer("SLURM_STEP_ID", 0, 2147483647, "it is Slurm's; or set FERRY_PORT");
    return std::uint16_t(kFirst + (job % kPorts + step % kPorts * kStepApart) % kPorts);
  }
  const int number = integer(name, 1, 65535, kStart);
  if (variable("FERRY_PORT") || !variable("TORCHELASTIC_RUN_ID")) return std::uint16_t(number);
  return std::uint16_t(number < 65535 ? number + 1 : number - 1);
}

// No message of these shows a value.
std::string secret() {
  if (const auto value = variable("FERRY_SECRET")) {
    if (value->empty()) {
      refuse("FERRY_SECRET",
             "is empty, expected a random text, the same on all ranks; "
             "`export FERRY_SECRET=$(openssl rand -hex 16)`");
    }
    return *value;
  }
  if (const auto path = variable("FERRY_SECRET_FILE")) return bootstrap::read_secret_file(*path);
  refuse("FERRY_SECRET",
         "is not set (nor FERRY_SECRET_FILE), expected a random text, the same on all ranks of "
         "several "
         "hosts; `ferry run` sets it, other launchers do not: before them, `export "
         "FERRY_SECRET=$(openssl rand -hex 16)`");
}

/// Where ranks of one host meet: the kernel says that the other end is of this user, and the name
/// is of this job as far as its launcher has one, so that two jobs with one port do not mix.
std::string socket_name(std::uint16_t port) {
  std::string job;
  for (const char* id :
       {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID"}) {
    if (const auto value = variable(id)) job += std::string(id) + "=" + *value + "\n";
  }
  const std::string name = "@ferry." + std::to_string(user_id()) + "." + std::to_string(port);
  if (job.empty()) return name;
  bootstrap::Sha256 hash;
  hash.update(std::as_bytes(std::span(job)));
  std::string digits = ".";
  const bootstrap::Digest digest = hash.finish();
  for (const std::byte one : std::span(digest).first(8)) {
    constexpr const char* kHex = "0123456789abcdef";
    digits +=
        {kHex[std::to_integer<int>(one >> 4)], kHex[std::to_integer<int>(one & std::byte{15})]};
  }
  return name + digits;
}

bool is_set(const char* name) {
  const auto value = variable(name);
  if (!value || value->empty() || *value == "0") return false;
  if (*value != "1") refuse(name, "is " + in_quotes(*value) + ", expected 0 or 1");
  return true;
}

}  // namespace

TcpOptions tcp_options_from_environment() {
  TcpOptions options;
  const Launcher by = launcher();
  options.size = integer(by.size, 1, 65536, kStart);
  options.rank = integer(by.rank, 0, options.size - 1, kStart);
  options.port = port(by);
  options.join = is_set("FERRY_JOIN");
  options.begin = is_set("FERRY_BEGIN");
  if (user_sockets() && on_one_host(by) && !variable("FERRY_SECRET") &&
      !variable("FERRY_SECRET_FILE")) {
    options.address = socket_name(options.port);
    return options;
  }
  options.address = address(by);
  options.secret = secret();
  return options;
}

}  // namespace ferry
