// Packed experts.
#include <fmt/format.h>

#include <nanobind/stl/shared_ptr.h>
#include "layer.h"
#include "spec.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gatefold::python {
namespace {

/// An optional vector or matrix of a layer, as f32.
std::vector<float> layer_vector(nb::handle object, const char* name,
                                std::initializer_list<std::int64_t> shape, const char* meaning) {
  if (object.is_none()) return {};
  const Tensor tensor(object, name);
  tensor.expect_float();
  tensor.expect_shape(shape, meaning);
  return tensor.to_host<float>();
}

struct VectorArguments {
  nb::object router, router_bias, correction_bias, gate_up_bias, down_bias;

  LayerVectors read(const MoeSpec& spec, bool interleaved) const {
    LayerVectors v;
    v.router = layer_vector(router, "router", {spec.experts, spec.hidden}, "[experts, hidden]");
    v.router_bias = layer_vector(router_bias, "router_bias", {spec.experts}, "[experts]");
    v.correction_bias = layer_vector(correction_bias, "correction_bias", {spec.experts}, "[experts]");
    v.down_bias = layer_vector(down_bias, "down_bias", {spec.experts, spec.hidden}, "[experts, hidden]");
    const auto both = layer_vector(gate_up_bias, "gate_up_bias", {spec.experts, 2 * spec.intermediate},
                                   "[experts, 2 * intermediate]");
    const auto i = static_cast<std::size_t>(spec.intermediate);
    for (std::size_t at = 0; at < both.size(); ++at) {
      const bool up = interleaved ? at % 2 == 1 : at / i % 2 == 1;
      (up ? v.up_bias : v.gate_bias).push_back(both[at]);
    }
    return v;
  }
};

struct PackOptions {
  std::string device, precision;
  bool weights_only, batch_invariant, fast_accumulation;

  PlanOptions plan() const {
    PlanOptions options;
    options.precision = to_precision(precision);
    options.weights_only = weights_only;
    options.batch_invariant = batch_invariant;
    options.fast_accumulation = fast_accumulation;
    return options;
  }
};

std::shared_ptr<Layer> make_layer(Result<ExpertWeights> weights, const PlanOptions& options) {
  return Handled::make<Layer>(value(std::move(weights)), options);
}

/// gate_up and down as stacks of matrices, in the layouts that transformers models have.
class Stacks {
 public:
  Stacks(const Tensor& gate_up, const Tensor& down, bool transposed, bool interleaved)
      : gate_up_(gate_up), down_(down), transposed_(transposed), interleaved_(interleaved) {
    for (const Tensor* tensor : {&gate_up, &down}) {
      tensor->expect_shape({-1, -1, -1}, "[experts, n, k]");
      tensor->expect_float();
    }
    n_ = transposed ? 2 : 1;
    if (gate_up.size(n_) % 2 != 0)
      invalid(fmt::format("gate_up is {}: {} rows cannot be gate and up", gate_up.shape_text(),
                          gate_up.size(n_)));
    const std::int64_t e = gate_up.size(0), i = gate_up.size(n_) / 2, h = gate_up.size(3 - n_);
    if (e > (1 << 24) || i > (1 << 24) || h > (1 << 24))
      invalid("gate_up is too large: " + gate_up.shape_text());
    if (transposed)
      down.expect_shape({e, i, h}, "[experts, intermediate, hidden]");
    else
      down.expect_shape({e, h, i}, "[experts, hidden, intermediate]");
    down.expect_device(gate_up.device());
  }

  void sizes(MoeSpec& spec) const {
    spec.experts = static_cast<int>(gate_up_.size(0));
    spec.intermediate = static_cast<int>(gate_up_.size(n_) / 2);
    spec.hidden = static_cast<int>(gate_up_.size(3 - n_));
  }

  Result<QuantizedMatrix> quantize(SchemeId scheme, int expert, Projection projection,
                                   const QuantizeOptions& options) {
    const Tensor& stack = projection == Projection::down ? down_ : gate_up_;
    const std::int64_t half = gate_up_.size(n_) / 2;
    const bool up = projection == Projection::up, down = projection == Projection::down;
    const StridedMatrix matrix(stack, expert,
                               down || !up    ? 0
                               : interleaved_ ? 1
                                              : half,
                               down ? stack.size(n_) : half, down || !interleaved_ ? 1 : 2, transposed_);
    auto result = gatefold::quantize(scheme, matrix.view(copy_), options);
    if (result) return result;
    return Status(result.status().code(),
                  fmt::format("expert {}, {}: {}", expert, name(projection), result.status().message()));
  }

