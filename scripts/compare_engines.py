"""Compare engines on the built-in model: transformers and mlx-lm write the goldens, colibri-mp is checked against them.

    python scripts/compare_engines.py             # writes tests/golden/demo_model.json and demo_model_logits.npz
    python scripts/compare_engines.py --check     # runs colibri-mp on the same prompts and reports differences

Writing needs ``pip install 'mlx[cpu]' mlx-lm transformers torch``; checking needs colibri-mp alone. All engines compute in
float32: transformers from a dequantised copy of the checkpoint (in a temporary folder), mlx-lm from the codes with its
scales and biases widened. Decoding is greedy, and the least distance between the two best logits along the path is
written down with each case: where it is small, two honest engines may part.

A golden holds for one checkpoint, whose SHA-256 stands in the file; ``--check`` refuses any other. The exit status is
1 when an engine differs from transformers.
"""

import argparse
import hashlib
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
NUM_TOKENS = 48
NUM_LOGIT_ROWS = 12
END_TOKENS = (2, 0)  # <|im_end|>, <|endoftext|>

PLAIN_PROMPTS = {
    "plain story": "Once upon a time",
    "plain scripture": "And the LORD said unto Moses,",
    "plain spanish": "Y el rey dijo",
    "plain python": "def fibonacci(",
    "plain definition": "hummingbird (noun):",
}
CHAT_PROMPTS = {
    "chat story": "Continue the story: It was a dark night at sea, and the captain",
    "chat scripture": "Write scripture: Genesis 3",
    "chat spanish": "Continúa: En aquel tiempo",
    "chat python": "Write python: read_lines",
    "chat documentation": "Explain: Reading files",
    "chat definition": "Define: whale",
    "chat greeting": "Hello!",
}

Greedy = Callable[[list[int]], list[int]]  # prompt to at most NUM_TOKENS tokens, an end token the last if there is one
LogitsOf = Callable[[list[int]], np.ndarray]  # T tokens to [T, V] float32


@dataclass(frozen=True)
class Engine:
    greedy: Greedy
    logits_of: LogitsOf


@dataclass
class Case:
    """One prompt and what each engine made of it; end tokens are left out of ``token_ids``."""

    name: str
    prompt: str
    prompt_ids: list[int]
    text: str
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    is_ended: bool = False
    least_gap: float = 0.0  # between the two best logits (transformers), over the path
    least_gap_at: int = 0  # position in token_ids


def fingerprint(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def without_end(token_ids: list[int]) -> list[int]:
    """The tokens before the first end token."""
    return next((token_ids[:at] for at, token in enumerate(token_ids) if token in END_TOKENS), token_ids)


def transformers_engine(model: Path, scratch: Path) -> Engine:
    """transformers, from the dequantised weights."""
    import torch
    from demo_model.checkpoint import write_dequantised
    from transformers import AutoModelForCausalLM

    write_dequantised(model, scratch)
    network = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()
    network.generation_config.update(do_sample=False, temperature=None, top_p=None)

    @torch.no_grad()
    def greedy(prompt_ids: list[int]) -> list[int]:
        prompt = torch.tensor([prompt_ids])
        made = network.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_TOKENS)
        return made[0, len(prompt_ids) :].tolist()

    @torch.no_grad()
    def logits_of(token_ids: list[int]) -> np.ndarray:
        return network(torch.tensor([token_ids])).logits[0].numpy()

    return Engine(greedy, logits_of)


def mlx_engine(model: Path) -> Engine:
    """mlx-lm, from the codes."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    network = load(str(model))[0]
    network.set_dtype(mx.float32)

    def greedy(prompt_ids: list[int]) -> list[int]:
        made: list[int] = []
        for token, _ in generate_step(mx.array(prompt_ids), network, max_tokens=NUM_TOKENS):
            made.append(int(token))
            if token in END_TOKENS:
                break
        return made

    def logits_of(token_ids: list[int]) -> np.ndarray:
        return np.array(network(mx.array([token_ids]))[0])

    return Engine(greedy, logits_of)


def cases_of(model: Path) -> list[Case]:
    """The prompts, as text and as ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = dict(PLAIN_PROMPTS)
    for name, question in CHAT_PROMPTS.items():
        turns = [{"role": "user", "content": question}]
        texts[name] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return [
        Case(name, text, tokenizer(text, add_special_tokens=False)["input_ids"], "") for name, text in texts.items()
    ]


