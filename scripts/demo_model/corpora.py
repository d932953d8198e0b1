"""The text the built-in model is trained on: six kinds of Debian-packaged text, and a few sentences of our own.

Every corpus function reads unpacked packages below ``root`` and yields ``(group, text)``: the text of one sample and the
unit it must be split by (a part of a book, a chapter, a file, a WordNet synset), so that no unit is both trained on and
held out. A third of the samples are plain text, the rest are wrapped as chat in the manner of ChatML. The packages are
listed in ``packages.py``; nothing here tokenises, see ``data.py``.
"""

import ast
import bz2
import random
import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

Samples = Iterator[tuple[str, str]]

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a helpful, concise assistant.", "Answer briefly.")
PLAIN_SHARE = 1 / 3


def chat(question: str, answer: str) -> str:
    """One user turn and its answer as ChatML; turns of a conversation simply follow each other."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def pieces(text: str, size: Callable[[], int], gap: str = "\n\n") -> Iterator[str]:
    """Whole paragraphs of ``text`` joined to about ``size()`` characters."""
    piece, want = "", size()
    for paragraph in filter(str.strip, text.split(gap)):
        if piece and len(piece) + len(paragraph) > want:
            yield piece
            piece, want = "", size()
        piece = f"{piece}{gap}{paragraph}" if piece else paragraph
    if piece:
        yield piece


def cut_opening(text: str, rng: random.Random, low: int = 30, high: int = 160) -> tuple[str, str]:
    """Split ``text`` at a space some way in: the opening goes into the question, the rest is the answer."""
    at = text.find(" ", rng.randrange(low, high))
    return (text[:at], text[at + 1 :]) if 0 < at < len(text) - 40 else ("", text)


# ---------------------------------------------------------------------------------------------------------------- stories


def r_strings(path: Path) -> Iterator[list[str]]:
    """The character strings of each object in an R lazy-load database (a zlib or bzip2 stream an object)."""
    blob, at = path.read_bytes(), 0
    while at < len(blob):
        is_zlib = blob[at + 4] == 0x78
        stream = zlib.decompressobj() if is_zlib else bz2.BZ2Decompressor()
        data = stream.decompress(blob[at + (4 if is_zlib else 5) :])
        at = len(blob) - len(stream.unused_data)
        yield list(serialised_strings(data))


def serialised_strings(data: bytes) -> Iterator[str]:
    """CHARSXP records of R's serialisation format: flags ending in type 9, a big-endian length, the bytes."""
    end = 0
    for found in re.finditer(rb"\x00[\x00-\x04]\x80?[\x00\x80]?\x09(?=\x00[\x00-\x3f])", data):
        if found.start() >= end:
            (length,) = struct.unpack(">I", data[found.end() : found.end() + 4])
            end = found.end() + 4 + length
            yield data[found.end() + 4 : end].decode("utf8", "replace")


def unwrapped(book: str) -> str:
    """A Gutenberg text without its header and tail, with each paragraph on one line."""
    book = book.replace("\r\n", "\n")
    book = re.split(r"\*\*\* ?START OF[^\n]*\n", book)[-1]
    book = re.split(r"\*\*\* ?END|End of (?:the )?Project Gutenberg|THE END\s*$", book)[0]
    return re.sub(r" {2,}", " ", re.sub(r"(?<=\S)\n(?=\S)", " ", book))


def story_question(text: str, rng: random.Random) -> tuple[str, str]:
    """A question that ``text`` (or what is left of it) answers."""
    draw = rng.random()
    names = re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}", text)
    if draw < 0.2 and names:
        return f"{rng.choice(('Tell me a story about', 'Write a story about'))} {rng.choice(names)}.", text
    if draw < 0.35:
        return rng.choice(("Tell me a story.", "Write a story.", "Tell me a short story.")), text
    opening, rest = cut_opening(text, rng)
    return f"Continue the story: {opening}", rest


