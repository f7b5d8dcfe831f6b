// Calibration on the GPU loses as much as on the CPU, in every scheme, and gives the same bits in every run.
#include "quantize/gptq.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <random>
#include <vector>

#include "../model_files.h"
#include "gatefold/calibrate.h"
#include "gatefold/decoder.h"
#include "gpu.h"
#include "model/smoothing.h"
#include "quantize/layer_quantizer.h"

namespace gatefold {
namespace {

using Floats = std::vector<float>;

constexpr std::int64_t kTokens = 6000, kHidden = 256, kInner = 384;  // more tokens than fit in one chunk

/// A layer of one expert, and inputs with a few large channels and correlations.
struct Problem {
  Floats x, residual, gate, up, down;
  Samples samples;

  explicit Problem(int seed = 1) {
    std::mt19937 random(static_cast<unsigned>(seed));
    std::normal_distribution<float> normal;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const float common = normal(random);
      for (std::int64_t j = 0; j < kHidden; ++j)
        x.push_back((normal(random) + common) * (j % 17 == 0 ? 4.0f : 0.5f));
      if (t % 5 == 4) continue;  // routed elsewhere
      samples.tokens.push_back(static_cast<std::int32_t>(t));
      samples.weights.push_back(t % 7 == 0 ? 0.0f : 0.25f + 0.5f * static_cast<float>(t % 3));
      samples.importance.push_back(t % 7 == 0 ? 0.01f : samples.weights.back() * samples.weights.back());
    }
    samples.routed = samples.size();
    residual.assign(x.size(), 1.0f);
    for (Floats* w : {&gate, &up, &down})
      for (std::int64_t i = 0; i < kHidden * kInner; ++i)
        w->push_back(normal(random) * (random() % 50 == 0 ? 0.2f : 0.04f));
  }
  PlainExpert expert() const {
    return {{gate.data(), DType::f32, kInner, kHidden},
            {up.data(), DType::f32, kInner, kHidden},
            {down.data(), DType::f32, kHidden, kInner}};
  }
  LayerInputs inputs(SchemeId id) const {
    return {.scheme = id,
            .tokens = kTokens,
            .hidden = kHidden,
            .inner = kInner,
            .normed = x.data(),
            .residual = residual.data()};
  }
};

Floats values_of(const QuantizedMatrix& matrix) {
  Floats out(static_cast<std::size_t>(matrix.n * matrix.k));
  dequantize(matrix, out.data());
  return out;
}

/// sum of importance * x x^T over the samples; rows of x belong to samples.
Floats hessian_of(const Floats& x, const Samples& samples, std::int64_t k) {
  std::vector<double> sum(static_cast<std::size_t>(k * k));
  for (std::int64_t s = 0; s < samples.size(); ++s)
    for (std::int64_t i = 0; i < k; ++i) {
      const double left = static_cast<double>(samples.importance[s]) * x[s * k + i];
      for (std::int64_t j = 0; j <= i; ++j) sum[i * k + j] += left * x[s * k + j];
    }
  Floats out(sum.size());
  for (std::int64_t i = 0; i < k; ++i)
    for (std::int64_t j = 0; j < k; ++j)
      out[i * k + j] = static_cast<float>(sum[std::max(i, j) * k + std::min(i, j)]);
  return out;
}

/// trace((W - Q) H (W - Q)^T)
double loss(const Floats& weights, const Floats& values, const Floats& hessian, std::int64_t k) {
  double sum = 0;
  std::vector<double> d(static_cast<std::size_t>(k));
  for (std::size_t row = 0; row < weights.size(); row += static_cast<std::size_t>(k)) {
    for (std::int64_t j = 0; j < k; ++j) d[j] = static_cast<double>(weights[row + j]) - values[row + j];
    for (std::int64_t i = 0; i < k; ++i) {
      double line = 0;
      for (std::int64_t j = 0; j < k; ++j) line += hessian[i * k + j] * d[j];
      sum += line * d[i];
    }
  }
  return sum;
}

Floats product(const Floats& x, const Floats& w, std::int64_t k) {
  const std::size_t rows = x.size() / static_cast<std::size_t>(k), n = w.size() / static_cast<std::size_t>(k);
  Floats y(rows * n);
#pragma omp parallel for
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t i = 0; i < n; ++i) {
      float sum = 0;
      for (std::int64_t j = 0; j < k; ++j) sum += x[r * k + j] * w[i * k + j];
      y[r * n + i] = sum;
    }
  return y;
}

