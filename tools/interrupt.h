#pragma once

namespace gatefold::cli {

/// While one exists, the first Ctrl-C (SIGINT, SIGTERM) is only noted, so that a command can clean up; the
/// second one ends the program.
class DeferInterrupts {
 public:
  DeferInterrupts();
  ~DeferInterrupts();
  DeferInterrupts(const DeferInterrupts&) = delete;
  static bool pending();
};

}  // namespace gatefold::cli
