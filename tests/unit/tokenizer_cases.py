"""Two small tokenizers with all 256 bytes: byte-level BPE (as Qwen, OLMoE) and pieces with byte fallback (as Mixtral)."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = [
    "hello world, hello token",
    "Straße und Grüße",
    "日本語のテキスト",
    "emoji 🦜🐦 and 👩‍👩‍👧",
    "   spaces\n\n\ttabs",
]


def byte_level() -> Tokenizer:
    """Byte-level BPE with chat markers as special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=special, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Pieces that begin with a space mark, unknown characters as bytes, a begin token before every text."""
    pieces = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("</s>", 0.0),
        ("▁", -2.0),
        ("▁hello", -3.0),
        ("▁world", -3.0),
        ("lo", -3.0),
    ]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)] + [(letter, -4.0) for letter in "abcdehlortw"]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


BACKENDS = {"byte level": byte_level, "byte fallback": byte_fallback}


def write_tokenizer(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """A folder with the files of a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
