// Which limit a message names.
#include "base/process_limits.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <ferry/error.hpp>
#include <new>
#include <stdexcept>
#include <system_error>

#include "platform/posix/test_limits.hpp"

namespace ferry {
namespace {

bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Limits, OfFilesAreToldBeforeTheKernelDoes) {
  const test::LoweredLimit limit(Limit::file_size, 4096);
  EXPECT_EQ(file_limit_text(4096), "");
  EXPECT_EQ(file_limit_text(4097),
            "files of this process may have 4096 bytes (ulimit -f), and this needs 4097; raise the "
            "limit (ulimit -f unlimited) before it starts");
}

TEST(Limits, OfAddressSpaceAreNamedWithWhatIsTaken) {
  // More than a sanitizer takes.
  const test::LoweredLimit limit(Limit::address_space, std::uint64_t{1} << 46);
  if (!limit_of(Limit::address_space))
    GTEST_SKIP() << "an emulator takes no limit of address space";
  const std::string text = memory_limit_text(123);
  EXPECT_TRUE(says(text,
                   "the address space of this process is limited to 70368744177664 bytes "
                   "(ulimit -v 68719476736), of which "))
      << text;
  EXPECT_TRUE(says(text, "; 123 more were needed; raise the limit (ulimit -v unlimited)")) << text;
  EXPECT_TRUE(says(thread_limit_text(EAGAIN), "no more threads")) << thread_limit_text(EAGAIN);
  EXPECT_TRUE(says(thread_limit_text(EAGAIN), "ulimit -v")) << thread_limit_text(EAGAIN);
}

template <class Thrown>
std::string in_words_of(const Thrown& thrown) {
  try {
    in_words(3, "Group", [&] { throw thrown; });
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::exhausted);
    EXPECT_EQ(error.rank(), 3);
    return error.what();
  }
  return "(no error of Ferry's)";
}

TEST(Limits, WhatIsThrownNakedIsPutIntoWords) {
  EXPECT_TRUE(in_words_of(std::bad_alloc()).starts_with("rank 3: Group: no memory; "));
  const std::error_code none(EAGAIN, std::generic_category());
  EXPECT_TRUE(in_words_of(std::system_error(none)).starts_with("rank 3: Group: no more threads; "));
  EXPECT_EQ(in_words(3, "Group", [] { return 7; }), 7);
  EXPECT_THROW(in_words(3, "Group", [] { throw std::logic_error("x"); }), std::logic_error);
  const std::error_code other(EACCES, std::generic_category());
  EXPECT_THROW(in_words(3, "Group", [&] { throw std::system_error(other); }), std::system_error);
  try {
    in_words(3, "Group", [] { throw Error(ErrorKind::mismatch, "as it was"); });
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "as it was");
  }
}

}  // namespace
}  // namespace ferry
