#!/usr/bin/env python3
"""Does a run stay within its memory plan? Prints JSON last.

    scripts/measure_memory.py MODEL --ram 40%             # a size, or a share of the checkpoint's bytes
    scripts/measure_memory.py --matrix FOLDER [MODEL]     # the plan's total against the measured peak, 21 ways

The first form runs a prompt within --ram and once with everything resident, and exits with 1 if the budget was passed or the
tokens differ. The second one makes small models in FOLDER (kept for the next time), runs them, the built-in model and MODEL
with several sizes, contexts and numbers of workers, fills context and pools, and exits with 1 if a peak is not within
+0 / -10 % of its plan's total.

Memory is the sum of PSS of all processes of the cluster, client and resource tracker included, every 100 ms, read by
this process, which is none of them. What a client does with its answers is its own: it counts as it was when the cluster was
ready. Libraries that other programs have mapped as well are shared with them, which makes figures look smaller.
"""

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from colibri_mp.checkpoint.hub import resolve
from colibri_mp.config import LaunchConfig, parse_size
from colibri_mp.memory import process_bytes
from colibri_mp.plan_terms import max_logit_rows
from colibri_mp.planner import Plan, plan_for

PERIOD_S = 0.1
NEW_TOKENS = 16
LEAST_SHARE = 0.9  # of a plan's total that has to be used
CLIENT = """
import json, sys
from colibri_mp import Cluster
job = json.loads(sys.stdin.readline())
with Cluster.launch(job["model"], **job["settings"]) as cluster:
    print(json.dumps(cluster.stats()["memory"]["by_process"]), flush=True)
    done = cluster.generate(job["prompt"], max_tokens=job["max_tokens"], temperature=0.0, ignore_eos=True)
    if job["num_scored"]:
        cluster.logits(job["prompt"][: job["num_scored"]])
    memory = cluster.stats()["memory"]
print(json.dumps({"token_ids": done.token_ids, "stats": done.stats, "memory": memory}), flush=True)
"""
SMALL_MODELS = {
    "qwen3": "--family qwen3_moe --hidden 512 --layers 12 --experts 64 --top-k 4 --width 256 --heads 8 --kv-heads 4 --vocab 8192",
    "mixtral": "--family mixtral --dtype bf16 --hidden 256 --layers 4 --experts 8 --top-k 2 --width 512 --heads 4 --vocab 32000",
    "olmoe": "--family olmoe --bits 8 --hidden 1024 --layers 6 --experts 32 --top-k 4 --width 512 --heads 16 --vocab 16384",
    "sparse": (
        "--family glm_moe_dsa --hidden 512 --layers 4 --dense-layers 1 --dense-width 512 --experts 32 --top-k 4 --width 256 --heads 4 "
        "--q-rank 256 --nope-dim 64 --v-dim 64 --index-heads 4 --index-freq 2 --vocab 4096 --ctx 65536"
    ),
}
CASES = (  # model, --ram, --ctx, --workers
    ("demo", "310MB", 256, 1), ("demo", "330MB", 2048, 1), ("demo", "1GB", 512, 2), ("demo", "auto", 2048, 4),
    ("qwen3", "360MB", 512, 1), ("qwen3", "500MB", 4096, 1), ("qwen3", "450MB", 1024, 2), ("qwen3", "600MB", 2048, 3),
    ("qwen3", "auto", 4096, 2),
    ("mixtral", "340MB", 512, 1), ("mixtral", "400MB", 4096, 1), ("mixtral", "auto", 2048, 2),
    ("olmoe", "450MB", 1024, 1), ("olmoe", "750MB", 4096, 2), ("olmoe", "auto", 512, 1),
    ("large", "1300MB", 512, 1), ("large", "1800MB", 1024, 2), ("large", "2500MB", 2048, 1), ("large", "3500MB", 2048, 2),
    ("large", "auto", 1024, 1), ("sparse", "750MB", 32768, 1),
)  # fmt: skip


