#pragma once

namespace gatefold::cuda {

/// What the kernels of routing are made for.
inline constexpr int kMostExperts = 1024;
inline constexpr int kMostTopK = 32;

}  // namespace gatefold::cuda
