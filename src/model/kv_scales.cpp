#include <algorithm>
#include <cmath>

#include "gatefold/calibrate.h"
#include "gatefold/decoder.h"
#include "model/eval.h"

namespace gatefold {

Result<std::vector<KvScales>> search_kv_scales(const Checkpoint& checkpoint,
                                               std::span<const std::int32_t> tokens, int window,
                                               int threads) {
  if (Status status = check_windows(tokens, window); !status.ok()) return status;
  const auto decoder = Decoder::load(checkpoint, {.threads = threads});
  if (!decoder) return decoder.status();
  std::vector<KvScales> largest(checkpoint.config().is_moe.size(), {0, 0});
  const auto widen = [](float& so_far, const MatrixView& x) {
    const auto* data = static_cast<const float*>(x.data);
    for (std::int64_t i = 0; i < x.rows * x.cols; ++i) so_far = std::max(so_far, std::fabs(data[i]));
  };
  ForwardHooks hooks;
  hooks.kv = [&](int layer, const MatrixView& keys, const MatrixView& values) {
    widen(largest[static_cast<std::size_t>(layer)].key, keys);
    widen(largest[static_cast<std::size_t>(layer)].value, values);
  };
  Sequence sequence = decoder->new_sequence();
  for (std::size_t at = 0; at + window <= tokens.size(); at += window) {
    sequence.clear();
    if (Status status = decoder->forward(tokens.subspan(at, window), sequence, hooks); !status.ok())
      return status;
  }
  for (KvScales& scales : largest)
    for (float* scale : {&scales.key, &scales.value})
      *scale = *scale > 0 ? *scale / static_cast<float>(formats::e4m3.max()) : 1.0f;
  return largest;
}

}  // namespace gatefold