 private:
  const Tensor& gate_up_;
  const Tensor& down_;
  bool transposed_, interleaved_;
  std::size_t n_;
  std::vector<std::byte> copy_;
};

constexpr const char* pack_doc =
    R"(Quantizes the experts of a layer and packs them for a device.

gate_up [experts, 2 * intermediate, hidden] and down [experts, hidden, intermediate] are any DLPack tensors of
f32, f16 or bf16, of any strides, on the CPU or a GPU; they are read in place and not kept. Rows of gate_up are
those of gate, then those of up; interleaved: gate 0, up 0, gate 1, ... transposed: [experts, hidden, 2 *
intermediate] and [experts, intermediate, hidden], as gpt-oss has them. Biases likewise: gate_up_bias
[experts, 2 * intermediate], down_bias [experts, hidden].

ep_size: MoeSpec. The router [experts, hidden] is needed by plans that are run on hidden states alone. act_dtype: the model's 16-bit
type, 'bf16' or 'f16'; None: f16 if gate_up is, else bf16. precision, weights_only, batch_invariant and
fast_accumulation: as for the plans that will run it (MoePlan.create); operators run it so.

Raises InvalidArgument for shapes, types or values (NaN, Inf) that cannot be packed, Unsupported if no kernel takes
the layer, IoError if there is not enough memory.)";

std::shared_ptr<Layer> pack(nb::object gate_up_object, nb::object down_object, const std::string& scheme,
                            int top_k, int ep_size, const Activation& activation, const Routing& routing,
                            VectorArguments vectors, const std::optional<std::string>& act_dtype,
                            PackOptions pack_options, bool interleaved, bool transposed, bool scale_search) {
  const Tensor gate_up(gate_up_object, "gate_up"), down(down_object, "down");
  Stacks stacks(gate_up, down, transposed, interleaved);
  MoeSpec spec;
  spec.scheme = to_scheme(scheme);
  stacks.sizes(spec);
  spec.top_k = top_k;
  spec.ep_size = ep_size;
  spec.activation = activation;
  spec.routing = routing;
  spec.act_dtype = act_dtype                       ? to_act_dtype(*act_dtype)
                   : gate_up.dtype() == DType::f16 ? DType::f16
                                                   : DType::bf16;
  spec.bias = !vectors.gate_up_bias.is_none() || !vectors.down_bias.is_none();
  check(spec.validate());
  LayerVectors layer_vectors = vectors.read(spec, interleaved);
  const Device device = to_device(pack_options.device);
  const PlanOptions plan = pack_options.plan();
  use_threads();
  gate_up.wait();
  down.wait();

  const nb::gil_scoped_release release;
  return make_layer(ExpertWeights::pack(
                        spec, device, std::move(layer_vectors),
                        [&](int expert, Projection projection) {
                          {
                            const nb::gil_scoped_acquire acquire;
                            check_signals();
                          }
                          return stacks.quantize(spec.scheme, expert, projection,
                                                 {.scale_search = scale_search});
                        },
                        {}, plan),
                    plan);
}

std::shared_ptr<Layer> pack_from(const MoeSpec& spec, nb::callable source, VectorArguments vectors,
                                 PackOptions pack_options) {
  LayerVectors layer_vectors = vectors.read(spec, false);
  const PlanOptions plan = pack_options.plan();
  const Device device = to_device(pack_options.device);
  use_threads();
  return make_layer(ExpertWeights::pack(
                        spec, device, std::move(layer_vectors),
                        [&](int expert, Projection projection) -> Result<QuantizedMatrix> {
                          check_signals();
                          return nb::cast<QuantizedMatrix>(source(expert, std::string(name(projection))));
                        },
                        {}, plan),
                    plan);
}

std::shared_ptr<Layer> load(const std::string& directory, int layer, const std::optional<std::string>& scheme,
                            PackOptions pack_options, bool scale_search, bool shared_expert, int ep_size,
                            int ep_rank) {
  LoadOptions options;
  options.layer = layer;
  if (scheme) options.scheme = to_scheme(*scheme);
  options.device = to_device(pack_options.device);
  options.quantize.scale_search = scale_search;
  options.plan = pack_options.plan();
  options.shared_expert = shared_expert;
  options.ep_size = ep_size;
  options.ep_rank = ep_rank;
  use_threads();
  const nb::gil_scoped_release release;
  const auto checkpoint = value(Checkpoint::open(directory));
  return make_layer(load_experts(checkpoint, options), options.plan);
}

