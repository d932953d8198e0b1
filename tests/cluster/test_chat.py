"""Chat: commands, files, a full context; from a pipe and, through a pseudo-terminal, as a person uses it."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from colibri_mp import Cluster
from colibri_mp.chat import Chat
from colibri_mp.chat.conversation import Conversation
from colibri_mp.chat.lines import PipedLines
from colibri_mp.errors import ConfigError
from colibri_mp.messages import Failed, Finished

COMMAND = [sys.executable, "-m", "colibri_mp"]
TALK = [*COMMAND, "chat", "--name", "talk", "--temp", "0", "--max-tokens", "16"]
ENDLESS = """
import sys
from colibri_mp import Cluster
from colibri_mp.cli import main
from colibri_mp.commands import chat
chat.sampling_options = lambda args: {"temperature": 0.0, "ignore_eos": True}
sys.exit(main(["chat", "--name", "talk"]))
"""
BECOME_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A running cluster that the verbs attach to."""
    with Cluster.launch("demo", name="talk", num_workers=1, num_threads=2, ctx=512, usage="off") as running:
        yield running


class Terminal:
    """A process with a terminal of its own, of which the test is the person."""

    def __init__(self, command: list[str]) -> None:
        self._fd, other = os.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", BECOME_TERMINAL, *command],
            stdin=other, stdout=other, stderr=other, start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(other)

    def press(self, text: str) -> None:
        """Press keys."""
        os.write(self._fd, text.encode())

    def wait_for(self, wanted: str) -> None:
        """Read until `wanted` is shown; what came before it is forgotten."""
        deadline = time.monotonic() + 40
        while wanted not in self.shown:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._fd], [], [], left_s)[0] or not self._read():
                pytest.fail(f"{wanted!r} is not shown, but {self.shown!r}")
        self.shown = self.shown.partition(wanted)[2]

    def interrupt_line(self) -> None:
        """Ctrl-C in the middle of a line. Readline sees a signal that comes just before it sleeps only at the next key."""
        self.press("half")
        self.wait_for("half")
        self.press("\x03")
        if not select.select([self._fd], [], [], 3)[0]:
            self.press("\r")

    def wait_for_end(self) -> int:
        """Read to the end; returns the exit code."""
        while select.select([self._fd], [], [], 40)[0] and self._read():
            pass
        return self.process.wait(timeout=40)

    def _read(self) -> bool:
        try:
            content = os.read(self._fd, 4096)
        except OSError:  # Linux: the other side is closed
            return False
        self.shown += content.decode(errors="replace")
        return bool(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def piped(text: str) -> subprocess.CompletedProcess[str]:
    """The verb with input from a pipe."""
    return subprocess.run(TALK, input=text, capture_output=True, text=True, timeout=100)


def talk(cluster: Cluster, text: str, **options: Any) -> tuple[int, str, str]:
    """Exit code, output and remarks of a chat with these lines."""
    out, remarks = io.StringIO(), io.StringIO()
    settings = {"max_tokens": 16, "temperature": 0.0, **options}
    code = Chat(cluster, settings, None, out, remarks).run(PipedLines(io.StringIO(text)))
    return code, out.getvalue(), remarks.getvalue()


# -- pipes -------------------------------------------------------------------------------------------------------------


def test_from_a_pipe(cluster: Cluster) -> None:
    """One message a line, no prompt shown, answers on stdout, remarks on stderr; the history is part of the next prompt."""
    done = piped("Define: river\n/stats\nDefine: \\\nsea\n/stats\n/reset\nDefine: sea\n/stats\n/exit\nnever read\n")
    assert done.returncode == 0, done.stderr
    assert "> " not in done.stdout
    prompts = [int(line.split("(")[1].split()[0]) for line in done.stdout.splitlines() if "prompt tokens" in line]
    first, second, third = prompts
    assert first < second
    assert third < second
    assert done.stdout.startswith(
        cluster.generate([{"role": "user", "content": "Define: river"}], max_tokens=16, temperature=0.0).text
    )
    assert "[cut after 16 tokens, by --max-tokens]" in done.stderr


def test_what_fails_in_a_pipe_is_in_the_exit_code(cluster: Cluster) -> None:
    """An unknown command is named with the nearest one; the rest is done; the exit code is 1."""
    done = piped("/rset\nDefine: river\n")
    assert done.returncode == 1
    assert "[unknown command /rset; did you mean /reset?]" in done.stderr
    assert done.stdout.strip()


def test_commands(cluster: Cluster) -> None:
    """/system, /undo, /retry and /stats do what they say, and say what they cannot do."""
    code, out, remarks = talk(
        cluster, "/stats\n/undo\n/retry\n/system Be brief.\nDefine: river\n/retry\n/stats\n/undo\n/stats\n"
    )
    assert code == 1
    assert "nothing to take back" in remarks
    assert "no question to ask again" in remarks
    lines = out.splitlines()
    assert lines[0] == "no answer yet"
    answers, messages = lines[1:3], [line for line in lines if line.endswith("messages in the conversation")]
    assert answers[0] == answers[1]  # greedy: the same question gets the same answer
    assert messages == ["2 messages in the conversation", "0 messages in the conversation"]


def test_retry_with_a_seed_draws_anew(cluster: Cluster) -> None:
    """With --seed a question asked again gets another answer, the same one in every run."""
    runs = [talk(cluster, "Define: river\n/retry\n", temperature=1.0, seed=5)[1] for _ in range(2)]
    first, second = runs[0].splitlines()[:2]
    assert runs[0] == runs[1]
    assert first != second


def test_save_and_load(cluster: Cluster, tmp_path: Path) -> None:
    """A loaded conversation goes on as the saved one would have; the file is the user's alone and replaced as a whole."""
    path = tmp_path / "talk.json"
    path.write_text("old")
    _, out, _ = talk(cluster, f"/system Be brief.\nDefine: river\n/save {path}\nDefine: sea\n")
    saved = json.loads(path.read_text())
    assert (saved["format"], saved["version"], saved["system"]) == ("colibri-mp conversation", 1, "Be brief.")
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]
    assert path.stat().st_mode & 0o777 == 0o600
    code, again, remarks = talk(cluster, f"/load {path}\nDefine: sea\n")
    assert (code, again.splitlines()[-1]) == (0, out.splitlines()[-1])
    assert f"[2 messages of {path}" in remarks


