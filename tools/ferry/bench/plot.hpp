// bench/plot_exchange.py, carried inside the command.
#pragma once
#include <string>
#include <string_view>

namespace ferry::cli {

extern const std::string_view kPlotProgram;

/// Draws a JSON file into an image, by python3 with matplotlib. False, and says so: it did not.
bool draw_plot(const std::string& json_file, const std::string& image);

}  // namespace ferry::cli
