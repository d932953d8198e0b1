"""The command line as a new user meets it: what is printed, exit codes, bad input of every kind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from colibri_mp.kernels.isa import prepare_cache

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_moe"
COMMAND = [sys.executable, "-m", "colibri_mp"]
SMALL = ["--model", str(MODEL), "--ctx", "128", "--threads", "1", "--workers", "1"]


def cli(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line; standard input is a pipe."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **(env or {})},
    )


def refused(done: subprocess.CompletedProcess[str], code: int, *wanted: str) -> None:
    """An error in one message that holds `wanted`: no traceback, nothing on stdout."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for text in wanted:
        assert text in done.stderr


def test_run_prints_one_json_object() -> None:
    """`run --json` ends with one object that has the documented fields, and the golden tokens."""
    golden = np.load(MODEL / "golden.npz")
    prompt = ",".join(map(str, golden["input_ids"]))
    done = cli("run", "--prompt-ids", prompt, *SMALL, "--max-tokens", "16", "--temp", "0", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["token_ids"] == golden["generated_ids"].tolist()
    fields = {
        "text",
        "token_ids",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "ttft_s",
        "prefill_tok_s",
        "decode_tok_s",
    }
    assert fields <= answer.keys()
    assert {"hits", "misses", "hit_rate", "bytes_read", "disk_s"} <= answer["cache"].keys()
    assert {"budget_bytes", "peak_bytes", "by_process"} <= answer["memory"].keys()
    assert 0 < answer["memory"]["peak_bytes"] <= answer["memory"]["budget_bytes"]
    assert {"client", "coordinator", "worker 0"} <= answer["memory"]["by_process"].keys()


def test_help_loads_nothing_heavy() -> None:
    """The command line answers at once: numbers, kernels, sockets and tables are loaded by the verbs that need them."""
    heavy = {"numpy", "numba", "zmq", "rich", "msgspec", "jinja2", "tokenizers", "psutil", "starlette", "uvicorn"}
    code = f"import sys; from colibri_mp import cli; cli._parser(); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_plan_as_json_adds_up() -> None:
    """The terms of `plan --json` add up to at most the budget."""
    done = cli("plan", *SMALL, "--ram", "500MB", "--json")
    plan = json.loads(done.stdout)
    assert plan["budget_bytes"] == 500_000_000
    assert sum(term["nbytes"] for term in plan["terms"]) == plan["planned_bytes"] <= plan["budget_bytes"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["rum"], ["invalid choice: 'rum'", "did you mean run?"]),
        (["run", "--modle", "x"], ["--modle", "did you mean --model?"]),
        (["run", "--mode", "x"], ["--mode", "did you mean --model?"]),
        (["run", "x", "--temp", "warm"], ["--temp", "'warm'"]),
        (["run", "x", "--workers", "-1"], ["--workers must be at least 0"]),
        (["run", "x", "--ram", "many"], ["not a size: 'many'"]),
        (["run", "--prompt-ids", "1,b"], ["--prompt-ids", "'1,b'"]),
        (["run", "x", "--system", "y"], ["--system needs --chat"]),
        (["run", "x", "--name", "nobody"], ["no cluster named 'nobody'"]),
        (["status"], ["no cluster named 'default'", "colibri-cluster launch"]),
        (["stop", "--name", "nobody"], ["no cluster named 'nobody'"]),
        ([], ["required: VERB"]),
    ],
)
def test_wrong_usage(arguments: list[str], wanted: list[str]) -> None:
    """Each wrong flag, verb or value is named, with the nearest right one; exit code 2."""
    refused(cli(*arguments), 2, *wanted)


def test_too_small_ram_says_how_much_is_needed_and_for_what() -> None:
    """The refusal lists the terms; the size that it asks for is enough, and a little less is not."""
    done = cli("plan", *SMALL, "--ram", "100MB")
    refused(done, 4, "too small", "resident weights", "KV cache", "expert pools", "raise --ram")
    needed = int(done.stderr.split("(")[1].split(" bytes")[0])
    assert cli("plan", *SMALL, "--ram", str(needed)).returncode == 0
    refused(cli("plan", *SMALL, "--ram", str(needed - 100_000)), 4, "too small")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep to RLIMIT_AS")
def test_limited_address_space() -> None:
    """Under `ulimit -v` the plan refuses what a process could not map, in place of an abort in the middle of the start."""
    command = " ".join([*COMMAND, "run", "--prompt-ids", "1", *SMALL])
    done = subprocess.run(["sh", "-c", f"ulimit -v 1000000; {command}"], capture_output=True, text=True, timeout=60)
    refused(done, 4, "coordinator needs", "`ulimit -v` (RLIMIT_AS) allows 1.02 GB")


