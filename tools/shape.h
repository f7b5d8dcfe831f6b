#pragma once
/// \file
/// --model and --shape of bench and tune.

#include "gatefold/bench.h"
#include "tools/cli.h"

namespace gatefold::cli {

/// `shape` must live as long as the command.
void add_shape(CLI::App* command, BenchShape& shape);

}  // namespace gatefold::cli
