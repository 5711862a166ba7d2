// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104): how ranks prove the job's secret without
// sending it. Not a general cryptography library: nothing else in Ferry needs one.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ferry::bootstrap {

using Digest = std::array<std::byte, 32>;

/// Running SHA-256: `update` any number of times, then `finish` once.
class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> data);
  /// The digest of everything given. The object must not be used afterwards.
  Digest finish();

 private:
  void compress(const std::byte* block);

  std::array<std::uint32_t, 8> state_;
  std::array<std::byte, 64> block_{};
  std::size_t filled_ = 0;
  std::uint64_t total_ = 0;
};

/// Running HMAC-SHA-256 under `key` (any length).
class HmacSha256 {
 public:
  explicit HmacSha256(std::span<const std::byte> key);
  void update(std::span<const std::byte> data) { inner_.update(data); }
  Digest finish();

 private:
  std::array<std::byte, 64> outer_pad_;
  Sha256 inner_;
};

Digest sha256(std::span<const std::byte> data);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data);

/// Compares in a time that does not depend on where the two differ.
bool same_digest(const Digest& a, const Digest& b);

}  // namespace ferry::bootstrap