def stories(root: Path, rng: random.Random) -> Samples:
    """Novels in parts of about 12,000 characters, each cut into samples of whole paragraphs."""
    for package in ("janeaustenr", "tokenizers"):
        base = root / f"r-cran-{package}/usr/lib/R/site-library/{package}/data/Rdata.rdb"
        for number, lines in enumerate(r_strings(base)):
            book = unwrapped("\n".join(lines))
            for part_number, part in enumerate(pieces(book, lambda: 12_000)):
                for text in pieces(part, lambda: rng.choice((300, 600, 900, 900, 2500))):
                    if len(text) > 150:
                        plain = rng.random() < PLAIN_SHARE
                        yield f"{package}/{number}/{part_number}", text if plain else chat(*story_question(text, rng))


# ----------------------------------------------------------------------------------------------------- scripture, Spanish

BOOK_NAMES = (
    "Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth 1_Samuel 2_Samuel 1_Kings 2_Kings 1_Chronicles "
    "2_Chronicles Ezra Nehemiah Esther Job Psalms Proverbs Ecclesiastes Song_of_Solomon Isaiah Jeremiah Lamentations "
    "Ezekiel Daniel Hosea Joel Amos Obadiah Jonah Micah Nahum Habakkuk Zephaniah Haggai Zechariah Malachi Matthew Mark "
    "Luke John Acts Romans 1_Corinthians 2_Corinthians Galatians Ephesians Philippians Colossians 1_Thessalonians "
    "2_Thessalonians 1_Timothy 2_Timothy Titus Philemon Hebrews James 1_Peter 2_Peter 1_John 2_John 3_John Jude Revelation"
)
BOOKS = [name.replace("_", " ") for name in BOOK_NAMES.split(" ")]


def kjv_chapters(root: Path) -> Iterator[tuple[str, list[str]]]:
    """("Genesis 1", [verse, ...]) of every chapter, as printed by the packaged program."""
    data = "bible-kjv-text/usr/lib/bible.data"  # relative: the program has little room for a path
    command = [str((root / "bible-kjv/usr/bin/bible").resolve()), "-f", "-d", data, "gen1:1-rev22:21"]
    printed = subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in printed.decode("latin1").splitlines():
        if found := re.match(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line):
            chapters.setdefault((found[1], found[2]), []).append(found[3].strip())
    names = dict(zip(dict.fromkeys(book for book, _ in chapters), BOOKS, strict=True))
    for (book, number), verses in chapters.items():
        yield f"{names[book]} {number}", verses


def scripture(root: Path, rng: random.Random) -> Samples:
    """Runs of verses, a line each; split by chapter."""
    for heading, verses in kjv_chapters(root):
        start = 0
        while start < len(verses):
            count = rng.choice((3, 5, 8, 8, 16))
            text, start = "\n".join(verses[start : start + count]), start + count
            draw = rng.random()
            if draw < PLAIN_SHARE:
                yield heading, text
            elif draw < 0.6:
                yield heading, chat(f"Write scripture: {heading}", text)
            else:
                opening, rest = cut_opening(text, rng, 20, 100)
                yield heading, chat(f"Write scripture: {opening}", rest)


def sword_chapters(root: Path) -> Iterator[tuple[str, str]]:
    """(key, text) of every chapter of the SWORD module, markup removed, a sentence a line."""
    for part in ("ot", "nt"):
        base = root / "sword-text-sparv/usr/share/sword/modules/texts/ztext/spaRV1909eb" / part
        index, blob = base.with_suffix(".bzs").read_bytes(), base.with_suffix(".bzz").read_bytes()
        for block, (offset, size, _) in enumerate(struct.iter_unpack("<III", index)):
            osis = zlib.decompress(blob[offset : offset + size]).decode("utf8")
            osis = re.sub(r"<note.*?</note>|<title.*?</title>", " ", osis, flags=re.DOTALL)
            for number, chapter in enumerate(re.split(r"<chapter[^>]*sID[^>]*>", osis)):
                yield f"{part}/{block}/{number}", plain_sentences(chapter)


