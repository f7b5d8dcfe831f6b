#pragma once
/// \file
/// What an ExpertWeights handle holds.

#include <memory>
#include <vector>

#include "gatefold/moe.h"
#include "moe/arena.h"

namespace gatefold {

struct PackedMatrix {
  SchemeId scheme = SchemeId::bf16;
  std::int64_t n = 0, k = 0;
  Format scale_format;
  TensorScale tensor_scale;
  std::optional<TensorScale> input_scale;
  const std::byte* data = nullptr;
};

/// A matrix is of this scheme and shape, has as many bytes as it needs, and its columns are in order.
Status check_matrix(const QuantizedMatrix& matrix, SchemeId wanted, std::int64_t n, std::int64_t k);

/// One feed-forward network: gate and up [I, H], down [H, I].
struct Ffn {
  PackedMatrix gate, up, down;
};

/// Memory of a device for the packed weights of a layer, zeroed and 64-byte aligned.
class WeightMemory {
 public:
  virtual ~WeightMemory() = default;
  virtual std::size_t bytes() const = 0;
  /// Called before the matrices of a routed expert, which will lie within `bytes` from byte `at` on.
  virtual void expect(std::size_t /*at*/, std::size_t /*bytes*/, int /*expert*/) {}
  /// Packs `count` matrices of one shape, which are multiplied by the same inputs, into the sum of their
  /// bytes from byte `at` on, a multiple of 64, and sets where each begins.
  virtual Status pack(const QuantizedMatrix* matrices, int count, std::size_t at, PackedMatrix* packed) = 0;
  /// What pack() was given, without its order of columns.
  virtual Result<QuantizedMatrix> unpack(const Ffn&, Projection) const {
    return Status(Code::unsupported, "weights that are packed for a GPU cannot be had back");
  }
  /// Called once, after the last matrix.
  virtual Status finish(const ExpertWeights::State& state) = 0;
  /// Where the memory is, for ExpertWeights::describe.
  virtual std::string describe() const = 0;
};

/// How matrices lie in memory. Kernels name the layout that they read.
struct WeightLayout {
  std::string_view name;  ///< ends in a version if handles of older ones may be around
  /// Bytes of an [n, k] matrix whose scales are stored in `scale_format`.
  std::size_t (*bytes)(SchemeId scheme, Format scale_format, std::int64_t n, std::int64_t k);
  Result<std::unique_ptr<WeightMemory>> (*allocate)(std::size_t bytes, const Device& device);
  /// What scales that are stored in `stored` become before they are packed beside such activations; nullptr:
  /// they stay as they are.
  Format (*scale_format)(SchemeId scheme, Format stored, const Operand& activation) = nullptr;
};

/// Host memory.
class HostWeights final : public WeightMemory {
 public:
  using Pack = void (*)(const QuantizedMatrix* matrices, int count, std::byte* out, PackedMatrix* packed);
  using Unpack = Result<QuantizedMatrix> (*)(const Ffn& ffn, Projection projection);
  static Result<std::unique_ptr<WeightMemory>> allocate(std::size_t bytes, Pack pack, Unpack unpack);

  std::size_t bytes() const override { return arena_.bytes(); }
  const std::byte* data() const { return arena_.data(); }
  void expect(std::size_t at, std::size_t bytes, int expert) override;
  Status pack(const QuantizedMatrix* matrices, int count, std::size_t at, PackedMatrix* packed) override;
  Result<QuantizedMatrix> unpack(const Ffn& ffn, Projection projection) const override {
    return unpack_(ffn, projection);
  }
  Status finish(const ExpertWeights::State&) override { return {}; }
  std::string describe() const override;

 private:
  HostWeights(Arena arena, Pack pack, Unpack unpack)
      : arena_(std::move(arena)), pack_(pack), unpack_(unpack) {}
  Arena arena_;
  Pack pack_;
  Unpack unpack_;
};

struct ExpertWeights::State {
  MoeSpec spec;
  Device device;
  LayerVectors vectors;
  const WeightLayout* layout = nullptr;
  std::unique_ptr<WeightMemory> memory;
  std::size_t expert_bytes = 0;  ///< of one routed expert
  std::vector<Ffn> routed;
  Ffn shared;
  bool static_input_scales = false;  ///< the checkpoint gives the activation scales of routed experts
};

}  // namespace gatefold
