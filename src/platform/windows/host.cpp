#include "platform/host.hpp"

#include <algorithm>
#include <array>

#include "platform/windows/system.hpp"

namespace ferry {

// Of the installation: a name that lasts longer than a boot tells hosts apart as well.
std::string boot_id(int& error) {
  error = 0;
  std::array<char, 128> text{};
  DWORD bytes = text.size() - 1;
  const LSTATUS found =
      RegGetValueA(HKEY_LOCAL_MACHINE, "SOFTWARE\\Microsoft\\Cryptography", "MachineGuid",
                   RRF_RT_REG_SZ | RRF_SUBKEY_WOW6464KEY, nullptr, text.data(), &bytes);
  return found == ERROR_SUCCESS ? text.data() : "";
}

std::string host_name() {
  std::array<char, 256> name{};
  DWORD length = name.size();
  return GetComputerNameExA(ComputerNameDnsHostname, name.data(), &length) ? name.data() : "";
}

std::uint64_t user_id() {
  HANDLE token = nullptr;
  if (!OpenProcessToken(GetCurrentProcess(), TOKEN_QUERY, &token)) return 0;
  alignas(TOKEN_USER) std::array<char, sizeof(TOKEN_USER) + SECURITY_MAX_SID_SIZE> user{};
  DWORD bytes = 0;
  const bool known = GetTokenInformation(token, TokenUser, user.data(), user.size(), &bytes) != 0;
  CloseHandle(token);
  if (!known) return 0;
  const PSID sid = reinterpret_cast<const TOKEN_USER*>(user.data())->User.Sid;
  return windows::hash_of({static_cast<const char*>(sid), GetLengthSid(sid)});
}

std::uint64_t shared_memory_place() {
  DWORD session = 0;
  return ProcessIdToSessionId(GetCurrentProcessId(), &session) ? std::uint64_t{session} + 1 : 0;
}

std::optional<std::string> environment_variable(const char* name) {
  const DWORD bytes = GetEnvironmentVariableA(name, nullptr, 0);  // with the end's
  if (bytes == 0) return std::nullopt;
  std::string value(bytes, '\0');
  value.resize(std::min(GetEnvironmentVariableA(name, value.data(), bytes), bytes - 1));
  return value;
}

}  // namespace ferry
