"""From the death of a rank to the next committed step of examples/elastic_training.

    python bench/elastic_kills.py [--ranks 20] [--kills 200] [--of-a-run 4] [--out FILE]

Ranks of `ferry run --elastic` kill themselves before every call of a step, and while their experts
compute; rank 0 among them; nobody takes their places. Runs are repeated until there were --kills.
For each stage it prints percentiles, in milliseconds:

- committed: from the kill until the next step is committed on all survivors, less the median step
  before (the aim is 100 at most, p99);
- failed, regrouped, settled, computed: until the last survivor has its error, has returned from
  `regroup`, has its experts from the vault, has all sums.

And, over all kills, the steps of each survivor in the 10 steps after the next committed one,
relative to those before, times ranks before / ranks after: what a survivor still computes of the
tokens that it computed before (the aim is 99 %). The losses of every step are compared with those
of an undisturbed run of two ranks. Experts sleep for each row, as virtual GPUs.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "elastic_training"))
# The calls of a step in their order; a rank dies before the one with this name.
CALLS = ["plan", "dispatch", "combine", "dispatch back", "plan sums", "gather", "commit", "put"]
STAGES = [*CALLS, "experts"]
FIRST, APART = 20, 24  # steps before the first kill, and between two


class Watched:
    """A group or a vault whose calls are counted and timed."""

    def __init__(self, inner: Any, called: Any) -> None:
        self._inner, self._called = inner, called

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("plan", "dispatch", "combine", "commit", "regroup", "put"):
            return found
        return lambda *given, **named: self._called(name, found, *given, **named)


def be_rank() -> None:
    import train

    folder = Path(os.environ["ELASTIC_KILLS_FOLDER"])
    victims = json.loads(os.environ["ELASTIC_KILLS"])  # {"step": [rank, stage]}

    class Rank(train.Trainer):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.calls = 0  # of this step
            self.events: list[tuple[str, float, int, int]] = []
            self.group, self.vault = (Watched(one, self.call) for one in (self.group, self.vault))

        def say(self, what: str, step: int) -> None:
            now = time.monotonic()
            self.events.append((what, now, step, len(self.group.view().ranks)))

        def die(self, step: int) -> None:
            (folder / f"kill-{step}").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        def call(self, name: str, function: Any, *given: Any, **named: Any) -> Any:
            step = given[0] if name in ("commit", "put") else self.step + 1
            rank, stage = victims.get(str(step), (-1, ""))
            if rank == self.group.rank and self.calls < len(CALLS) and stage == CALLS[self.calls]:
                self.die(step)
            if rank == self.group.rank and stage == "experts" and self.calls == 2:
                threading.Timer(0.01, self.die, [step]).start()
            self.calls += 1
            try:
                made = function(*given, **named)
            except train.LOSSES:
                self.say("failed", step)
                raise
            if name in ("commit", "regroup"):
                self.say({"commit": "committed"}.get(name, "regrouped"), step)
            if name in ("put", "regroup"):
                self.calls = 0
            return made

        def settle(self, view: Any) -> None:
            super().settle(view)
            self.calls = 0
            self.say("settled", self.step)

        def gradients(self, step: int) -> float:
            self.calls = 0
            loss = super().gradients(step)
            self.say("computed", step)
            return loss

    made = []

    class Kept(Rank):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    train.Trainer = Kept
    train.main()
    (folder / f"rank-{made[0].group.rank}").write_text(json.dumps(made[0].events))


def train_once(
    given: argparse.Namespace, ranks: int, steps: int, row_seconds: float, victims: dict[str, Any]
) -> tuple[dict[int, float], dict[str, float], dict[int, list[Any]]]:
    """Losses by step, when who was killed by step, and what each survivor said."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "ferry"), "run", "--elastic"]
        command += [f"{max(1, ranks // 2)}:{ranks}", "--restarts", "0", "--", sys.executable]
        command += [__file__, "--steps", str(steps), "--row-seconds", str(row_seconds)]
        about = {"ELASTIC_KILLS_FOLDER": folder, "ELASTIC_KILLS": json.dumps(victims)}
        done = subprocess.run(
            command,
            env=os.environ | about,
            capture_output=True,
            text=True,
            timeout=given.timeout,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        losses: dict[int, float] = {}
        for words in (line.split() for line in done.stdout.splitlines()):
            if "loss" in words:
                losses[int(words[words.index("step") + 1])] = float(words[-1])
        kills = {file.name[5:]: float(file.read_text()) for file in Path(folder).glob("kill-*")}
        said = {
            int(file.name[5:]): json.loads(file.read_text()) for file in Path(folder).glob("rank-*")
        }
        return losses, kills, said


def figures_of(kill: float, said: dict[int, list[Any]]) -> dict[str, float]:
    """Of one kill, in milliseconds since; "share" is a fraction."""
    first: dict[str, float] = {}
    before_all, steps, shares = [], [], []
    for events in said.values():
        commits = [(at, ranks) for what, at, _, ranks in events if what == "committed"]
        old = [at for at, _ in commits if at <= kill][-11:]
        ranks_before = next(ranks for at, ranks in reversed(commits) if at <= kill)
        new = [at for at, ranks in commits if at > kill and ranks < ranks_before][:11]
        regrouped = next(at for what, at, *_ in events if what == "regrouped" and at > kill)
        for what in ("failed", "regrouped", "settled", "computed", "committed"):
            since = kill if what in ("failed", "regrouped") else regrouped
            at = next(at for name, at, *_ in events if name == what and at > since)
            first[what] = max(first.get(what, 0.0), 1e3 * (at - kill))
        before = (old[-1] - old[0]) / (len(old) - 1)
        after = (new[-1] - new[0]) / (len(new) - 1)
        ranks_after = next(ranks for at, ranks in commits if at == new[0])
        shares.append(before / after * ranks_before / ranks_after)
        steps.append(1e3 * before)
        before_all += [1e3 * (b - a) for a, b in itertools.pairwise(old)]
    return first | {"step": statistics.median(before_all), "share": min(shares)}


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[round(part * (len(values) - 1))]


def row(name: str, kills: list[dict[str, float]]) -> str:
    def both(key: str, minus: str = "") -> str:
        values = [one[key] - one.get(minus, 0.0) for one in kills]
        return f"{quantile(values, 0.5):7.1f} {quantile(values, 0.99):7.1f}"

    cells = [both(what) for what in ("failed", "regrouped", "settled", "computed")]
    return f"{name:14} {len(kills):4} " + " ".join([
        *cells,
        both("committed", "step"),
        both("step"),
    ])


def main() -> None:
    import job  # not by ranks, which run this file, too, and have nothing to show

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=20)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--of-a-run", type=int, default=4, help="kills; at most half of the ranks")
    parser.add_argument("--row-seconds", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--out", type=Path, help="all figures, as JSON")
    given = parser.parse_args()
    given.of_a_run = min(given.of_a_run, given.ranks // 2, given.kills)
    steps = FIRST + APART * given.of_a_run
    job.say_progress("undisturbed, 2 ranks")
    undisturbed, _, _ = train_once(given, 2, steps, 0.0, {})
    chosen = random.Random(given.seed)
    by_stage: dict[str, list[dict[str, float]]] = {stage: [] for stage in STAGES}
    count = 0
    while count < given.kills:
        ranks = [0, *chosen.sample(range(1, given.ranks), given.of_a_run - 1)]
        chosen.shuffle(ranks)
        victims = {
            str(FIRST + APART * i): (rank, STAGES[(count + i) % len(STAGES)])
            for i, rank in enumerate(ranks)
        }
        job.say_progress(f"{count} of {given.kills} kills")
        losses, kills, said = train_once(given, given.ranks, steps, given.row_seconds, victims)
        if kills.keys() != victims.keys() or losses.keys() != undisturbed.keys():
            raise SystemExit(f"killed {kills.keys()} of {victims}; {len(losses)} losses")
        for step, loss in undisturbed.items():
            if abs(losses[step] - loss) > 1e-12 * abs(loss):
                raise SystemExit(f"step {step}: loss {losses[step]}, undisturbed {loss}")
        for step, at in kills.items():
            by_stage[victims[step][1]].append(figures_of(at, said))
        count += len(kills)
    job.say_progress("")
    every = [one for some in by_stage.values() for one in some]
    print("killed before    n    failed p50,99   regrouped         settled        computed"
          "  committed-step            step")  # fmt: skip
    for stage, some in by_stage.items():
        if some:
            print(row(stage, some))
    print(row("all", every))
    shares = [one["share"] for one in every]
    print(f"tokens of the slowest survivor after / before: median {statistics.median(shares):.2%}, "
          f"least {min(shares):.2%}; losses of {count} kills as undisturbed (1e-12)")  # fmt: skip
    if given.out:
        about = {"date": f"{datetime.date.today()}", "cores": len(os.sched_getaffinity(0))}
        about |= {"ranks": given.ranks, "row_seconds": given.row_seconds, "seed": given.seed}
        given.out.write_text(json.dumps(about | {"kills": by_stage}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    be_rank() if "ELASTIC_KILLS_FOLDER" in os.environ else main()
