// The main function of a program with the tests of many files (ferry_add_tests): the file whose
// tests run, as in the CMakeLists.txt, or all without it.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

int main(int count, char** words) {
  testing::InitGoogleTest(&count, words);
  // A filter is given by hand, or by a death test to the process in which the test dies.
  if (count < 2 || GTEST_FLAG_GET(filter) != "*") return RUN_ALL_TESTS();
  const std::string end = "/" + std::string(words[1]);
  std::string filter;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      if (!std::string("/").append(test.file()).ends_with(end)) continue;
      filter.append(suite.name()).append(".").append(test.name()).append(":");
    }
  }
  if (filter.empty()) {
    std::fprintf(stderr, "%s: got %s, expected a file with tests of this program\n", words[0],
                 words[1]);
    return 1;
  }
  GTEST_FLAG_SET(filter, filter);
  return RUN_ALL_TESTS();
}
