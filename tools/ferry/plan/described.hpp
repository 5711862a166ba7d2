// Clusters and models that YAML files describe. Each number says how it is known, and so by how
// much it may be wrong.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/exchange_model.hpp"

namespace ferry::cli {

enum class Kind { cluster, model };

/// Presets by name, as YAML.
const std::map<std::string, std::string_view>& presets(Kind kind);

struct Value {
  double value = 0;
  std::string from = "assumed";  ///< or measured, published
  double error = 0;              ///< relative: by so much it may be wrong, nine times of ten
};

/// GB/s: more than any GPU's link or memory has.
inline constexpr double kMostRate = 1e5;
/// By how much a value may be wrong that says no `error` of its own.
double error_of(const std::string& from);

/// Numbers by key; those of a section stand before those of the file.
class Described {
 public:
  /// A preset, or a file.
  static Described load(Kind kind, const std::string& name);

  const std::string& name() const { return name_; }
  const Value* find(const std::string& section, const std::string& key) const;
  double number(const std::string& key, double otherwise) const;
  double number(const std::string& section, const std::string& key, double otherwise) const;
  /// The keys of what is assumed.
  std::vector<std::string> assumed() const;

 private:
  std::string name_{};
  std::map<std::string, std::map<std::string, Value>> sections_{};  ///< "": the file
};

/// Which end of the errors of the values.
enum class End { likely, fast, slow };

/// In latency mode at most so many tokens of a rank cross as LL (kLLTokens of the kernels), whose
/// latency is less (`few_latency_us`).
inline constexpr double kFewTokens = 8;

/// What a cluster can do in an operation ("dispatch", "latency_combine", …), rows copied by so many
/// SMs.
ExchangeRates rates_of(const Described& cluster, const std::string& operation, int num_sms,
                       double tokens, End end = End::likely);

}  // namespace ferry::cli
