#include "bootstrap/frame.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "bootstrap/byte_order.hpp"

namespace ferry::bootstrap {
namespace {

struct TypeRule {
  const char* name;
  bool handshake;  // before both sides have proved the secret
  std::uint32_t shortest;
  std::uint32_t longest;
};

constexpr std::uint32_t kLongestReport = 1024;  // failed, missing: lists of ranks are cut short
constexpr std::uint32_t kLongestGiven = std::uint32_t(kMaxMessageBytes);

constexpr std::array<TypeRule, 13> kRules = {{
    {"none", true, 1, 0},
    {"hello", true, 36, 36},
    {"challenge", true, 32, 32},
    {"proof", true, 32, 32},
    {"welcome", true, 32, 32},
    {"refused", true, 20, 20},
    {"give", false, 0, kLongestGiven},
    {"part", false, 0, kLongestGiven},
    {"failed", false, 0, kLongestReport},
    {"ask", false, 0, 0},
    {"missing", false, 0, kLongestReport},
    {"goodbye", false, 4, 4},
    {"closing", false, 0, 0},
}};

const TypeRule* rule_of(FrameType type) {
  const auto index = std::size_t(type);
  return index == 0 || index >= kRules.size() ? nullptr : &kRules[index];
}

// Appends from `from` to `to` until it holds `wanted` bytes; says how many it took.
std::size_t fill(std::vector<std::byte>& to, std::size_t wanted, std::span<const std::byte> from) {
  const std::size_t n = std::min(wanted - to.size(), from.size());
  to.insert(to.end(), from.begin(), from.begin() + std::ptrdiff_t(n));
  return n;
}

}  // namespace

const char* name_of(FrameType type) {
  const TypeRule* rule = rule_of(type);
  return rule ? rule->name : "unknown";
}

std::array<std::byte, kHeaderBytes> encode_header(const FrameHeader& header) {
  std::vector<std::byte> out;
  out.reserve(kHeaderBytes);
  append(out, kFrameMagic);
  append(out, header.version);
  append(out, std::uint16_t(header.type));
  append(out, header.sequence);
  append(out, header.rank);
  append(out, header.length);
  std::array<std::byte, kHeaderBytes> bytes;
  std::copy(out.begin(), out.end(), bytes.begin());
  return bytes;
}

std::vector<std::byte> FrameSealer::seal(std::span<const std::byte> header,
                                         const Digest& payload_digest) {
  if (!key_) return {};
  std::vector<std::byte> counter;
  append(counter, counter_++);
  HmacSha256 mac(*key_);
  mac.update(counter);
  mac.update(header);
  mac.update(payload_digest);
  const Digest digest = mac.finish();
  return {digest.begin(), digest.end()};
}

std::size_t FrameParser::feed(std::span<const std::byte> bytes) {
  if (ready_ || error_ != FrameError::none) return 0;
  std::size_t taken = 0;
  if (!have_header_) {
    taken += fill(head_, kHeaderBytes, bytes);
    // Garbage is seen at its fourth byte, not when 24 have come.
    if (head_.size() >= 4 && ByteReader(head_).read<std::uint32_t>() != kFrameMagic) {
      error_ = FrameError::bad_magic;
      return taken;
    }
    if (head_.size() < kHeaderBytes || !read_header()) return taken;
  }
  taken += fill(payload_, header_.length, bytes.subspan(taken));
  if (payload_.size() < header_.length) return taken;
  const std::size_t mac_bytes = sealer_.authenticated() ? sizeof(Digest) : 0;
  taken += fill(mac_, mac_bytes, bytes.subspan(taken));
  if (mac_.size() == mac_bytes) finish();
  return taken;
}

bool FrameParser::read_header() {
  ByteReader reader(head_);
  reader.read<std::uint32_t>();  // magic, already checked
  header_.version = reader.read<std::uint16_t>();
  header_.type = FrameType(reader.read<std::uint16_t>());
  header_.sequence = reader.read<std::uint64_t>();
  header_.rank = reader.read<std::uint32_t>();
  header_.length = reader.read<std::uint32_t>();
  const TypeRule* rule = rule_of(header_.type);
  // A refusal is readable in every version, so that both sides can say what is wrong.
  if (header_.version != kStoreVersion && header_.type != FrameType::refused) {
    error_ = FrameError::bad_version;
  } else if (!rule || rule->handshake == sealer_.authenticated()) {
    error_ = FrameError::bad_type;
  } else if (header_.length < rule->shortest || header_.length > rule->longest) {
    error_ = FrameError::bad_length;
  }
  have_header_ = error_ == FrameError::none;
  return have_header_;
}

void FrameParser::finish() {
  if (sealer_.authenticated()) {
    const std::vector<std::byte> expected = sealer_.seal(head_, sha256(payload_));
    Digest want;
    Digest got;
    std::copy(expected.begin(), expected.end(), want.begin());
    std::copy(mac_.begin(), mac_.end(), got.begin());
    if (!same_digest(want, got)) {
      error_ = FrameError::bad_mac;
      payload_ = {};
      return;
    }
  }
  ready_ = Frame{header_, std::exchange(payload_, {})};
  head_.clear();
  mac_.clear();
  have_header_ = false;
}

std::optional<Frame> FrameParser::take() {
  return std::exchange(ready_, std::nullopt);
}

}  // namespace ferry::bootstrap
