// The multiply over panels on one core, weights and activations in its caches: every scheme in every form
// that the best instruction set has. per_line: time for 64 bytes of weights.
//   cmake -B build -DGATEFOLD_BENCHMARKS=ON && cmake --build build && build/benchmarks/panel_benchmark

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "cpu/panel.h"
#include "moe/arena.h"

namespace gatefold {
namespace {

constexpr std::int64_t kColumns = 2048, kBytes = 300'000;
constexpr PanelForm kForms[] = {PanelForm::limbs1, PanelForm::limbs2, PanelForm::pairs, PanelForm::floats};
constexpr const char* kFormNames[] = {"limbs1", "limbs2", "pairs", "floats"};
constexpr InputScale kScales[] = {InputScale::none, InputScale::block, InputScale::chunk};
constexpr const char* kScaleNames[] = {"row", "block", "chunk"};

void run(benchmark::State& state, SchemeId id, PanelMultiply multiply) {
  const std::int64_t tokens = state.range(0);
  const PanelShape shape = panel_shape(scheme(id), scheme(id).weight.scale, kPanelRows, kColumns);
  const auto panel = static_cast<std::int64_t>(shape.panel_bytes);
  const std::int64_t panels = std::max<std::int64_t>(2, kBytes / panel / 2 * 2);
  const Arena weights(static_cast<std::size_t>(panels * panel));  // codes of zero take no other time
  constexpr std::int64_t row = 4 * kColumns + 64;                 // of the widest form, and a line more
  const std::vector<std::byte> codes(static_cast<std::size_t>(tokens * row));
  const std::vector<float> zeros(kColumns);
  const std::vector<std::int32_t> starts(kColumns);
  std::vector<PanelInput> inputs;
  for (std::int64_t t = 0; t < tokens; ++t)
    inputs.push_back({codes.data() + t * row, zeros.data(), starts.data()});
  std::vector<float> out(static_cast<std::size_t>(tokens * 2 * kPanelRows));
  for (auto _ : state) {
    for (std::int64_t p = 0; p < panels; p += 2)
      multiply(shape, weights.data() + p * panel, panel, 2, inputs.data(), tokens, out.data(), 2 * kPanelRows,
               kPanelRows);
    benchmark::DoNotOptimize(out.data());
  }
  using benchmark::Counter;
  const auto lines = static_cast<double>(panels * panel / 64);
  state.counters["per_line"] = Counter(lines, Counter::kIsIterationInvariantRate | Counter::kInvert);
  state.counters["flops"] = Counter(static_cast<double>(2 * panels * kPanelRows * kColumns * tokens),
                                    Counter::kIsIterationInvariantRate);
}

const bool registered = [] {
  const PanelKernels& kernels = panel_kernels(best_isa());
  for (std::size_t i = 0; i < all_schemes().size(); ++i)
    for (const PanelForm form : kForms)
      for (const InputScale scale : kScales) {
        const auto id = static_cast<SchemeId>(i);
        const PanelMultiply multiply = kernels.find(id, form, scale, false);
        if (multiply == nullptr) continue;
        const std::string name =
            fmt::format("{}/{}/{}", all_schemes()[i].name, kFormNames[static_cast<int>(form)],
                        kScaleNames[static_cast<int>(scale)]);
        for (const int tokens : {1, 2, 4, 8, 64})
          benchmark::RegisterBenchmark(name.c_str(), run, id, multiply)->Arg(tokens);
      }
  return true;
}();

}  // namespace
}  // namespace gatefold
