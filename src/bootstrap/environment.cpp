// TcpOptions from the environment. The bootstrap reads environment variables here and nowhere else:
//
//   RANK, WORLD_SIZE   this process and how many there are (torchrun and `ferry run` set them)
//   MASTER_ADDR        rank 0's machine; 127.0.0.1 if unset. Rank 0 listens exactly there
//   FERRY_PORT         the store's port; MASTER_PORT if unset. Set it under torchrun: there
//                      MASTER_PORT belongs to torch's own store
//   FERRY_SECRET       the job's secret, the same on all ranks; or
//   FERRY_SECRET_FILE  a file that holds it (its last line end does not count)
#include <ferry/bootstrap.hpp>
#include <ferry/error.hpp>

#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

namespace ferry {
namespace {

constexpr const char* kStart =
    "start with `ferry run -n 4 -- prog` or torchrun, or set it yourself";
constexpr std::size_t kLongestSecret = 4096;

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

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

std::string secret_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) {
    refuse("FERRY_SECRET_FILE", "names a file that cannot be read (" + in_quotes(path) +
                                    "), expected one with the secret");
  }
  if (text.ends_with('\n')) text.pop_back();
  if (text.ends_with('\r')) text.pop_back();
  if (text.empty() || text.size() > kLongestSecret) {
    refuse("FERRY_SECRET_FILE", "names a file with " + std::to_string(text.size()) +
                                    " bytes, expected 1 to " + std::to_string(kLongestSecret));
  }
  return text;
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
  if (const auto path = variable("FERRY_SECRET_FILE")) return secret_of_file(*path);
  refuse(
      "FERRY_SECRET",
      "is not set (nor FERRY_SECRET_FILE), expected a random text, the same on all ranks; `ferry "
      "run` sets it, torchrun does not: before torchrun, `export FERRY_SECRET=$(openssl rand "
      "-hex 16)`");
}

}  // namespace

TcpOptions tcp_options_from_environment() {
  TcpOptions options;
  options.size = integer("WORLD_SIZE", 1, 65536, kStart);
  options.rank = integer("RANK", 0, options.size - 1, kStart);
  if (const auto address = variable("MASTER_ADDR")) {
    if (address->empty()) {
      refuse("MASTER_ADDR", "is empty, expected rank 0's host name or number");
    }
    options.address = *address;
  }
  const char* port = variable("FERRY_PORT") ? "FERRY_PORT" : "MASTER_PORT";
  options.port = std::uint16_t(integer(port, 1, 65535, kStart));
  options.secret = secret();
  return options;
}

}  // namespace ferry
