#include <cstdio>
#include <exception>

#include "tools/cli.h"

int main(int argc, char** argv) try {
  gatefold::cli::Cli cli;
  gatefold::cli::add_schemes(cli);
  gatefold::cli::add_inspect(cli);
  gatefold::cli::add_quantize(cli);
  gatefold::cli::add_convert(cli);
  gatefold::cli::add_recommend(cli);
  gatefold::cli::add_run(cli);
  gatefold::cli::add_eval(cli);
  gatefold::cli::add_generate(cli);
  gatefold::cli::add_compare(cli);
  gatefold::cli::add_bench(cli);
  gatefold::cli::add_tune(cli);
  gatefold::cli::add_completion(cli);
  return cli.run(argc, argv);
} catch (const std::exception& error) {  // out of memory, or stdout cannot be written
  std::fprintf(stderr, "gatefold: %s\n", error.what());
  return 1;
}
