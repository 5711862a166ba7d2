#include "bootstrap/sha256.hpp"

#include <algorithm>
#include <bit>

namespace ferry::bootstrap {
namespace {

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64
// primes.
constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr std::size_t kBlock = 64;

std::uint32_t load_big_endian(const std::byte* p) {
  return std::uint32_t(p[0]) << 24 | std::uint32_t(p[1]) << 16 | std::uint32_t(p[2]) << 8 |
         std::uint32_t(p[3]);
}

std::array<std::byte, kBlock> padded_key(std::span<const std::byte> key, std::byte pad) {
  std::array<std::byte, kBlock> out{};
  if (key.size() > kBlock) {
    const Digest hashed = sha256(key);
    std::copy(hashed.begin(), hashed.end(), out.begin());
  } else {
    std::copy(key.begin(), key.end(), out.begin());
  }
  for (std::byte& b : out) b ^= pad;
  return out;
}

}  // namespace

Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
             0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::compress(const std::byte* block) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t t = 0; t < 16; ++t) w[t] = load_big_endian(block + 4 * t);
  for (std::size_t t = 16; t < 64; ++t) {
    const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t t = 0; t < 64; ++t) {
    const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
    const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<std::uint32_t, 8> add = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state_[i] += add[i];
}

void Sha256::update(std::span<const std::byte> data) {
  total_ += data.size();
  if (filled_ > 0) {
    const std::size_t n = std::min(kBlock - filled_, data.size());
    std::copy_n(data.begin(), n, block_.begin() + std::ptrdiff_t(filled_));
    filled_ += n;
    data = data.subspan(n);
    if (filled_ < kBlock) return;
    compress(block_.data());
    filled_ = 0;
  }
  for (; data.size() >= kBlock; data = data.subspan(kBlock)) compress(data.data());
  std::copy(data.begin(), data.end(), block_.begin());
  filled_ = data.size();
}

Digest Sha256::finish() {
  const std::uint64_t bits = total_ * 8;
  block_[filled_++] = std::byte{0x80};
  if (filled_ > kBlock - 8) {
    std::fill(block_.begin() + std::ptrdiff_t(filled_), block_.end(), std::byte{0});
    compress(block_.data());
    filled_ = 0;
  }
  std::fill(block_.begin() + std::ptrdiff_t(filled_), block_.end(), std::byte{0});
  for (std::size_t i = 0; i < 8; ++i) block_[kBlock - 1 - i] = std::byte(bits >> (8 * i) & 0xff);
  compress(block_.data());
  Digest out;
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = std::byte(state_[i / 4] >> (24 - 8 * (i % 4)) & 0xff);
  }
  return out;
}

HmacSha256::HmacSha256(std::span<const std::byte> key)
    : outer_pad_(padded_key(key, std::byte{0x5c})) {
  inner_.update(padded_key(key, std::byte{0x36}));
}

Digest HmacSha256::finish() {
  const Digest inside = inner_.finish();
  Sha256 outer;
  outer.update(outer_pad_);
  outer.update(inside);
  return outer.finish();
}

Digest sha256(std::span<const std::byte> data) {
  Sha256 hash;
  hash.update(data);
  return hash.finish();
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data) {
  HmacSha256 mac(key);
  mac.update(data);
  return mac.finish();
}

bool same_digest(const Digest& a, const Digest& b) {
  std::byte difference{0};
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{0};
}

}  // namespace ferry::bootstrap
