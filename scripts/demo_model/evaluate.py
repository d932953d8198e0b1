"""Measure a trained model before and after quantisation, and write ``figures.json``, the card's only source of figures."""

import platform
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from .checkpoint import write_json
from .data import END_OF_TEXT, IM_END
from .export import as_stored, load_run, model_with, tensors_of
from .model import Model
from .train import HeldOut

TEMPERATURE, TOP_P, SEED, MOST_TOKENS = 0.7, 0.95, 1, 160
SAMPLE_PROMPTS = (
    "Once upon a time",
    "def fibonacci(",
    "<user>Continue the story: It was a dark night at sea, and the captain",
    "<user>Tell me a story about Emma.",
    "<user>Write scripture: Genesis 3",
    "<user>Continúa: En aquel tiempo",
    "<user>Write python: read_lines",
    "<user>Explain: Reading and writing files",
    "<user>Define: hummingbird",
    "<user>What does courage mean?",
    "<user>Hello!",
)


def prompt_of(sample: str) -> str:
    """A sample prompt as the model sees it: plain, or one user turn."""
    if sample.startswith("<user>"):
        return f"<|im_start|>user\n{sample.removeprefix('<user>')}<|im_end|>\n<|im_start|>assistant\n"
    return sample


@torch.no_grad()
def sampled(model: Model, token_ids: list[int], rng: np.random.Generator) -> list[int]:
    """Nucleus sampling in float32, everything computed again for each token; the end token, if any, is the last."""
    made: list[int] = []
    while len(made) < MOST_TOKENS and not (made and made[-1] in (END_OF_TEXT, IM_END)):
        logits = model(torch.tensor([token_ids + made]))[0, -1].double().numpy() / TEMPERATURE
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        order = shares.argsort()[::-1]
        kept = order[: int(np.searchsorted(shares[order].cumsum(), TOP_P)) + 1]
        made.append(int(rng.choice(kept, p=shares[kept] / shares[kept].sum())))
    return made


def samples_of(model: Model, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What the model says to each prompt, the first and only draw."""
    found = []
    for sample in SAMPLE_PROMPTS:
        prompt = prompt_of(sample)
        made = sampled(model, tokenizer.encode(prompt, add_special_tokens=False).ids, np.random.default_rng(SEED))
        is_ended = made[-1] in (END_OF_TEXT, IM_END)
        found.append({"prompt": sample, "text": tokenizer.decode(made), "num_tokens": len(made), "is_ended": is_ended})
    return found


class ExpertCounts:
    """How often each expert of each layer was chosen, by kind of text."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.by_kind: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(1, np.int64))

    def add(self, kind: str) -> None:
        self.by_kind[kind] = self.by_kind[kind] + np.stack([r.counts.numpy() for r in self.model.routings()])


def count_parameters(model: Model) -> dict[str, int]:
    """All, and those that work on one token."""
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if name.endswith(("gate_proj", "up_proj", "down_proj")))
    share = model.shape.num_experts_per_tok / model.shape.num_experts
    return {"all": sum(sizes.values()), "active": sum(sizes.values()) - int(experts * (1 - share))}


def evaluate(run: Path, data: Path) -> None:
    """Write ``figures.json`` beside the checkpoint. Two threads work on models of their own, as in training."""
    torch.set_num_threads(1)
    state, held_out = load_run(run), HeldOut(data)
    length = state["recipe"]["decay_length"]
    tensors = tensors_of(state)
    stored = as_stored(tensors)
    before, after, speaker = (model_with(state["shape"], weights) for weights in (tensors, stored, stored))
    counts = ExpertCounts(after)
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        bits_before = pool.submit(held_out.bits_per_byte, before, length)
        bits_after = pool.submit(held_out.bits_per_byte, after, length, after_batch=counts.add)
        samples = pool.submit(samples_of, speaker, Tokenizer.from_file(str(data / "tokenizer.json")))
        figures = {
            "step": state["step"],
            "recipe": state["recipe"],
            "cycles": state["cycles"],
            "shape": state["shape"],
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "parameters": count_parameters(after),
            "window": length,
            "bits_per_byte": {"before": bits_before.result(), "after": bits_after.result()},
            "expert_counts": {kind: found.tolist() for kind, found in counts.by_kind.items()},
            "sampling": {"temperature": TEMPERATURE, "top_p": TOP_P, "seed": SEED, "most_tokens": MOST_TOKENS},
            "samples": samples.result(),
        }
    write_json(run / "figures.json", figures)
