// The command `ferry` as a function: for its program, and for the Python package.
#pragma once

namespace ferry::cli {

/// What `main` does with the same arguments; returns the exit code. Prints errors; never throws.
int run_command(int argc, char** argv);

}  // namespace ferry::cli
