"""Models of transformers with Gatefold's experts: tiny random ones of every family that uses the interface."""
import copy
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import gatefold
import gatefold.transformers as gt
from common import TINY

gt.register()
SMALL = dict(vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
             max_position_embeddings=64, head_dim=64)
SPARSE = dict(SMALL, intermediate_size=128, moe_intermediate_size=128, num_experts=6, num_experts_per_tok=2)
FAMILIES = {
    "qwen2_moe": dict(SPARSE, shared_expert_intermediate_size=128),
    "qwen3_moe": SPARSE,
    "mixtral": dict(SMALL, intermediate_size=128, num_local_experts=6, num_experts_per_tok=2),
    "olmoe": dict(SMALL, intermediate_size=128, num_experts=6, num_experts_per_tok=2),
    "gpt_oss": dict(SMALL, intermediate_size=128, num_local_experts=6, num_experts_per_tok=2),
    "glm4_moe": dict(SMALL, intermediate_size=128, moe_intermediate_size=128, n_routed_experts=6,
                     num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1, n_shared_experts=1),
    "deepseek_v3": dict(SMALL, intermediate_size=128, moe_intermediate_size=128, n_routed_experts=6,
                        num_experts_per_tok=2, first_k_dense_replace=1, n_group=2, topk_group=1, n_shared_experts=1,
                        q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64),
}


def tiny(family, dtype=torch.float32):
    """Weights that bf16 holds exactly, so that only the order of sums differs."""
    torch.manual_seed(0)
    sizes = dict(FAMILIES[family], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if family == "deepseek_v3":
        del sizes["head_dim"]
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for parameter in model.parameters():  # some are zero or empty at first
        if parameter.ndim == 3 or parameter.abs().max() == 0 or not parameter.isfinite().all():
            torch.nn.init.normal_(parameter, std=0.1)
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return model


IDS = torch.arange(1, 12)[None]


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.double()


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def expect_same_bits(a, b):
    """Of all weights; torch's own sums depend on where in memory these lie."""
    assert a.state_dict().keys() == b.state_dict().keys()
    assert all(torch.equal(tensor, b.state_dict()[name]) for name, tensor in a.state_dict().items())
    assert relative(logits(a), logits(b)) <= 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    model = tiny(family)
    expected = logits(model)
    eager = model.generate(IDS, max_new_tokens=4, do_sample=False)
    model.set_experts_implementation("gatefold")
    with pytest.warns(UserWarning, match="rounded to bfloat16"):
        actual = logits(model)
    assert 0 < relative(actual, expected) <= 1e-5 or torch.equal(actual, expected)
    assert any(hasattr(module, "_gatefold_handle") for module in model.modules())
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), eager)


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_families(family, tmp_path):
    """int8 is close; saved and loaded again it has the same bits."""
    model = tiny(family)
    expected = logits(model)
    gt.quantize_(model, "int8")
    assert 0 < relative(logits(model), expected) <= 0.05
    assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape == (1, 15)

    source, target = tmp_path / "source", tmp_path / "quantized"
    tiny(family).save_pretrained(source)
    load = transformers.AutoModelForCausalLM.from_pretrained
    on_load = load(source, quantization_config=gt.GatefoldConfig("int8"), dtype=torch.float32)
    expect_same_bits(on_load, model)
    on_load.save_pretrained(target)
    again = load(target, dtype=torch.float32)
    expect_same_bits(again, model)
    assert again.config.quantization_config.scheme == "int8"


@pytest.mark.parametrize("scheme", ["nvfp4", "uint4_g128", "fp8_block"])
def test_saved_bits_of_other_layouts(scheme, tmp_path):
    tiny("qwen3_moe").save_pretrained(tmp_path / "source")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "source", quantization_config=gt.GatefoldConfig(scheme), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "quantized")
    expect_same_bits(load(tmp_path / "quantized", dtype=torch.bfloat16), model)


def test_weights_that_change_are_packed_again():
    model = tiny("qwen3_moe", torch.bfloat16)
    model.set_experts_implementation("gatefold")
    logits(model)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
    changed = logits(model)
    model.set_experts_implementation("eager")
    assert relative(changed, logits(model)) <= 0.02


def test_some_modules_only():
    model = gt.quantize_(tiny("qwen3_moe"), "mxfp4", modules="model.layers.1.*")
    kinds = [type(layer.mlp.experts).__name__ for layer in model.model.layers]
    assert kinds == ["Qwen3MoeExperts", "QuantizedExperts"]
    copy.deepcopy(model)
    with pytest.raises(gatefold.InvalidArgument, match="no experts modules that match"):
        gt.quantize_(model, "mxfp4", modules=["model.layers.7.*"])
    with pytest.raises(gatefold.InvalidArgument, match="no scheme 'int5'"):
        gt.GatefoldConfig("int5")


def test_unknown_activation_is_refused():
    model = tiny("qwen3_moe")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.ReLU()
    with pytest.raises(gatefold.Unsupported, match="activation"):
        gt.quantize_(model, "mxfp4")


def test_checkpoints_of_gatefold_load(tmp_path):
    """Experts as quantize_checkpoint wrote them, in the model that they came from."""
    gatefold.quantize_checkpoint(TINY, str(tmp_path / "q"), "int4_g128")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = gt.load_quantized_(load(TINY, dtype=torch.bfloat16), tmp_path / "q")
    direct = gt.quantize_(load(TINY, dtype=torch.bfloat16), "int4_g128")
    assert torch.equal(logits(model), logits(direct))
    with pytest.raises(RuntimeError, match="dropped"):
        model.state_dict()


def bits_per_byte(model, text):
    with torch.no_grad():
        logits = model(text).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).item() / np.log(2)


def test_loss_of_a_trained_model():
    """bf16: the loss of eager within 0.0005 bits per byte."""
    text = torch.tensor(list(open(TINY + "/valid.txt", "rb").read(16384))).reshape(-1, 512)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(TINY, dtype=torch.bfloat16, experts_implementation="eager")
    eager = bits_per_byte(model, text)
    model.set_experts_implementation("gatefold")
    assert abs(bits_per_byte(model, text) - eager) <= 0.0005
    assert abs(bits_per_byte(gt.quantize_(model, "mxfp4"), text) - eager) <= 0.05
