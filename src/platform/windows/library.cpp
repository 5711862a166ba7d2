#include "platform/library.hpp"

#include <system_error>

#include "platform/windows/system.hpp"

namespace ferry {
namespace {

std::string last_error(const char* name) {
  const std::error_code code(static_cast<int>(GetLastError()), std::system_category());
  return std::string(name) + ": " + code.message();
}

}  // namespace

Library::Library(const char* name) : handle_(LoadLibraryA(name)) {
  if (handle_ == nullptr) error_ = last_error(name);
}

void* Library::symbol(const char* name) {
  if (handle_ == nullptr) return nullptr;
  auto* const found = GetProcAddress(static_cast<HMODULE>(handle_), name);
  if (found == nullptr) error_ = last_error(name);
  return reinterpret_cast<void*>(found);
}

}  // namespace ferry
