#include "cuda/weights.h"

#include <fmt/format.h>

#include <algorithm>

#include "gatefold/codec.h"

namespace gatefold::cuda {
namespace {

constexpr std::size_t kMostStaged = 16 << 20;

/// Numbers in a 16-bit type, if it has all of them; else nothing.
std::vector<std::uint16_t> narrowed(const std::vector<float>& numbers, DType dtype) {
  std::vector<std::uint16_t> codes(numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const bool f16 = dtype == DType::f16;
    const auto code = f16 ? encode<formats::f16>(numbers[i]) : encode<formats::bf16>(numbers[i]);
    if ((f16 ? decode<formats::f16>(code) : decode<formats::bf16>(code)) != numbers[i]) return {};
    codes[i] = static_cast<std::uint16_t>(code);
  }
  return codes;
}

}  // namespace

bool is_wide(SchemeId id, Format scale_format) {
  const Operand& w = scheme(id).weight;
  return may_be_wide(w) && (scale_format == formats::f16 || scale_format == formats::f32);
}

Format packed_scales(SchemeId id, Format stored, const Operand& activation) {
  const Operand& w = scheme(id).weight;
  if (!may_be_wide(w) || is_wide(id, stored) == (activation.value == formats::f16)) return stored;
  return is_wide(id, stored) ? w.scale : formats::f32;
}

bool shared_is_alike(const MoeSpec& spec) {
  return spec.shared.intermediate == spec.intermediate && spec.shared.scheme == spec.scheme;
}

DeviceWeights::Staging::~Staging() {
  if (stream == nullptr) return;
  cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
}

/// Waits until the buffers are free, and sees that they are large enough.
Status DeviceWeights::Staging::reserve(std::size_t bytes, int device_index) {
  if (stream == nullptr)
    if (Status status = check(cudaStreamCreate(&stream), "create a stream"); !status.ok()) return status;
  if (Status status = synchronize(stream); !status.ok()) return status;
  if (host.bytes() >= bytes) return {};
  Result<Memory> pinned = Memory::allocate(bytes, "weights to be packed", device_index, Place::pinned);
  if (!pinned) return pinned.status();
  host = std::move(*pinned);
  Result<Memory> staged = Memory::allocate(bytes, "weights to be packed", device_index);
  if (!staged) return staged.status();
  device = std::move(*staged);
  return {};
}

Result<std::unique_ptr<WeightMemory>> DeviceWeights::allocate(std::size_t bytes, const Device& device) {
  Result<DeviceInfo> info = device_info(device.index);
  if (!info) return info.status();
  Result<Memory> memory = Memory::allocate(bytes, "packed weights", device.index);
  if (!memory) return memory.status();
  std::unique_ptr<DeviceWeights> weights(new DeviceWeights);
  weights->device_ = *info;
  weights->memory_ = std::move(*memory);
  const DeviceGuard guard(device.index);
  if (Status status = cuda::fill(weights->memory_.data(), 0, bytes); !status.ok()) return status;
  return std::unique_ptr<WeightMemory>(std::move(weights));
}

Status DeviceWeights::pack(const QuantizedMatrix* matrices, int count, std::size_t at, PackedMatrix* packed) {
  const DeviceGuard guard(device_.index);
  const QuantizedMatrix& first = matrices[0];
  std::size_t bytes = 0;
  bool wide = false;
  for (int i = 0; i < count; ++i) {
    bytes += PackSource::bytes(matrices[i], {0, first.n});
    wide |= is_wide(matrices[i].scheme, matrices[i].scale_format);
    const Format scale = scheme(matrices[i].scheme).weight.scale;
    if (scale.bits == 8 && matrices[i].scale_format != scale)
      return {Code::unsupported, fmt::format("scales of {} are {}, not {}", scheme(matrices[i].scheme).name,
                                             name(matrices[i].scale_format), name(scale))};
  }
  PackJob job{.shape = {packed_format(scheme(first.scheme), wide), first.n, first.k, count},
              .out = memory_.data() + at};
  job.shape.format.in_order = in_order;
  for (int i = 0; i < count; ++i) {
    packed[i].data = job.out;
    if (wide) packed[i].scale_format = job.shape.format.scale;
  }
  // Buffers of at most one matrix each: an expert in all.
  const std::size_t most = std::min(kMostStaged, bytes / static_cast<std::size_t>(count));
  const std::int64_t units = units_at_a_time(job.shape, matrices, most);
  for (; job.first_unit < job.shape.units; job.first_unit += units) {
    job.end_unit = std::min(job.first_unit + units, job.shape.units);
    if (Status status = pack_units(matrices, job); !status.ok()) return status;
  }
  return {};
}

/// Each buffer has a stream of its own: one is filled while another is copied and a third one packed.
Status DeviceWeights::pack_units(const QuantizedMatrix* matrices, PackJob job) {
  Staging& staging = staging_[next_];
  next_ = (next_ + 1) % kBuffers;
  const PackRows rows = job.rows();
  std::size_t bytes = 0;
  for (int i = 0; i < job.shape.matrices; ++i) bytes += PackSource::bytes(matrices[i], rows);
  if (Status status = staging.reserve(bytes, device_.index); !status.ok()) return status;
  stage({matrices, static_cast<std::size_t>(job.shape.matrices)}, rows, staging.host.data());
  std::size_t offset = 0;
  for (int i = 0; i < job.shape.matrices; ++i) {
    job.sources[i] = {matrices[i], rows, staging.device.data() + offset};
    offset += PackSource::bytes(matrices[i], rows);
  }
  if (Status status = cuda::copy(staging.device.data(), staging.host.data(), bytes, staging.stream);
      !status.ok())
    return status;
  return check(launch_pack(job, staging.stream), "launch the packing of weights");
}

Status DeviceWeights::finish(const ExpertWeights::State& state) {
  const DeviceGuard guard(device_.index);
  if (Status status = find_matrices(state); !status.ok()) return status;
  if (Status status = copy_vectors(state); !status.ok()) return status;
  return finish_packing();
}

Status DeviceWeights::finish_packing() {
  const DeviceGuard guard(device_.index);
  if (Status status = synchronize(); !status.ok()) return status;
  for (Staging& staging : staging_) {
    if (staging.stream == nullptr) continue;
    if (Status status = synchronize(staging.stream); !status.ok()) return status;
    staging.host = Memory();
    staging.device = Memory();
  }
  return {};
}

/// The matrices of all experts must be packed alike: kernels find an expert by its number. So must be those
/// of a shared one that is alike.
Status DeviceWeights::find_matrices(const ExpertWeights::State& state) {
  std::vector<const Ffn*> experts;
  for (const Ffn& ffn : state.routed) experts.push_back(&ffn);
  if (shared_is_alike(state.spec)) experts.push_back(&state.shared);
  const auto matrices = [](const PackedMatrix& m) { return DeviceMatrices{m.data, 0}; };
  const auto find = [&](PackedMatrix Ffn::*matrix, DeviceMatrices& found) -> Status {
    found = matrices(experts[0]->*matrix);
    if (experts.size() > 1) found.expert_stride = (experts[1]->*matrix).data - found.data;
    for (std::size_t e = 0; e < experts.size(); ++e) {
      const PackedMatrix& m = experts[e]->*matrix;
      if (m.data != found.data + static_cast<std::int64_t>(e) * found.expert_stride)
        return {Code::internal, fmt::format("expert {} is packed at another distance", e)};
    }
    return {};
  };
  if (Status status = find(&Ffn::gate, gate_up); !status.ok()) return status;
  if (Status status = find(&Ffn::down, down); !status.ok()) return status;
  if (state.spec.shared.intermediate != 0) {
    shared_gate_up = matrices(state.shared.gate);
    shared_down = matrices(state.shared.down);
  }
  return {};
}

Status DeviceWeights::copy_vectors(const ExpertWeights::State& state) {
  const LayerVectors& v = state.vectors;
  const std::pair<const std::vector<float>*, const float**> floats[] = {
      {&v.router, &router},           {&v.router_bias, &router_bias}, {&v.correction_bias, &correction_bias},
      {&v.shared_gate, &shared_gate}, {&v.gate_bias, &gate_bias},     {&v.up_bias, &up_bias},
      {&v.down_bias, &down_bias},
  };
  const auto padded = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  std::vector<TensorScale> scales[2], shared_scales[2];
  for (const Ffn& ffn : state.routed) {
    if (!state.static_input_scales) break;
    scales[0].push_back(*ffn.gate.input_scale);
    scales[1].push_back(*ffn.down.input_scale);
  }
  if (state.shared.gate.input_scale) {
    shared_scales[0].push_back(*state.shared.gate.input_scale);
    shared_scales[1].push_back(*state.shared.down.input_scale);
  }
  const std::vector<std::uint16_t> codes_of_router = narrowed(v.router, state.spec.act_dtype);
  std::size_t bytes = 2 * padded(scales[0].size() * sizeof(TensorScale)) +
                      2 * padded(shared_scales[0].size() * sizeof(TensorScale)) +
                      padded(codes_of_router.size() * sizeof(std::uint16_t)) +
                      padded(v.input_order.size() * sizeof(std::int32_t));
  for (const auto& [values, _] : floats) bytes += padded(values->size() * sizeof(float));
  Result<Memory> memory = Memory::allocate(bytes, "router and biases", device_.index);
  if (!memory) return memory.status();
  vectors_ = std::move(*memory);

  std::byte* to = vectors_.data();
  const auto put = [&](const auto& values, auto** where) -> Status {
    if (values.empty()) return {};
    const std::size_t size = values.size() * sizeof(values[0]);
    *where = reinterpret_cast<decltype(values.data())>(to);
    Status status = cuda::copy(to, values.data(), size);
    to += padded(size);
    return status;
  };
  for (const auto& [values, where] : floats)
    if (Status status = put(*values, where); !status.ok()) return status;
  if (Status status = put(codes_of_router, &router16); !status.ok()) return status;
  if (Status status = put(v.input_order, &input_order); !status.ok()) return status;
  if (Status status = put(scales[0], &input_scales); !status.ok()) return status;
  if (Status status = put(scales[1], &mid_scales); !status.ok()) return status;
  if (Status status = put(shared_scales[0], &shared_input_scale); !status.ok()) return status;
  return put(shared_scales[1], &shared_mid_scale);
}

std::string DeviceWeights::describe() const {
  return fmt::format("on device {} ({})", device_.index, device_.name);
}

}  // namespace gatefold::cuda
