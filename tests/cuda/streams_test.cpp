// Layers that run at the same time in several streams: blocks of one wait while blocks of others hold the
// device.
#include "../moe_layer.h"
#include "cuda/device.h"
#include "gpu.h"

namespace gatefold {
namespace {

class Streams : public GpuTest {};

/// A layer on the device, and calls of it: weights are shared, all else is each call's own.
class Calls {
 public:
  static constexpr std::int64_t tokens = 300;

  explicit Calls(SchemeId scheme) : Calls(Layer(spec_of(scheme))) {}

  MoePlan plan(std::optional<CudaTuning> tuning = {}) const {
    PlanOptions options{.max_tokens = tokens};
    options.cuda_tuning = tuning;
    auto plan = MoePlan::create(spec_, options, Device::cuda());
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    return std::move(*plan);
  }
  std::size_t results() const { return static_cast<std::size_t>(tokens * spec_.hidden); }

  void run(const MoePlan& plan, const DeviceVector<float>& out, const DeviceVector<std::byte>& workspace,
           cuda::Stream stream) const {
    const Status status = plan.run(weights_,
                                   {.hidden = {x_.data(), DType::bf16, tokens, spec_.hidden},
                                    .topk_ids = ids_.data(),
                                    .topk_weights = slot_weights_.data()},
                                   {.hidden = {out.data(), DType::f32, tokens, spec_.hidden}},
                                   {workspace.data(), workspace.size()}, stream);
    ASSERT_TRUE(status.ok()) << status.message();
  }

 private:
  explicit Calls(Layer layer)
      : spec_(layer.spec()),
        weights_(layer.weights({.max_tokens = tokens}, Device::cuda())),
        x_(codes_of<formats::bf16>(layer.numbers(results(), 1.0f))),
        ids_(ids(spec_)),
        slot_weights_(std::vector<float>(ids_.size(), 0.5f)) {}

  static MoeSpec spec_of(SchemeId scheme) {
    MoeSpec spec = small_spec(scheme);
    spec.experts = 40;  // so few tokens each that all layers have a chain
    spec.top_k = 3;
    spec.hidden = 1024;
    spec.intermediate = 512;
    return spec;
  }
  static std::vector<std::int32_t> ids(const MoeSpec& spec) {
    std::vector<std::int32_t> ids;
    for (std::int32_t slot = 0; slot < tokens * spec.top_k; ++slot) ids.push_back(slot % spec.experts);
    return ids;
  }

  MoeSpec spec_;
  ExpertWeights weights_;
  DeviceVector<std::uint16_t> x_;
  DeviceVector<std::int32_t> ids_;
  DeviceVector<float> slot_weights_;
};

// Every kernel of one layer beside those of another: none waits for ever, and all bits are those of a call
// alone.
TEST_F(Streams, LayersAtTheSameTime) {
  const Calls layers[] = {Calls(SchemeId::int4_g128), Calls(SchemeId::fp8_block),
                          Calls(SchemeId::fp8_block_afp8), Calls(SchemeId::mxfp4_afp8)};
  cudaStream_t streams[std::size(layers)];
  for (cudaStream_t& stream : streams)
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  std::size_t most = 0;
  for (const Calls& calls : layers) most = std::max(most, calls.plan().candidates(Calls::tokens).size());
  for (std::size_t i = 0; i < most; ++i) {
    std::vector<MoePlan> plans;
    std::vector<DeviceVector<float>> outs;
    std::vector<DeviceVector<std::byte>> workspaces;
    std::vector<std::vector<float>> alone;
    for (const Calls& calls : layers) {
      const auto candidates = calls.plan().candidates(Calls::tokens);
      plans.push_back(calls.plan(candidates[i % candidates.size()].tuning));
      workspaces.emplace_back(plans.back().workspace_bytes());
      outs.emplace_back(calls.results());
      calls.run(plans.back(), outs.back(), workspaces.back(), nullptr);
      alone.push_back(outs.back().host());
      ASSERT_TRUE(cuda::fill(outs.back().data(), 0xFF, calls.results() * sizeof(float)).ok());
    }
    ASSERT_TRUE(cuda::synchronize().ok());
    for (int round = 0; round < 30; ++round)
      for (std::size_t layer = 0; layer < std::size(layers); ++layer)
        layers[layer].run(plans[layer], outs[layer], workspaces[layer], streams[layer]);
    for (std::size_t layer = 0; layer < std::size(layers); ++layer) {
      ASSERT_TRUE(cuda::synchronize(streams[layer]).ok());
      EXPECT_EQ(outs[layer].host(), alone[layer]) << plans[layer].describe();
    }
  }
  for (const cudaStream_t stream : streams) EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

}  // namespace
}  // namespace gatefold
