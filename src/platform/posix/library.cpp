#include "platform/library.hpp"

#include <dlfcn.h>

namespace ferry {
namespace {

std::string last_error() {
  const char* const words = dlerror();
  return words != nullptr ? words : "unknown error";
}

}  // namespace

Library::Library(const char* name) : handle_(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ == nullptr) error_ = last_error();
}

void* Library::symbol(const char* name) {
  void* const found = handle_ != nullptr ? dlsym(handle_, name) : nullptr;
  if (found == nullptr && handle_ != nullptr) error_ = last_error();
  return found;
}

}  // namespace ferry
