// What tiles leave: results in 16 bits, of all columns or in parts, beside the same ones in f32; codes,
// beside those of a kernel that rounds; and the largest number of a tensor, beside that which a kernel finds.
// And what weights are by scales that are rounded to bf16, beside those by scales in bf16.
#include <bit>

#include "format/matrix.h"
#include "gatefold/codec.h"
#include "gpu.h"
#include "gpu_layer.h"

namespace gatefold {
namespace {

class NarrowResults : public GpuTest {
 protected:
  /// A layer's results in bf16 or f16, as numbers.
  static std::vector<float> run_narrow(const MoePlan& plan, const ExpertWeights& weights,
                                       const std::vector<std::uint16_t>& x, const Routed& routed,
                                       DType type) {
    std::vector<float> out;
    out.reserve(x.size());
    for (const std::uint16_t code : run<std::uint16_t>(plan, weights, x, routed, type))
      out.push_back(type == DType::bf16 ? decode<formats::bf16>(code) : decode<formats::f16>(code));
    return out;
  }
};

/// What the results' rounding, and as much before it, may be off by.
constexpr std::pair<DType, double> kNarrow[] = {{DType::bf16, 0x1p-8}, {DType::f16, 0x1p-11}};

// What tiles leave of slots has 16 bits then: that may be as far off as the results' own rounding.
TEST_F(NarrowResults, OfEveryCandidate) {
  for (const auto& [scheme, hidden] : {std::pair{SchemeId::fp8_channel, 256},
                                       {SchemeId::fp8_channel, 170},
                                       {SchemeId::fp8_block_afp8, 256},
                                       {SchemeId::fp8_block_afp8, 170}}) {
    MoeSpec spec = small_spec(scheme);
    spec.hidden = hidden;
    Layer layer(spec);
    PlanOptions options{.max_tokens = 301, .debug_workspace = true};
    const ExpertWeights weights = layer.weights(options, Device::cuda());
    const auto any = MoePlan::create(spec, options, Device::cuda());
    ASSERT_TRUE(any.ok()) << any.status().message();
    for (const CudaCandidate& candidate : any->candidates(301))
      for (const std::size_t tokens : {90, 301}) {
        SCOPED_TRACE(testing::Message() << describe(candidate.tuning) << ", " << tokens << " tokens");
        options.cuda_tuning = candidate.tuning;
        const auto x =
            codes_of<formats::bf16>(layer.numbers(tokens * static_cast<std::size_t>(hidden), 1.0f));
        const Routed routed = route(tokens, 3);
        const auto plan = MoePlan::create(spec, options, Device::cuda());
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        const auto expected = run<float>(*plan, weights, x, routed, DType::f32);
        for (const auto& [type, allowed] : kNarrow)
          EXPECT_LE(
              relative_l2(run_narrow(*plan, weights, x, routed, type), {expected.begin(), expected.end()}),
              allowed);
      }
  }
}

// Scales of groups in f16, as in AWQ and GPTQ, are rounded to bf16, but beside f16 activations.
TEST_F(NarrowResults, ScalesOfGroups) {
  for (const auto& [scheme, type, rounded] : {std::tuple{SchemeId::int4_g32, DType::bf16, true},
                                              {SchemeId::uint4_g64, DType::bf16, true},
                                              {SchemeId::int4_g128, DType::bf16, true},
                                              {SchemeId::uint4_g128, DType::bf16, true},
                                              {SchemeId::int4_g32, DType::f16, false},
                                              {SchemeId::uint4_g128, DType::f16, false},
                                              {SchemeId::int4_g128_afp8, DType::bf16, true},
                                              {SchemeId::int4_g32_aint8, DType::f16, true}}) {
    SCOPED_TRACE(testing::Message() << gatefold::scheme(scheme).name << ' ' << name(type));
    MoeSpec spec = small_spec(scheme);
    spec.act_dtype = type;
    Layer layer(spec);
    ReferenceWeights in_f16 = layer.reference(), in_bf16 = in_f16;
    for (std::size_t e = 0; e < in_f16.routed.size(); ++e)
      for (QuantizedMatrix ReferenceFfn::*matrix :
           {&ReferenceFfn::gate, &ReferenceFfn::up, &ReferenceFfn::down}) {
        QuantizedMatrix& m = in_f16.routed[e].*matrix;
        std::vector<float> scales = all_scales(m);
        for (float& scale : scales) scale *= 1 + 0x1p-10f;  // which bf16 has not
        convert_scales(m, formats::f16);
        store_scales(m, 0, scales.data(), scales.size());
        in_bf16.routed[e].*matrix = m;
        convert_scales(in_bf16.routed[e].*matrix, formats::bf16);
      }
    const PlanOptions options{.max_tokens = 130, .debug_workspace = true};
    const ExpertWeights by_f16 = pack(spec, in_f16, options, Device::cuda()),
                        by_bf16 = pack(spec, in_bf16, options, Device::cuda());
    const auto plan = MoePlan::create(spec, options, Device::cuda());
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    for (const std::size_t tokens : {2, 130}) {
      const auto x = codes_of<formats::bf16>(layer.numbers(tokens * 256, 1.0f));
      const Routed routed = route(tokens, 3);
      EXPECT_EQ(run<float>(*plan, by_f16, x, routed, DType::f32) ==
                    run<float>(*plan, by_bf16, x, routed, DType::f32),
                rounded)
          << tokens << " tokens";
    }
  }
}

// Long rows of down are multiplied in two parts, which are rounded to 16 bits by themselves: together they
// are as far off as one.
TEST_F(NarrowResults, Parts) {
  int cut = 0;
  for (std::size_t id = 0; id < all_schemes().size(); ++id) {
    const Scheme& scheme = all_schemes()[id];
    // Where all columns are added up in e4m3's multiplies, which keep about 14 bits, parts differ by that.
    const double of_sums = cuda::packed_format(scheme).for_bytes ? 0x1p-9 : 0;
    MoeSpec spec = small_spec(static_cast<SchemeId>(id));
    spec.experts = 3;
    spec.hidden = 128;
    spec.intermediate = 66 * 128;  // parts of 33 records
    Layer layer(spec);
    PlanOptions options{.max_tokens = 90, .debug_workspace = true};
    const ExpertWeights weights = layer.weights(options, Device::cuda());
    const auto any = MoePlan::create(spec, options, Device::cuda());
    ASSERT_TRUE(any.ok()) << any.status().message();
    for (const CudaCandidate& candidate : any->candidates(options.max_tokens)) {
      if (candidate.tuning.body != CudaTuning::Body::warpgroups || candidate.tuning.tile_tokens > 80)
        continue;
      for (const std::size_t tokens : {20, 90}) {
        SCOPED_TRACE(testing::Message()
                     << scheme.name << ", " << describe(candidate.tuning) << ", " << tokens << " tokens");
        const auto x =
            codes_of<formats::bf16>(layer.numbers(tokens * static_cast<std::size_t>(spec.hidden), 1.0f));
        const Routed routed = route(tokens, 3);
        options.cuda_tuning = candidate.tuning;
        const auto plan = MoePlan::create(spec, options, Device::cuda());
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        const auto whole = run<float>(*plan, weights, x, routed, DType::f32);
        PlanOptions invariant = options;
        invariant.batch_invariant = true;
        const auto uncut = MoePlan::create(spec, invariant, Device::cuda());
        for (const auto& [type, allowed] : kNarrow) {
          const auto parts = run_narrow(*plan, weights, x, routed, type);
          EXPECT_LE(relative_l2(parts, {whole.begin(), whole.end()}), allowed + of_sums);
          EXPECT_EQ(run_narrow(*plan, weights, x, routed, type), parts);
          if (!uncut.ok()) continue;
          EXPECT_NE(run_narrow(*uncut, weights, x, routed, type), parts);
          ++cut;
        }
      }
    }
  }
  EXPECT_GE(cut, 100);
}

// Tiles of 128 tokens leave the codes of a kernel that rounds what those of 192 leave, whatever the numbers
// are.
TEST_F(NarrowResults, Codes) {
  constexpr std::size_t tokens = 301;
  for (const int intermediate : {128, 200, 258}) {
    SCOPED_TRACE(intermediate);
    MoeSpec spec = small_spec(SchemeId::fp8_block_afp8);
    spec.intermediate = intermediate;
    const auto hidden = static_cast<std::size_t>(spec.hidden);
    Layer layer(spec);
    std::vector<float> numbers = layer.numbers(tokens * hidden, 1.0f);
    // Zeros; scales that are too small and too large to divide by as usual; Inf and NaN.
    for (const auto& [token, factor] :
         {std::pair<std::size_t, float>{0, 0.0f}, {1, 1e-20f}, {2, 1e15f}, {3, 1e30f}})
      for (std::size_t i = 0; i < hidden; ++i) numbers[token * hidden + i] *= factor;
    const auto x = codes_of<formats::bf16>(numbers);
    PlanOptions options{.max_tokens = tokens, .debug_workspace = true};
    const ExpertWeights weights = layer.weights(options, Device::cuda());
    std::vector<std::vector<std::uint32_t>> bits;
    for (const int tile : {128, 192}) {
      options.cuda_tuning = CudaTuning{CudaTuning::Body::warpgroups, tile};
      const auto plan = MoePlan::create(spec, options, Device::cuda());
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      bits.emplace_back();
      for (const float value : run<float>(*plan, weights, x, route(tokens, 3), DType::f32))
        bits.back().push_back(std::bit_cast<std::uint32_t>(value));
    }
    EXPECT_EQ(bits[0], bits[1]);
  }
}

/// With 8 channels more, which are 0.
ReferenceFfn with_empty_channels(ReferenceFfn ffn) {
  for (QuantizedMatrix* matrix : {&ffn.gate, &ffn.up}) {
    matrix->n += 8;
    matrix->values.resize(static_cast<std::size_t>(matrix->n * matrix->k));
  }
  QuantizedMatrix& down = ffn.down;
  std::vector<std::byte> wider(static_cast<std::size_t>(down.n * (down.k + 8)));
  for (std::int64_t row = 0; row < down.n; ++row)
    std::copy_n(down.values.begin() + row * down.k, down.k, wider.begin() + row * (down.k + 8));
  down.values = std::move(wider);
  down.k += 8;
  return ffn;
}

// Ends of tiles leave the codes by static scales that a kernel makes where rows end within a record, whatever
// the numbers are.
TEST_F(NarrowResults, StaticCodes) {
  MoeSpec spec = small_spec(SchemeId::fp8_tensor_afp8);
  spec.intermediate = 384;
  const auto hidden = static_cast<std::size_t>(spec.hidden);
  Layer layer(spec, 4, true);
  MoeSpec wider = spec;
  wider.intermediate += 8;
  ReferenceWeights padded = layer.reference();
  for (ReferenceFfn& expert : padded.routed) expert = with_empty_channels(expert);
  for (const std::size_t tokens : {5, 90, 301}) {
    std::vector<float> numbers = layer.numbers(tokens * hidden, 1.0f);
    for (const auto& [token, factor] :
         {std::pair<std::size_t, float>{0, 0.0f}, {1, 1e-20f}, {2, 1e15f}, {3, 1e30f}})
      for (std::size_t i = 0; i < hidden; ++i) numbers[token * hidden + i] *= factor;
    const auto x = codes_of<formats::bf16>(numbers);
    PlanOptions options{.max_tokens = static_cast<int>(tokens), .debug_workspace = true};
    const ExpertWeights weights = layer.weights(options, Device::cuda()),
                        wider_weights = pack(wider, padded, options, Device::cuda());
    const auto any = MoePlan::create(spec, options, Device::cuda());
    ASSERT_TRUE(any.ok()) << any.status().message();
    for (const CudaCandidate& candidate : any->candidates(options.max_tokens)) {
      if (candidate.tuning.body != CudaTuning::Body::warpgroups) continue;
      SCOPED_TRACE(testing::Message() << describe(candidate.tuning) << ", " << tokens << " tokens");
      options.cuda_tuning = candidate.tuning;
      std::vector<std::uint32_t> bits[2];
      for (int i = 0; i < 2; ++i) {
        const auto plan = MoePlan::create(i == 0 ? spec : wider, options, Device::cuda());
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        for (const float value :
             run<float>(*plan, i == 0 ? weights : wider_weights, x, route(tokens, 3), DType::f32))
          bits[i].push_back(std::bit_cast<std::uint32_t>(value));
      }
      EXPECT_EQ(bits[0], bits[1]);
    }
  }
}

// Ends of tiles find the largest number of a tensor that a kernel finds for a shared expert, whatever the
// numbers are: an expert that all tokens are routed to has the same bits as that one.
TEST_F(NarrowResults, LargestOfTensor) {
  MoeSpec spec = small_spec(SchemeId::fp8_tensor_afp8);
  spec.top_k = 1;
  spec.intermediate = 388;
  const auto hidden = static_cast<std::size_t>(spec.hidden);
  MoeSpec with_shared = spec;
  with_shared.shared = {.intermediate = spec.intermediate, .gated = false, .scheme = spec.scheme};
  Layer layer(spec);
  ReferenceWeights shared = layer.reference();
  shared.shared = shared.routed[1];
  for (const std::size_t tokens : {301, 2100})  // fewer rows of a shared expert are multiplied by warps
    for (const float factor :
         {1.0f, 0.0f, 1e15f, 1e19f, 1e30f}) {  // zeros; large numbers; some or all are Inf or NaN
      std::vector<float> numbers = layer.numbers(tokens * hidden, 1.0f);
      for (std::size_t i = 0; i < hidden; ++i) numbers[(tokens - 1) * hidden + i] *= factor;
      const auto x = codes_of<formats::bf16>(numbers);
      PlanOptions options{.max_tokens = static_cast<int>(tokens)};  // ids need not be experts
      const auto bits = [&](const MoeSpec& of, const ReferenceWeights& weights, std::int32_t expert) {
        const auto plan = MoePlan::create(of, options, Device::cuda());
        EXPECT_TRUE(plan.ok()) << plan.status().message();
        const Routed routed{std::vector<std::int32_t>(tokens, expert), std::vector<float>(tokens, 1.0f)};
        std::vector<std::uint32_t> bits;
        for (const float value :
             run<float>(*plan, pack(of, weights, options, Device::cuda()), x, routed, DType::f32))
          bits.push_back(std::isnan(value) ? ~0u : std::bit_cast<std::uint32_t>(value));
        return bits;
      };
      const auto expected = bits(with_shared, shared, -1);
      const auto any = MoePlan::create(spec, options, Device::cuda());
      ASSERT_TRUE(any.ok()) << any.status().message();
      for (const CudaCandidate& candidate : any->candidates(options.max_tokens)) {
        if (candidate.tuning.body != CudaTuning::Body::warpgroups) continue;
        SCOPED_TRACE(testing::Message()
                     << describe(candidate.tuning) << ", " << tokens << " tokens, one times " << factor);
        options.cuda_tuning = candidate.tuning;
        EXPECT_EQ(bits(spec, layer.reference(), 1), expected);
      }
      options.cuda_tuning.reset();
    }
}

}  // namespace
}  // namespace gatefold
