#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "bootstrap/test_ranks.hpp"
#include "platform/host.hpp"
#include "platform/process.hpp"

namespace ferry::bootstrap {
namespace {

class Environment : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "FERRY_PORT",
                             "FERRY_SECRET",
                             "FERRY_SECRET_FILE",
                             "SLURM_PROCID",
                             "SLURM_NTASKS",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_STEP_NODELIST",
                             "SLURM_JOB_NODELIST",
                             "SLURM_JOB_ID",
                             "SLURM_STEP_ID",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "MPI_LOCALNRANKS",
                             "LOCAL_WORLD_SIZE",
                             "SLURM_STEP_NUM_NODES",
                             "TORCHELASTIC_RUN_ID",
                             "PMIX_NAMESPACE",
                             "PMI_JOBID"}) {
      ::unsetenv(name);
    }
    set("RANK", "1");
    set("WORLD_SIZE", "4");
    set("MASTER_ADDR", "node7");
    set("MASTER_PORT", "29500");
    set("FERRY_SECRET", "hush-hush");
  }
  static void set(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); }
  static std::string message() {
    const Error e = error_from([] { tcp_options_from_environment(); });
    EXPECT_EQ(e.kind(), ErrorKind::invalid_argument) << e.what();
    EXPECT_FALSE(contains(e, "hush-hush")) << e.what();
    return e.what();
  }
  static void expect_message(const std::string& part) {
    EXPECT_NE(message().find(part), std::string::npos) << message();
  }
};

TEST_F(Environment, GivesTheOptions) {
  const TcpOptions options = tcp_options_from_environment();
  EXPECT_EQ(options.rank, 1);
  EXPECT_EQ(options.size, 4);
  EXPECT_EQ(options.address, "node7");
  EXPECT_EQ(options.port, 29500);
  EXPECT_EQ(options.secret, "hush-hush");
}

TEST_F(Environment, FerryPortComesBeforeMasterPort) {
  set("FERRY_PORT", "31000");
  EXPECT_EQ(tcp_options_from_environment().port, 31000);
  set("FERRY_PORT", "0");
  expect_message("FERRY_PORT is \"0\", expected an integer from 1 to 65535");
}

TEST_F(Environment, UnderstandsSlurm) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) ::unsetenv(name);
  set("SLURM_PROCID", "3");
  set("SLURM_NTASKS", "8");
  set("SLURM_JOB_ID", "1234567");
  set("SLURM_STEP_ID", "0");
  set("SLURM_JOB_NODELIST", "alpha,beta");
  TcpOptions options = tcp_options_from_environment();
  EXPECT_EQ(options.rank, 3);
  EXPECT_EQ(options.size, 8);
  EXPECT_EQ(options.address, "alpha");
  EXPECT_EQ(options.port, 24567);
  set("SLURM_STEP_NUM_TASKS", "4");  // a step may be smaller than its job
  for (const auto& [list, first] :
       {std::pair{"node[003-010,12]-ib,x7", "node003-ib"}, std::pair{"n[7]", "n7"},
        std::pair{"n[1,5]", "n1"}, std::pair{"one", "one"}}) {
    set("SLURM_STEP_NODELIST", list);
    options = tcp_options_from_environment();
    EXPECT_EQ(options.size, 4);
    EXPECT_EQ(options.address, first);
  }
  set("SLURM_STEP_NODELIST", "r[1-2]n[1-4]");
  expect_message("SLURM_STEP_NODELIST is \"r[1-2]n[1-4]\", whose first host");
  set("SLURM_STEP_NODELIST", "r[1-2");
  expect_message("expected Slurm's form");
  set("MASTER_ADDR", "gamma");  // what is said wins
  set("MASTER_PORT", "29501");
  options = tcp_options_from_environment();
  EXPECT_EQ(options.address, "gamma");
  EXPECT_EQ(options.port, 29501);
  set("SLURM_PROCID", "4");
  expect_message("SLURM_PROCID is \"4\", expected an integer from 0 to 3");
}

