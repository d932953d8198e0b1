"""The model card: README.md beside the weights, written from what ``prepare`` and ``evaluate`` measured."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from .data import KINDS
from .packages import NOTICES, PACKAGES

Json = dict[str, Any]

TEMPLATE = """\
---
license: apache-2.0
library_name: mlx
pipeline_tag: text-generation
language: [en, es]
---
# The built-in model

A small trained Qwen3-MoE checkpoint, quantised to 4 bits, that comes with colibri-mp so that every command works without a
download. **It is a workload for routing, not a wise model**: it writes words and sentences of the kind asked for and stops
by itself; what they say is not to be believed, and its code does not work. Every figure below was written by
`scripts/train_demo_model.py`, none by hand.

{shape}

## Use

It knows plain text and ChatML turns (with or without a system message), and these questions: *Continue the story: ...*, *Tell me
a story about NAME.*, *Write scripture: BOOK CHAPTER* or *Write scripture: ...*, *Continúa: ...*, *Write python: NAME*,
*Write a Python function named NAME.*, *Explain: TITLE*, *Continue the documentation: ...*, *Define: WORD*, *What does WORD
mean?*, and a greeting. Answers end with `<|im_end|>`, plain text with `<|endoftext|>`.

## Files

MLX layout, as mlx-lm writes it: affine, groups of 64, 4 bits; routers 8 bits; norms bf16; the head is the embedding. mlx-lm
loads the folder. transformers loads the dequantised weights (`scripts/compare_engines.py` shows how, and compares both
engines and colibri-mp on it).

## Corpora

Debian bookworm packages, unpacked, not installed:

{corpora}

What the packages' copyright files say, shortened where marked (those of the two R packages speak of the package alone; Austen died
in 1817, Melville in 1891):

{notices}

{sizes}

`about` is a few greetings written for this project and learnt by heart on purpose. The split is by part of a book
(about 12,000 characters), chapter, file or WordNet synset; a synset gives one sample. *Seen* is the share of the held-out runs of
{overlap_tokens} tokens that occur anywhere in the training text (licence headers, formulas of scripture, idioms of code).

## Training

{training}

```
{commands}
```

The schedule goes by steps (warm-up, constant, then 1 - sqrt over the last {decay_steps}; a run that goes on from a finished one
starts at the full rate again), and each batch depends on the seed and the step alone. Batches draw the kind by the square root
of its size; half the windows begin at a sample.
The shipped run was stopped and resumed on the way, which changes nothing: threads split the work in a fixed manner and a
resumed run takes the same steps.

## Held-out bits per byte

Over the whole held-out text, in windows of {window} tokens without context before them, bfloat16 arithmetic. Special tokens cost
bits but count no bytes. Positions beyond {window} were never trained on: expect less of long conversations.

{bits}

## Routing

How often each expert was chosen on the held-out text, after quantisation: per cent of a layer's choices, by expert number
({even:.1f} is even).

{experts}

{spread}

## Samples

From the quantised weights, {sampling}; the first draw of each, whole.

{samples}

## Limits

Trained on {tokens} tokens, so: grammar mostly, sense hardly, facts not at all. The texts are old and of their time.
Questions of other kinds get an answer of one of the kinds above. It says nothing about the quality of large models, and its
routing is like theirs in kind only: a learnt router with uneven, text-dependent use of experts.
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shape_line(figures: Json) -> str:
    shape, parameters = figures["shape"], figures["parameters"]
    return (
        f"{shape['num_hidden_layers']} layers, hidden size {shape['hidden_size']}, {shape['num_attention_heads']} heads and "
        f"{shape['num_key_value_heads']} KV heads of {shape['head_dim']}, {shape['num_experts']} experts of width "
        f"{shape['moe_intermediate_size']}, {shape['num_experts_per_tok']} chosen a token, vocabulary {shape['vocab_size']}: "
        f"{parameters['all'] / 1e6:.1f} M parameters, {parameters['active'] / 1e6:.1f} M of them active a token."
    )


def corpora_table(meta: Json) -> str:
    rows = [[p.kind, p.what, f"`{p.name}` {meta['packages'][p.name]}", p.licence] for p in PACKAGES]
    return table(["kind", "text", "package", "licence"], rows)


def sizes_table(meta: Json) -> str:
    rows = []
    for kind in (*KINDS, "about"):
        train, held = (meta["sizes"].get(f"{kind}.{split}") for split in ("train", "held"))
        seen = f"{meta['overlap']['share'][kind]:.1%}" if held else ""
        held_cells = [f"{held['samples']:,}", f"{held['tokens']:,}"] if held else ["", ""]
        rows.append([kind, f"{train['samples']:,}", f"{train['tokens']:,}", *held_cells, seen])
    return table(["kind", "training samples", "tokens", "held-out samples", "tokens", "seen"], rows)


