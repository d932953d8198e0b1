"""Scripts on a real cluster: transcripts that depend on nothing but the file, the verb as a user meets it."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri_mp import Cluster
from colibri_mp.interruption import Interruption
from colibri_mp.script.checking import read_script
from colibri_mp.script.play import Play, TurnResult
from colibri_mp.script.runner import Runner, make_plays
from colibri_mp.script.transcript import transcript

SESSIONS = Path(__file__).parents[2] / "scripts" / "sessions"
COMMAND = [sys.executable, "-m", "colibri_mp", "script"]


class Silent:
    """A listener that shows nothing."""

    def asked(self, play: Play) -> None:
        """Nothing."""

    def heard(self, play: Play, result: TurnResult) -> None:
        """Nothing."""

    def turn_ended(self, play: Play, result: TurnResult) -> None:
        """Nothing."""

    def ended(self, play: Play) -> None:
        """Nothing."""

    def tick(self) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The built-in model with room for a few of the examples' sessions at once."""
    with Cluster.launch("demo", num_workers=2, num_threads=2, ctx=1024, slots=8, usage="off") as running:
        yield running


def play(cluster: Cluster, path: Path, concurrency: int, shuffle: int | None = None) -> list[Play]:
    """The plays of a script in the order of the file; `shuffle` seeds another order to begin them in."""
    plays = make_plays(read_script(path))
    order = list(plays)
    if shuffle is not None:
        random.Random(shuffle).shuffle(order)
    with Interruption() as interruption:
        Runner(cluster, order, concurrency, Silent(), interruption).run()
    assert [(play.state, play.error) for play in plays] == [("done", "")] * len(plays)
    return plays


@pytest.mark.parametrize("path", sorted(SESSIONS.iterdir()), ids=lambda path: path.name)
def test_transcripts_depend_on_the_file_alone(cluster: Cluster, path: Path) -> None:
    """Every example gives the same bytes one session at a time, three, or sixteen at once, begun in any order."""
    plays = play(cluster, path, 1)
    alone = transcript(plays)
    assert play_bytes(cluster, path, 3, shuffle=1) == alone
    assert play_bytes(cluster, path, 16, shuffle=2) == alone
    lines = [json.loads(line) for line in alone.splitlines()]
    assert all(line.get("skipped") or line["token_ids"] for line in lines)
    answers = [line["text"] for line in lines if line.get("prompt") == lines[0].get("prompt")]
    assert len(set(answers)) == len(answers)  # repeats draw differently


def play_bytes(cluster: Cluster, path: Path, concurrency: int, shuffle: int) -> bytes:
    """The transcript."""
    return transcript(play(cluster, path, concurrency, shuffle))


def script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the verb; nothing is a terminal."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=100, cwd=cwd)


def test_launches_show_learning(tmp_path: Path) -> None:
    """Two launches say the same, the second with what the first has learned; report, tables and progress say so."""
    done = script(str(SESSIONS / "learning.toml"), "--launches", "2", "--output", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    first, second = report["launches"]
    assert second["same_as_first"] is True
    assert (tmp_path / second["transcript"]).read_bytes() == (tmp_path / first["transcript"]).read_bytes()
    assert (tmp_path / first["transcript"]).stat().st_mode & 0o777 == 0o600
    assert second["total"]["cache"]["hit_rate"] > first["total"]["cache"]["hit_rate"]
    for launch in report["launches"]:
        total = launch["total"]
        assert (total["sessions"], total["done"], total["failed"]) == (3, 3, 0)
        assert total["completion_tokens"] == sum(session["completion_tokens"] for session in launch["sessions"])
        assert 0 < total["ttft_s"]["p50"] <= total["ttft_s"]["p99"] <= total["ttft_s"]["max"]
        assert 0 < total["inter_token_s"]["p50"] <= total["inter_token_s"]["p99"]
        assert 0 < launch["memory"]["peak_bytes"] <= launch["memory"]["budget_bytes"]
        assert total["cache"]["bytes_read"] > 0
    assert "scripture #2, turn 1 of 1: " in done.stderr
    assert not list(tmp_path.glob("script-runs"))


def test_a_failed_session_is_seen(tmp_path: Path) -> None:
    """The others are played, the failure is named in table and report, and the exit code is 1."""
    path = tmp_path / "mixed.toml"
    path.write_text(
        '[launch]\nctx = 128\nworkers = 1\n[defaults]\nmax_tokens = 4\n[[session]]\nname = "long"\n'
        f'turns = ["{"word " * 400}"]\n[[session]]\nname = "short"\nturns = ["Define: river"]\n'
    )
    done = script(str(path), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "1 sessions failed" in done.stderr
    assert "launch 1: long failed: turn 1: the prompt has" in done.stdout
    assert "short" in done.stdout
    (folder,) = (tmp_path / "script-runs").iterdir()
    lines = [json.loads(line) for line in (folder / "transcript-1.jsonl").read_text().splitlines()]
    assert [(line["session"], "error" in line) for line in lines] == [("long", True), ("short", False)]


@pytest.mark.parametrize(
    ("content", "arguments", "wanted"),
    [
        ('[[session]]\nname = "a"\ntruns = ["x"]\n', [], "unknown key 'truns'; did you mean 'turns'?"),
        ('[[session]]\nname = "a"\nturns = ["x"]\n', ["--concurrency", "0"], "--concurrency must be at least 1"),
        ('[[session]]\nname = "a"\nturns = ["x"]\n', ["--lanches", "2"], "did you mean --launches?"),
        ('fresh = true\n[[session]]\nname = "a"\nturns = ["x"]\n', ["--usage", "off"], "--usage: this script is fresh"),
    ],
)
def test_wrong_use_of_the_verb(tmp_path: Path, content: str, arguments: list[str], wanted: str) -> None:
    """What is wrong is one message with exit code 2, and nothing has been started or written."""
    (tmp_path / "talk.toml").write_text(content)
    done = script("talk.toml", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["talk.toml"]


def test_check_starts_nothing(tmp_path: Path) -> None:
    """`--check` says what a file holds."""
    done = script(str(SESSIONS / "many.jsonl"), "--check", cwd=tmp_path)
    assert done.returncode == 0
    assert "well-formed: 8 sessions with 17 turns, 1 launches" in done.stderr
    assert not list(tmp_path.iterdir())


def test_interrupt_writes_what_there_is(tmp_path: Path) -> None:
    """Ctrl-C in the middle: the answers so far are in the transcript, the report says so, exit code 130."""
    path = tmp_path / "long.toml"
    path.write_text(
        '[launch]\nctx = 2048\n[defaults]\nignore_eos = true\n[[session]]\nname = "short"\n'
        'turns = [{ text = "Define: river", max_tokens = 5 }, "Define: mountain"]\n'
    )
    process = subprocess.Popen(
        [*COMMAND, str(path), "--output", "out"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path,
    )  # fmt: skip
    assert process.stderr is not None
    assert any("turn 1 of 2" in line for line in process.stderr)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted; what there is has been written to out" in err
    assert "Traceback" not in err
    assert "short stopped: interrupted" in out
    lines = [json.loads(line) for line in (tmp_path / "out" / "transcript-1.jsonl").read_text().splitlines()]
    assert [(line["turn"], line.get("error")) for line in lines] == [(1, None), (2, "interrupted")]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["interrupted"] is True