TEST_F(Environment, StepsOfOneSlurmJobHavePortsOfTheirOwn) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_PORT"}) ::unsetenv(name);
  set("SLURM_PROCID", "0");
  set("SLURM_NTASKS", "2");
  set("SLURM_JOB_ID", "2147483647");
  std::set<int> ports;
  for (const char* step : {"0", "1", "2", "9999", "10001"}) {
    set("SLURM_STEP_ID", step);
    ports.insert(tcp_options_from_environment().port);
  }
  EXPECT_EQ(ports.size(), 4u);  // 1 and 10001 are alike
  EXPECT_GE(*ports.begin(), 20000);
  EXPECT_LT(*ports.rbegin(), 30000);
}

TEST_F(Environment, ABatchScriptIsNoTaskOfSlurm) {
  for (const char* name : {"RANK", "WORLD_SIZE"}) ::unsetenv(name);
  set("SLURM_PROCID", "0");
  set("SLURM_NTASKS", "8");
  expect_message("WORLD_SIZE is not set");  // no step
  for (const char* step : {"4294967291", "4294967290", ""}) {
    set("SLURM_STEP_ID", step);
    expect_message("WORLD_SIZE is not set");
  }
}

TEST_F(Environment, MpirunInsideASlurmJobSaysTheRank) {
  for (const char* name : {"RANK", "WORLD_SIZE"}) ::unsetenv(name);
  set("SLURM_PROCID", "0");
  set("SLURM_NTASKS", "2");
  set("SLURM_STEP_ID", "0");
  set("OMPI_COMM_WORLD_RANK", "3");
  set("OMPI_COMM_WORLD_SIZE", "4");
  const TcpOptions options = tcp_options_from_environment();
  EXPECT_EQ(options.rank, 3);
  EXPECT_EQ(options.size, 4);
}

TEST_F(Environment, UnderstandsOpenMpi) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR"}) ::unsetenv(name);
  set("OMPI_COMM_WORLD_RANK", "1");
  set("OMPI_COMM_WORLD_SIZE", "2");
  set("OMPI_COMM_WORLD_LOCAL_SIZE", "2");
  const TcpOptions options = tcp_options_from_environment();
  EXPECT_EQ(options.rank, 1);
  EXPECT_EQ(options.size, 2);
  EXPECT_EQ(options.address, "127.0.0.1");
  set("OMPI_COMM_WORLD_LOCAL_SIZE", "1");
  expect_message("MASTER_ADDR is not set, but Open MPI's ranks are on several hosts");
  set("MASTER_ADDR", "node1");
  EXPECT_EQ(tcp_options_from_environment().address, "node1");
}

TEST_F(Environment, UnderstandsMpich) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR"}) ::unsetenv(name);
  set("PMI_RANK", "1");
  set("PMI_SIZE", "2");
  set("MPI_LOCALNRANKS", "2");
  TcpOptions options = tcp_options_from_environment();
  EXPECT_EQ(options.rank, 1);
  EXPECT_EQ(options.size, 2);
  EXPECT_EQ(options.address, "127.0.0.1");
  set("MPI_LOCALNRANKS", "1");
  expect_message("MASTER_ADDR is not set, but MPICH's ranks are on several hosts");
  // Of srun --mpi=pmi2, or of an mpiexec whose daemons are the tasks.
  set("SLURM_PROCID", "0");
  set("SLURM_NTASKS", "1");
  set("SLURM_STEP_ID", "0");
  set("SLURM_STEP_NODELIST", "alpha,beta");
  options = tcp_options_from_environment();
  EXPECT_EQ(options.rank, 1);
  EXPECT_EQ(options.size, 2);
  EXPECT_EQ(options.address, "alpha");
}

TEST_F(Environment, TorchrunNeedsNoPortOfItsOwn) {
  set("TORCHELASTIC_RUN_ID", "none");
  EXPECT_EQ(tcp_options_from_environment().port, 29501);  // its own store has 29500
  set("MASTER_PORT", "65535");
  EXPECT_EQ(tcp_options_from_environment().port, 65534);
  set("FERRY_PORT", "31000");
  EXPECT_EQ(tcp_options_from_environment().port, 31000);
}