def tokens_seen(figures: Json) -> int:
    return int(figures["step"] * figures["recipe"]["batch_tokens"])


def training_line(figures: Json) -> str:
    recipe, versions = figures["recipe"], figures["versions"]
    return (
        f"{tokens_seen(figures):,} tokens in {figures['step']:,} steps of {recipe['batch_tokens']:,}, windows of "
        f"{recipe['length']} ({recipe['decay_length']} in the decay). Muon for the matrices (rate {recipe['lr']}), AdamW for "
        f"embedding, routers and norms ({recipe['adam_lr']}), bfloat16 autocast on {recipe['threads']} CPU threads, seed "
        f"{recipe['seed']}, PyTorch {versions['torch']}, Python {versions['python']}. The commands:"
    )


def commands(figures: Json) -> str:
    recipe = figures["recipe"]
    cycles = [*figures["cycles"], (recipe["steps"], recipe["decay_steps"])]
    trains = [
        f"train{' --resume' if number else ''} --steps {steps} --decay-steps {decay_steps}"
        for number, (steps, decay_steps) in enumerate(cycles)
    ]
    verbs = ("fetch", "prepare", *trains, "evaluate", "export", "card")
    return "\n".join(f"python scripts/train_demo_model.py {verb}" for verb in verbs)


def bits_table(figures: Json) -> str:
    rows = []
    for name, bits in figures["bits_per_byte"].items():
        mean = np.mean(list(bits.values()))
        rows.append([f"{name} quantisation", *(f"{bits[kind]:.3f}" for kind in KINDS), f"{mean:.3f}"])
    return table(["", *KINDS, "mean"], rows)


def expert_table(figures: Json) -> str:
    counts = np.sum(list(figures["expert_counts"].values()), axis=0)  # [L, E]
    shares = counts / counts.sum(1, keepdims=True)
    rows = [[str(layer), " ".join(f"{share:.1f}" for share in 100 * row)] for layer, row in enumerate(shares)]
    return table(["layer", "experts"], rows)


def entropy(shares: np.ndarray) -> np.ndarray:
    """Bits, over the last axis."""
    return np.asarray(-np.sum(shares * np.log2(np.maximum(shares, 1e-12)), axis=-1))


def spread_table(figures: Json) -> str:
    by_kind = np.array(list(figures["expert_counts"].values()), float)  # [kinds, L, E]
    shares = by_kind.sum(0) / by_kind.sum((0, 2))[:, None]
    kinds = by_kind / by_kind.sum(2, keepdims=True)
    divergence = entropy(kinds.mean(0)) - entropy(kinds).mean(0)
    rows = [
        ["load entropy (1 is even)", *(f"{e / np.log2(shares.shape[1]):.3f}" for e in entropy(shares))],
        ["hottest expert / mean", *(f"{hot:.2f}" for hot in shares.max(1) * shares.shape[1])],
        ["coldest expert / mean", *(f"{cold:.2f}" for cold in shares.min(1) * shares.shape[1])],
        ["Jensen-Shannon divergence between kinds (bits)", *(f"{d:.3f}" for d in divergence)],
    ]
    return table(["layer", *map(str, range(len(shares)))], rows)


def samples_text(figures: Json) -> str:
    return "\n\n".join(map(sample_block, figures["samples"]))


def sample_block(sample: Json) -> str:
    who = "user" if sample["prompt"].startswith("<user>") else "text"
    end = "ended by itself" if sample["is_ended"] else "cut"
    heading = f"**{who}: {sample['prompt'].removeprefix('<user>')}** ({sample['num_tokens']} tokens, {end})"
    return f"{heading}\n\n~~~~\n{sample['text'].rstrip()}\n~~~~"


def sampling_line(figures: Json) -> str:
    s = figures["sampling"]
    return f"temperature {s['temperature']}, top-p {s['top_p']}, seed {s['seed']}, at most {s['most_tokens']} tokens"


def write_card(run: Path, data: Path, out: Path) -> None:
    figures, meta = (json.loads(path.read_text()) for path in (run / "figures.json", data / "meta.json"))
    card = TEMPLATE.format(
        shape=shape_line(figures),
        corpora=corpora_table(meta),
        notices="\n".join(f"- {notice}" for notice in NOTICES),
        sizes=sizes_table(meta),
        overlap_tokens=meta["overlap"]["tokens"],
        training=training_line(figures),
        commands=commands(figures),
        decay_steps=figures["recipe"]["decay_steps"],
        window=figures["window"],
        bits=bits_table(figures),
        even=100 / figures["shape"]["num_experts"],
        experts=expert_table(figures),
        spread=spread_table(figures),
        sampling=sampling_line(figures),
        samples=samples_text(figures),
        tokens=f"{tokens_seen(figures) / 1e6:.1f} M",
    )
    (out / "README.md").write_text(card)