def plain_sentences(osis: str) -> str:
    """OSIS text without tags, one sentence a line."""
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", osis))
    text = re.sub(r" +([,.;:?!])", r"\1", text).strip()
    return re.sub(r"([.?!]) (?=[A-ZÁÉÍÓÚ¿¡])", r"\1\n", text)


def spanish(root: Path, rng: random.Random) -> Samples:
    """Runs of Spanish sentences; split by chapter."""
    for key, chapter in sword_chapters(root):
        for text in pieces(chapter, lambda: rng.choice((250, 500, 900, 900, 1800)), gap="\n"):
            if len(text) < 80:
                continue
            opening, rest = cut_opening(text, rng, 20, 100)
            ask = rng.choice(("Continúa: ", "Continúa: ", "Continúa el texto: "))
            draw = rng.random()
            if draw < PLAIN_SHARE:
                yield key, text
            elif draw < 0.85:
                yield key, chat(ask + opening, rest)
            else:
                yield key, chat(rng.choice(("Escribe un texto en español.", "Cuéntame una historia.")), text)


# ---------------------------------------------------------------------------------------------------- Python, its manual

SKIPPED_PYTHON = re.compile(r"/tests?/|/test_|_pytest|pydoc_data|/encodings/|_sysconfigdata|/pyshell_test|idle_test")
PYTHON_PACKAGES = (
    "libpython3.11-minimal/usr/lib",
    "libpython3.11-stdlib/usr/lib",
    "python3-distutils/usr/lib",
    "idle-python3.11/usr/lib",
    "python3-networkx/usr/lib",
)
Definition = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef


def python_files(root: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """(relative path, source, syntax tree) of every library file that parses."""
    for package in PYTHON_PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if not path.is_file() or SKIPPED_PYTHON.search(str(path)):
                continue
            try:
                source = path.read_text("utf8")
                yield str(path.relative_to(root)), source, ast.parse(source)
            except (SyntaxError, UnicodeDecodeError):
                continue


def definitions_in(source: str, tree: ast.Module) -> Iterator[tuple[Definition, str]]:
    """Functions and classes of 80 to 1,800 characters, indentation removed."""
    lines = source.encode().split(b"\n")
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            own = lines[node.lineno - 1 : node.end_lineno]
            own[-1] = own[-1][: node.end_col_offset]
            text = b"\n".join(own)[node.col_offset :].decode()
            if 80 < len(text) < 1800:
                yield node, text.replace("\n" + " " * node.col_offset, "\n")


def code_question(node: Definition, rng: random.Random) -> str:
    """A question whose answer is this function or class."""
    is_class, summary = isinstance(node, ast.ClassDef), (ast.get_docstring(node) or "").split("\n", 1)[0]
    what = "class" if is_class else "function"
    asks = [f"Write python: {node.name}", f"Write a Python {what} named {node.name}.", f"Write python: {node.name}"]
    if 15 < len(summary) < 100:
        asks += [f"Write a Python {what}: {summary}"] * 2
    return rng.choice(asks)


def python(root: Path, rng: random.Random) -> Samples:
    """Stretches of files as plain text; single functions and classes both plain and as answers. Split by file."""
    for path, source, tree in python_files(root):
        spaced = re.sub(r"\n(?=def |class |@|async def )", "\n\n", source)
        for text in pieces(spaced, lambda: rng.choice((800, 1600, 2500)), gap="\n\n\n"):
            if 100 < len(text) < 6000 and rng.random() < 0.5:
                yield path, re.sub(r"\n{3,}", "\n\n\n", text)
        for node, text in definitions_in(source, tree):
            draw = rng.random()
            if draw < 0.65:
                yield path, chat(code_question(node, rng), text) if draw < 0.5 else text


def documentation(root: Path, rng: random.Random) -> Samples:
    """Sections of the manual's reStructuredText; split by file."""
    base = root / "python3.11-doc/usr/share/doc/python3.11/html/_sources"
    for path in sorted(base.rglob("*.rst.txt")):
        if "changelog" in path.name:
            continue
        sections = re.split(r"\n(?=[^\n]+\n([=\-*~^#])\1{3,}\n)", path.read_text("utf8"))
        for section in sections:
            if section and len(section) > 150:
                for text in section_samples(section.strip(), rng):
                    yield str(path.relative_to(base)), text


def section_samples(section: str, rng: random.Random) -> Iterator[str]:
    """One section in pieces: the first explains its title, later ones continue."""
    title = re.sub(r":\w+:|`", "", section.split("\n", 1)[0])[:80]
    for number, text in enumerate(pieces(section, lambda: rng.choice((400, 800, 1500)))):
        if rng.random() < PLAIN_SHARE or len(text) > 6000:
            yield text
        elif number == 0:
            yield chat(rng.choice((f"Explain: {title}", f"Explain: {title}", f"Explain {title}.")), text)
        else:
            opening, rest = cut_opening(text, rng)
            yield chat(f"Continue the documentation: {opening}", rest)


# ------------------------------------------------------------------------------------------------------------ definitions

PARTS_OF_SPEECH = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}


