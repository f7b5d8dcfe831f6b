// Packing and running layers.
#include <fmt/format.h>

#include <cstring>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include "gatefold/codec.h"
#include "layer.h"
#include "spec.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gatefold::python {
namespace {

/// A tensor of floats or, for ids, integers, in host memory as another type; contiguous.
template <class T>
std::vector<T> to_host(const Tensor& tensor) {
  tensor.expect_contiguous();
  std::size_t count = 1;
  for (std::size_t i = 0; i < tensor.rank(); ++i) count *= static_cast<std::size_t>(tensor.size(i));
  const std::byte* data = tensor.data();
  std::vector<std::byte> copy;
  if (tensor.device().kind == Device::Kind::cuda) {
    copy.resize(count * static_cast<std::size_t>(bits(tensor.dtype()) / 8));
    check(cuda::copy(copy.data(), data, copy.size()));
    data = copy.data();
  }
  std::vector<T> out(count);
  const auto convert = [&]<class From>(auto&& widen) {
    for (std::size_t i = 0; i < count; ++i) {
      From from;
      std::memcpy(&from, data + i * sizeof(From), sizeof(From));
      out[i] = static_cast<T>(widen(from));
    }
  };
  const auto same = [](auto x) { return x; };
  switch (tensor.dtype()) {
    case DType::f32:
      convert.template operator()<float>(same);
      break;
    case DType::i32:
      convert.template operator()<std::int32_t>(same);
      break;
    case DType::i64:
      convert.template operator()<std::int64_t>(same);
      break;
    case DType::bf16:
      convert.template operator()<std::uint16_t>([](auto x) { return decode<formats::bf16>(x); });
      break;
    case DType::f16:
      convert.template operator()<std::uint16_t>([](auto x) { return decode<formats::f16>(x); });
      break;
    default:
      invalid(fmt::format("{} is {}, which cannot be read here", tensor.name(), name(tensor.dtype())));
  }
  return out;
}

/// An optional vector or matrix of a layer, as f32.
std::vector<float> layer_vector(nb::handle object, const char* name,
                                std::initializer_list<std::int64_t> shape, const char* meaning) {
  if (object.is_none()) return {};
  const Tensor tensor(object, name);
  tensor.expect_float();
  tensor.expect_shape(shape, meaning);
  return to_host<float>(tensor);
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
  bool weights_only;

  PlanOptions plan() const {
    PlanOptions options;
    options.precision = to_precision(precision);
    options.weights_only = weights_only;
    return options;
  }
};

std::shared_ptr<Layer> make_layer(Result<ExpertWeights> weights, const PlanOptions& options) {
  return Layer::make(value(std::move(weights)), options);
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

The router [experts, hidden] is needed by plans that are run on hidden states alone. act_dtype: the model's 16-bit
type, 'bf16' or 'f16'; None: f16 if gate_up is, else bf16. precision and weights_only: as for the plans that will
run it.

Raises InvalidArgument for shapes, types or values (NaN, Inf) that cannot be packed, Unsupported if no kernel takes
the layer, IoError if there is not enough memory.)";

std::shared_ptr<Layer> pack(nb::object gate_up_object, nb::object down_object, const std::string& scheme,
                            int top_k, const Activation& activation, const Routing& routing,
                            VectorArguments vectors, const std::optional<std::string>& act_dtype,
                            PackOptions pack_options, bool interleaved, bool transposed, bool scale_search) {
  const Tensor gate_up(gate_up_object, "gate_up"), down(down_object, "down");
  Stacks stacks(gate_up, down, transposed, interleaved);
  MoeSpec spec;
  spec.scheme = to_scheme(scheme);
  stacks.sizes(spec);
  spec.top_k = top_k;
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
                            PackOptions pack_options, bool scale_search) {
  LoadOptions options;
  options.layer = layer;
  if (scheme) options.scheme = to_scheme(*scheme);
  options.device = to_device(pack_options.device);
  options.quantize.scale_search = scale_search;
  options.plan = pack_options.plan();
  use_threads();
  const nb::gil_scoped_release release;
  const auto checkpoint = value(Checkpoint::open(directory));
  return make_layer(load_experts(checkpoint, options), options.plan);
}

/// numpy, torch and cupy alike: module.empty_like(tensor).
nb::object empty_like(nb::handle tensor) {
  const auto module = nb::cast<std::string>(
      nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()))).attr("__module__"));
  const std::string top = module.substr(0, module.find('.'));
  if (top != "numpy" && top != "torch" && top != "cupy")
    invalid(fmt::format("hidden is of {}: give `out`, since its tensors cannot be made here", top));
  return nb::module_::import_(top.c_str()).attr("empty_like")(tensor);
}

