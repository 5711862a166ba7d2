// For tests: other users, files of theirs, and file systems for one process. Mostly for root alone.
#pragma once
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>

namespace ferry::test {

/// This process is another user's for good. False: not allowed.
inline bool become_user(unsigned id) {
  return setresuid(id, id, id) == 0;
}

/// Root as another user and group, for a while.
class AsUser {
 public:
  explicit AsUser(unsigned id) : group_(getegid()) {
    if (setegid(id) != 0 || seteuid(id) != 0) throw std::runtime_error("this is not root");
  }
  ~AsUser() {
    if (seteuid(0) != 0 || setegid(group_) != 0) std::terminate();
  }
  AsUser(const AsUser&) = delete;
  AsUser& operator=(const AsUser&) = delete;

 private:
  const gid_t group_;
};

constexpr unsigned kSameUser = ~0U;
/// False: only root may.
inline bool give_away(const std::string& path, unsigned user, unsigned group) {
  return chown(path.c_str(), user, group) == 0;
}
/// As the user that this process stands for now.
inline bool may_read(const std::string& path) {
  return faccessat(AT_FDCWD, path.c_str(), R_OK, AT_EACCESS) == 0;
}
inline bool make_fifo(const std::string& path) {
  return mkfifo(path.c_str(), 0600) == 0;
}
/// From now on new files get no rights, not even the owner's.
inline void withhold_rights() {
  umask(0777);
}

/// From now on this process mounts for itself alone. False: not allowed.
inline bool own_mounts() {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}
inline bool mount_over(const std::string& file, const std::string& place) {
  return mount(file.c_str(), place.c_str(), nullptr, MS_BIND, nullptr) == 0;
}
inline bool mount_memory(const std::string& place, const std::string& options) {
  return mount("tmpfs", place.c_str(), "tmpfs", 0, options.c_str()) == 0;
}

}  // namespace ferry::test
