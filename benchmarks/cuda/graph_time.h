#pragma once

#include <cstdio>

#include "cuda/device.h"
#include "cuda/measure.h"
#include "format/median.h"

namespace gatefold {

/// Time of one call in microseconds: the median over replays of a graph of several calls, from a rest; they
/// work on copies in turn, so that data comes from memory. 0 if it cannot be measured.
template <class Call>
double graph_us(int calls, Call&& call) {
  const auto all = [&](cuda::Stream stream) {
    for (int i = 0; i < calls; ++i) call(i, cuda::native(stream));
    return Status();
  };
  auto timer = cuda::Timer::create(0);
  auto times = timer ? timer->rested(all, 21) : timer.status();
  if (!times) {
    std::printf("%s\n", times.status().message().c_str());
    return 0;
  }
  return median(*times) / calls;
}

}  // namespace gatefold