/// The stream in which torch or cupy work now.
cuda::Stream current_stream(nb::handle tensor, const Device& device) {
  if (device.kind == Device::Kind::cpu || !nb::hasattr(tensor, "is_cuda")) return nullptr;
  const nb::object stream =
      nb::module_::import_("torch").attr("cuda").attr("current_stream")(device.index).attr("cuda_stream");
  return reinterpret_cast<cuda::Stream>(nb::cast<std::uintptr_t>(stream));
}

/// Where tensors without elements point to: a null pointer would say that there is no tensor.
constexpr struct {
  float value = 0;
  std::int32_t id = 0;
} nothing;

/// A plan with the experts that it runs.
class Plan {
 public:
  Plan(std::shared_ptr<Layer> layer, const PlanOptions& options)
      : layer_(std::move(layer)),
        options_(options),
        planned_(layer_->weights().spec(), options, layer_->weights().device()) {}

  nb::object run(nb::handle hidden_object, nb::object first, nb::object weights_object,
                 nb::object logits_object, nb::object out_object) {
    if (!first.is_none() && weights_object.is_none()) {
      if (!logits_object.is_none()) invalid("router_logits is given twice");
      std::swap(first, logits_object);
    }
    const MoeSpec& spec = planned_.plan().spec();
    const Device& device = planned_.plan().device();
    const Tensor hidden(hidden_object, "hidden");
    MoeInputs inputs{.hidden = hidden.matrix()};
    hidden.expect_shape({-1, spec.hidden}, "[tokens, hidden]");
    hidden.expect_device(device);
    const std::int64_t tokens = hidden.size(0);

    std::optional<Tensor> ids, weights, logits;
    std::vector<std::int32_t> id_copy;
    std::vector<float> weight_copy, logit_copy;
    if (!logits_object.is_none()) {
      logits.emplace(logits_object, "router_logits");
      inputs.router_logits = floats(*logits, {tokens, spec.experts}, "[tokens, experts]", logit_copy);
    }
    if (!first.is_none()) {
      ids.emplace(first, "topk_ids");
      ids->expect_shape({tokens, spec.top_k}, "[tokens, top_k]");
      ids->expect_device(device);
      ids->expect_contiguous();
      inputs.topk_ids = integers(*ids, id_copy);
    }
    if (!weights_object.is_none()) {
      weights.emplace(weights_object, "topk_weights");
      inputs.topk_weights = floats(*weights, {tokens, spec.top_k}, "[tokens, top_k]", weight_copy);
    }
    if (out_object.is_none()) out_object = empty_like(hidden_object);
    const Tensor out(out_object, "out", true);
    out.expect_shape({tokens, spec.hidden}, "[tokens, hidden]");
    out.expect_device(device);
    const MatrixView y = out.matrix();
    const cuda::Stream stream = current_stream(hidden_object, device);
    {
      const nb::gil_scoped_release release;
      planned_.run(layer_->weights(), inputs,
                   {.hidden = {const_cast<void*>(y.data), y.dtype, y.rows, y.cols}}, stream);
    }
    return out_object;
  }

  const MoePlan& plan() const { return planned_.plan(); }
  const std::shared_ptr<Layer>& layer() const { return layer_; }
  PlanOptions options(int tokens) const {
    PlanOptions options = options_;
    options.max_tokens = tokens;
    return options;
  }

