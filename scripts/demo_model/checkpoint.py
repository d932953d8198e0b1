"""The files of the built-in model: written as mlx-lm lays them out, and read back dequantised.

No PyTorch here, so that ``compare_engines.py`` can use it too. Tensors are named as in the training code, whose expert
stacks are ``layers.N.mlp.gate_proj`` [E, F, H], ``up_proj`` [E, F, H] and ``down_proj`` [E, H, F].
"""

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from .quantise import Quantised, from_bf16, quantise, to_bf16

Tensors = dict[str, np.ndarray]

BITS = 4
ROUTER_BITS = 8
DTYPES: dict[str, np.dtype[Any]] = {"U32": np.dtype("<u4"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def mlx_name(name: str) -> str:
    """``layers.0.mlp.up_proj`` is ``model.layers.0.mlp.switch_mlp.up_proj.weight`` on disk."""
    return "model." + re.sub(r"\.mlp\.(\w+_proj)$", r".mlp.switch_mlp.\1.weight", name)


def quantised_tensors(tensors: Tensors) -> Tensors:
    """The checkpoint's tensors: matrices as codes (uint32) with scales and biases, norms as bf16 bits (uint16)."""
    stored: Tensors = {}
    for name, value in tensors.items():
        on_disk = mlx_name(name)
        if value.ndim == 1:
            stored[on_disk] = to_bf16(value)
            continue
        found = quantise(value, ROUTER_BITS if name.endswith("mlp.gate.weight") else BITS)
        stored[on_disk] = found.weight
        stored[on_disk.replace(".weight", ".scales")] = found.scales
        stored[on_disk.replace(".weight", ".biases")] = found.biases
    return stored


def write_safetensors(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    """uint32 as U32, uint16 as BF16, float32 as F32; the header is padded so that the data start at a multiple of 8."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, value in ordered:
        offsets = [offset, offset + value.nbytes]
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        offset += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, value in ordered:
            file.write(np.ascontiguousarray(value).tobytes())


def read_safetensors(path: Path) -> Tensors:
    blob = path.read_bytes()
    (size,) = struct.unpack_from("<Q", blob)
    header: dict[str, Any] = json.loads(blob[8 : 8 + size])
    header.pop("__metadata__", None)
    data = memoryview(blob)[8 + size :]
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def dequantised_tensors(stored: Tensors) -> Tensors:
    """float32 tensors under the names they have in the file, stacks of experts still whole; scales and biases gone."""
    plain: Tensors = {}
    for name, value in stored.items():
        scales = stored.get(name.replace(".weight", ".scales"))
        if name.endswith((".scales", ".biases")):
            continue
        if scales is None or value.dtype != np.uint32:
            plain[name] = from_bf16(value)
        else:
            bits = ROUTER_BITS if name.endswith("mlp.gate.weight") else BITS
            plain[name] = Quantised(value, scales, stored[name.replace(".weight", ".biases")], bits).dequantised()
    return plain


def per_expert(plain: Tensors) -> Tensors:
    """The same with a tensor an expert, as the Hugging Face hub has them."""
    split: Tensors = {}
    for name, value in plain.items():
        if ".switch_mlp." in name:
            for expert, matrix in enumerate(value):
                split[name.replace("switch_mlp", f"experts.{expert}")] = matrix
        else:
            split[name] = value
    return split


def config(shape: dict[str, Any]) -> dict[str, Any]:
    """config.json without the quantisation, as transformers reads it. ``shape`` are the fields of ``model.Shape``."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **shape,
        "intermediate_size": shape["moe_intermediate_size"] * shape["num_experts_per_tok"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "router_aux_loss_coef": 0.01,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def quantisation(num_layers: int) -> dict[str, Any]:
    """The ``quantization`` entry of config.json: the routers are named because they differ."""
    routers = {f"model.layers.{n}.mlp.gate": {"group_size": 64, "bits": ROUTER_BITS} for n in range(num_layers)}
    return {"group_size": 64, "bits": BITS, "mode": "affine", **routers}


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text_files(out: Path, tokenizer: Path) -> None:
    """What every form of the model needs besides config.json and the weights."""
    (out / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.95}
    write_json(out / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0, **sampling})
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 2048}
    write_json(
        out / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "clean_up_tokenization_spaces": False},
    )


def write_mlx(out: Path, tensors: Tensors, shape: dict[str, Any], tokenizer: Path) -> None:
    """The shipped form: ``tensors`` float32 by their training names."""
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / "model.safetensors", quantised_tensors(tensors), {"format": "mlx"})
    scheme = quantisation(shape["num_hidden_layers"])
    write_json(out / "config.json", {**config(shape), "quantization": scheme, "quantization_config": scheme})
    write_text_files(out, tokenizer)


def write_dequantised(model: Path, out: Path) -> None:
    """A float32 copy of a shipped model for transformers: bf16 could not hold code * scale + bias exactly."""
    out.mkdir(parents=True, exist_ok=True)
    plain = per_expert(dequantised_tensors(read_safetensors(model / "model.safetensors")))
    write_safetensors(out / "model.safetensors", plain, {"format": "pt"})
    settings = json.loads((model / "config.json").read_text())
    settings = {key: value for key, value in settings.items() if not key.startswith("quantization")}
    write_json(out / "config.json", {**settings, "torch_dtype": "float32"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (out / name).write_bytes((model / name).read_bytes())