def test_missing_model() -> None:
    """A folder that does not exist is named."""
    refused(cli("run", "x", "--model", "/no/such/model"), 3, "/no/such/model")


def test_truncated_shard(tmp_path: Path) -> None:
    """A file that is too short is named with both sizes before anything starts."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    refused(cli("run", "--prompt-ids", "1", "--model", str(model)), 3, "model.safetensors", "truncated")


def test_prompt_longer_than_the_context() -> None:
    """The refusal says both lengths and the flag."""
    refused(cli("run", "--prompt-ids", ",".join(["5"] * 129), *SMALL), 10, "129 tokens", "128", "--ctx")


def test_text_without_a_tokenizer() -> None:
    """A checkpoint without tokenizer asks for ids."""
    refused(cli("run", "hello", *SMALL), 10, "--prompt-ids")


def test_run_folder_of_somebody_else(tmp_path: Path) -> None:
    """A run folder that others may enter is refused with the variable to set."""
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)
    refused(cli("run", "--prompt-ids", "1", *SMALL, env={"COLIBRI_RUN_DIR": str(folder)}), 2, "0700", "COLIBRI_RUN_DIR")


def test_name_in_use() -> None:
    """A second cluster of the same name is refused; the first one goes on and can be used, asked and stopped."""
    launched = cli("launch", *SMALL, "--name", "busy", "--detach")
    assert launched.returncode == 0, launched.stderr
    try:
        refused(cli("launch", *SMALL, "--name", "busy", "--detach"), 2, "'busy' is already running", "stop --name busy")
        done = cli("run", "--prompt-ids", "1,2,3", "--name", "busy", "--max-tokens", "2", "--temp", "0", "--json")
        assert json.loads(done.stdout)["completion_tokens"] == 2
        status = json.loads(cli("status", "--name", "busy", "--json").stdout)
        assert (status["state"], status["progress"]["tokens"]) == ("serving", 4)
        digest = cli("status", "--name", "busy").stdout
        assert all(text in digest for text in ("worker", "in 2 steps: ", "slowest layers: ", "2.00 a token"))
    finally:
        stopped = cli("stop", "--name", "busy")
    assert stopped.returncode == 0, stopped.stderr
    refused(cli("status", "--name", "busy"), 2, "no cluster named 'busy'")


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs to mount a small /dev/shm: Linux, root")
def test_small_shared_memory() -> None:
    """A /dev/shm that cannot hold the pools is refused with both sizes and the cure, before anything starts."""
    run = " ".join([*COMMAND, "run", "--prompt-ids", "1", *SMALL])
    script = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {run}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=100)
    refused(done, 4, "/dev/shm has 65.5 kB free", "the expert pools need", "--shm-size")


def test_unwritable_home(tmp_path: Path) -> None:
    """Without a place for the kernel cache it still runs, and says where the kernels are kept."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    compiled = prepare_cache().path
    other_place = tmp_path / f"colibri-mp-{os.getuid()}"
    other_place.mkdir(mode=0o700)
    (other_place / compiled.name).symlink_to(compiled)  # as if it had run before: compiling takes half a minute
    env = {
        "HOME": str(blocked),
        "XDG_CACHE_HOME": str(blocked / "cache"),
        "TMPDIR": str(tmp_path),
        "COLIBRI_RUN_DIR": "/tmp/cmp-home",
    }
    env["COLIBRI_CACHE_DIR"] = str(blocked / "colibri")
    done = cli("run", "--prompt-ids", "1,2,3", *SMALL, "--max-tokens", "1", "--temp", "0", "--json", env=env)
    shutil.rmtree("/tmp/cmp-home", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completion_tokens"] == 1
    assert f"compiled kernels are kept in {other_place / compiled.name}" in done.stderr
    assert "cannot be written" in done.stderr


def test_interrupt_ends_everything_calmly() -> None:
    """Ctrl-C in the middle of an answer: one line, exit code 130, nothing left (the leak check looks)."""
    command = [*COMMAND, "run", "--prompt-ids", "1,2,3", *SMALL[:2], "--ctx", "512", "--temp", "0", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "loading" in line:
            break
    else:
        pytest.fail("it ended before it began to load")
    time.sleep(0.3)  # somewhere in the start or in the answer: both must end calmly
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert out == ""


def test_output_to_a_closed_pipe() -> None:
    """`| head` ends the run without a traceback."""
    script = f"{sys.executable} -m colibri_mp --help | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: colibri-cluster")
    assert "Traceback" not in done.stderr
