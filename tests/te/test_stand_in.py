"""`install_as_transformer_engine`: unmodified programs of Transformer Engine's users run, each in its own process."""

import importlib.util
import json
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from shared.stand_in_programs import INSTALL, printed

import optimized
import reference
from reference.te import stand_in

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"accelerate": "accelerate", "fabric": "lightning", "lightning": "lightning"}


def test_transformer_engines_modules_resolve() -> None:
    program = """
    import importlib, importlib.metadata, importlib.util, json, sys
    before = set(dir(reference)), set(sys.modules)
    import transformer_engine, transformer_engine as root
    import transformer_engine.pytorch as te
    import transformer_engine.common.recipe as recipe
    import transformer_engine.pytorch.module.base
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch import Linear, fp8_autocast
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, check_mxfp8_support
    from transformer_engine.pytorch.module import LayerNormLinear
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.optimizers import FusedAdam
    from transformer_engine.pytorch.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.attention import DotProductAttention
    from transformer_engine.pytorch.distributed import checkpoint
    assert root.pytorch is te and root.common.recipe is recipe and recipe.Format is reference.recipe.Format
    assert te.Linear is Linear is reference.Linear and te.fp8.fp8_autocast is reference.fp8.fp8_autocast
    assert issubclass(Linear, TransformerEngineBaseModule) and FusedAdam is reference.optimizers.FusedAdam
    assert recipe.DelayedScaling is DelayedScaling is te.recipe.DelayedScaling
    modules = {"fp8", "optimizers", "quantization", "recipe"}  # say what is missing; their names are the same
    assert all(getattr(te, name) is getattr(reference, name) for name in set(reference.__all__) - modules)
    assert importlib.util.find_spec("transformer_engine") and importlib.util.find_spec("transformer_engine.jax") is None
    reference.install_as_transformer_engine()  # changes nothing
    assert sys.modules["transformer_engine"] is root and before[0] == set(dir(reference))
    assert all(name.startswith("transformer_engine") for name in set(sys.modules) - before[1])
    versions = [importlib.metadata.version(name) for name in ("transformer_engine", "transformer-engine")]
    print(json.dumps([root.__version__, *versions, check_mxfp8_support()[0]]))
    """
    assert printed(INSTALL + textwrap.dedent(program)) == [*[stand_in.VERSION] * 3, False]


def test_the_version_is_that_of_the_api_which_tests_compare_with() -> None:
    api = json.loads((ROOT / "tests/transformer_engine_api.json").read_text("utf-8"))
    assert api["version"] == stand_in.VERSION


def test_every_name_of_transformer_engine_can_be_imported_and_refuses_to_be_used() -> None:
    """The table is read from Transformer Engine's source (read_transformer_engine_api.py)."""
    program = """
    import importlib, json, types
    from reference import placeholders
    count, wrong = 0, []
    older = [(module, {"function": names.split()}) for module, names in placeholders.OLDER.items()]
    for module, groups in [*placeholders.table().items(), *older]:
        found = importlib.import_module(module)
        for what in ("class", "function", "value"):
            for name in groups.get(what, ()):
                got = {}
                exec(f"from {module} import {name}", got)
                one = got[name]
                if one is not getattr(found, name):
                    wrong.append((module, name, "twice"))
                text = getattr(one, "__doc__", None) or getattr(one, "_sentence", "")
                if isinstance(one, types.ModuleType) or "is not offered by Twin Engine: " not in str(text):
                    theirs = getattr(one, "__module__", "").startswith(("transformer_engine", "torch"))
                    if what == "class" and isinstance(one, type) and not theirs:
                        wrong.append((module, name, one.__module__))
                    continue
                count += 1
                if isinstance(one, type):
                    if isinstance(3, one) or issubclass(int, one):
                        wrong.append((module, name, "isinstance"))
                    one = type("Own", (one,), {"__init__": lambda self: None})
                try:
                    one()
                    wrong.append((module, name, "was called"))
                except NotImplementedError as error:
                    if not str(error).endswith("."):
                        wrong.append((module, name, str(error)))
    print(json.dumps([count > 500, wrong]))
    """
    assert printed(INSTALL + textwrap.dedent(program)) == [True, []]


