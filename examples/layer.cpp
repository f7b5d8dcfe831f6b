// One MoE layer of a checkpoint, quantized on load and run on 8 tokens.
#include <gatefold/moe.h>

#include <cstdio>

int main(int argc, char** argv) {
  using namespace gatefold;
  const auto fail = [](const Status& status) {
    return std::fprintf(stderr, "%s\n", status.message().c_str()), 1;
  };
  const auto checkpoint = Checkpoint::open(argc > 1 ? argv[1] : "models/tiny-moe");
  if (!checkpoint) return fail(checkpoint.status());
  const auto experts = load_experts(*checkpoint, {.layer = 0, .scheme = SchemeId::mxfp4});
  if (!experts) return fail(experts.status());
  const auto plan = MoePlan::create(experts->spec(), {.max_tokens = 8});
  if (!plan) return fail(plan.status());

  const int hidden = experts->spec().hidden;
  std::vector<float> x(8 * hidden, 0.5f), y(8 * hidden);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const Status done = plan->run(*experts, {.hidden = {x.data(), DType::f32, 8, hidden}},
                                {.hidden = {y.data(), DType::f32, 8, hidden}}, workspace);
  if (!done.ok()) return fail(done);
  std::printf("%s: y[0] = %g\n", std::string(plan->kernel_name()).c_str(), y[0]);
}