def test_what_was_computed_is_saved_too(cluster: Cluster, tmp_path: Path) -> None:
    """Another cluster goes on without computing the conversation again; a damaged file is said, and changes no answer."""
    path = tmp_path / "talk.json"
    _, out, remarks = talk(cluster, f"{'What does it mean? ' * 12}\n/save {path}\nDefine: sea\n")
    kept = tmp_path / "talk.json.kv"
    assert re.search(r"saved 2 messages to .*; [1-9]\d+ computed tokens of \d+ to ", remarks)
    assert kept.stat().st_mode & 0o777 == 0o600
    whole = kept.read_bytes()
    with Cluster.launch("demo", num_workers=1, num_threads=2, ctx=512, usage="off") as other:
        kept.write_bytes(whole[:-100])
        code, _, remarks = talk(other, f"/load {path}\n")
        assert (code, remarks.count("[2 messages of ")) == (0, 1)
        assert "(the next answer begins later)" in remarks
        kept.write_bytes(whole)
        _, restored, remarks = talk(other, f"/load {path}\nDefine: sea\n/stats\n")
        assert "tokens need not be computed again" in remarks
        assert "of them cached" in restored
    assert restored.splitlines()[0] == out.splitlines()[-1]
    kept.unlink()
    assert "is not there" in talk(cluster, f"/load {path}\n")[2]
    talk(cluster, f"/save {path}\n")  # nothing has been said: nothing is kept
    assert not kept.exists()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("{", "is not a conversation"),
        ("[" * 100_000, "is not a conversation"),
        ('{"format": "x"}', "is not a conversation"),
        ('{"format": "colibri-mp conversation", "version": 2}', "has version 2"),
        ('{"format": "colibri-mp conversation", "version": 1, "system": 3}', "system must be a text"),
        ('{"format": "colibri-mp conversation", "version": 1, "messages": [{}]}', "each with its answer"),
        (
            '{"format": "colibri-mp conversation", "version": 1, "messages": [{"role": "user", "content": "a"}, 3]}',
            "message 2 must have the role 'assistant'",
        ),
    ],
)
def test_files_that_are_no_conversation(tmp_path: Path, content: str, wanted: str) -> None:
    """Each is named with what is wrong."""
    path = tmp_path / "talk.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=wanted):
        Conversation.load(path)


def test_bad_places(cluster: Cluster, tmp_path: Path) -> None:
    """A file that cannot be read or written is named, and what has been said is still there."""
    text = f"Define: river\n/load {tmp_path}/none\n/save {tmp_path}/no/where\n/save {tmp_path}\n/save\n/stats\n"
    code, out, remarks = talk(cluster, text)
    assert code == 1
    assert "none: cannot be read: No such file" in remarks
    assert "where: cannot be written: there is no such folder" in remarks
    assert "cannot be written: it is a folder" in remarks
    assert "/save needs the name of a file" in remarks
    assert "2 messages in the conversation" in out


