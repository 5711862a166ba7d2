// bench/plot_exchange.py, carried inside the command.
#pragma once
#include <string_view>

namespace ferry::cli {

extern const std::string_view kPlotProgram;

}  // namespace ferry::cli
