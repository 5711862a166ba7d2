#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "bootstrap/sha256.hpp"

namespace ferry::bootstrap {
namespace {

std::span<const std::byte> bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string hex(const Digest& digest) {
  std::string out;
  for (std::byte b : digest) {
    out += "0123456789abcdef"[int(b) >> 4];
    out += "0123456789abcdef"[int(b) & 15];
  }
  return out;
}

// FIPS 180-4 examples (NIST, "SHA256.pdf" of the cryptographic standards examples).
TEST(Sha256, FipsVectors) {
  EXPECT_EQ(hex(sha256(bytes(""))),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(bytes("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(bytes(std::string(1000000, 'a')))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesOfAnyLengthGiveTheSameDigest) {
  const std::string text(300, 'x');
  for (std::size_t length = 0; length <= text.size(); length += 7) {
    const std::string_view whole = std::string_view(text).substr(0, length);
    for (std::size_t piece : {1u, 3u, 63u, 64u, 65u, 130u}) {
      Sha256 hash;
      for (std::size_t at = 0; at < length; at += piece)
        hash.update(bytes(whole.substr(at, piece)));
      EXPECT_EQ(hex(hash.finish()), hex(sha256(bytes(whole)))) << length << " by " << piece;
    }
  }
}

// RFC 4231, test cases 1-4, 6 and 7 (5 is a truncated output).
TEST(HmacSha256, Rfc4231Vectors) {
  EXPECT_EQ(hex(hmac_sha256(bytes(std::string(20, '\x0b')), bytes("Hi There"))),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256(bytes("Jefe"), bytes("what do ya want for nothing?"))),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(bytes(std::string(20, '\xaa')), bytes(std::string(50, '\xdd')))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counting;
  for (char c = 1; c <= 25; ++c) counting += c;
  EXPECT_EQ(hex(hmac_sha256(bytes(counting), bytes(std::string(50, '\xcd')))),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hex(hmac_sha256(bytes(std::string(131, '\xaa')),
                            bytes("Test Using Larger Than Block-Size Key - Hash Key First"))),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hex(hmac_sha256(bytes(std::string(131, '\xaa')),
                            bytes("This is a test using a larger than block-size key and a larger "
                                  "than block-size data. The key needs to be hashed before being "
                                  "used by the HMAC algorithm."))),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(SameDigest, SeesEveryByte) {
  const Digest a = sha256(bytes("a"));
  EXPECT_TRUE(same_digest(a, a));
  for (std::size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    b[i] ^= std::byte{1};
    EXPECT_FALSE(same_digest(a, b)) << i;
  }
}

}  // namespace
}  // namespace ferry::bootstrap