struct Outcome {
  QuantizedExpert expert;
  Floats residual;
};

Outcome run_gpu(const LayerInputs& inputs, const Problem& p) {
  Outcome outcome;
  outcome.residual.resize(p.residual.size());
  auto layer = cuda_layer_quantizer(inputs, 1, 0);
  EXPECT_TRUE(layer) << layer.status().message();
  for (const Status& status : {(*layer)->quantize(0, p.expert(), p.samples, {}, outcome.expert),
                               (*layer)->add(0), (*layer)->finish(outcome.residual.data())})
    EXPECT_TRUE(status.ok()) << status.message();
  return outcome;
}

/// What the expert adds to the tokens' ones.
Floats expected_output(const Problem& p, const Floats& inner, const QuantizedMatrix& down) {
  const Floats out = product(inner, values_of(down), kInner);
  Floats residual = p.residual;
  for (std::int64_t s = 0; s < p.samples.size(); ++s)
    for (std::int64_t j = 0; j < kHidden; ++j)
      residual[p.samples.tokens[s] * kHidden + j] += p.samples.weights[s] * out[s * kHidden + j];
  return residual;
}

class GptqOnGpu : public GpuTest, public testing::WithParamInterface<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Schemes, GptqOnGpu, testing::Range<std::size_t>(0, all_schemes().size()),
                         [](const auto& info) { return std::string(all_schemes()[info.param].name); });

TEST_P(GptqOnGpu, LosesWhatTheCpuLoses) {
  const auto id = static_cast<SchemeId>(GetParam());
  if (!scheme(id).weight.quantized()) GTEST_SKIP() << "not quantized";
  const Problem p;
  const Outcome outcome = run_gpu(p.inputs(id), p);
  const QuantizedExpert& gpu = outcome.expert;
  Floats x;
  for (const std::int32_t token : p.samples.tokens)
    x.insert(x.end(), p.x.begin() + token * kHidden, p.x.begin() + (token + 1) * kHidden);
  round_activations(scheme(id).activation, nullptr, kHidden, x);
  const Floats inputs = hessian_of(x, p.samples, kHidden);
  GptqOptions options;
  for (const Floats* part : {&p.gate, &p.up})
    options.tensor_amax =
        std::max(options.tensor_amax, largest_magnitude({part->data(), DType::f32, kInner, kHidden}));
  const auto expect_alike = [&](const char* name, const Floats& weights, const QuantizedMatrix& ours,
                                const Floats& hessian, std::int64_t n, std::int64_t k,
                                const GptqOptions& with) {
    const auto cpu = gptq(id, n, k, weights.data(), hessian, with);
    ASSERT_TRUE(cpu) << cpu.status().message();
    EXPECT_EQ(ours.tensor_scale.value, cpu->tensor_scale.value) << name;
    const double theirs = loss(weights, values_of(*cpu), hessian, k);
    const double found = loss(weights, values_of(ours), hessian, k);
    EXPECT_NEAR(found / theirs, 1, 0.01) << name;
    RecordProperty(name, std::to_string(found / theirs));
  };
  expect_alike("gate", p.gate, gpu.gate, inputs, kInner, kHidden, options);
  expect_alike("up", p.up, gpu.up, inputs, kInner, kHidden, options);

  const Floats gate = product(x, values_of(gpu.gate), kHidden);
  Floats inner = product(x, values_of(gpu.up), kHidden);
  for (std::size_t i = 0; i < inner.size(); ++i) inner[i] *= gate[i] / (1 + std::exp(-gate[i]));
  round_activations(scheme(id).activation, nullptr, kInner, inner);
  expect_alike("down", p.down, gpu.down, hessian_of(inner, p.samples, kInner), kHidden, kInner, {});

  const Floats residual = expected_output(p, inner, gpu.down);
  double error = 0, whole = 0;
  for (std::size_t i = 0; i < residual.size(); ++i) {
    error += std::pow(static_cast<double>(residual[i]) - outcome.residual[i], 2);
    whole += std::pow(static_cast<double>(residual[i]) - 1, 2);
  }
  // Sums in another order move some activations to the next code; scales of a tensor are those of a chunk.
  EXPECT_LT(std::sqrt(error / whole), scheme(id).batch_dependent()         ? 0.1
                                      : scheme(id).quantizes_activations() ? 2e-2
                                                                           : 1e-5);
}

