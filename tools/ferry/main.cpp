// ferry: the command line as a program of its own.
#include "entry.hpp"

int main(int argc, char** argv) {
  return ferry::cli::run_command(argc, argv);
}