TEST_F(Environment, RanksOfOneHostNeedNoSecret) {
  const std::string name = "@ferry." + std::to_string(user_id()) + ".29500";
  ::unsetenv("FERRY_SECRET");
  set("LOCAL_WORLD_SIZE", "4");
  TcpOptions options = tcp_options_from_environment();
  EXPECT_EQ(options.address, name);
  EXPECT_EQ(options.secret, "");
  set("FERRY_SECRET", "hush-hush");  // what is said wins
  options = tcp_options_from_environment();
  EXPECT_EQ(options.address, "node7");
  EXPECT_EQ(options.secret, "hush-hush");
  ::unsetenv("FERRY_SECRET");
  set("LOCAL_WORLD_SIZE", "2");  // others are elsewhere
  expect_message("FERRY_SECRET is not set");
  ::unsetenv("LOCAL_WORLD_SIZE");
  expect_message("FERRY_SECRET is not set");
  for (const char* unused : {"RANK", "WORLD_SIZE"}) ::unsetenv(unused);
  set("SLURM_PROCID", "3");
  set("SLURM_NTASKS", "4");
  set("SLURM_STEP_ID", "0");
  set("SLURM_STEP_NUM_NODES", "2");
  expect_message("FERRY_SECRET is not set");
  set("SLURM_STEP_NUM_NODES", "1");
  EXPECT_EQ(tcp_options_from_environment().address.find(name + "."), 0U);
}

// Two jobs of a user with one port: their launchers' names for them keep them apart.
TEST_F(Environment, JobsOfOneHostMeetApart) {
  ::unsetenv("FERRY_SECRET");
  set("LOCAL_WORLD_SIZE", "4");
  std::set<std::string> places = {tcp_options_from_environment().address};
  for (const char* id : {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "PMI_JOBID"}) {
    for (const char* job : {"7", "8"}) {
      set(id, job);
      TcpOptions options = tcp_options_from_environment();
      EXPECT_LT(options.address.size(), 60U);
      EXPECT_TRUE(places.insert(options.address).second) << id << "=" << job;
      EXPECT_EQ(tcp_options_from_environment().address, options.address);
    }
  }
}

TEST_F(Environment, NamesWhatIsMissing) {
  ::unsetenv("RANK");
  expect_message("RANK is not set, expected an integer from 0 to 3; start with `ferry run");
  ::unsetenv("WORLD_SIZE");
  expect_message("WORLD_SIZE is not set");
}

TEST_F(Environment, NamesAMissingPortAndDefaultsToLoopback) {
  ::unsetenv("MASTER_PORT");
  expect_message("MASTER_PORT is not set, expected an integer from 1 to 65535");
  set("MASTER_PORT", "1");
  ::unsetenv("MASTER_ADDR");
  EXPECT_EQ(tcp_options_from_environment().address, "127.0.0.1");
  set("MASTER_ADDR", "");
  expect_message("MASTER_ADDR is empty");
}

TEST_F(Environment, IntegersAreReadStrictly) {
  for (const char* bad : {"", " 1", "1 ", "+1", "-1", "0x1", "1.0", "4", "one", "99999999999999"}) {
    set("RANK", bad);
    expect_message("RANK is \"" + std::string(bad) + "\", expected an integer from 0 to 3");
  }
  set("RANK", "\x1b[31m");
  expect_message("RANK is \"?[31m\"");
}

TEST_F(Environment, SaysHowToSetASecret) {
  set("FERRY_SECRET", "");
  expect_message("FERRY_SECRET is empty");
  ::unsetenv("FERRY_SECRET");
  expect_message("export FERRY_SECRET=$(openssl rand -hex 16)");
}

TEST_F(Environment, ReadsASecretFile) {
  const std::string path = ::testing::TempDir() + "ferry_secret_" + std::to_string(process_id());
  ::unsetenv("FERRY_SECRET");
  set("FERRY_SECRET_FILE", path);
  expect_message("FERRY_SECRET_FILE names \"" + path + "\", which cannot be opened: No such file");
  std::ofstream(path) << "from a file\n";
  std::filesystem::permissions(
      path, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  EXPECT_EQ(tcp_options_from_environment().secret, "from a file");
  set("FERRY_SECRET", "hush-hush");  // comes first
  EXPECT_EQ(tcp_options_from_environment().secret, "hush-hush");
  std::remove(path.c_str());
}

}  // namespace
}  // namespace ferry::bootstrap
