#include "tools/progress.h"

#include <barkeep/barkeep.h>
#include <langinfo.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <clocale>
#include <iostream>

namespace gatefold::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double plain_interval = 10;  // seconds between lines where there is no terminal

/// Block characters need a terminal that knows them.
barkeep::ProgressBarStyle bar_style() {
  std::setlocale(LC_CTYPE, "");
  return std::string_view(nl_langinfo(CODESET)) == "UTF-8" ? barkeep::Blocks : barkeep::Bars;
}

}  // namespace

struct Progress::State {
  std::string label, unit;
  double scale = 1, total = 0;
  Clock::time_point start;                                   ///< of the first call of set
  double first = 0;                                          ///< what was done then
  std::atomic<double> done = 0, rate = 0, seconds_left = 0;  // read by the display's thread
  const bool terminal = isatty(STDERR_FILENO) == 1;
  std::shared_ptr<barkeep::BaseDisplay> display;

  void show() {
    const double interval = terminal ? 0.2 : plain_interval;
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
                                     .style = bar_style(),
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
  s.done = static_cast<double>(done) / s.scale;
  if (s.start == Clock::time_point()) {
    s.start = Clock::now();
    s.first = s.done;
    s.total = static_cast<double>(total) / s.scale;
  }
  const double elapsed = std::chrono::duration<double>(Clock::now() - s.start).count();
  s.rate = elapsed > 0 ? (s.done - s.first) / elapsed : 0;
  s.seconds_left = s.rate > 0 ? (s.total - s.done) / s.rate : 0;
  if (s.display == nullptr && (s.terminal || elapsed > plain_interval)) s.show();
}

void Progress::finish() {
  if (state_->display != nullptr) state_->display->done();
  state_->display.reset();
}

}  // namespace gatefold::cli
