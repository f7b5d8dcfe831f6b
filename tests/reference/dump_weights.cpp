// dump_weights DIR OUT: the weights of all experts of a checkpoint as this library sees them, as f32, in
// OUT/model.safetensors under "<layer>.<expert>.<projection>". For test_compressed_tensors.py.

#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors_writer.h"
#include "gatefold/checkpoint.h"

namespace gatefold {
namespace {

std::vector<float> widen(const MatrixView& view) {
  const Result<QuantizedMatrix> plain =
      quantize(view.dtype == DType::f16 ? SchemeId::f16 : SchemeId::bf16, view);
  std::vector<float> weights(static_cast<std::size_t>(view.rows * view.cols));
  if (plain.ok()) dequantize(*plain, weights.data());
  return weights;
}

std::vector<float> widen(const QuantizedMatrix& matrix) {
  std::vector<float> weights(static_cast<std::size_t>(matrix.n * matrix.k));
  dequantize(matrix, weights.data());
  return weights;
}

Status dump(const char* from, const char* to) {
  const Result<Checkpoint> checkpoint = Checkpoint::open(from);
  if (!checkpoint.ok()) return checkpoint.status();
  const MoeSpec& moe = checkpoint->config().moe;
  std::vector<PlannedTensor> plan;
  std::vector<std::vector<float>> data;
  for (int layer = 0; layer < checkpoint->config().layers; ++layer)
    for (int expert = 0; expert < moe.experts; ++expert)
      for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
        const Result<ExpertMatrix> matrix = checkpoint->expert(layer, expert, projection);
        if (!matrix.ok()) return matrix.status();
        data.push_back(std::visit([](const auto& stored) { return widen(stored); }, *matrix));
        const bool down = projection == Projection::down;
        plan.push_back(
            {std::to_string(layer) + "." + std::to_string(expert) + "." + std::string(name(projection)),
             DType::f32,
             {down ? moe.hidden : moe.intermediate, down ? moe.intermediate : moe.hidden}});
      }
  std::filesystem::create_directories(to);
  Result<SafetensorsWriter> writer = SafetensorsWriter::create(to, plan, ~std::uint64_t{0});
  if (!writer.ok()) return writer.status();
  for (std::size_t i = 0; i < data.size(); ++i)
    if (Status status = writer->write(i, std::as_bytes(std::span(data[i]))); !status.ok()) return status;
  return writer->finish();
}

}  // namespace
}  // namespace gatefold

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const gatefold::Status status = gatefold::dump(arguments[1], arguments[2]);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
