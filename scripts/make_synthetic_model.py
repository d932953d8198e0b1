#!/usr/bin/env python3
"""Write a checkpoint of random weights in a published layout, of any shape, for benchmarks and memory tests.

    scripts/make_synthetic_model.py OUT                      OLMoE-shaped, 4 bit in groups of 64, 3.8 GB
    scripts/make_synthetic_model.py OUT --family qwen3_moe --hidden 1024 --kv-heads 4 --shards 4
    scripts/make_synthetic_model.py OUT --dtype bf16         unquantised, one tensor an expert
    scripts/make_synthetic_model.py OUT --preset glm-5.2 --container      7 of GLM-5.2's 78 layers, 3 of them dense; 25 GB

Quantised checkpoints are as mlx_lm writes them (stacked experts, 8-bit router, header not padded). The same arguments give
the same bytes for each tensor, in however many shards. Weights are random codes, scaled by the rule of thumb
1/sqrt(columns) so that activations stay finite, logits spread, and routing is near uniform (the busiest of 64 experts gets
twice the mean). Memory use is constant; the folder appears under its name only when it is complete. `--container` writes what
`colibri-cluster convert` would make of a checkpoint, without room for the checkpoint itself (`synthetic_container`).
"""

import argparse
import contextlib
import json
import math
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 256 << 10  # fits a core's second-level cache; 4 MiB takes twice as long
ROUTER_BITS, ROUTER_GROUP_SIZE = 8, 64
ARCHITECTURES = {
    "olmoe": "OlmoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}
MLA_FAMILIES = ("glm_moe_dsa",)
MLA_SIZES = {
    "q_rank": (2048, "q_lora_rank"),
    "kv_rank": (512, "kv_lora_rank"),
    "nope_dim": (192, "qk_nope_head_dim"),
    "rope_dim": (64, "qk_rope_head_dim"),
    "v_dim": (256, "v_head_dim"),
    "index_heads": (32, "index_n_heads"),
    "index_dim": (128, "index_head_dim"),
    "index_topk": (2048, "index_topk"),
    "index_freq": (4, "index_topk_freq"),
    "dense_layers": (3, "first_k_dense_replace"),
    "dense_width": (12288, "intermediate_size"),
}
"""Flags of families with latent attention: GLM-5.2's sizes, and the fields of config.json."""
PRESETS = {
    "glm-5.2": {
        **{
            "family": "glm_moe_dsa",
            "hidden": 6144,
            "layers": 7,
            "experts": 256,
            "top_k": 8,
            "width": 2048,
            "heads": 64,
        },
        **{"vocab": 154880, "ctx": 202752, "embed_bits": 8},
    }
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
Table = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Options:
    """The shape of the model and of its files."""

    family: str
    hidden: int
    layers: int
    experts: int
    top_k: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ctx: int
    bits: int
    group_size: int
    dtype: str
    shards: int
    seed: int
    embed_bits: int = 0
    mla: dict[str, int] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        """Whether the matrices are MLX affine codes; else bf16."""
        return self.dtype == "mlx"


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written: random bytes of the stream `key`, each replaced by its entry in `table` if there is one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    key: str
    table: Table | None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * (2 if self.dtype == "BF16" else 4)


# -- what is in the model ----------------------------------------------------------------------------------------------


def model_tensors(options: Options) -> Iterator[Tensor]:
    """Every tensor of the model, in the order of the file."""
    hidden, embed_bits = options.hidden, options.embed_bits or options.bits
    yield from matrix(options, "model.embed_tokens", (options.vocab, hidden), deviation=1.0, bits=embed_bits)
    for layer in range(options.layers):
        path = f"model.layers.{layer}"
        yield norm(f"{path}.input_layernorm", hidden)
        if options.family in MLA_FAMILIES:
            yield from latent_attention_tensors(options, f"{path}.self_attn", has_indexer(options, layer))
        else:
            yield from attention_tensors(options, f"{path}.self_attn")
        yield norm(f"{path}.post_attention_layernorm", hidden)
        if layer < options.mla.get("dense_layers", 0):
            yield from dense_tensors(options, f"{path}.mlp", options.mla["dense_width"])
        else:
            yield from moe_tensors(options, f"{path}.{'block_sparse_moe' if options.family == 'mixtral' else 'mlp'}")
    yield norm("model.norm", hidden)
    yield from matrix(options, "lm_head", (options.vocab, hidden), deviation=3 / math.sqrt(hidden), bits=embed_bits)


def attention_tensors(options: Options, path: str) -> Iterator[Tensor]:
    """Grouped-query attention."""
    hidden, q_rows, kv_rows = options.hidden, options.heads * options.head_dim, options.kv_heads * options.head_dim
    yield from matrix(options, f"{path}.q_proj", (q_rows, hidden))
    yield from matrix(options, f"{path}.k_proj", (kv_rows, hidden))
    yield from matrix(options, f"{path}.v_proj", (kv_rows, hidden))
    # Attention to random text adds much the same vector everywhere: kept small, lest routing follows it.
    yield from matrix(options, f"{path}.o_proj", (hidden, q_rows), deviation=0.3 / math.sqrt(q_rows))
    if options.family != "mixtral":
        whole = options.family == "olmoe"
        yield norm(f"{path}.q_norm", q_rows if whole else options.head_dim)
        yield norm(f"{path}.k_norm", kv_rows if whole else options.head_dim)


def latent_attention_tensors(options: Options, path: str, with_indexer: bool) -> Iterator[Tensor]:
    """Latent attention (MLA), and the indexer (DSA) of the layers that have one."""
    sizes, hidden, heads = options.mla, options.hidden, options.heads
    yield from matrix(options, f"{path}.q_a_proj", (sizes["q_rank"], hidden))
    yield norm(f"{path}.q_a_layernorm", sizes["q_rank"])
    yield from matrix(options, f"{path}.q_b_proj", (heads * (sizes["nope_dim"] + sizes["rope_dim"]), sizes["q_rank"]))
    yield from matrix(options, f"{path}.kv_a_proj_with_mqa", (sizes["kv_rank"] + sizes["rope_dim"], hidden))
    yield norm(f"{path}.kv_a_layernorm", sizes["kv_rank"])
    yield from matrix(options, f"{path}.kv_b_proj", (heads * (sizes["nope_dim"] + sizes["v_dim"]), sizes["kv_rank"]))
    v_width = heads * sizes["v_dim"]
    yield from matrix(options, f"{path}.o_proj", (hidden, v_width), deviation=0.3 / math.sqrt(v_width))
    if with_indexer:
        queries = sizes["index_heads"] * sizes["index_dim"]
        yield from matrix(options, f"{path}.indexer.wq_b", (queries, sizes["q_rank"]))
        yield from matrix(options, f"{path}.indexer.wk", (sizes["index_dim"], hidden))
        yield norm(f"{path}.indexer.k_norm", sizes["index_dim"])
        yield vector(f"{path}.indexer.k_norm.bias", sizes["index_dim"], -0.1, 0.1)
        yield from matrix(options, f"{path}.indexer.weights_proj", (sizes["index_heads"], hidden))


def has_indexer(options: Options, layer: int) -> bool:
    """Whether the layer chooses positions by itself, by the rule of `index_topk_freq` with its default offset, 2."""
    return max(layer - 1, 0) % options.mla["index_freq"] == 0


def dense_tensors(options: Options, path: str, width: int) -> Iterator[Tensor]:
    """A dense block, or a shared expert."""
    yield from matrix(options, f"{path}.gate_proj", (width, options.hidden))
    yield from matrix(options, f"{path}.up_proj", (width, options.hidden))
    yield from matrix(options, f"{path}.down_proj", (options.hidden, width))


def router_tensors(options: Options, path: str) -> Iterator[Tensor]:
    """The router: 8 bits if quantised; where scores are corrected it is plain, as mlx_lm leaves it."""
    deviation, shape = 2 / math.sqrt(options.hidden), (options.experts, options.hidden)
    if options.family not in MLA_FAMILIES:
        router_options = {"bits": ROUTER_BITS, "group_size": ROUTER_GROUP_SIZE}
        yield from matrix(options, f"{path}.gate", shape, deviation, **router_options)
        return
    yield plain(f"{path}.gate", shape, deviation)
    yield vector(f"{path}.gate.e_score_correction_bias", options.experts, -0.02, 0.02)


def moe_tensors(options: Options, path: str) -> Iterator[Tensor]:
    """Router and experts of one layer: stacked if quantised, one tensor an expert if not."""
    yield from router_tensors(options, path)
    if options.family in MLA_FAMILIES:
        yield from dense_tensors(options, f"{path}.shared_experts", options.width)
    shapes = {"gate_proj": (options.width, options.hidden), "up_proj": (options.width, options.hidden)}
    shapes["down_proj"] = (options.hidden, options.width)
    if options.quantised:
        for name, shape in shapes.items():
            yield from matrix(options, f"{path}.switch_mlp.{name}", (options.experts, *shape))
        return
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if options.family == "mixtral" else {}
    for expert in range(options.experts):
        for name, shape in shapes.items():
            yield from matrix(options, f"{path}.experts.{expert}.{names.get(name, name)}", shape)


def matrix(
    options: Options,
    path: str,
    shape: tuple[int, ...],
    deviation: float | None = None,
    bits: int | None = None,
    group_size: int | None = None,
) -> Iterator[Tensor]:
    """The tensors of a matrix whose values have that standard deviation (default 1/sqrt(columns))."""
    *lead, cols = shape
    deviation = deviation or 1 / math.sqrt(cols)
    if not options.quantised:
        yield plain(path, shape, deviation)
        return
    bits, group_size = bits or options.bits, group_size or options.group_size
    scales = to_bf16(scale_levels(deviation, bits))
    biases = to_bf16(from_bf16(scales) * -((1 << bits) - 1) / 2)
    groups = (*lead, cols // group_size)
    yield Tensor(f"{path}.weight", "U32", (*lead, cols * bits // 32), path, None)
    yield Tensor(f"{path}.scales", "BF16", groups, f"{path}.scales", scales)
    yield Tensor(
        f"{path}.biases", "BF16", groups, f"{path}.scales", biases
    )  # the same stream: bias = -mean code * scale


def scale_levels(deviation: float, bits: int) -> npt.NDArray[np.floating[Any]]:
    """256 scales that give uniform codes this standard deviation, within a quarter."""
    return deviation / _code_deviation(bits) * np.linspace(0.75, 1.25, 256)


def plain(path: str, shape: tuple[int, ...], deviation: float) -> Tensor:
    """An unquantised matrix."""
    levels = (np.arange(256) - 127.5) / _code_deviation(8)
    return Tensor(f"{path}.weight", "BF16", shape, path, to_bf16(levels * deviation))


def norm(path: str, size: int) -> Tensor:
    """A norm's weight, 0.8 to 1.2."""
    return Tensor(f"{path}.weight", "BF16", (size,), path, to_bf16(np.linspace(0.8, 1.2, 256)))


def vector(name: str, size: int, least: float, most: float) -> Tensor:
    """A bias."""
    return Tensor(name, "BF16", (size,), name, to_bf16(np.linspace(least, most, 256)))


def _code_deviation(bits: int) -> float:
    """Standard deviation of uniform codes 0 .. 2^bits - 1."""
    return math.sqrt((4.0**bits - 1) / 12)


def to_bf16(values: npt.NDArray[np.floating[Any]]) -> Table:
    """Round to nearest even, as uint16 bit patterns."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return (rounded >> 16).astype(np.uint16)


def from_bf16(table: Table) -> npt.NDArray[np.float32]:
    """The values of bit patterns."""
    return (table.astype(np.uint32) << 16).view(np.float32)


def config_json(options: Options) -> dict[str, Any]:
    """config.json, in the older dialect, which every reader knows."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[options.family]],
        "model_type": options.family,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "max_position_embeddings": options.ctx,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_experts_per_tok": options.top_k,
        "num_local_experts" if options.family == "mixtral" else "num_experts": options.experts,
        "intermediate_size": options.width,
    }
    if options.family == "qwen3_moe":
        config |= {"moe_intermediate_size": options.width, "norm_topk_prob": True, "decoder_sparse_step": 1}
    if options.family == "olmoe":
        config |= {"norm_topk_prob": False, "clip_qkv": None}
    if options.family in MLA_FAMILIES:
        config |= mla_config(options)
    if options.quantised:
        config["quantization"] = quantisation(options)
    return config


def mla_config(options: Options) -> dict[str, Any]:
    """What config.json says of latent attention, its indexer, and a corrected router."""
    sizes = {name: options.mla[flag] for flag, (_, name) in MLA_SIZES.items()}
    experts = {"n_routed_experts": options.experts, "n_shared_experts": 1, "moe_intermediate_size": options.width}
    router = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1}
    return {
        **sizes,
        **experts,
        **router,
        "rope_theta": 1_000_000.0,
        "rope_interleave": True,
        "head_dim": sizes["qk_rope_head_dim"],
    }


def quantisation(options: Options) -> dict[str, Any]:
    """Which bits the matrices have."""
    settings: dict[str, Any] = {"group_size": options.group_size, "bits": options.bits, "mode": "affine"}
    if options.embed_bits:
        embedding = {"group_size": options.group_size, "bits": options.embed_bits}
        settings |= {"model.embed_tokens": embedding, "lm_head": embedding}
    block = "block_sparse_moe" if options.family == "mixtral" else "mlp"
    router = {"group_size": ROUTER_GROUP_SIZE, "bits": ROUTER_BITS} if options.family not in MLA_FAMILIES else False
    sparse = range(options.mla.get("dense_layers", 0), options.layers)
    return settings | {f"model.layers.{i}.{block}.gate": router for i in sparse}


# -- writing it --------------------------------------------------------------------------------------------------------


def split_shards(tensors: list[Tensor], num_shards: int) -> list[list[Tensor]]:
    """Consecutive tensors in `num_shards` files of about the same size."""
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    shards: list[list[Tensor]] = [[] for _ in range(num_shards)]
    for tensor in tensors:
        shards[min(done * num_shards // total, num_shards - 1)].append(tensor)
        done += tensor.nbytes
    return [shard for shard in shards if shard]


def header_bytes(tensors: list[Tensor]) -> bytes:
    """The safetensors header, not padded, as MLX writes it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


def chunks(tensor: Tensor, seed: int) -> Iterator[npt.NDArray[Any]]:
    """The tensor's bytes, a chunk at a time. Raw SFC64 output: the same in every version of numpy."""
    stream = np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(tensor.key.encode())]))
    needed = tensor.nbytes if tensor.table is None else tensor.nbytes // 2  # random bytes
    while needed > 0:
        words = stream.random_raw(min(-(-needed // 8), CHUNK_BYTES // 8))
        raw = words.astype("<u8", copy=False).view(np.uint8)[:needed]
        yield raw if tensor.table is None else tensor.table.astype("<u2")[raw]
        needed -= raw.size


class ProgressLine:
    """One line on stderr, rewritten at most twice a second; on a terminal only the last state stays."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes, self._done_bytes = total_bytes, 0
        self._started = self._shown = time.perf_counter()

    def add(self, nbytes: int) -> None:
        """Count bytes written, and show the state if it is time."""
        self._done_bytes += nbytes
        if time.perf_counter() - self._shown > 0.5 and sys.stderr.isatty():
            self.show("\r")

    def show(self, start: str = "", end: str = "") -> None:
        """Show the state."""
        self._shown = time.perf_counter()
        rate = self._done_bytes / max(self._shown - self._started, 1e-9)
        state = f"{self._done_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s"
        print(f"{start}{state}  ", end=end, file=sys.stderr, flush=True)


def write_shard(file: BinaryIO, tensors: list[Tensor], seed: int, progress: ProgressLine, is_hollow: bool) -> None:
    """Write one safetensors file; a hollow one has holes for experts."""
    file.write(header_bytes(tensors))
    for tensor in tensors:
        if is_hollow and ".switch_mlp." in tensor.name:
            file.truncate(file.seek(tensor.nbytes, 1))
            continue
        for chunk in chunks(tensor, seed):
            file.write(chunk.data)
            progress.add(chunk.nbytes)


def write_container(folder: Path, options: Options) -> None:
    """Write a container into the existing `folder`, by way of a checkpoint without its experts."""
    from synthetic_container import fill_container

    hollow = folder / "hollow"
    hollow.mkdir()
    write_model(hollow, options, is_hollow=True)
    scales = {
        cols: to_bf16(scale_levels(1 / math.sqrt(cols), options.bits)) for cols in (options.hidden, options.width)
    }
    fill_container(hollow, folder, scales, options.seed)
    shutil.rmtree(hollow)


def write_model(folder: Path, options: Options, is_hollow: bool = False) -> None:
    """Write weights, index and config into the existing `folder`; hollow: only the sizes of the experts are there."""
    tensors = list(model_tensors(options))
    total = sum(tensor.nbytes for tensor in tensors)
    shards = split_shards(tensors, options.shards)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    progress = ProgressLine(total)
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            write_shard(file, shard, options.seed, progress, is_hollow)
    progress.show("\r" if sys.stderr.isatty() else "", "\n")
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", config_json(options))


def write_json(path: Path, value: object) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path, vocab: int) -> None:
    """Copy a tokenizer's files, if all its ids are in the vocabulary."""
    model = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    largest = max([*model["model"]["vocab"].values(), *(token["id"] for token in model.get("added_tokens", []))])
    if largest >= vocab:
        raise SystemExit(f"{source}: the tokenizer has ids up to {largest}, --vocab is {vocab}: raise it")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


@contextlib.contextmanager
def complete_or_absent(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` at the end, and is removed if anything goes wrong."""
    if out.exists():
        raise SystemExit(f"{out}: exists already: remove it or give another name")
    out.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(out.parent).free
    if needed_bytes > free_bytes:
        raise SystemExit(f"{out}: needs {needed_bytes / 1e9:.2f} GB, the disk has {free_bytes / 1e9:.2f} GB free")
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# -- the command line --------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Options]:
    """Read the command line and check that the shape is possible."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Sizes default to OLMoE-1B-7B's.",
    )
    add = parser.add_argument
    add("out", type=Path, help="folder to make")
    add("--preset", choices=tuple(PRESETS), help="sizes of a published model, and a few of its layers")
    add("--family", choices=tuple(ARCHITECTURES), default="olmoe")
    add("--hidden", type=positive, default=2048, help="hidden size (default %(default)s)")
    add("--layers", type=positive, default=16, help="default %(default)s")
    add("--experts", type=positive, default=64, help="experts a layer (default %(default)s)")
    add("--top-k", type=positive, default=8, help="experts a token (default %(default)s)")
    add("--width", type=positive, default=1024, help="width of an expert (default %(default)s)")
    add("--heads", type=positive, default=16, help="attention heads (default %(default)s)")
    add("--kv-heads", type=positive, help="key/value heads (default: as many)")
    add("--head-dim", type=positive, help="size of a head (default: hidden / heads)")
    add("--vocab", type=positive, default=50304, help="vocabulary (default %(default)s)")
    add("--ctx", type=positive, default=4096, help="max_position_embeddings (default %(default)s)")
    add("--bits", type=int, choices=(2, 3, 4, 5, 6, 8), default=4, help="bits of a code (default %(default)s)")
    add(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        default=64,
        help="columns that share a scale (default %(default)s)",
    )
    add("--dtype", choices=("mlx", "bf16"), default="mlx", help="mlx: quantised; bf16: not (default %(default)s)")
    add("--shards", type=positive, default=1, help="number of weight files (default %(default)s)")
    add("--embed-bits", type=int, choices=(0, 4, 8), default=0, help="of embedding and head (default: as all)")
    for flag, (size, name) in MLA_SIZES.items():
        add(
            f"--{flag.replace('_', '-')}",
            type=positive,
            default=size,
            help=f"glm_moe_dsa: {name} (default %(default)s)",
        )
    add("--container", action="store_true", help="write a container: one read an expert")
    add("--seed", type=int, default=0, help="default %(default)s")
    add("--tokenizer", type=Path, help="folder whose tokenizer files are copied")
    parser.set_defaults(**PRESETS.get(parser.parse_known_args(arguments)[0].preset, {}))
    known = parser.parse_args(arguments)
    known.kv_heads = known.kv_heads or known.heads
    known.head_dim = known.head_dim or known.hidden // known.heads
    known.mla = {flag: getattr(known, flag) for flag in MLA_SIZES} if known.family in MLA_FAMILIES else {}
    options = Options(**{name: getattr(known, name) for name in Options.__dataclass_fields__})
    for problem in problems(options):
        parser.error(problem)
    return known, options


def positive(text: str) -> int:
    """An argument that must be a whole number above 0."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {value}")
    return value


def problems(options: Options) -> Iterator[str]:
    """What is wrong with the shape."""
    group_size = max(options.group_size, ROUTER_GROUP_SIZE)
    if options.quantised:
        columns = {"--hidden": options.hidden, "heads * head-dim": options.heads * options.head_dim}
        if options.mla:
            columns = {"--hidden": options.hidden, "heads * v-dim": options.heads * options.mla["v_dim"]}
            columns |= {
                f"--{name.replace('_', '-')}": options.mla[name] for name in ("q_rank", "kv_rank", "dense_width")
            }
        for name, cols in columns.items():
            if cols % group_size:
                yield f"{name} = {cols} must be a multiple of {group_size}"
        if options.width % options.group_size:
            yield f"--width {options.width} must be a multiple of --group-size {options.group_size}"
    if options.mla.get("dense_layers", 0) >= options.layers:
        yield f"--dense-layers {options.mla['dense_layers']} must be below --layers {options.layers}"
    if options.heads % options.kv_heads:
        yield f"--heads {options.heads} must be a multiple of --kv-heads {options.kv_heads}"
    if options.family == "olmoe" and options.heads * options.head_dim != options.hidden:
        yield "olmoe has no head-dim of its own: heads * head-dim must be the hidden size"
    if not 1 <= options.top_k <= options.experts:
        yield f"--top-k {options.top_k} must be 1 to --experts {options.experts}"


def main(arguments: list[str] | None = None) -> None:
    """Make the checkpoint."""
    known, options = parse(arguments)
    needed = sum(tensor.nbytes for tensor in model_tensors(options)) + (16 << 20)
    with complete_or_absent(known.out, needed) as folder:
        if known.tokenizer:
            copy_tokenizer(known.tokenizer, folder, options.vocab)
        if known.container:
            write_container(folder, options)
        else:
            write_model(folder, options)
    print(f"{known.out}: {options.family}, {options.layers} layers of {options.experts} experts", file=sys.stderr)


if __name__ == "__main__":
    main()