PRIVATE = """
from transformer_engine.common import _cuda_major_version, load_framework_extension
from transformer_engine.pytorch.attention.dot_product_attention.backends import _flash_attn_fwd_v3, flash_attn_func_v3
from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import _attention_backends
from transformer_engine.pytorch.cpp_extensions import FusedAttnBackend, fused_attn_fwd, general_gemm, rmsnorm_fwd
from transformer_engine.pytorch.module.base import _2X_ACC_FPROP, TransformerEngineBaseModule
from transformer_engine.pytorch.module.layernorm_mlp import _act_func, _LayerNormMLP
from transformer_engine.pytorch.module.linear import _Linear
from transformer_engine.pytorch.triton.permutation import permute_with_mask_map
from transformer_engine_torch import CommOverlap, CommOverlapType, DType, NVTE_Fused_Attn_Backend, NVTE_QKV_Layout

def assign():
    _attention_backends["backend_selection_requires_update"] = True

def name():
    _attention_backends.flag = True

import json
uses = [assign, name, rmsnorm_fwd, lambda: FusedAttnBackend["FP8"], lambda: [*FusedAttnBackend], _flash_attn_fwd_v3,
        lambda: _2X_ACC_FPROP == False, lambda: 2 * _2X_ACC_FPROP, lambda: _Linear.apply(), lambda: _act_func("gelu"),
        lambda: NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD, CommOverlap, lambda: CommOverlapType.RS, permute_with_mask_map]
wrong = []
for i, use in enumerate(uses):
    try:
        wrong.append([i, str(use())])
    except (AttributeError, NotImplementedError) as error:
        if not str(error).startswith("transformer_engine") or " is not offered by Twin Engine: " not in str(error):
            wrong.append([i, str(error)])
    except Exception as error:
        wrong.append([i, str(error)])
print(json.dumps([wrong, DType is reference.DType]))
"""


def test_private_names_and_those_of_the_extension_are_imported_and_refuse_to_be_used() -> None:
    """Also names that a module has from the second of several `import *`, or under a condition."""
    assert printed(INSTALL + PRIVATE) == [[], True]


def test_classes_say_that_they_are_transformer_engines() -> None:
    """And pickles and copies go on naming this package, so that they need no stand-in."""
    program = """
    import copy, json, pickle, torch
    from reference import stand_in
    before = {name: one.__module__ for name, one in vars(reference).items() if isinstance(one, type)}
    reference.install_as_transformer_engine()
    import transformer_engine.pytorch as te
    layer = te.TransformerLayer(32, 32, 2, num_gqa_groups=1, qk_norm_type="L2Normalization", device="cpu")
    own = [m for m in layer.modules() if next(m.parameters(), None) is not None]
    assert len(own) > 4 and all(m.__module__.startswith("transformer_engine.pytorch.") for m in own)
    assert te.Linear.__module__ == "transformer_engine.pytorch.module.linear"
    assert repr(te.Linear) == "<class 'transformer_engine.pytorch.module.linear.Linear'>"
    class Mine(te.Linear):
        pass
    things = [layer, te.recipe.DelayedScaling(), te.recipe.Format.HYBRID, te.DType.kFloat8E4M3, te.ops.GELU(),
              te.InferenceParams(2, 16, 2, 16, torch.bfloat16), te.CudaRNGStatesTracker()]
    for thing in things:
        for protocol in (2, 5):
            data = pickle.dumps(thing, protocol)
            assert b"transformer_engine" not in data and type(pickle.loads(data)) is type(thing)
        assert type(copy.copy(thing)) is type(copy.deepcopy(thing)) is type(thing)
    assert Mine.__module__ == "__main__" and type(copy.deepcopy(Mine(16, 16))) is Mine
    kept = pickle.dumps(layer)
    stand_in.uninstall()
    assert before == {name: one.__module__ for name, one in vars(reference).items() if isinstance(one, type)}
    assert torch.equal(pickle.loads(kept).layernorm_mlp.fc1_weight, layer.layernorm_mlp.fc1_weight)
    print(json.dumps("done"))
    """
    assert printed("import reference\n" + textwrap.dedent(program)) == "done"


def test_names_with_an_obvious_answer_are_offered() -> None:
    program = """
    import json
    from transformer_engine.pytorch.utils import get_device_compute_capability, is_bf16_compatible
    from transformer_engine.pytorch.jit import jit_fuser, no_torch_dynamo
    from transformer_engine.pytorch.attention.dot_product_attention import utils
    import torch
    utils.get_attention_backend = torch.compiler.disable(utils.get_attention_backend)  # as BioNeMo does at import
    try:
        get_device_compute_capability()
        said = "no GPU is visible here"
    except RuntimeError as error:
        said = str(error)
    print(json.dumps([is_bf16_compatible(), jit_fuser(len)("ab"), no_torch_dynamo()(len)("ab"), said]))
    """
    *values, said = printed(INSTALL + textwrap.dedent(program))
    assert values == [True, 2, 2]
    assert "no GPU is visible here" in said