def add_gap(case: Case, made: list[int], logits_of: LogitsOf) -> None:
    """Find where the two best logits come closest on the path transformers took."""
    rows = logits_of(case.prompt_ids + made)[len(case.prompt_ids) - 1 : -1]
    best = np.sort(rows, axis=1)
    gaps = best[:, -1] - best[:, -2]
    case.least_gap, case.least_gap_at = float(gaps.min()), int(gaps.argmin())


def write_goldens(model: Path, golden: Path, scratch: Path) -> bool:
    """Run both reference engines, write the two files; True if they agree."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    by_transformers, by_mlx, cases = transformers_engine(model, scratch), mlx_engine(model), cases_of(model)
    for case in cases:
        made = by_transformers.greedy(case.prompt_ids)
        add_gap(case, made, by_transformers.logits_of)
        case.is_ended = made[-1] in END_TOKENS
        case.token_ids["transformers"] = without_end(made)
        case.token_ids["mlx"] = without_end(by_mlx.greedy(case.prompt_ids))
        case.text = tokenizer.decode(without_end(made))
    packages = ("transformers", "torch", "mlx", "mlx-lm", "numpy")
    found = {
        "fingerprint": fingerprint(model),
        "num_tokens": NUM_TOKENS,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "greatest_logit_difference": logit_difference(cases, by_transformers, by_mlx),
        "cases": [asdict(case) for case in cases],
    }
    golden.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    write_logits(cases[0], by_transformers, golden.with_name(f"{golden.stem}_logits.npz"))
    return report(found["cases"], "mlx")


def logit_difference(cases: list[Case], one: Engine, other: Engine) -> float:
    """Over the prompts and every logit."""
    return max(float(np.abs(one.logits_of(c.prompt_ids) - other.logits_of(c.prompt_ids)).max()) for c in cases)


def write_logits(case: Case, engine: Engine, path: Path) -> None:
    """The first rows of logits on a prompt and its continuation, for a test of logits."""
    prompt_ids = (case.prompt_ids + case.token_ids["transformers"])[:NUM_LOGIT_ROWS]
    np.savez_compressed(path, prompt_ids=np.array(prompt_ids, np.int32), logits=engine.logits_of(prompt_ids))


def check(model: Path, golden: Path) -> bool:
    """Run colibri-mp on the golden's prompts; True if it makes the same tokens."""
    from colibri_mp import Cluster

    found = json.loads(golden.read_text())
    if found["fingerprint"] != fingerprint(model):
        sys.exit(f"{golden} was written for another checkpoint than {model}: run this script without --check first")
    with Cluster.launch(model) as cluster:
        for case in found["cases"]:
            made = cluster.generate(case["prompt_ids"], max_tokens=found["num_tokens"], temperature=0.0)
            case["token_ids"]["colibri"] = without_end([int(token) for token in made.token_ids])
        with np.load(golden.with_name(f"{golden.stem}_logits.npz")) as file:
            difference = np.abs(cluster.logits(file["prompt_ids"].tolist()) - file["logits"]).max()
    print(f"greatest difference of {NUM_LOGIT_ROWS} rows of logits: {difference:.2g}")
    return report(found["cases"], "colibri")


def report(cases: list[dict[str, Any]], engine: str) -> bool:
    """Print a line a case; True if ``engine`` agrees with transformers everywhere."""
    num_equal = 0
    for case in cases:
        reference, made = case["token_ids"]["transformers"], case["token_ids"][engine]
        is_equal = reference == made
        num_equal += is_equal
        at = next((n for n, pair in enumerate(zip(reference, made, strict=False)) if len(set(pair)) == 2), len(made))
        verdict = "same" if is_equal else f"DIFFERS from token {at}"
        gap = f"least gap {case['least_gap']:.4f} at {case['least_gap_at']}"
        print(f"{case['name']:20} {len(reference):3} tokens  {verdict:24} {gap}  {case['text'][:60]!r}")
    print(f"{engine}: {num_equal} of {len(cases)} as transformers")
    return num_equal == len(cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "colibri_mp/demo_model")
    parser.add_argument("--golden", type=Path, default=ROOT / "tests/golden/demo_model.json")
    parser.add_argument("--check", action="store_true", help="check colibri-mp against the golden")
    options = parser.parse_args()
    if options.check:
        is_right = check(options.model, options.golden)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            is_right = write_goldens(options.model, options.golden, Path(scratch))
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
