#pragma once
/// \file
/// Which multiply (moe_gemm.h) takes how many tokens: a table that a plan makes once, of measured choices or
/// of what a model of clocks says is fastest.

#include <optional>
#include <span>
#include <vector>

#include "cuda/moe_gemm.h"
#include "moe/kernel.h"

namespace gatefold::cuda {

/// The matrices of an expert that one multiply reads.
struct GemmMatrices {
  std::int64_t rows = 0, k = 0;
  int count = 1;
};

/// Multiplies of the same tokens by the same experts, which have to be done alike: the first leaves its
/// results as the second one reads them.
struct GemmWork {
  SchemeId scheme = SchemeId::bf16;
  InputKind input = InputKind::bf16;
  InputKind bytes = InputKind::bf16;        ///< where codes are multiplied as such: else as `input`
  bool rounds = false;                      ///< rows are rounded before each multiply
  bool fast_accumulation = false;           ///< InputKind::e4m3_fast instead of e4m3, where there are kernels
  int experts = 1, top_k = 1, ep_size = 1;  ///< MoeSpec
  int shared = 0;  ///< of the experts, and of a token's choices: those that all tokens choose
  std::vector<GemmMatrices> multiplies;
  bool in_parts = false;  ///< columns of the last matrix may be cut into parts (GemmArgs)

  PackedFormat format() const { return packed_format(gatefold::scheme(scheme), input == InputKind::f16); }
};

/// More rows of one matrix are work enough without parts.
inline constexpr int kMostRowsOfParts = 512;

struct GemmChoice {
  CudaTuning tuning;
  GemmKernel full;     ///< by items of as many tokens as the kernel allows
  bool whole = false;  ///< so are those of the choice: thread blocks can find them

  GemmKernel kernel() const {
    GemmKernel kernel = full;
    kernel.tokens = tuning.tile_tokens;
    return kernel;
  }
};

struct GemmTableOptions {
  int max_tokens = 1;
  std::optional<CudaTuning> forced = {};                  ///< for all numbers of tokens
  std::span<const std::optional<CudaTuning>> tuned = {};  ///< by cuda_token_class; where there is none, or
                                                          ///< no such candidate, the model decides
  bool batch_invariant = false;                           ///< only candidates that add up in one order
};

class GemmTable {
 public:
  /// Also makes the kernels ready to be launched on the current device. Errors: no candidate, or not the one
  /// that is forced; what CUDA says.
  static Result<GemmTable> create(const GemmWork& work, const DeviceInfo& device,
                                  const GemmTableOptions& options);

  const GemmChoice& at(int tokens) const {
    std::size_t i = 0;
    while (i + 1 < ranges_.size() && ranges_[i].most < tokens) ++i;
    return choices_[ranges_[i].choice];
  }
  /// In how many parts the columns of the last matrix are best cut: a power of two.
  int parts(int tokens) const;
  /// All candidates with the clocks that the model predicts.
  std::vector<CudaCandidate> candidates(int tokens) const;

 private:
  struct Range {
    int most;  ///< tokens
    std::size_t choice;
  };
  std::size_t choose(int tokens, const GemmTableOptions& options) const;

  GemmWork work_;
  int multiprocessors_ = 1;
  std::vector<GemmChoice> choices_;
  std::vector<Range> ranges_;
};

}  // namespace gatefold::cuda