class GptqGpuTest : public GpuTest {};

void expect_same(const QuantizedMatrix& a, const QuantizedMatrix& b) {
  EXPECT_EQ(a.values, b.values);
  EXPECT_EQ(a.scales, b.scales);
  EXPECT_EQ(a.zero_points, b.zero_points);
}

TEST_F(GptqGpuTest, SameBitsInEveryRun) {
  const Problem p;
  for (const SchemeId id : {SchemeId::int4_g128, SchemeId::nvfp4, SchemeId::uint4_g32}) {
    const Outcome first = run_gpu(p.inputs(id), p), second = run_gpu(p.inputs(id), p);
    expect_same(first.expert.gate, second.expert.gate);
    expect_same(first.expert.up, second.expert.up);
    expect_same(first.expert.down, second.expert.down);
    EXPECT_EQ(first.residual, second.residual);
  }
}

/// An expert that is quantized already leaves what it left when it was quantized.
TEST_F(GptqGpuTest, RunsWhatIsQuantized) {
  const Problem p;
  Floats fold(kHidden, 1.0f);
  for (std::size_t j = 0; j < fold.size(); j += 3) fold[j] = 4;
  std::vector<LayerInputs> cases;
  for (const SchemeId id : {SchemeId::int4_g128, SchemeId::nvfp4_anvfp4, SchemeId::fp8_block})
    cases.push_back(p.inputs(id));
  cases.push_back(p.inputs(SchemeId::int4_g128));
  cases.back().method = Method::awq;
  cases.back().fold = fold;
  cases.push_back(p.inputs(SchemeId::fp8_tensor_afp8));
  cases.back().method = Method::smoothquant;
  cases.back().fold = fold;
  cases.back().input_scale = TensorScale{0.02f, false};
  cases.back().down_scale = [](const Floats&) { return TensorScale{0.05f, false}; };
  for (const LayerInputs& inputs : cases) {
    const Outcome outcome = run_gpu(inputs, p);
    EXPECT_EQ(outcome.expert.gate.input_scale.has_value(), inputs.input_scale.has_value());
    EXPECT_EQ(outcome.expert.down.input_scale.has_value(), inputs.input_scale.has_value());
    auto layer = cuda_layer_quantizer(inputs, 1, 0);
    ASSERT_TRUE(layer);
    Floats residual(p.residual.size());
    ASSERT_TRUE((*layer)->run(0, outcome.expert, p.samples).ok());
    ASSERT_TRUE((*layer)->add(0).ok());
    ASSERT_TRUE((*layer)->finish(residual.data()).ok());
    EXPECT_EQ(residual, outcome.residual);
  }
}

/// The search of scales of channels ends where the CPU's does.
TEST_F(GptqGpuTest, FindsTheSmoothingOfTheCpu) {
  const Problem p;
  const Sample sample = sample_of(p.x, kHidden);
  const std::vector<Floats> matrices{p.gate, p.up};
  for (const SchemeId id : {SchemeId::int4_g128, SchemeId::int8_aint8, SchemeId::nvfp4, SchemeId::mxfp4_afp8,
                            SchemeId::uint4_g32})
    for (const bool maxima : {false, true})
      for (const bool powers_of_two : {false, true}) {
        const Floats cpu = search_smoothing(id, maxima, powers_of_two, sample, matrices);
        const auto gpu = cuda_search_smoothing(id, maxima, powers_of_two, sample, matrices, 0);
        ASSERT_TRUE(gpu) << gpu.status().message();
        ASSERT_EQ(gpu->size(), cpu.size());
        for (std::size_t j = 0; j < cpu.size(); ++j)
          ASSERT_NEAR((*gpu)[j] / cpu[j], 1, 1e-5) << scheme(id).name << ' ' << maxima << powers_of_two;
      }
}

