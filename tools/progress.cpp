#include "tools/progress.h"

#include <barkeep/barkeep.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <iostream>

namespace gatefold::cli {
namespace {
using Clock = std::chrono::steady_clock;
}

struct Progress::State {
  std::string label, unit;
  double scale = 1, total = 0;
  Clock::time_point start = Clock::now();
  std::atomic<double> done = 0, rate = 0, seconds_left = 0;  // read by the display's thread
  std::shared_ptr<barkeep::BaseDisplay> display;

  void show() {
    const bool terminal = isatty(STDERR_FILENO) == 1;
    const double interval = terminal ? 0.2 : 10.0;
    const auto counter = [&](std::atomic<double>* value, const std::string& format) {
      return barkeep::Counter(
          value,
          {.out = &std::cerr, .format = format, .interval = interval, .no_tty = !terminal, .show = false});
    };
    auto amount =
        barkeep::ProgressBar(&done, {.out = &std::cerr,
                                     .total = total,
                                     .format = label + (terminal ? " {bar} " : " ") +
                                               "{percent:3.0f} %  {value:.2f} of {total:.2f} " + unit,
                                     .interval = interval,
                                     .no_tty = !terminal,
                                     .show = false});
    display = barkeep::Composite(
        {amount, counter(&rate, "{value:.2f} " + unit + "/s"), counter(&seconds_left, "{value:.0f} s left")});
    display->show();
  }
};

Progress::Progress(std::string label, std::string unit, double scale) : state_(std::make_unique<State>()) {
  state_->label = std::move(label);
  state_->unit = std::move(unit);
  state_->scale = scale;
}

Progress::~Progress() {
  finish();
}

void Progress::set(std::uint64_t done, std::uint64_t total) {
  State& s = *state_;
  const std::chrono::duration<double> elapsed = Clock::now() - s.start;
  s.total = static_cast<double>(total) / s.scale;
  s.done = static_cast<double>(done) / s.scale;
  s.rate = s.done / std::max(elapsed.count(), 1e-3);
  s.seconds_left = s.rate > 0 ? (s.total - s.done) / s.rate : 0;
  if (s.display == nullptr) s.show();
}

void Progress::finish() {
  if (state_->display != nullptr) state_->display->done();
  state_->display.reset();
}

}  // namespace gatefold::cli