void add_weights(nb::module_& m) {
  nb::class_<Layer>(
      m, "ExpertWeights",
      "The weights of one layer, packed for one device. Immutable: any number of plans and threads may "
      "use it.")
      .def_static(
          "pack",
          [](const MoeSpec& spec, nb::callable source, nb::object router, nb::object router_bias,
             nb::object correction_bias, nb::object gate_up_bias, nb::object down_bias,
             const std::string& device, const std::string& precision, bool weights_only, bool batch_invariant,
             bool fast_accumulation) {
            return pack_from(spec, std::move(source),
                             {router, router_bias, correction_bias, gate_up_bias, down_bias},
                             {device, precision, weights_only, batch_invariant, fast_accumulation});
          },
          "spec"_a, "source"_a, nb::kw_only(), "router"_a = nb::none(), "router_bias"_a = nb::none(),
          "correction_bias"_a = nb::none(), "gate_up_bias"_a = nb::none(), "down_bias"_a = nb::none(),
          "device"_a = "cpu", "precision"_a = "native", "weights_only"_a = false, "batch_invariant"_a = false,
          "fast_accumulation"_a = false,
          "Packs what source(expert, 'gate' | 'up' | 'down') -> QuantizedMatrix gives, called once for each "
          "matrix. "
          "Memory: the packed layer and one expert.")
      .def_prop_ro("spec", [](const Layer& l) { return l.weights().spec(); })
      .def_prop_ro("packed_bytes", [](const Layer& l) { return l.weights().packed_bytes(); })
      .def_prop_ro("handle", &Layer::handle,
                   "The number by which torch operators know these weights, while this object lives.")
      .def_prop_ro("warnings",
                   [](const Layer& l) {
                     return std::vector<std::string>(l.weights().warnings().begin(),
                                                     l.weights().warnings().end());
                   })
      .def("describe", [](const Layer& l) { return l.weights().describe(); })
      .def(
          "matrix",
          [](const Layer& l, int expert, const std::string& projection) {
            for (const Projection p : {Projection::gate, Projection::up, Projection::down}) {
              if (projection != name(p)) continue;
              use_threads();
              const nb::gil_scoped_release release;
              return value(l.weights().matrix(expert, p));
            }
            invalid(fmt::format("projection = '{}', expected 'gate', 'up' or 'down'", projection));
          },
          "expert"_a, "projection"_a,
          "A matrix as it was packed, 'gate', 'up' or 'down': the same bits. Raises InvalidArgument; "
          "Unsupported "
          "for weights on a GPU.")
      .def("publish", &Layer::publish, "name"_a,
           "A handle that follows from the name: the same in every process. Raises InvalidArgument if other "
           "experts that live have the name.")
      .def("__deepcopy__", [](std::shared_ptr<Layer> l, nb::handle) { return l; });  // immutable

  m.def(
      "pack",
      [](nb::object gate_up, nb::object down, const std::string& scheme, int top_k, int ep_size,
         const Activation& activation, const Routing& routing, nb::object router, nb::object router_bias,
         nb::object correction_bias, nb::object gate_up_bias, nb::object down_bias,
         std::optional<std::string> act_dtype, const std::string& device, const std::string& precision,
         bool weights_only, bool batch_invariant, bool fast_accumulation, bool interleaved, bool transposed,
         bool scale_search) {
        return pack(gate_up, down, scheme, top_k, ep_size, activation, routing,
                    {router, router_bias, correction_bias, gate_up_bias, down_bias}, act_dtype,
                    {device, precision, weights_only, batch_invariant, fast_accumulation}, interleaved,
                    transposed, scale_search);
      },
      "gate_up"_a, "down"_a, "scheme"_a, nb::kw_only(), "top_k"_a, "ep_size"_a = 1,
      "activation"_a = Activation{}, "routing"_a = Routing{}, "router"_a = nb::none(),
      "router_bias"_a = nb::none(), "correction_bias"_a = nb::none(), "gate_up_bias"_a = nb::none(),
      "down_bias"_a = nb::none(), "act_dtype"_a = nb::none(), "device"_a = "cpu", "precision"_a = "native",
      "weights_only"_a = false, "batch_invariant"_a = false, "fast_accumulation"_a = false,
      "interleaved"_a = false, "transposed"_a = false, "scale_search"_a = false, pack_doc);

  m.def(
      "load_experts",
      [](const std::string& directory, int layer, std::optional<std::string> scheme,
         const std::string& device, const std::string& precision, bool weights_only, bool batch_invariant,
         bool fast_accumulation, bool scale_search, bool shared_expert, int ep_size, int ep_rank) {
        return load(directory, layer, scheme,
                    {device, precision, weights_only, batch_invariant, fast_accumulation}, scale_search,
                    shared_expert, ep_size, ep_rank);
      },
      "directory"_a, "layer"_a, "scheme"_a = nb::none(), nb::kw_only(), "device"_a = "cpu",
      "precision"_a = "native", "weights_only"_a = false, "batch_invariant"_a = false,
      "fast_accumulation"_a = false, "scale_search"_a = false, "shared_expert"_a = true, "ep_size"_a = 1,
      "ep_rank"_a = 0,
      "One layer of a Hugging Face checkpoint, router and (unless told otherwise) shared expert included; "
      "quantized on load if the checkpoint is not. scheme None: as stored. ep_size, ep_rank: only the "
      "experts of one of so many equal parts (MoeSpec), without the router: calls give topk_ids and "
      "topk_weights. Raises BadFile, IoError, Unsupported, InvalidArgument.");
}

}  // namespace

void add_experts(nb::module_& m) {
  add_spec(m);
  add_weights(m);
  add_plan(m);
}

}  // namespace gatefold::python
