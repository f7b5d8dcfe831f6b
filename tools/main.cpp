#include "tools/cli.h"

int main(int argc, char** argv) {
  gatefold::cli::Cli cli;
  gatefold::cli::add_schemes(cli);
  gatefold::cli::add_inspect(cli);
  gatefold::cli::add_quantize(cli);
  gatefold::cli::add_run(cli);
  gatefold::cli::add_eval(cli);
  gatefold::cli::add_generate(cli);
  gatefold::cli::add_compare(cli);
  gatefold::cli::add_bench(cli);
  gatefold::cli::add_completion(cli);
  return cli.run(argc, argv);
}