REFUSED = {
    "root.pytorch.Fp8Padding(16)": "te.Fp8Padding is not offered by Twin Engine: there are no",
    "root.common.recipe.CustomRecipe()": "recipe.CustomRecipe is not offered by Twin",
    "root.pytorch.CustomRecipe()": "recipe.CustomRecipe is not offered by Twin Engine: te.recipe has Del",
    "reference.CustomRecipe": "recipe.CustomRecipe is not offered by Twin Engine: te.recipe has Del",
    "root.pytorch.GroupedLinear(2, 16, 16)": "te.GroupedLinear is not offered by Twin Engine: there are no layers",
    "root.pytorch.router.fused_moe_aux_loss()": "fused_moe_aux_loss is not offered by Twin Engine: there are no lay",
    "root.pytorch.export.onnx_export()": "te.onnx_export is not offered by Twin Engine: there is no export",
    "import transformer_engine.jax": "No module named 'transformer_engine.jax'",
    "root.pytorch.Lineal": "transformer_engine.pytorch.Lineal is not offered by Twin Engine, which stands in for",
    "root.pytorch.ops.AllReduce()": "ops.AllReduce is not offered by Twin Engine: layers take tp_group and",
    "root.pytorch.module.base.get_workspace()": "transformer_engine.pytorch.module.base.get_workspace is not offered "
    "by",
    "root.pytorch.tensor.utils.replace_raw_data()": "transformer_engine.pytorch.tensor.utils.replace_raw_data is not",
    "root.pytorch.constants.TE_DType[3]": "transformer_engine.pytorch.constants.TE_DType is not offered by",
    "root.pytorch.Float8BlockQuantizer.copy": "te.Float8BlockQuantizer is not offered by Twin Engine: te.Float8Tensor",
    "root.pytorch.module._private": "module 'transformer_engine.pytorch.module' has no attribute '_private'",
    "optimized.install_as_transformer_engine()": "transformer_engine means the other side of Twin Engine in this",
    "importlib.metadata.distribution('transformer-engine').locate_file('x')": "x: transformer_engine is Twin Engine",
}


def test_what_is_not_offered_says_so() -> None:
    program = """
    import importlib.metadata, json
    import optimized, reference, transformer_engine as root
    import transformer_engine.pytorch.router, transformer_engine.pytorch.export
    found = []
    for statement in statements:
        try:
            exec(statement)
            found.append("nothing")
        except Exception as error:
            found.append(str(error))
    print(json.dumps(found))
    """
    found = printed(INSTALL + f"statements = {list(REFUSED)}\n" + textwrap.dedent(program))
    for text, sentence in zip(found, REFUSED.values(), strict=True):
        assert sentence in text


# What megatron/core/extensions/transformer_engine.py and its neighbours do with Transformer Engine while they are
# imported, in releases 0.16.1 and the one after it.
MEGATRON = """
import inspect, json
import transformer_engine as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from transformer_engine.pytorch.distributed import activation_recompute_forward, checkpoint
from transformer_engine.pytorch.float8_tensor import Float8Tensor
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast, fp8_model_init
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD
from transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss, fused_topk_with_score_function
)
from transformer_engine.pytorch.tensor import QuantizedTensor
p = te.pytorch
bases = (p.Linear, p.LayerNormLinear, p.DotProductAttention, p.GroupedLinear, p.RMSNorm)
for base in (*bases, te.common.recipe.DelayedScaling, p.distributed.CudaRNGStatesTracker):
    type("Of" + base.__name__, (base,), {})
def annotated(self) -> te.pytorch.ops.Sequential: ...
def op(self, one: te.pytorch.ops.FusibleOperation) -> None: ...
wanted = {"delay_wgrad_compute", "symmetric_ar_type", "rng_tracker_name", "ub_overlap_rs_dgrad"}
assert wanted <= set(inspect.signature(p.Linear).parameters)
assert issubclass(Float8Tensor, QuantizedTensor)
print(json.dumps("imported"))
"""


def test_what_megatron_core_imports_is_there() -> None:
    assert printed(INSTALL + MEGATRON) == "imported"


@pytest.mark.parametrize("how", ["module", "metadata", "imported"])
def test_the_real_one_is_left_alone(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "metadata":
        folder = tmp_path / "transformer_engine-2.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Name: transformer_engine\nVersion: 2.0\n")
    elif how == "module":
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine" / "__init__.py").write_text("")
    else:
        monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    sentence = "^install_as_transformer_engine: the real transformer_engine is installed here; an environment without"
    for side in (reference, optimized):
        with pytest.raises(RuntimeError, match=sentence):
            side.install_as_transformer_engine()
    assert sys.meta_path == finders
    assert "transformer_engine.pytorch" not in sys.modules


