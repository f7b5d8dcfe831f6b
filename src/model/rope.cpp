#include "model/rope.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace gatefold {
namespace {

// The steps below round to f32 where transformers does: models are trained and measured with these numbers.

// theta^(-2i / d)
std::vector<float> plain(double theta, int head_dim) {
  std::vector<float> frequencies(head_dim / 2);
  for (int i = 0; i < head_dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    frequencies[i] = 1.0f / static_cast<float>(std::pow(static_cast<float>(theta), double{exponent}));
  }
  return frequencies;
}

// Long wavelengths are divided by the factor, short ones kept, those between are blended.
void scale_llama3(const RopeConfig& config, std::vector<float>& frequencies) {
  const auto factor = static_cast<float>(config.factor);
  const auto low = static_cast<float>(config.low_freq_factor);
  const auto context = static_cast<float>(config.original_max_positions);
  const auto longest = static_cast<float>(config.original_max_positions / config.low_freq_factor);
  const auto shortest = static_cast<float>(config.original_max_positions / config.high_freq_factor);
  for (float& frequency : frequencies) {
    const float wavelength = static_cast<float>(2 * std::numbers::pi) / frequency;
    if (wavelength > longest) {
      frequency /= factor;
    } else if (wavelength >= shortest) {
      const float smooth =
          (context / wavelength - low) / static_cast<float>(config.high_freq_factor - config.low_freq_factor);
      frequency = (1 - smooth) * frequency / factor + smooth * frequency;
    }
  }
}

// Dimensions that turn more than beta_fast times within the original context are kept, those that turn less
// than beta_slow times are divided by the factor, with a linear ramp between.
void scale_yarn(const RopeConfig& config, int head_dim, std::vector<float>& frequencies) {
  const auto dimension = [&](double turns) {
    return head_dim * std::log(config.original_max_positions / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(config.theta));
  };
  double low = dimension(config.beta_fast);
  double high = dimension(config.beta_slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, head_dim - 1.0);
  if (low == high) high += 0.001;
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float position = (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low);
    const float kept = 1 - std::clamp(position, 0.0f, 1.0f);
    const float interpolated = 1.0f / (static_cast<float>(config.factor) * (1.0f / frequencies[i]));
    frequencies[i] = interpolated * (1 - kept) + frequencies[i] * kept;
  }
}

double yarn_attention_factor(const RopeConfig& config) {
  const auto factor = [&](double mscale) {
    return config.factor <= 1 ? 1.0 : 0.1 * mscale * std::log(config.factor) + 1.0;
  };
  if (config.attention_factor != 0) return config.attention_factor;
  if (config.mscale != 0 && config.mscale_all_dim != 0)
    return factor(config.mscale) / factor(config.mscale_all_dim);
  return factor(1);
}

}  // namespace

Result<Rope> Rope::create(const RopeConfig& config, int head_dim, int max_positions) {
  if (head_dim < 2 || head_dim % 2 != 0)
    return Status(Code::unsupported, fmt::format("rope: head_dim {} is not even", head_dim));
  if (config.type == RopeConfig::Type::dynamic && head_dim == 2)
    return Status(Code::unsupported, "rope: type dynamic is not defined for head_dim 2");
  Rope rope;
  rope.config_ = config;
  rope.head_dim_ = head_dim;
  rope.max_positions_ = max_positions;
  if (config.original_max_positions == 0) rope.config_.original_max_positions = max_positions;
  if (config.type == RopeConfig::Type::yarn)
    rope.attention_factor_ = static_cast<float>(yarn_attention_factor(config));
  const std::vector<float> frequencies = rope.inverse_frequencies(max_positions);
  if (!std::isfinite(rope.attention_factor_) ||
      !std::all_of(frequencies.begin(), frequencies.end(), [](float f) { return std::isfinite(f); }))
    return Status(Code::bad_file,
                  fmt::format("rope: theta {}, factor {} and original_max_position_embeddings {} give "
                              "frequencies that are not finite",
                              config.theta, config.factor, config.original_max_positions));
  return rope;
}

std::vector<float> Rope::inverse_frequencies(std::int64_t length) const {
  double theta = config_.theta;
  if (config_.type == RopeConfig::Type::dynamic) {
    const double stretch =
        static_cast<double>(std::max<std::int64_t>(length, max_positions_)) / max_positions_;
    theta *= std::pow(config_.factor * stretch - (config_.factor - 1), head_dim_ / (head_dim_ - 2.0));
  }
  std::vector<float> frequencies = plain(theta, head_dim_);
  switch (config_.type) {
    case RopeConfig::Type::linear:
      for (float& frequency : frequencies) frequency /= static_cast<float>(config_.factor);
      break;
    case RopeConfig::Type::llama3:
      scale_llama3(config_, frequencies);
      break;
    case RopeConfig::Type::yarn:
      scale_yarn(config_, head_dim_, frequencies);
      break;
    default:
      break;
  }
  return frequencies;
}

void Rope::angles(std::int64_t first, std::int64_t tokens, std::int64_t length, float* cos,
                  float* sin) const {
  const std::vector<float> frequencies = inverse_frequencies(length);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (const float frequency : frequencies) {
      const float angle = static_cast<float>(first + t) * frequency;
      *cos++ = std::cos(angle) * attention_factor_;
      *sin++ = std::sin(angle) * attention_factor_;
    }
  }
}

void rotate(float* x, int head_dim, const float* cos, const float* sin) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float low = x[i];
    const float high = x[i + half];
    x[i] = low * cos[i] - high * sin[i];
    x[i + half] = high * cos[i] + low * sin[i];
  }
}

}  // namespace gatefold
