#include "api/tuning_file.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <string_view>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "ferry/tuning.hpp"
#include "platform/host.hpp"

namespace ferry {
namespace {

constexpr int kMostDepth = 16;
constexpr std::size_t kMostBytes = std::size_t{16} << 20;
constexpr std::size_t kMostShown = 40;

/// Reads forward; every function leaves what it read behind.
class JsonText {
 public:
  JsonText(const std::string& file, std::string_view text) : file_(file), text_(text) {}

  void object(const std::function<void(const std::string& key)>& member) {
    sequence('{', '}', [&] {
      const std::string key = string();
      expect(':');
      member(key);
    });
  }
  void array(const std::function<void()>& element) { sequence('[', ']', element); }
  std::string string() {
    expect('"');
    std::string read;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] == '\\') ++at_;  // the characters behind it are no matter of settings
      if (at_ < text_.size()) read += text_[at_++];
    }
    expect('"');
    return read;
  }
  double number() {
    skip_space();
    std::string_view rest = text_.substr(at_);
    const std::optional<double> value = take_number(rest);
    if (!value) refuse("a number");
    at_ = text_.size() - rest.size();
    return *value;
  }
  /// A whole number from 0 to `most`.
  std::int64_t whole(std::int64_t most) {
    const std::size_t before = at_;
    const double value = number();
    if (value >= 0 && value <= static_cast<double>(most) && value == std::floor(value)) {
      return static_cast<std::int64_t>(value);
    }
    at_ = before;
    refuse("a whole number from 0 to " + std::to_string(most));
  }
  bool boolean() {
    if (word("true")) return true;
    if (!word("false")) refuse("true or false");
    return false;
  }
  void skip() {
    skip_space();
    switch (at_ < text_.size() ? text_[at_] : '\0') {
      case '{': return object([this](const std::string&) { skip(); });
      case '[': return array([this] { skip(); });
      case '"': (void)string(); return;
      default: break;
    }
    if (word("null") || word("true") || word("false")) return;
    (void)number();
  }
  void end() {
    skip_space();
    if (at_ < text_.size()) refuse("the end of the file");
  }
  [[noreturn]] void refuse(const std::string& expected) {
    skip_space();
    const auto line =
        1 + std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(at_), '\n');
    throw Error(ErrorKind::invalid_argument,
                "tuning: " + file_ + ", line " + std::to_string(line) + ": got \"" +
                    printable(text_.substr(at_, text_.substr(at_).find('\n')), kMostShown) +
                    "\", expected " + expected);
  }

 private:
  void skip_space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }
  bool word(std::string_view expected) {
    skip_space();
    if (text_.substr(at_, expected.size()) != expected) return false;
    at_ += expected.size();
    return true;
  }
  void expect(char c) {
    const char text[] = {c, '\0'};
    if (!word(text)) refuse(std::string("'") + c + "'");
  }
  void sequence(char open, char close, const std::function<void()>& element) {
    const char end[] = {close, '\0'};
    if (++depth_ > kMostDepth) refuse("at most " + std::to_string(kMostDepth) + " levels");
    expect(open);
    if (!word(end)) {
      do {
        element();
      } while (word(","));
      expect(close);
    }
    --depth_;
  }

  std::string file_;
  std::string_view text_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

/// A word that is one of these, as its number.
template <class Enum>
Enum named(JsonText& json, Enum last) {
  const std::string word = json.string();
  std::string known;
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    const std::string name(name_of(static_cast<Enum>(i)));
    if (word == name) return static_cast<Enum>(i);
    known += (i == 0 ? "" : ", ") + name;
  }
  json.refuse("one of " + known + " before it");
}

/// False: of latency mode, which has no settings.
bool read_entry(JsonText& json, TunedCall& entry) {
  bool throughput = true;
  json.object([&](const std::string& key) {
    if (key == "call") {
      entry.call = json.string();
      if (entry.call != "dispatch" && entry.call != "combine") {
        json.refuse("dispatch or combine before it");
      }
    } else if (key == "mode") {
      throughput = json.string() == "throughput";
    } else if (key == "dtype") {
      entry.dtype = named(json, Dtype::u8);
    } else if (key == "crossing") {
      entry.crossing = named(json, Crossing::hierarchical);
    } else if (key == "order") {
      entry.order = json.string() == "expert_major" ? RowOrder::expert_major : RowOrder::rank_major;
    } else if (key == "hidden") {
      entry.hidden = json.whole(1 << 24);
    } else if (key == "ranks") {
      entry.ranks = static_cast<int>(json.whole(4096));
    } else if (key == "tokens") {
      // Of recorded routes it is a mean.
      entry.tokens = static_cast<std::int64_t>(std::clamp(json.number(), 0.0, 1e9));
    } else if (key == "first") {
      entry.first = json.boolean();
    } else if (key == "chunk_bytes") {
      entry.chunk_bytes = json.whole(1 << 30);
    } else if (key == "num_sms") {
      entry.num_sms = static_cast<int>(json.whole(1024));
    } else {
      json.skip();
    }
  });
  if (entry.call.empty()) json.refuse("a \"call\" in the entry before it");
  return throughput;
}

}  // namespace

void apply_tuning_environment(GroupConfig& config) {
  const std::string given = environment_variable("FERRY_TUNING").value_or("");
  if (config.tune || given.empty() || given == "off") return;
  config.tune = true;
  if (given != "on") config.tuning = load_tuning(given);
}

std::string tuning_text(const GroupConfig& config) {
  if (!config.tune.value_or(false)) return "off";
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  const auto add = [&](const std::string& word) {
    for (const char c : word + ";") hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  };
  for (const TunedCall& one : config.tuning) {
    add(one.call);
    for (const std::int64_t number :
         {static_cast<std::int64_t>(one.dtype), static_cast<std::int64_t>(one.order), one.hidden,
          std::int64_t{one.ranks}, one.tokens, std::int64_t{one.first},
          static_cast<std::int64_t>(one.crossing), one.chunk_bytes, std::int64_t{one.num_sms},
          std::int64_t{one.settled}}) {
      add(std::to_string(number));
    }
  }
  return std::to_string(config.fewest_sms) + " to " + std::to_string(config.most_sms) + " SMs, " +
         std::to_string(config.tuning.size()) + " settings to start from (hash " +
         std::to_string(hash) + ")";
}

std::vector<TunedCall> load_tuning(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  std::string text(kMostBytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));  // a folder fails here
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (!in.eof() || in.bad() || text.size() > kMostBytes) {
    throw Error(ErrorKind::invalid_argument,
                "tuning: " + printable(file, 200) +
                    " cannot be read; expected a file that `ferry " +
                    "plan --tuning` or `ferry bench --tune` wrote, of at most 16 MiB");
  }
  std::vector<TunedCall> entries;
  bool known = false;
  JsonText json(printable(file, 200), text);
  json.object([&](const std::string& key) {
    if (key == "format") {
      known = json.whole(std::numeric_limits<int>::max()) == 1;
    } else if (key == "entries") {
      json.array([&] {
        TunedCall entry;
        if (read_entry(json, entry)) entries.push_back(entry);
      });
    } else {
      json.skip();
    }
  });
  json.end();
  if (!known) json.refuse("\"format\": 1 in it");
  return entries;
}

}  // namespace ferry
