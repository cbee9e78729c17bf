"""Steps of one token with a cache of keys and values: four Llama-3-8B-shaped layers, against PyTorch and Hugging Face
(docs/results/decode.json).

Each sequence has a prompt of 1792 tokens in a cache for 2048, and every step adds a token to each. The host's clock
measures blocks of steps of all contestants in turn, launches included. In a CUDA graph, one captured step is replayed,
and attention reads the whole cache; otherwise ours reads the blocks of 128 keys that hold tokens. PyTorch's layer is
compiled, has a static cache of the same size and calls `scaled_dot_product_attention` with a mask; as in ours, queries
that share a head of keys are the rows of one head. Ours in FP8 has weights that are kept in FP8. There is no embedding,
no head and no sampling.

Hugging Face's model (if transformers is installed) has its StaticCache and is compiled as its `generate` compiles it:
mode "reduce-overhead", which makes CUDA graphs. It has a norm after the layers. A contestant's memory is the most that
torch's allocator held for it in one step that is not replayed from a graph: weights, cache and what the step needs.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

import optimized as te
from optimized import measure
from optimized.bench import Payload, Progress, result, silent
from optimized.bench.layers import layer
from optimized.bench.layers.layer_models import RECIPE, Case, Llama, turned
from optimized.bench.table import Table, table

NAME = "decode"
WHAT = "tokens one by one from a cache, against others"
KERNELS = (
    *("activation", "activation_cast_transpose", "attention", "attention_decode", "cast", "cast_transpose", "dropout"),
    *("gemm", "gemm_fp8", "gemm_fp8_fused", "norm", "norm_cast", "norm_cast_transpose", "norm_total", "rotary"),
)
LAYERS, ROOM, PROMPT = 4, 2048, 1792
BATCHES = (1, 32)
THEIR_MODEL = "Hugging Face, bf16, compiled, CUDA graphs"
CASE = Case("Llama 3 8B", 4096, 14336, 32, ROOM, 1, torch.bfloat16, True, 0.0, True, 8, True)
STEPS, UNCOUNTED = 16, 4  # of a block; the first ones are not counted


class Ours:
    """This library's layers; `block` makes steps."""

    def __init__(self, case: Case, fp8: bool, graphed: bool) -> None:
        options: dict[str, Any] = {"normalization": "RMSNorm", "bias": False, "activation": "swiglu"}
        options |= {"num_gqa_groups": case.kv_heads, "params_dtype": case.dtype, "fuse_qkv_params": True}
        options |= {"init_method": _normal, "output_layer_init_method": _normal}
        with te.quantized_model_init(enabled=fp8):
            layers = (
                te.TransformerLayer(case.hidden, case.ffn, case.heads, layer_number=i + 1, **options)
                for i in range(LAYERS)
            )
            self.layers = torch.nn.ModuleList(layers).eval()
        self.fp8, self.batch = fp8, range(case.batch)
        self.angles = te.RotaryPositionEmbedding(case.channels)(ROOM)
        self.cache = te.InferenceParams(case.batch, ROOM, case.kv_heads, case.channels, case.dtype)
        self.cache.pre_step(dict.fromkeys(self.batch, PROMPT))
        self.x = _normal(torch.empty(PROMPT, case.batch, case.hidden, dtype=case.dtype, device="cuda"))
        self.forward()
        self.x = self.x[-1:].clone()
        self.step: Callable[[], object] = self.forward
        if graphed:
            self.block(1)
            self.step = measure.graph(lambda _: self.forward(), 1)

    def forward(self) -> torch.Tensor:
        """All layers, of the tokens that `pre_step` said."""
        x = self.x
        with te.autocast(recipe=RECIPE) if self.fp8 else contextlib.nullcontext():
            for one in self.layers:
                x = one(x, rotary_pos_emb=self.angles, inference_params=self.cache)
        return x

    def block(self, steps: int) -> None:
        """So many steps, which are queued."""
        for _ in range(steps):
            self.cache.pre_step(dict.fromkeys(self.batch, 1))
            self.step()

    def alone(self) -> None:
        """One step, launched op by op."""
        self.cache.pre_step(dict.fromkeys(self.batch, 1))
        self.forward()


class PlainLayer(Llama):
    """The layer in plain PyTorch, with a static cache; q and k are turned by rows of a table."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        shape = (case.batch, case.kv_heads or case.heads, ROOM, case.channels)
        self.keys, self.values = (_normal(torch.empty(shape, dtype=case.dtype, device="cuda")) for _ in range(2))
        self.columns = torch.arange(ROOM, device="cuda")

    def step(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """x `[1, batch, hidden]` of the token at place `at` `[1]`."""
        q, k, v = self.qkv(self.ln1(x)).unflatten(2, (-1, self.case.channels)).split(self.heads, dim=2)
        turns = [one.index_select(0, at) for one in self.turns]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (turned(q, *turns), turned(k, *turns), v))
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        q = q.reshape(*k.shape[:2], -1, self.case.channels)
        seen = (self.columns <= at).expand(q.shape[0], 1, q.shape[2], ROOM)
        out = scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        h = x + self.projection(out.reshape(x.shape))
        first, second = self.fc1(self.ln2(h)).chunk(2, dim=2)
        return h + self.fc2(silu(first) * second)


class Theirs:
    """PyTorch's layers, compiled."""

    def __init__(self, case: Case, graphed: bool) -> None:
        with torch.device("cuda"):
            self.layers = [PlainLayer(case).to("cuda", case.dtype) for _ in range(LAYERS)]
            self.x = _normal(torch.empty(1, case.batch, case.hidden, dtype=case.dtype))
            self.at = torch.full((1,), PROMPT)
        for one in self.layers:
            for parameter in one.parameters():
                _normal(parameter)
        self.compiled = torch.compile(PlainLayer.step)
        self.step: Callable[[], object] = self.forward
        if graphed:
            self.block(3)
            self.step = measure.graph(lambda _: self.forward(), 1)

    def forward(self) -> torch.Tensor:
        """All layers, of the token at the present place."""
        x = self.x
        for one in self.layers:
            x = self.compiled(one, x, self.at)
        return x

    def block(self, steps: int) -> None:
        """So many steps, which are queued."""
        for _ in range(steps):
            self.at += 1
            self.step()

    def alone(self) -> None:
        """One step, launched op by op."""
        self.at += 1
        self.forward()