def test_a_full_context(cluster: Cluster) -> None:
    """A question that does not fit and an answer that fills the context say so, with the cure; /reset makes room."""
    code, out, remarks = talk(cluster, f"{'word ' * 600}\n/reset\nDefine: river\n")
    assert code == 1
    assert "the context holds 512" in remarks
    assert "/undo takes back" in remarks
    assert out.strip()
    code, _, remarks = talk(cluster, "Define: river\n", max_tokens=None, ignore_eos=True)
    assert code == 0
    assert "[the context is full: /undo or /reset makes room, or start again with a larger --ctx]" in remarks


def test_a_failure_of_the_cluster_ends_one_answer() -> None:
    """An expert that cannot be read fails the answer; the conversation is still there, and the question can be asked again."""

    class Failing:
        def __init__(self) -> None:
            self.events = [Failed(1, "read", "layer 3: cannot be read"), Finished(2, "stop", "Yes.", {})]

        def submit(self, prompt: Any, **options: Any) -> int:
            return self.events[0].request_id

        def next_event(self, timeout_s: float | None, wake_fd: int | None) -> tuple[int, Failed | Finished]:
            event = self.events.pop(0)
            return event.request_id, event

    code, out, remarks = talk(Failing(), "Really?\n/retry\n")  # type: ignore[arg-type]
    assert (code, out) == (1, "Yes.\n")
    assert "[layer 3: cannot be read; /retry asks again]" in remarks


# -- terminals ---------------------------------------------------------------------------------------------------------


def test_a_person_at_a_terminal(cluster: Cluster) -> None:
    """A prompt is shown, the last line comes back with the arrow, Tab completes a command, Ctrl-D ends with exit code 0."""
    with Terminal(TALK) as terminal:
        terminal.wait_for("/help shows the commands")
        terminal.wait_for("> ")
        terminal.press("Define: river\r")
        terminal.wait_for("by --max-tokens]")
        terminal.wait_for("> ")
        terminal.press("\x1b[A\r")
        terminal.wait_for("by --max-tokens]")
        terminal.press("/st\t\r")
        terminal.wait_for("4 messages in the conversation")
        terminal.wait_for("> ")
        terminal.press("\x04")
        assert terminal.wait_for_end() == 0


def test_interrupting_an_answer(cluster: Cluster) -> None:
    """Ctrl-C stops the answer and not the program; what there is of it stays; nothing of the request is left."""
    with Terminal([sys.executable, "-c", ENDLESS]) as terminal:
        terminal.wait_for("> ")
        terminal.press("Define: river\r")
        terminal.wait_for("(noun)")
        terminal.press("\x03")
        terminal.wait_for("[stopped]")
        terminal.wait_for("> ")
        terminal.press("/stats\r")
        terminal.wait_for("ended: cancelled")
        terminal.wait_for("2 messages in the conversation")
        requests = cluster.stats()["requests"]
        assert (requests["active"], requests["kv_blocks_free"]) == (0, requests["kv_blocks"])
        terminal.press("/exit\r")
        assert terminal.wait_for_end() == 0


def test_interrupting_at_the_prompt(cluster: Cluster) -> None:
    """Ctrl-C at the prompt gives a hint and drops the line; a second one ends with exit code 130."""
    with Terminal(TALK) as terminal:
        terminal.wait_for("> ")
        terminal.interrupt_line()
        terminal.wait_for("(Ctrl-C again, /exit or Ctrl-D ends)")
        terminal.wait_for("> ")
        terminal.press("/stats\r")
        terminal.wait_for("no answer yet")
        terminal.wait_for("> ")
        terminal.interrupt_line()
        terminal.wait_for("(Ctrl-C again")
        terminal.wait_for("> ")
        terminal.interrupt_line()
        assert terminal.wait_for_end() == 128 + signal.SIGINT
        assert "Traceback" not in terminal.shown


def test_interrupting_run_cancels(cluster: Cluster) -> None:
    """Ctrl-C during `run` on a running cluster ends the request there; the cluster goes on."""
    process = subprocess.Popen(
        [*COMMAND, "run", "Once upon a time", "--name", "talk", "--temp", "1.5", "--seed", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 128 + signal.SIGINT, err
    assert b"Traceback" not in err
    deadline = time.monotonic() + 20
    while cluster.stats()["requests"]["active"] and time.monotonic() < deadline:
        cluster.next_event(0.05)
    requests = cluster.stats()["requests"]
    assert (requests["active"], requests["kv_blocks_free"]) == (0, requests["kv_blocks"])
