#include "posix/process_end.hpp"

#include <fmt/format.h>

#include <csignal>
#include <map>

namespace ferry::cli {
namespace {

// sigabbrev_np is newer (glibc 2.32) than what packages run on.
const std::map<int, const char*> kSignalNames{
    {SIGABRT, "ABRT"}, {SIGALRM, "ALRM"}, {SIGBUS, "BUS"},   {SIGCONT, "CONT"},
    {SIGFPE, "FPE"},   {SIGHUP, "HUP"},   {SIGILL, "ILL"},   {SIGINT, "INT"},
    {SIGIO, "IO"},     {SIGKILL, "KILL"}, {SIGPIPE, "PIPE"}, {SIGPROF, "PROF"},
    {SIGQUIT, "QUIT"}, {SIGSEGV, "SEGV"}, {SIGSYS, "SYS"},   {SIGTERM, "TERM"},
    {SIGTRAP, "TRAP"}, {SIGUSR1, "USR1"}, {SIGUSR2, "USR2"}, {SIGVTALRM, "VTALRM"},
    {SIGXCPU, "XCPU"}, {SIGXFSZ, "XFSZ"}};

}  // namespace

std::string describe(const ProcessEnd& end) {
  if (end.signal == 0) return fmt::format("exited with code {}", end.code);
  const auto name = kSignalNames.find(end.signal);
  return name != kSignalNames.end()
             ? fmt::format("was killed by signal {} (SIG{})", end.signal, name->second)
             : fmt::format("was killed by signal {}", end.signal);
}

}  // namespace ferry::cli
