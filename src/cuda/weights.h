#pragma once
/// \file
/// A layer's packed weights in device memory, with what else the layer's kernels read.

#include "cuda/device.h"
#include "cuda/pack.h"
#include "moe/kernel.h"

namespace gatefold::cuda {

/// Whether group scales are in f16 or f32 where the scheme has bf16 (may_be_wide).
bool is_wide(SchemeId scheme, Format scale_format);
/// What scales that are stored in `stored` become before they are packed beside such activations.
Format packed_scales(SchemeId scheme, Format stored, const Operand& activation);

/// Whether there is a shared expert, of the scheme and shape of routed ones: it is packed after them.
bool shared_is_alike(const MoeSpec& spec);

/// The matrices that one multiply reads.
struct DeviceMatrices {
  const std::byte* data = nullptr;  ///< of expert 0
  std::int64_t expert_stride = 0;   ///< bytes
};

class DeviceWeights final : public WeightMemory {
 public:
  static Result<std::unique_ptr<WeightMemory>> allocate(std::size_t bytes, const Device& device);
  static const DeviceWeights& of(const ExpertWeights::State& state) {
    return static_cast<const DeviceWeights&>(*state.memory);
  }

  std::size_t bytes() const override { return memory_.bytes(); }
  Status pack(const QuantizedMatrix* matrices, int count, std::size_t at, PackedMatrix* packed) override;
  Status finish(const ExpertWeights::State& state) override;
  /// Waits until all matrices are packed, and frees what that took.
  Status finish_packing();
  std::string describe() const override;

  const DeviceInfo& device() const { return device_; }
  bool in_order = false;  ///< of matrices that are packed from now on: PackedFormat
  DeviceMatrices gate_up, down, shared_gate_up, shared_down;
  /// LayerVectors, and static activation scales [experts]; nullptr where the layer has none.
  const float *router = nullptr, *router_bias = nullptr, *correction_bias = nullptr, *shared_gate = nullptr;
  const std::int32_t* input_order = nullptr;
  const std::uint16_t* router16 = nullptr;  ///< `router` in the layer's 16-bit type, if it has its numbers
  const float *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
  const TensorScale *input_scales = nullptr, *mid_scales = nullptr;
  const TensorScale *shared_input_scale = nullptr, *shared_mid_scale = nullptr;

 private:
  /// Rows of matrices on their way to the device, while the next ones are copied to page-locked memory.
  struct Staging {
    Memory host, device;
    cudaStream_t stream = nullptr;
    Status reserve(std::size_t bytes, int device_index);
    ~Staging();
  };

  DeviceWeights() = default;
  Status pack_units(const QuantizedMatrix* matrices, PackJob job);
  Status find_matrices(const ExpertWeights::State& state);
  Status copy_vectors(const ExpertWeights::State& state);

  DeviceInfo device_;
  Memory memory_, vectors_;
  static constexpr int kBuffers = 3;
  Staging staging_[kBuffers];
  int next_ = 0;
};

}  // namespace gatefold::cuda
