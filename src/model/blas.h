#pragma once
/// \file
/// BLAS calls from inside a parallel region.

#include <omp.h>

namespace gatefold {

/// Makes BLAS calls of this OpenMP thread use one thread. An OpenMP build of OpenBLAS does so by itself
/// inside a parallel region, but a region of one thread does not count as parallel. To be created in the
/// region: there the setting belongs to the thread's task and ends with it.
struct SerialBlas {
  SerialBlas() { omp_set_num_threads(1); }
};

}  // namespace gatefold
