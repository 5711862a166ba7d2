// Programs of bench/ that draw, carried inside the command.
#pragma once
#include <string>
#include <string_view>

namespace ferry::cli {

extern const std::string_view kExchangePlot;  ///< bench/plot_exchange.py
extern const std::string_view kMatrixPlot;    ///< bench/plot_matrix.py
extern const std::string_view kPlanPlot;      ///< bench/plot_plan.py

/// Why nothing can be drawn here, and what to do. "": it can.
std::string no_plot();
/// Draws a JSON file into an image, by python3 with matplotlib. False, and says so: it did not.
bool draw_plot(std::string_view program, const std::string& json_file, const std::string& image);
/// The same of what no file has.
bool draw_text(std::string_view program, const std::string& json, const std::string& image);

}  // namespace ferry::cli