TEST_F(GptqGpuTest, NoSamplesDeadChannelsAndWrongShapes) {
  Problem p;
  for (std::int64_t t = 0; t < kTokens; ++t)
    for (const std::int64_t dead : {3, 70}) p.x[t * kHidden + dead] = 0;
  auto layer = cuda_layer_quantizer(p.inputs(SchemeId::nvfp4), 1, 0);
  ASSERT_TRUE(layer);
  QuantizedExpert out;
  LayerQuantizer::Options options;
  options.gate_up.damping = options.down.damping = 0;
  ASSERT_TRUE((*layer)->quantize(0, p.expert(), p.samples, options, out).ok());
  for (const QuantizedMatrix* matrix : {&out.gate, &out.up, &out.down})
    for (const float value : values_of(*matrix)) ASSERT_TRUE(std::isfinite(value));
  ASSERT_TRUE((*layer)->quantize(0, p.expert(), {}, {}, out).ok());
  ASSERT_TRUE((*layer)->add(0).ok());
  for (const float value : values_of(out.down)) ASSERT_TRUE(std::isfinite(value));

  LayerInputs odd = p.inputs(SchemeId::int4_g128);
  odd.inner = 96;
  auto narrow = cuda_layer_quantizer(odd, 1, 0);
  ASSERT_TRUE(narrow);
  const PlainExpert expert{{p.gate.data(), DType::f32, 96, kHidden},
                           {p.up.data(), DType::f32, 96, kHidden},
                           {p.down.data(), DType::f32, kHidden, 96}};
  const Status status = (*narrow)->quantize(0, expert, p.samples, {}, out);
  EXPECT_NE(status.message().find("k = 96 is not a multiple of group 128"), std::string::npos);
}

/// Whole models: the KL to the bf16 model is that of the CPU's calibration, and resuming changes no bit.
TEST_F(GptqGpuTest, CalibratesModels) {
  const std::string bytes = read_file(tiny_moe + "/calibration.txt").substr(0, 16384);
  const std::vector<std::int32_t> tokens(reinterpret_cast<const unsigned char*>(bytes.data()),
                                         reinterpret_cast<const unsigned char*>(bytes.data()) + bytes.size());
  const std::string valid = read_file(tiny_moe + "/valid.txt").substr(0, 16384);
  const std::vector<std::int32_t> text(reinterpret_cast<const unsigned char*>(valid.data()),
                                       reinterpret_cast<const unsigned char*>(valid.data()) + valid.size());
  TemporaryDirectory root;
  for (const auto& [id, method] : {std::pair{SchemeId::int4_g128, Method::gptq},
                                   {SchemeId::nvfp4, Method::gptq},
                                   {SchemeId::int8_aint8, Method::gptq},
                                   {SchemeId::int4_g128, Method::awq},
                                   {SchemeId::int8_aint8, Method::smoothquant},
                                   {SchemeId::fp8_tensor_afp8, Method::smoothquant}}) {
    const std::string label = fmt::format("{}-{}", scheme(id).name, name(method));
    CompareOptions compare_options;
    for (const Device device : {Device::cpu(), Device::cuda()}) {
      const auto out = root / (label + (device == Device::cpu() ? "-cpu" : "-gpu"));
      const auto report = calibrate(open_checkpoint(tiny_moe), out, tokens,
                                    {.scheme = id, .method = method, .device = device});
      ASSERT_TRUE(report) << report.status().message();
      compare_options.others.push_back(open_checkpoint(out.string()));
    }
    const auto rows = compare(open_checkpoint(tiny_moe), text, compare_options);
    ASSERT_TRUE(rows) << rows.status().message();
    EXPECT_NEAR((*rows)[1].kl / (*rows)[0].kl, 1, 0.1) << label;
    RecordProperty(label, std::to_string((*rows)[1].kl / (*rows)[0].kl));
  }

  CalibrateOptions options{.scheme = SchemeId::int4_g128, .device = Device::cuda()};
  const int experts = open_checkpoint(tiny_moe).config().moe.experts;
  std::int64_t asked = 0;
  options.cancelled = [&] { return ++asked > 2 * experts + 3; };
  EXPECT_FALSE(calibrate(open_checkpoint(tiny_moe), root / "again", tokens, options));
  options.cancelled = {};
  options.resume = true;
  const auto resumed = calibrate(open_checkpoint(tiny_moe), root / "again", tokens, options);
  ASSERT_TRUE(resumed) << resumed.status().message();
  EXPECT_EQ(resumed->resumed_layers, 2);
  EXPECT_EQ(read_file(root / "again" / "model.safetensors"),
            read_file(root / "int4_g128-gptq-gpu" / "model.safetensors"));
}

}  // namespace
}  // namespace gatefold