class HuggingFace:
    """transformers' Llama with its static cache; PyTorch compiles its forward into CUDA graphs.

    Args:
        case: sizes and batch.
        device: where it is.
        options: for `torch.compile`.
    """

    def __init__(self, case: Case, device: str = "cuda", **options: Any) -> None:
        library: Any = importlib.import_module("transformers")
        sizes: dict[str, Any] = {"hidden_size": case.hidden, "intermediate_size": case.ffn}
        sizes["num_attention_heads"] = case.heads
        sizes |= {"num_key_value_heads": case.kv_heads, "num_hidden_layers": LAYERS, "vocab_size": 16}
        config = library.LlamaConfig(**sizes, max_position_embeddings=ROOM)
        with torch.device(device):
            self.model = library.LlamaModel._from_config(config, dtype=case.dtype).eval()
            x = _normal(torch.empty(case.batch, PROMPT, case.hidden, dtype=case.dtype))
        self.cache = library.StaticCache(config=config, max_cache_len=ROOM)
        self.x = x
        self.alone()
        self.x = x[:, -1:].clone()
        self.compiled = torch.compile(self.model.__call__, **options)
        self.block(3)  # it compiles in the first and captures graphs in the next

    def block(self, steps: int) -> None:
        """So many steps, which are queued."""
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            self.compiled(inputs_embeds=self.x, past_key_values=self.cache, use_cache=True)

    def alone(self) -> None:
        """One step that is not compiled."""
        self.model(inputs_embeds=self.x, past_key_values=self.cache, use_cache=True)


Contestant = Ours | Theirs | HuggingFace


def _normal(x: torch.Tensor) -> torch.Tensor:
    """Draw on the GPU, which takes less time than on the CPU."""
    return torch.nn.init.normal_(x, 0, 0.023)


def contestants(case: Case) -> dict[str, Callable[[], Contestant]]:
    """What makes each contestant, by name; Hugging Face's is there if transformers is."""
    found: dict[str, Callable[[], Contestant]] = {
        "Twin Engine, bf16": lambda: Ours(case, False, False),
        "Twin Engine, bf16, CUDA graph": lambda: Ours(case, False, True),
        "Twin Engine, FP8": lambda: Ours(case, True, False),
        "Twin Engine, FP8, CUDA graph": lambda: Ours(case, True, True),
        "PyTorch, bf16, compiled": lambda: Theirs(case, False),
        "PyTorch, bf16, compiled, CUDA graph": lambda: Theirs(case, True),
    }
    if importlib.util.find_spec("transformers") is not None:
        found[THEIR_MODEL] = lambda: HuggingFace(case, mode="reduce-overhead")
    return found


def _built(make: Callable[[], Contestant]) -> tuple[Contestant, int]:
    """A contestant, and the most bytes that torch's allocator held for it in one step."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made = make()
    made.alone()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    made.alone()
    torch.cuda.synchronize()
    return made, torch.cuda.max_memory_allocated() - before


@torch.no_grad()
def run(progress: Progress = silent, repeats: int = 9, case: Case = CASE) -> Payload:
    rows: list[dict[str, Any]] = []
    for done, batch in enumerate(BATCHES, 1):
        entrants = {name: _built(make) for name, make in contestants(replace(case, batch=batch)).items()}
        samples = layer.timed({name: one.block for name, (one, _) in entrants.items()}, repeats, STEPS, UNCOUNTED)
        for name, values in samples.items():
            ms = measure.spread(values)
            row = {"name": name, "batch": batch, "ms": ms, "tokens_per_second": batch / ms["median"] * 1e3}
            rows.append({**row, "peak_bytes": entrants[name][1]})
        del entrants
        layer.clear()
        progress(done / len(BATCHES))
    what = "steps of one token with a cache of keys and values; host clock, blocks of steps in turn"
    sizes = {"layers": LAYERS, "prompt": PROMPT, "room": ROOM, "hidden": case.hidden, "ffn": case.ffn}
    return result(what, KERNELS, repeats=repeats, sizes=sizes, rows=rows)


def tables(payload: Payload) -> list[Table]:
    """Tokens a second and memory, by batch."""
    found: dict[str, list[str]] = {}
    for row in payload["rows"]:
        cells = (f"{row['ms']['median']:.2f}", f"{row['tokens_per_second']:,.0f}", f"{row['peak_bytes'] / 2**30:.2f}")
        found.setdefault(row["name"], []).extend(cells)
    batches = dict.fromkeys(row["batch"] for row in payload["rows"])
    columns = [f"{part}, batch {n}" for n in batches for part in ("ms", "tokens/s", "GiB")]
    sizes = payload["sizes"]
    how = (
        f"Median time of a step of one token for each sequence, launches included, through {sizes['layers']} layers of "
        f"Llama 3 8B's shape (of its 32); {sizes['prompt']:,} tokens and more are in a cache for {sizes['room']:,}. "
        "GiB: the most that a step's tensors had, weights and cache among them."
    )
    return [table(payload, "Decoding with a cache", ("", *columns), [(name, *row) for name, row in found.items()], how)]
