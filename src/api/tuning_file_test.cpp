// Files of settings: what is read, and what is refused.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "api/tuning_file.hpp"
#include "core/test_errors.hpp"

namespace ferry {
namespace {

using test::expect_error;

std::string file_with(const std::string& text) {
  const std::string file = testing::TempDir() + "ferry_tuning_file_test.json";
  std::ofstream(file) << text;
  return file;
}

TEST(TuningFile, ReadsWhatFerryPlanWrites) {
  const auto entries = load_tuning(file_with(R"({
    "format": 1, "program": "ferry plan", "nested": {"a": [1, -2.5e3, null, true, "\"x\""]},
    "entries": [
      {"ranks": 64, "call": "dispatch", "dtype": "e4m3", "tokens": 4096.0, "mode": "throughput",
       "crossing": "hierarchical", "num_sms": 9, "us": 12.5},
      {"ranks": 64, "call": "combine", "dtype": "bf16", "tokens": 128, "mode": "latency"},
      {"call": "combine", "dtype": "bf16", "order": "expert_major", "hidden": 7168, "first": false,
       "chunk_bytes": 65536}]})"));
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].call, "dispatch");
  EXPECT_EQ(entries[0].dtype, Dtype::e4m3);
  EXPECT_EQ(entries[0].ranks, 64);
  EXPECT_EQ(entries[0].tokens, 4096);
  EXPECT_EQ(entries[0].crossing, Crossing::hierarchical);
  EXPECT_EQ(entries[0].num_sms, 9);
  EXPECT_EQ(entries[1].order, RowOrder::expert_major);
  EXPECT_EQ(entries[1].hidden, 7168);
  EXPECT_EQ(entries[1].chunk_bytes, 65536);
}

TEST(TuningFile, RefusesWithTheLine) {
  const auto refused = [](const std::string& text, std::vector<std::string> words) {
    words.push_back("ferry_tuning_file_test.json");
    expect_error(ErrorKind::invalid_argument, words, [&] { (void)load_tuning(file_with(text)); });
  };
  refused("", {"line 1", "expected '{'"});
  refused("{\"entries\": []}", {"\"format\": 1"});
  refused("{\"format\": 2, \"entries\": []}", {"\"format\": 1"});
  refused("{\"format\": 1,\n\"entries\": [{\"dtype\": \"bf16\"}]}", {"line 2", "\"call\""});
  refused("{\"format\": 1,\n\n\"entries\": [{\"call\": \"all_reduce\"}]}",
          {"line 3", "dispatch or"});
  refused("{\"format\": 1, \"entries\": [{\"dtype\": \"f64\"}]}", {"one of f32, bf16"});
  refused("{\"format\": 1, \"entries\": [{\"num_sms\": -1}]}", {"got \"-1", "0 to 1024"});
  refused("{\"format\": 1, \"entries\": [{\"num_sms\": 1e400}]}", {"a number"});
  refused("{\"format\": 1} x", {"the end of the file"});
  refused("{\"a\": " + std::string(100, '[') + "}", {"at most 16 levels"});
  refused("{\"a\": \"", {"expected '\"'"});
  expect_error(ErrorKind::invalid_argument, {"/no/such/file", "cannot be read"},
               [] { (void)load_tuning("/no/such/file"); });
}

TEST(TuningFile, TheEnvironmentSaysWhatIsNotGiven) {
  const auto with = [](const char* value, std::optional<bool> tune) {
    setenv("FERRY_TUNING", value, 1);
    GroupConfig config;
    config.tune = tune;
    apply_tuning_environment(config);
    unsetenv("FERRY_TUNING");
    return config;
  };
  EXPECT_FALSE(with("", {}).tune.has_value());
  EXPECT_FALSE(with("off", {}).tune.has_value());
  EXPECT_EQ(with("on", {}).tune, true);
  const std::string file =
      file_with("{\"format\": 1, \"entries\": [{\"call\": \"combine\", \"num_sms\": 3}]}");
  EXPECT_EQ(with(file.c_str(), {}).tuning.size(), 1u);
  EXPECT_EQ(with(file.c_str(), false).tune, false);
  EXPECT_TRUE(with(file.c_str(), true).tuning.empty());
  EXPECT_NE(tuning_text(with(file.c_str(), {})), tuning_text(with("on", {})));
  EXPECT_EQ(tuning_text(with("", {})), tuning_text(with("off", false)));
}

}  // namespace
}  // namespace ferry
