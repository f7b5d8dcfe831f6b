#include "tools/interrupt.h"

#include <csignal>

namespace gatefold::cli {
namespace {

volatile std::sig_atomic_t noted = 0;

void set(void (*handler)(int), int flags) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

}  // namespace

// SA_RESETHAND: the default comes back with the first signal.
DeferInterrupts::DeferInterrupts() {
  set([](int) { noted = 1; }, SA_RESETHAND | SA_RESTART);
}
DeferInterrupts::~DeferInterrupts() {
  set(SIG_DFL, 0);
}
bool DeferInterrupts::pending() {
  return noted != 0;
}

}  // namespace gatefold::cli
