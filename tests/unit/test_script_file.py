"""The file of a script: what it means, and that everything wrong in it is named before anything starts."""

from pathlib import Path

import pytest

from colibri_mp.errors import ConfigError
from colibri_mp.messages import Constraint
from colibri_mp.script.checking import read_script
from colibri_mp.script.definition import Script
from colibri_mp.script.placeholders import Answer, Repeat, parse
from colibri_mp.script.seeds import derive_seed

EXAMPLES = sorted((Path(__file__).parents[2] / "scripts" / "sessions").iterdir())
GOOD = '[[session]]\nname = "anna"\nturns = ["Hi"]\n'


def read(tmp_path: Path, content: str, suffix: str = ".toml") -> Script:
    """The script of a text."""
    path = tmp_path / f"talk{suffix}"
    path.write_text(content)
    return read_script(path)


def problems(tmp_path: Path, content: str, suffix: str = ".toml") -> str:
    """What is said of a text that is wrong; every line names the file."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content, suffix)
    message = str(caught.value)
    assert all(line.startswith(str(tmp_path / "talk")) for line in message.split("\n"))
    return message


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_well_formed(path: Path) -> None:
    """Every example has sessions with turns."""
    assert all(session.turns for session in read_script(path).sessions)


def test_everything_a_file_may_say(tmp_path: Path) -> None:
    """Settings, defaults, sessions and turns arrive where they belong; the innermost option wins."""
    script = read(
        tmp_path,
        """
        name = "talk of two"
        seed = 9
        launches = 2
        concurrency = 3
        settle_s = 1
        [launch]
        workers = 2
        ram = "1GB"
        pins = 0
        [defaults]
        system = "Be brief."
        temperature = 1
        stop = "END"
        [[session]]
        name = "anna"
        temperature = 0.5
        repeat = 2
        turns = ["Hi", { text = "So {answer}?", temperature = 0, seed = 5, repeat = 2, when = "a", unless = "b", expect = "c" }]
        [[session]]
        name = "ben"
        after = "anna"
        delay_s = 0.5
        history = false
        max_tokens = 3
        turns = [[1, 2], { ids = [3], logit_bias = { 7 = -1.5 }, constraint = { kind = "regex", text = "a+" } }]
        """,
    )
    anna, ben = script.sessions
    assert (script.name, script.seed, script.launches, script.concurrency, script.settle_s) == (
        "talk of two",
        9,
        2,
        3,
        1,
    )
    assert script.launch == {"num_workers": 2, "ram": "1GB", "pins": 0}
    assert (anna.form, anna.repeat, len(anna.turns), anna.system) == ("chat", 2, 3, parse("Be brief."))
    assert anna.turns[0].options == {"temperature": 0.5, "stop": ("END",)}
    assert anna.turns[1] == anna.turns[2]
    assert (anna.turns[1].options["temperature"], anna.turns[1].seed) == (0, 5)
    assert [
        found and found.pattern for found in (anna.turns[1].when, anna.turns[1].unless, anna.turns[1].expect)
    ] == list("abc")
    assert (ben.form, ben.after, ben.delay_s, ben.history) == ("ids", ("anna",), 0.5, False)
    assert ben.turns[0].ids == (1, 2)
    assert ben.turns[1].options == {
        "temperature": 1, "stop": ("END",), "max_tokens": 3, "logit_bias": {7: -1.5}, "constraint": Constraint("regex", "a+"),
    }  # fmt: skip


def test_jsonl_says_the_same_as_toml(tmp_path: Path) -> None:
    """The two forms of a file make equal scripts."""
    toml = read(tmp_path, "seed = 4\n[defaults]\ntop_k = 3\n" + GOOD)
    jsonl = read(
        tmp_path,
        '{"settings": {"seed": 4, "defaults": {"top_k": 3}}}\n\n{"name": "anna", "turns": ["Hi"]}\n',
        ".jsonl",
    )
    assert (toml.seed, toml.sessions) == (jsonl.seed, jsonl.sessions)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("seeed = 1\n" + GOOD, "unknown key 'seeed'; did you mean 'seed'?"),
        ("seed = -1\n" + GOOD, "seed: must be an integer of at least 0, not -1"),
        ("launches = 'two'\n" + GOOD, "launches: must be an integer from 1 to 10000, not 'two'"),
        ("settle_s = inf\n" + GOOD, "settle_s: must be a number of seconds"),
        ("fresh = true\n[launch]\nusage = 'x'\n" + GOOD, "leave launch.usage out"),
        ("[launch]\nworker = 1\n" + GOOD, "launch: unknown key 'worker'; did you mean 'workers'?"),
        ("[launch]\nworkers = '1'\n" + GOOD, "launch, workers: must be int, not '1'"),
        ("[launch]\nram = 'much'\n" + GOOD, "launch, ram: not a size: 'much'"),
        ("[defaults]\ntempo = 1\n" + GOOD, "defaults: unknown key 'tempo'"),
        ("", "there is no session"),
        ("[session]\nname = 'anna'\n", "[[session]] with two brackets"),
        ("x = = 1", "not valid TOML"),
        (GOOD + GOOD, "session 2, name: 'anna' is taken by session 1"),
        ("[[session]]\nturns = ['x']\n", "session 1, name: must be a word"),
        ("[[session]]\nname = 'a b'\nturns = ['x']\n", "session 1, name: must be a word"),
        ("[[session]]\nname = 'anna'\n", "session 'anna': has no turns"),
        ("[[session]]\nname = 'anna'\nturns = []\n", "session 'anna', turns: must be a list that is not empty"),
        (GOOD + "temperatur = 1\n", "session 'anna': unknown key 'temperatur'; did you mean 'temperature'?"),
        (GOOD + "temperature = 'hot'\n", "session 'anna', temperature: expected float, got str, and this is 'hot'"),
        (GOOD + "top_p = 2\n", "session 'anna', top_p: must be in (0, 1], not 2"),
        (GOOD + "max_tokens = 0\n", "session 'anna', max_tokens: must be an integer of at least 1, not 0"),
        (GOOD + "constraint = { kind = 'regx', text = 'a' }\n", "session 'anna', constraint: Invalid enum value 'regx'"),
        (GOOD + "constraint = { kind = 'regex', txt = 'a' }\n", "constraint: has the keys kind and text, not kind, txt"),
        (GOOD + "logit_bias = { a = 1 }\n", "session 'anna', logit_bias: expected int, got str"),
        (GOOD + "stop = ''\n", "session 'anna', stop: must be a text that is not empty"),
        (GOOD + "repeat = true\n", "session 'anna', repeat: must be an integer"),
        (GOOD + "after = 'ann'\n", "session 'anna', after: there is no session 'ann'; did you mean 'anna'?"),
        (GOOD + "after = 'anna'\n", "sessions wait for each other: anna -> anna"),
        (GOOD.replace("Hi", " "), "session 'anna', turn 1, text: must be a text that is not empty"),
        (GOOD.replace('"Hi"', "3"), "session 'anna', turn 1: must be a text, a list of token ids, or a table, not 3"),
        (GOOD.replace('"Hi"', "[]"), "session 'anna', turn 1, ids: must be a list of token ids that is not empty"),
        (GOOD.replace('"Hi"', "[1, -2]"), "session 'anna', turn 1, ids: must be a list of token ids"),
        (GOOD.replace('"Hi"', '"a", [1]'), "session 'anna', turns: turns are texts or token ids, not both"),
        (GOOD.replace('"Hi"', "[1]") + "system = 'x'\n", "session 'anna', system: only a session with the chat template"),
        (GOOD.replace('"Hi"', "{}"), "session 'anna', turn 1: needs either text or ids"),
        (GOOD.replace('"Hi"', '{ text = "a", wen = "b" }'), "turn 1: unknown key 'wen'; did you mean 'when'?"),
        (GOOD.replace('"Hi"', '"a", { text = "a", when = "(" }'), "turn 2, when: not a regular expression"),
        (GOOD.replace('"Hi"', '{ text = "a", when = "b" }'), "turn 1: when and unless look at the answer before"),
        (GOOD.replace("Hi", "{answre}"), "turn 1, text: there is no placeholder '{answre}'; did you mean {answer}?"),
        (GOOD.replace("Hi", "f() {"), "turn 1, text: a single '{'; write '{{' for a brace"),
        (GOOD.replace("Hi", "{answer}"), "turn 1, text: {answer}: there is no answer before it"),
        (GOOD.replace('"Hi"', '"a", "{answers[1]}"'), "turn 2, text: {answers[1]}: there is only answers[0] before it"),
        (GOOD.replace("Hi", "{ben.answer}"), "turn 1, text: takes an answer of 'ben': add it to after"),
        (GOOD + "after = 'ben'\n" + GOOD.replace("anna", "ben") + "after = 'anna'\n", "wait for each other"),
        (
            GOOD.replace("Hi", "{ben.answer}") + "after = 'ben'\n" + GOOD.replace("anna", "ben") + "repeat = 2\n",
            "takes an answer of 'ben', which is played 2 times",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, content: str, wanted: str) -> None:
    """The message has the session, the turn, the key, the value and the cure."""
    assert wanted in problems(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("{", "line 1: not valid JSON"),
        ('{"name": "a", "name": "b", "turns": ["x"]}', "line 1: not valid JSON: the key 'name' stands there twice"),
        ("\n3\n", "line 2: must be a table with a name and turns, not 3"),
        ('{"settings": 3}', "line 1: settings must be an object"),
        ('{"settings": {}}\n{"name": "a"}', "session 'a': has no turns"),
        ('{"name": "a", "turns": ["x"]}\n{"settings": {}}', "line 2, name: must be a word"),
        ("[" * 10_000, "line 1: not valid JSON"),
    ],
)
def test_what_is_wrong_in_jsonl_is_named(tmp_path: Path, content: str, wanted: str) -> None:
    """The message has the line."""
    assert wanted in problems(tmp_path, content, ".jsonl")


def test_all_problems_at_once(tmp_path: Path) -> None:
    """A file with many faults is told of all, up to a number."""
    assert len(problems(tmp_path, "a = 1\nb = 2\n[[session]]\nc = 3\n").split("\n")) == 5
    found = problems(tmp_path, "[[session]]\n" + "".join(f"key{n} = 1\n" for n in range(40)))
    assert found.endswith("and 22 more")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, another kind of file, and bytes that are no text are named."""
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        read_script(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.toml: cannot be read"):
        read_script(tmp_path / "bytes.toml")
    assert "a script is a .toml or a .jsonl file" in problems(tmp_path, GOOD, ".yaml")


def test_placeholders_and_braces() -> None:
    """Answers and the repeat are filled in; doubled braces are braces; braces in an answer mean nothing."""
    template = parse("{{{answers[0]}}} {ben.answer} {repeat} {answer}")
    assert template.parts == (
        "{", Answer(None, 0), "}", " ", Answer("ben", -1), " ", Repeat(), " ", Answer(None, -1),
    )  # fmt: skip
    assert template.fill(lambda answer: f"<{answer.session} {answer.index} {{x}}>", 3) == (
        "{<None 0 {x}>} <ben -1 {x}> 3 <None -1 {x}>"
    )


def test_derived_seeds_are_pinned() -> None:
    """Transcripts of old scripts stay what they were: the hash does not change. No two turns share a seed."""
    assert derive_seed(7, "anna", 1, 1) == 2818001315316343624
    seeds = {
        derive_seed(*key) for key in [(0, "a", 1, 1), (1, "a", 1, 1), (0, "b", 1, 1), (0, "a", 2, 1), (0, "a", 1, 2)]
    }
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
