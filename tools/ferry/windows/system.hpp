// What the files of this folder share.
#pragma once
#include <winsock2.h>
// After winsock2.h.
#include <windows.h>

#include <memory>
#include <string>
#include <system_error>

namespace ferry::cli {

struct CloseHandle_ {
  void operator()(void* handle) const { CloseHandle(handle); }
};
using Handle = std::unique_ptr<void, CloseHandle_>;

[[noreturn]] inline void raise_last(const char* what) {
  throw std::system_error(static_cast<int>(GetLastError()), std::system_category(), what);
}

/// A job whose processes end with this one: a handle that only this process has.
inline Handle make_job() {
  Handle job(CreateJobObjectA(nullptr, nullptr));
  JOBOBJECT_EXTENDED_LIMIT_INFORMATION limits{};
  limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
  if (!job || !SetInformationJobObject(job.get(), JobObjectExtendedLimitInformation, &limits,
                                       sizeof limits)) {
    raise_last("cannot make a job object");
  }
  return job;
}

}  // namespace ferry::cli
