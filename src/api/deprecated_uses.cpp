// Each line below compiles, with a warning of the compiler (deprecated_uses.cmake).
#include <ferry/ferry.hpp>
static const ferry::DispatchOptions rows{.worst_case_rows = 4};
static const ferry::DispatchOptions dispatch{.sms = 24};
static const ferry::CombineOptions combine{.sms = 24};
static const ferry::LatencyDispatchOptions send{.waits = ferry::TensorView()};
static const ferry::LatencyCombineOptions sum{.waits = ferry::TensorView()};
static const int sms = dispatch.sms;
static const ferry::MemoryUse memory{};
static const ferry::ErrorKind kind = ferry::ErrorKind::left_behind;