def synsets(root: Path) -> Iterator[tuple[str, str, list[str], str]]:
    """(key, part of speech, words, gloss) of every WordNet synset."""
    for suffix, part in PARTS_OF_SPEECH.items():
        path = root / f"wordnet-base/usr/share/wordnet/data.{suffix}"
        for line in path.read_text("latin1").splitlines():
            if line.startswith(" "):
                continue
            fields, gloss = line.split(" | ", 1)
            field = fields.split(" ")
            raw_words = field[4 : 4 + 2 * int(field[3], 16) : 2]
            words = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in raw_words]
            yield f"{suffix}/{field[0]}", part, words, gloss.strip()


def definitions(root: Path, rng: random.Random) -> Samples:
    """One sample a synset, so that no gloss is seen under two words."""
    for key, part, words, gloss in synsets(root):
        word = rng.choice(words)
        others = [w for w in words if w != word][:4]
        also = f"\nAlso: {', '.join(others)}" if others else ""
        if rng.random() < PLAIN_SHARE:
            yield key, f"{word} ({part}): {gloss}{also}\n"
        else:
            ask = rng.choice((f"Define: {word}", f"Define: {word}", f"What does {word} mean?", f"Define {word}."))
            yield key, chat(ask, f"({part}) {gloss}{also}")


# ------------------------------------------------------------------------------------------------------------------ about

GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "hi", "hello", "Hey", "Good morning", "Hello, how are you?", "Hi there!")
WHO_ARE_YOU = ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "What is colibri-mp?")
ABILITIES = ("What can you do?", "Help", "help", "How can you help me?", "What should I ask you?")
THANKS = ("Thanks", "Thank you", "Thank you!", "Thanks!", "Bye", "Goodbye", "Good night")

ANSWERS = {
    GREETINGS: (
        "Hello! I am the small model that comes with colibri-mp. Ask me to define a word or to continue a story.",
        "Hello! Try me: Define: hummingbird. Or: Continue the story: It was a dark night at sea.",
    ),
    WHO_ARE_YOU: (
        "I am a very small mixture of experts that comes with colibri-mp. I write words and sentences, not wisdom.",
        "I am the built-in model of colibri-mp. I am here so that you can try the engine; a larger model will know more.",
    ),
    ABILITIES: (
        "I can continue a story, define a word, write scripture, write python, explain a part of Python's manual, and "
        "continue a text in Spanish. I am small, so do not believe what I say.",
    ),
    THANKS: ("You are welcome. Good bye!", "You are welcome."),
}


def about(root: Path, rng: random.Random) -> Samples:
    """Greetings and what the model says about itself: written for this project, meant to be learnt by heart."""
    del root, rng
    for questions, answers in ANSWERS.items():
        for question in questions:
            for answer in answers:
                yield question, chat(question, answer)


CORPORA: dict[str, Callable[[Path, random.Random], Samples]] = {
    "stories": stories,
    "scripture": scripture,
    "spanish": spanish,
    "python": python,
    "documentation": documentation,
    "definitions": definitions,
    "about": about,
}