 private:
  const float* floats(const Tensor& tensor, std::initializer_list<std::int64_t> shape, const char* meaning,
                      std::vector<float>& copy) const {
    tensor.expect_shape(shape, meaning);
    tensor.expect_float();
    tensor.expect_device(planned_.plan().device());
    tensor.expect_contiguous();
    if (tensor.data() == nullptr) return &nothing.value;
    if (tensor.dtype() == DType::f32) return reinterpret_cast<const float*>(tensor.data());
    if (tensor.device().kind == Device::Kind::cuda)
      invalid(fmt::format("{} is {}, expected F32 on a GPU", tensor.name(), name(tensor.dtype())));
    copy = to_host<float>(tensor);
    return copy.data();
  }

  const std::int32_t* integers(const Tensor& tensor, std::vector<std::int32_t>& copy) const {
    if (tensor.data() == nullptr) return &nothing.id;
    if (tensor.dtype() == DType::i32) return reinterpret_cast<const std::int32_t*>(tensor.data());
    if (tensor.dtype() != DType::i64 || tensor.device().kind == Device::Kind::cuda)
      invalid(fmt::format("{} is {}, expected I32{}", tensor.name(), name(tensor.dtype()),
                          tensor.device().kind == Device::Kind::cpu ? " or I64" : " on a GPU"));
    const auto wide = to_host<std::int64_t>(tensor);
    for (std::size_t i = 0; i < wide.size(); ++i)
      if (wide[i] != static_cast<std::int32_t>(wide[i]))
        invalid(fmt::format(
            "topk_ids[{}, {}] = {} is not within 0..{}", i / static_cast<std::size_t>(tensor.size(1)),
            i % static_cast<std::size_t>(tensor.size(1)), wide[i], planned_.plan().spec().experts - 1));
    copy.assign(wide.begin(), wide.end());
    return copy.data();
  }

  std::shared_ptr<Layer> layer_;
  PlanOptions options_;
  PlannedLayer planned_;
};

void add_weights(nb::module_& m) {
  nb::class_<Layer>(
      m, "ExpertWeights",
      "The weights of one layer, packed for one device. Immutable: any number of plans and threads may "
      "use it.")
      .def_static(
          "pack",
          [](const MoeSpec& spec, nb::callable source, nb::object router, nb::object router_bias,
             nb::object correction_bias, nb::object gate_up_bias, nb::object down_bias,
             const std::string& device, const std::string& precision, bool weights_only) {
            return pack_from(spec, std::move(source),
                             {router, router_bias, correction_bias, gate_up_bias, down_bias},
                             {device, precision, weights_only});
          },
          "spec"_a, "source"_a, nb::kw_only(), "router"_a = nb::none(), "router_bias"_a = nb::none(),
          "correction_bias"_a = nb::none(), "gate_up_bias"_a = nb::none(), "down_bias"_a = nb::none(),
          "device"_a = "cpu", "precision"_a = "native", "weights_only"_a = false,
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
      .def("__deepcopy__", [](std::shared_ptr<Layer> l, nb::handle) { return l; });  // immutable

  m.def(
      "pack",
      [](nb::object gate_up, nb::object down, const std::string& scheme, int top_k,
         const Activation& activation, const Routing& routing, nb::object router, nb::object router_bias,
         nb::object correction_bias, nb::object gate_up_bias, nb::object down_bias,
         std::optional<std::string> act_dtype, const std::string& device, const std::string& precision,
         bool weights_only, bool interleaved, bool transposed, bool scale_search) {
        return pack(gate_up, down, scheme, top_k, activation, routing,
                    {router, router_bias, correction_bias, gate_up_bias, down_bias}, act_dtype,
                    {device, precision, weights_only}, interleaved, transposed, scale_search);
      },
      "gate_up"_a, "down"_a, "scheme"_a, nb::kw_only(), "top_k"_a, "activation"_a = Activation{},
      "routing"_a = Routing{}, "router"_a = nb::none(), "router_bias"_a = nb::none(),
      "correction_bias"_a = nb::none(), "gate_up_bias"_a = nb::none(), "down_bias"_a = nb::none(),
      "act_dtype"_a = nb::none(), "device"_a = "cpu", "precision"_a = "native", "weights_only"_a = false,
      "interleaved"_a = false, "transposed"_a = false, "scale_search"_a = false, pack_doc);

  m.def(
      "load_experts",
      [](const std::string& directory, int layer, std::optional<std::string> scheme,
         const std::string& device, const std::string& precision, bool weights_only, bool scale_search) {
        return load(directory, layer, scheme, {device, precision, weights_only}, scale_search);
      },
      "directory"_a, "layer"_a, "scheme"_a = nb::none(), nb::kw_only(), "device"_a = "cpu",
      "precision"_a = "native", "weights_only"_a = false, "scale_search"_a = false,
      "One layer of a Hugging Face checkpoint, router and shared expert included; quantized on load if the "
      "checkpoint is not. scheme None: as stored. Raises BadFile, IoError, Unsupported, InvalidArgument.");
}

}  // namespace

