"""From samples to token streams: the split, the tokenizer, and the batches.

``prepare`` writes, below one folder, ``tokenizer.json``, ``KIND.SPLIT.npz`` (``ids`` uint16, ``starts`` of the samples)
and ``meta.json`` (sizes, package versions, overlap between the splits). A batch depends on the seed and the step number
alone, so a run that was stopped and resumed sees the same batches as one that was not.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpora import CORPORA, SYSTEM_PROMPTS
from .packages import versions_below

KINDS = tuple(kind for kind in CORPORA if kind != "about")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = range(3)
VOCAB_SIZE = 4096
HELD_OUT_ONE_IN = 25
OVERLAP_TOKENS = 16
ABOUT_SHARE = 0.015
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Splits = dict[str, list[str]]


def is_held_out(kind: str, group: str) -> bool:
    """Whether a unit of text is held out: decided by its name alone. Our own sentences never are."""
    digest = hashlib.md5(f"{kind}:{group}".encode(), usedforsecurity=False).digest()
    return kind != "about" and int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def split_samples(kind: str, root: Path, seed: int) -> Splits:
    """All samples of a kind, shuffled, exact repeats dropped, some chats given a system message."""
    rng = random.Random(f"{seed}:{kind}")
    seen: set[str] = set()
    splits: Splits = {"train": [], "held": []}
    for group, text in CORPORA[kind](root, rng):
        if text not in seen:
            seen.add(text)
            has_system = text.startswith("<|im_start|>") and rng.random() < 0.08
            system = f"<|im_start|>system\n{rng.choice(SYSTEM_PROMPTS)}<|im_end|>\n" if has_system else ""
            splits["held" if is_held_out(kind, group) else "train"].append(system + text)
    for samples in splits.values():
        rng.shuffle(samples)
    return splits


def train_tokenizer(splits: dict[str, Splits], bytes_each: int = 2_500_000) -> Tokenizer:
    """Byte-level BPE learnt on about as much training text of each kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_text(splits, bytes_each), trainer)
    return tokenizer


def tokenizer_text(splits: dict[str, Splits], bytes_each: int) -> Iterator[str]:
    """Training samples of every kind, chat markers removed, until each has given its share."""
    for split in splits.values():
        left = bytes_each
        for text in split["train"]:
            plain = re.sub("|".join(map(re.escape, SPECIAL_TOKENS)), "", text)
            yield plain
            left -= len(plain)
            if left < 0:
                break


@dataclass(frozen=True)
class Stream:
    """All samples of one kind and split, one after the other."""

    ids: np.ndarray  # [N] uint16
    starts: np.ndarray  # [samples] int64
    text_bytes: int  # UTF-8 bytes of the text, the special tokens not counted

    def save(self, path: Path) -> None:
        np.savez(path, ids=self.ids, starts=self.starts, text_bytes=self.text_bytes)

    @classmethod
    def load(cls, path: Path) -> "Stream":
        with np.load(path) as file:
            return cls(file["ids"], file["starts"], int(file["text_bytes"]))


def to_stream(tokenizer: Tokenizer, samples: list[str], seed: int, keep_apart: bool) -> Stream:
    """Tokenise; end each sample with <|endoftext|>, but let one chat in five run on into the next as a second turn."""
    rng = random.Random(seed)
    ids: list[int] = []
    starts, size = [], 0
    is_chat = [text.startswith("<|im_start|>user") for text in samples]
    encoded = tokenizer.encode_batch(samples, add_special_tokens=False)
    for number, (text, encoding) in enumerate(zip(samples, encoded, strict=True)):
        starts.append(len(ids))
        ids += encoding.ids
        size += len(text.encode()) - sum(len(s) * text.count(s) for s in SPECIAL_TOKENS)
        next_is_chat = number + 1 < len(samples) and is_chat[number + 1]
        if keep_apart or not (is_chat[number] and next_is_chat and rng.random() < 0.2):
            ids.append(END_OF_TEXT)
    return Stream(np.array(ids, np.uint16), np.array(starts, np.int64), size)


def ngram_hashes(ids: np.ndarray, n: int = OVERLAP_TOKENS) -> np.ndarray:
    """[N - n + 1] uint64: a hash of every run of n tokens."""
    hashes = np.zeros(len(ids) - n + 1, np.uint64)
    for offset in range(n):
        hashes = hashes * np.uint64(6364136223846793005) + ids[offset : len(ids) - n + 1 + offset].astype(np.uint64)
    return hashes


def overlaps(streams: dict[tuple[str, str], Stream]) -> dict[str, float]:
    """For each kind, the share of its held-out token runs that occur anywhere in the training text of any kind."""
    seen = np.unique(np.concatenate([ngram_hashes(s.ids) for (_, split), s in streams.items() if split == "train"]))
    return {
        kind: float(np.isin(ngram_hashes(s.ids), seen).mean())
        for (kind, split), s in streams.items()
        if split == "held" and len(s.ids) > OVERLAP_TOKENS
    }


def prepare(root: Path, out: Path, seed: int) -> None:
    """Read the corpora below ``root`` and write everything training needs into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    splits = {kind: split_samples(kind, root, seed) for kind in CORPORA}
    tokenizer = train_tokenizer(splits)
    tokenizer.save(str(out / "tokenizer.json"))
    streams: dict[tuple[str, str], Stream] = {}
    for kind, split in splits.items():
        for name, samples in split.items():
            if samples:
                stream = to_stream(tokenizer, samples, seed, keep_apart=name == "held")
                stream.save(out / f"{kind}.{name}.npz")
                streams[kind, name] = stream
                print(f"{kind:14} {name:6} {len(samples):7} samples {len(stream.ids):9} tokens")
    meta = {
        "seed": seed,
        "packages": versions_below(root),
        "sizes": {
            f"{kind}.{name}": {"samples": len(s.starts), "tokens": len(s.ids), "bytes": s.text_bytes}
            for (kind, name), s in streams.items()
        },
        "overlap": {"tokens": OVERLAP_TOKENS, "share": overlaps(streams)},
    }
    (out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    print("overlap", meta["overlap"])


class Batches:
    """Training windows: kinds by the square root of their size, half the windows from the start of a sample."""

    def __init__(self, data: Path, seed: int) -> None:
        self.seed = seed
        self.streams = [Stream.load(data / f"{kind}.train.npz") for kind in (*KINDS, "about")]
        roots = np.sqrt([len(s.ids) for s in self.streams[:-1]])
        self.shares = np.append(roots / roots.sum() * (1 - ABOUT_SHARE), ABOUT_SHARE)

    def batch(self, step: int, size: int, length: int) -> np.ndarray:
        """[size, length + 1] int64 token ids of training step ``step``."""
        rng = np.random.default_rng((self.seed, step))
        kinds = rng.choice(len(self.streams), size=size, p=self.shares)
        return np.stack([self.window(self.streams[kind], length + 1, rng) for kind in kinds]).astype(np.int64)

    def window(self, stream: Stream, length: int, rng: np.random.Generator) -> np.ndarray:
        ids, last = stream.ids, len(stream.ids) - length
        at = int(rng.choice(stream.starts)) if rng.random() < 0.5 else int(rng.integers(len(ids)))
        return ids[at : at + length] if at <= last else np.concatenate((ids[at:], ids[: length - len(ids) + at]))
