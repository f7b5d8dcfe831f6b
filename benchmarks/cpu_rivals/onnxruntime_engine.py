"""onnxruntime: com.microsoft.QMoE, one session per layer, one thread pool for all."""
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

import formats

# level 4: activations in int8 per block; level 0: in f32. For 8 bits there is only the former.
FORMATS = {
    "int8 b128": (8, 128, 4, formats.int8_offset(128)),
    "int4 b128 level 4": (4, 128, 4, formats.int4_offset(128)),
    "int4 b32 level 4": (4, 32, 4, formats.int4_offset(32)),
    "int4 b128 level 0": (4, 128, 0, formats.int4_offset(128)),
    "int4 b32 level 0": (4, 32, 0, formats.int4_offset(32)),
}
TYPES = {"uint8": TensorProto.UINT8, "float32": TensorProto.FLOAT}


class Engine:
    interleaved = True  # rows of gate and up alternate

    def __init__(self, name, shape, threads):
        self.shape = shape
        self.bits, self.block, self.level, self.matrix = FORMATS[name]
        onnxruntime.set_default_logger_severity(3)
        onnxruntime.set_global_thread_pool_sizes(threads, 1)

    def layer(self, up, down):
        shape = self.shape
        arrays = dict(zip(("w1", "s1", "w2", "s2"), up + down))
        node = helper.make_node(
            "QMoE", ["x", "router", "w1", "s1", "", "w2", "s2"], ["y"], domain="com.microsoft", k=shape.top_k,
            expert_weight_bits=self.bits, block_size=self.block, accuracy_level=self.level,
            activation_type="swiglu", swiglu_fusion=1, normalize_routing_weights=1)
        values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", columns])
                  for name, columns in (("x", shape.hidden), ("router", shape.experts), ("y", shape.hidden))}
        graph = helper.make_graph(
            [node], "layer", [values["x"], values["router"]], [values["y"]],
            [helper.make_tensor(name, TYPES[str(a.dtype)], a.shape, a.tobytes(), raw=True)
             for name, a in arrays.items()])
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.use_per_session_threads = False
        return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def inputs(self, x, ids, weights):
        """It routes by itself: logits that lead to these experts and weights."""
        router = np.full((len(x), self.shape.experts), -100, np.float32)
        np.put_along_axis(router, ids, np.log(weights), 1)
        return {"x": x, "router": router}

    def run(self, layer, inputs):
        return layer.run(None, inputs)[0]

    def result(self, out):
        return out


VERSIONS = f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}"