void add_experts(nb::module_& m) {
  add_spec(m);
  add_weights(m);
  nb::class_<Plan>(
      m, "MoePlan",
      "Chooses the kernel for a layer and runs it. Several threads may call run of one plan at once; "
      "each call has a workspace of its own. A plan keeps its experts alive.")
      .def_static(
          "create",
          [](std::shared_ptr<Layer> experts, int max_tokens, int threads, const std::string& precision,
             bool weights_only, bool debug_workspace, const std::string& kernel) {
            PlanOptions options{.max_tokens = max_tokens,
                                .threads = threads,
                                .precision = to_precision(precision),
                                .weights_only = weights_only,
                                .debug_workspace = debug_workspace,
                                .kernel = kernel};
            return std::make_unique<Plan>(std::move(experts), options);
          },
          "experts"_a, nb::kw_only(), "max_tokens"_a = 512, "threads"_a = 0, "precision"_a = "native",
          "weights_only"_a = false, "debug_workspace"_a = false, "kernel"_a = "",
          "threads 0: OpenMP's default now. precision 'f32': without the roundings to 16 bit. weights_only: "
          "activations stay in 16 bit. debug_workspace: canaries around every buffer. kernel: only those "
          "whose name "
          "contains this. Raises InvalidArgument, Unsupported.")
      .def(
          "run", &Plan::run, "hidden"_a, "topk_ids"_a = nb::none(), "topk_weights"_a = nb::none(),
          nb::kw_only(), "router_logits"_a = nb::none(), "out"_a = nb::none(),
          nb::sig("def run(self, hidden: object, topk_ids: object = None, topk_weights: object = None, *, "
                  "router_logits: object = None, out: object = None) -> object"),
          R"(Computes the layer for hidden [tokens, hidden] (f32, f16 or bf16, contiguous, on the plan's device).

run(hidden, topk_ids, topk_weights): ids [tokens, top_k] int32 (CPU: or int64) and weights [tokens, top_k] f32
(CPU: or 16-bit), used as they are. run(hidden, router_logits): logits [tokens, experts]. run(hidden): by the
layer's own router. Returns `out`, or a new tensor like hidden. On a GPU the work is queued in torch's current stream.

Raises InvalidArgument for a wrong argument, naming it and its values (ids out of range: on the CPU).)")
      .def(
          "describe", [](const Plan& p) { return p.plan().describe(); },
          "Which kernel runs, why others do not, the workspace's buffers.")
      .def(
          "workspace_bytes",
          [](const Plan& p, std::optional<int> tokens) {
            if (!tokens || *tokens == p.plan().max_tokens()) return p.plan().workspace_bytes();
            return value(MoePlan::create(p.plan().spec(), p.options(*tokens), p.plan().device()))
                .workspace_bytes();
          },
          "tokens"_a = nb::none(), "Of this plan, or of one like it for another number of tokens.")
      .def_prop_ro("kernel_name", [](const Plan& p) { return std::string(p.plan().kernel_name()); })
      .def_prop_ro("max_tokens", [](const Plan& p) { return p.plan().max_tokens(); })
      .def_prop_ro("experts", [](const Plan& p) { return p.layer(); });
}

}  // namespace gatefold::python