def test_the_optimized_side_can_stand_in() -> None:
    program = """
    import optimized, json
    optimized.install_as_transformer_engine()
    import transformer_engine.pytorch as te
    print(json.dumps([te.Linear is optimized.Linear, te.module.Linear is optimized.Linear]))
    """
    assert printed(program) == [True, True]


# As in Evo 2's model: layers that subclass te.Linear, with attributes set before its constructor.
EVO = """
import json, torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

def set_format_recipe():
    return DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")

class TELinear(te.Linear):
    def __init__(self, in_features, out_features, init_method, bias=True, skip_bias_add=False, use_fp8=False, **kwargs):
        params_dtype = torch.bfloat16
        self.te_return_bias = skip_bias_add and bias
        self.use_fp8_input_projections = use_fp8
        if use_fp8:
            self.fp8_recipe = set_format_recipe()
        super().__init__(in_features=in_features, out_features=out_features, sequence_parallel=False,
                         fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, init_method=init_method,
                         params_dtype=params_dtype, parallel_mode=None, bias=bias, return_bias=self.te_return_bias,
                         **kwargs)

    def forward(self, x):
        if self.use_fp8_input_projections:
            with te.fp8_autocast(enabled=True, fp8_recipe=self.fp8_recipe):
                out = super().forward(x)
        else:
            out = super().forward(x)
        return out if self.te_return_bias else (out, None)

x = torch.arange(16 * 32).reshape(16, 32).remainder(13).to(torch.bfloat16)
same = []
for use_fp8 in (True, False):
    layer = TELinear(32, 48, torch.nn.init.xavier_uniform_, use_fp8=use_fp8)
    plain = te.Linear(32, 48, params_dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    y, none = layer(x)
    y.float().sum().backward()
    with te.autocast(enabled=use_fp8, recipe=set_format_recipe()):
        z = plain(x)
    z.float().sum().backward()
    same += [none is None, torch.equal(y, z), torch.equal(layer.weight.grad, plain.weight.grad), layer.fp8 == use_fp8]
print(json.dumps(same))
"""
TRAINED = """
import json, torch
import transformer_engine.pytorch as te
torch.manual_seed(0)
def model():
    parts = torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.ReLU(), torch.nn.Linear(64, 16)
    return torch.nn.Sequential(*parts)
x, y = torch.randn(16, 32), torch.randn(16, 16)
def show(net, losses):
    kinds = [type(part).__name__ for part in net]
    in_fp8 = [part.fp8 and part.fp8_meta["recipe"].amax_history_len for part in net if isinstance(part, te.Linear)]
    print(json.dumps([kinds, in_fp8, losses[-1] < losses[0]]))
losses = []
"""
ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
handler = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=4, amax_compute_algo="max")
accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])
net = model()
net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
for _ in range(8):
    loss = torch.nn.functional.mse_loss(net(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
show(net, losses)
"""
FABRIC = """
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import TransformerEnginePrecision
recipe = {"fp8_format": "HYBRID", "amax_history_len": 4}
plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe, replace_layers=True)
fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
with fabric.init_module():
    net = model()
wrapped, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
for _ in range(8):
    loss = torch.nn.functional.mse_loss(wrapped(x), y)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
show(net, losses)
"""
LIGHTNING = """
import lightning, tempfile
from lightning.pytorch.plugins.precision import TransformerEnginePrecision
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()
    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
from transformer_engine.common.recipe import DelayedScaling
plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=DelayedScaling(amax_history_len=4))
trainer = lightning.Trainer(accelerator="cpu", max_epochs=8, logger=False, enable_progress_bar=False, plugins=plugin,
                            enable_checkpointing=False, enable_model_summary=False,
                            default_root_dir=tempfile.mkdtemp())
module = Module()
trainer.fit(module, data)
show(module.net, losses)
"""
PROGRAMS = {"accelerate": ACCELERATE, "fabric": FABRIC, "lightning": LIGHTNING}


def test_a_model_whose_layers_subclass_linear() -> None:
    assert printed(INSTALL + EVO) == [True] * 8


@pytest.mark.integration
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_libraries_train_in_fp8(name: str) -> None:
    if importlib.util.find_spec(LIBRARIES[name]) is None:
        pytest.skip(f"{LIBRARIES[name]} is not installed")
    kinds, in_fp8, fell = printed(INSTALL + TRAINED + PROGRAMS[name])
    assert kinds == ["Linear", "LayerNorm", "ReLU", "Linear"]
    assert in_fp8 == [4, 4]
    assert fell
