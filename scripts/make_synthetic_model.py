#!/usr/bin/env python3
"""Write a checkpoint of random weights in a published layout, of any shape, for benchmarks and memory tests.

    scripts/make_synthetic_model.py OUT                      OLMoE-shaped, 4 bit in groups of 64, 3.8 GB
    scripts/make_synthetic_model.py OUT --family qwen3_moe --hidden 1024 --kv-heads 4 --shards 4
    scripts/make_synthetic_model.py OUT --dtype bf16         unquantised, one tensor an expert

Quantised checkpoints are as mlx_lm writes them (stacked experts, 8-bit router, header not padded). The same arguments give
the same bytes for each tensor, in however many shards. Weights are random codes, scaled by the rule of thumb
1/sqrt(columns) so that activations stay finite, logits spread, and routing is near uniform (the busiest of 64 experts gets
twice the mean). Memory use is constant; the folder appears under its name only when it is complete.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 256 << 10  # fits a core's second-level cache; 4 MiB takes twice as long
ROUTER_BITS, ROUTER_GROUP_SIZE = 8, 64
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
    hidden, q_rows, kv_rows = options.hidden, options.heads * options.head_dim, options.kv_heads * options.head_dim
    yield from matrix(options, "model.embed_tokens", (options.vocab, hidden), deviation=1.0)
    for layer in range(options.layers):
        path = f"model.layers.{layer}"
        yield norm(f"{path}.input_layernorm", hidden)
        yield from matrix(options, f"{path}.self_attn.q_proj", (q_rows, hidden))
        yield from matrix(options, f"{path}.self_attn.k_proj", (kv_rows, hidden))
        yield from matrix(options, f"{path}.self_attn.v_proj", (kv_rows, hidden))
        # Attention to random text adds much the same vector everywhere: kept small, lest routing follows it.
        yield from matrix(options, f"{path}.self_attn.o_proj", (hidden, q_rows), deviation=0.3 / math.sqrt(q_rows))
        if options.family != "mixtral":
            whole = options.family == "olmoe"
            yield norm(f"{path}.self_attn.q_norm", q_rows if whole else options.head_dim)
            yield norm(f"{path}.self_attn.k_norm", kv_rows if whole else options.head_dim)
        yield norm(f"{path}.post_attention_layernorm", hidden)
        yield from moe_tensors(options, f"{path}.{'block_sparse_moe' if options.family == 'mixtral' else 'mlp'}")
    yield norm("model.norm", hidden)
    yield from matrix(options, "lm_head", (options.vocab, hidden), deviation=3 / math.sqrt(hidden))


def moe_tensors(options: Options, path: str) -> Iterator[Tensor]:
    """Router and experts of one layer: stacked if quantised, one tensor an expert if not."""
    router_options = {"bits": ROUTER_BITS, "group_size": ROUTER_GROUP_SIZE}
    router_deviation = 2 / math.sqrt(options.hidden)
    yield from matrix(options, f"{path}.gate", (options.experts, options.hidden), router_deviation, **router_options)
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
        levels = (np.arange(256) - 127.5) / _code_deviation(8)
        yield Tensor(f"{path}.weight", "BF16", shape, path, to_bf16(levels * deviation))
        return
    bits, group_size = bits or options.bits, group_size or options.group_size
    scales = to_bf16(deviation / _code_deviation(bits) * np.linspace(0.75, 1.25, 256))
    biases = to_bf16(from_bf16(scales) * -((1 << bits) - 1) / 2)
    groups = (*lead, cols // group_size)
    yield Tensor(f"{path}.weight", "U32", (*lead, cols * bits // 32), path, None)
    yield Tensor(f"{path}.scales", "BF16", groups, f"{path}.scales", scales)
    yield Tensor(
        f"{path}.biases", "BF16", groups, f"{path}.scales", biases
    )  # the same stream: bias = -mean code * scale


def norm(path: str, size: int) -> Tensor:
    """A norm's weight, 0.8 to 1.2."""
    return Tensor(f"{path}.weight", "BF16", (size,), path, to_bf16(np.linspace(0.8, 1.2, 256)))


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
        "architectures": [
            {"olmoe": "OlmoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}[
                options.family
            ]
        ],
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
    if options.quantised:
        block = "block_sparse_moe" if options.family == "mixtral" else "mlp"
        router = {"group_size": ROUTER_GROUP_SIZE, "bits": ROUTER_BITS}
        settings = {"group_size": options.group_size, "bits": options.bits, "mode": "affine"}
        config["quantization"] = settings | {f"model.layers.{i}.{block}.gate": router for i in range(options.layers)}
    return config


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


def write_shard(file: BinaryIO, tensors: list[Tensor], seed: int, progress: ProgressLine) -> None:
    """Write one safetensors file."""
    file.write(header_bytes(tensors))
    for tensor in tensors:
        for chunk in chunks(tensor, seed):
            file.write(chunk.data)
            progress.add(chunk.nbytes)


def write_model(folder: Path, options: Options) -> None:
    """Write weights, index and config into the existing `folder`."""
    tensors = list(model_tensors(options))
    total = sum(tensor.nbytes for tensor in tensors)
    shards = split_shards(tensors, options.shards)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    progress = ProgressLine(total)
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            write_shard(file, shard, options.seed, progress)
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
    add("--family", choices=("olmoe", "qwen3_moe", "mixtral"), default="olmoe")
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
    add("--seed", type=int, default=0, help="default %(default)s")
    add("--tokenizer", type=Path, help="folder whose tokenizer files are copied")
    known = parser.parse_args(arguments)
    known.kv_heads = known.kv_heads or known.heads
    known.head_dim = known.head_dim or known.hidden // known.heads
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
        for name, cols in {"--hidden": options.hidden, "heads * head-dim": options.heads * options.head_dim}.items():
            if cols % group_size:
                yield f"{name} = {cols} must be a multiple of {group_size}"
        if options.width % options.group_size:
            yield f"--width {options.width} must be a multiple of --group-size {options.group_size}"
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
        write_model(folder, options)
    print(f"{known.out}: {options.family}, {options.layers} layers of {options.experts} experts", file=sys.stderr)


if __name__ == "__main__":
    main()
