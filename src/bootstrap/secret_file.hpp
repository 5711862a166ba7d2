// The file that FERRY_SECRET_FILE names.
#pragma once
#include <string>

namespace ferry::bootstrap {

/// Its secret, without the last line end. Throws Error(invalid_argument) unless the path leads to a
/// regular file of 1 to 4096 bytes that belongs to this user or to root and that no other user may
/// read; root's own files may be readable by this user's group. Links are followed (Kubernetes
/// mounts secrets as links): what counts is the file that was opened. Never waits for a writer,
/// reads no more than a secret's length.
std::string read_secret_file(const std::string& path);

}  // namespace ferry::bootstrap