class Sampler(threading.Thread):
    """Sums the memory of a client and all its descendants until told to stop."""

    def __init__(self, client_pid: int) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.client_bytes = 0  # once the cluster is ready
        self.peak: dict[str, int] = {}
        self.peak_bytes = self.num_samples = 0
        self._client = psutil.Process(client_pid)

    def run(self) -> None:
        while not self.done.wait(PERIOD_S):
            try:
                processes = [self._client, *self._client.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            now = {f"{p.pid} {role(p)}": process_bytes(p.pid) for p in processes}
            client = f"{self._client.pid} client"
            now[client] = self.client_bytes or now[client]
            self.num_samples += 1
            if sum(now.values()) > self.peak_bytes:
                self.peak_bytes, self.peak = sum(now.values()), now


def role(process: psutil.Process) -> str:
    """What a process of the cluster is."""
    try:
        line = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "gone"
    for mark in ("resource_tracker", "colibri-coordinator", "spawn_main"):
        if mark in line:
            return mark.replace("spawn_main", "worker")
    return "client"


def one_run(model: str, prompt: list[int], max_tokens: int, num_scored: int = 0, **settings: Any) -> dict[str, Any]:
    """Tokens, figures and the memory peak of one cluster."""
    job = {"model": model, "settings": settings, "prompt": prompt, "max_tokens": max_tokens, "num_scored": num_scored}
    command = [sys.executable, "-P", "-c", CLIENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        sampler = Sampler(client.pid)
        client.stdin.write(json.dumps(job) + "\n")
        client.stdin.flush()
        sampler.start()
        ready = client.stdout.readline()
        sampler.client_bytes = json.loads(ready)["client"] if ready else 0
        last = client.stdout.readline()
        sampler.done.set()
        sampler.join()
    if not last:
        raise SystemExit(f"the client of {model} with {settings} has failed; its messages stand above")
    answer = json.loads(last)
    stats, memory = answer["stats"], answer["memory"]
    return {
        "token_ids": answer["token_ids"],
        "peak_bytes": sampler.peak_bytes,
        "peak_by_process": sampler.peak,
        "num_samples": sampler.num_samples,
        "budget_bytes": memory["budget_bytes"],
        "planned_bytes": memory["planned_bytes"],
        "own_peak_bytes": memory["peak_bytes"],
        "pressure_changes": memory["pressure"]["changes"],
        "hit_rate": stats["cache"]["hit_rate"],
        "decode_tok_s": stats["decode_tok_s"],
        "prefill_tok_s": stats["prefill_tok_s"],
        "cache": stats["cache"],
    }


def compare(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """A run within --ram beside one with everything resident."""
    stored = sum(path.stat().st_size for path in Path(args.model).glob("*.safetensors"))
    ram = int(stored * float(args.ram[:-1]) / 100) if args.ram.endswith("%") else parse_size(args.ram)
    prompt = [(7919 * i) % 1000 + 3 for i in range(args.prompt_tokens)]
    common = {"num_workers": args.workers, "ctx": args.ctx}
    small = one_run(args.model, prompt, args.max_tokens, ram=ram, **common)
    full = one_run(args.model, prompt, args.max_tokens, **common)
    within_budget = small["peak_bytes"] <= small["budget_bytes"]
    same_tokens = small["token_ids"] == full["token_ids"]
    result = {"model": args.model, "stored_bytes": stored, "within": small, "resident": full}
    result |= {"within_budget": within_budget, "same_tokens": same_tokens}
    return result, within_budget and same_tokens


def matrix(folder: Path, large: str | None, only: str | None) -> tuple[dict[str, Any], bool]:
    """The plan's total against the measured peak for every case."""
    cases = []
    for name, ram, ctx, workers in CASES:
        if only not in (None, name):
            continue
        model = model_path(folder, name, large)
        if model is None:
            print(f"{name:8} is left out: no model given", file=sys.stderr)
            continue
        case = {"model": name, "ram": ram, "ctx": ctx, "workers": workers} | fill(model, ram, ctx, workers)
        print(
            f"{name:8} --ram {ram:7} --ctx {ctx:4} --workers {workers}: planned {case['planned_bytes'] / 1e6:7.1f} MB, "
            f"peak {case['peak_bytes'] / 1e6:7.1f} MB, {case['used_share']:.3f}",
            file=sys.stderr,
        )
        cases.append(case)
    shares = [case["used_share"] for case in cases]
    is_within = all(LEAST_SHARE <= share <= 1 for share in shares)
    return {"cases": cases, "least": min(shares), "most": max(shares), "all_within": is_within}, is_within


def fill(model: str, ram: str, ctx: int, workers: int) -> dict[str, Any]:
    """Run a cluster whose context is filled with random tokens, which fill the pools; then score some."""
    settings = {"ram": ram, "ctx": ctx, "num_workers": workers}
    plan = plan_for(LaunchConfig(model=model, **settings), lambda _text: None)
    vocab = json.loads((resolve(model) / "config.json").read_text())["vocab_size"]
    prompt = [random.Random(i).randrange(vocab) for i in range(ctx - NEW_TOKENS)]
    num_scored = min(2 * max_logit_rows(vocab, plan.prefill_chunk), len(prompt))
    run = one_run(model, prompt, NEW_TOKENS, num_scored, **settings)
    return {
        "planned_bytes": run["planned_bytes"],
        "peak_bytes": run["peak_bytes"],
        "used_share": run["peak_bytes"] / run["planned_bytes"],
        "peak_by_process": run["peak_by_process"],
        "plan": by_process(plan),
        "hit_rate": run["hit_rate"],
        "pressure_changes": run["pressure_changes"],
    }


def by_process(plan: Plan) -> dict[str, dict[str, int]]:
    """The terms of a plan, by process."""
    found: dict[str, dict[str, int]] = {}
    for term in plan.terms:
        found.setdefault(term.process, {})[term.name] = term.nbytes
    return found


def model_path(folder: Path, name: str, large: str | None) -> str | None:
    """Where the model of a case is; a small one is made if need be."""
    if name in ("demo", "large"):
        return large if name == "large" else name
    path = folder / name
    if not path.exists():
        maker = Path(__file__).with_name("make_synthetic_model.py")
        subprocess.run([sys.executable, str(maker), str(path), *SMALL_MODELS[name].split()], check=True)
    return str(path)


def main() -> int:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of a checkpoint")
    parser.add_argument("--matrix", type=Path, metavar="FOLDER", help="hold plans against peaks; small models go there")
    parser.add_argument("--only", metavar="NAME", help="of the matrix, the cases of this model")
    parser.add_argument("--ram", default="40%")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--ctx", type=int, default=1024)
    args = parser.parse_args()
    if args.model is None and args.matrix is None:
        parser.error("give a MODEL, or --matrix FOLDER")
    started = time.perf_counter()
    result, is_good = matrix(args.matrix, args.model, args.only) if args.matrix else compare(args)
    print(json.dumps(result | {"seconds": time.perf_counter() - started}))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
