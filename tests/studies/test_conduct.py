"""How a study is run, resumed and recorded, on a study whose runs cost nothing and whose outcomes are known."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console
from typer.testing import CliRunner

from looplm.analysis.plots import curves
from looplm.cli.main import app
from looplm.studies.catalogue import STUDIES
from looplm.studies.conduct import conduct
from looplm.studies.runner import logged_steps
from looplm.studies.study import Outcome, Study, above


@dataclass(frozen=True)
class Noted:
    """Leaves a mark for every time that it is run."""

    accuracy: float
    loops: float = 2.0

    def steps(self):
        return 40

    def __call__(self, folder: Path) -> Outcome:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "runs").open("a") as file:
            file.write("x")
        if self.accuracy < 0:
            raise ValueError(f"{folder.name} has no accuracy")
        return Outcome(
            values={"accuracy": self.accuracy}, series={"loops": [(1.0, 0.0), (2.0, self.accuracy)]},
            facts={"parameters": 1234, "loops": self.loops},
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Toy(Study):
    """Two cells."""

    name: ClassVar[str] = "toy"
    title: ClassVar[str] = "A toy"
    claim: ClassVar[str] = "loops help."
    setting: ClassVar[str] = "nothing is trained."
    chance: ClassVar[str] = "guessing gets 0.1"

    looped: tuple[float, ...] = (0.5, 0.7, 0.9)
    plain: tuple[float, ...] = (0.2, 0.4, 0.3)

    def jobs(self, scale, seeds):
        assert scale == "smoke"
        return {
            "1x4, looped": [Noted(value) for value in self.looped[:seeds]],
            "1x1": [Noted(value, loops=1.0) for value in self.plain[:seeds]],
        }

    def verdicts(self, results):
        return [above(results, "accuracy", "1x4, looped", "1x1", "looped above plain", "accuracy")]

    def figures(self, results):
        lines = {cell: [outcome.series["loops"] for outcome in found] for cell, found in results.items()}
        return {"loops": (curves(lines, "loops", "accuracy"), "Accuracy by loops.")}


def run(study, out, seeds=3, again=False):
    console = Console(file=StringIO(), width=200)
    return conduct(study, out, "smoke", seeds, 1, again, console), console.file.getvalue()


def test_a_study_is_run_once_and_recorded_with_means_ranges_and_verdicts(tmp_path):
    (verdict,), printed = run(Toy(), tmp_path)
    assert (verdict.holds, verdict.seeds) == (True, 3)
    assert verdict.effect == pytest.approx(0.7 - 0.3)
    held = json.loads((tmp_path / "toy.json").read_text())
    assert held["origin"]["command"] == "looplm study toy --scale smoke --seeds 3"
    cell = held["cells"]["1x4, looped"]
    assert cell["summary"]["accuracy"] == {"mean": pytest.approx(0.7), "low": 0.5, "high": 0.9}
    assert cell["facts"] == {"parameters": 1234, "loops": 2.0, "seeds": [0, 1, 2]}
    assert [outcome["series"]["loops"][1] for outcome in cell["outcomes"]] == [[2.0, 0.5], [2.0, 0.7], [2.0, 0.9]]
    page = (tmp_path / "toy.md").read_text()
    assert "| 1x4, looped | 2 | 0.7 [0.5, 0.9] |" in page  # what differs is a column, what does not a sentence
    assert "Every run: parameters 1,234. Means over seeds" in page
    assert "![Accuracy by loops.](results/toy_loops.svg)" in page
    assert "- **Holds** (+0.4 accuracy, 3 seeds): looped above plain" in page
    assert (tmp_path / "toy_loops.svg").read_text().startswith("<svg")
    assert "0.7 [0.5, 0.9]" in printed
    run(Toy(), tmp_path)
    assert {path.read_text() for path in tmp_path.glob("*/seed*/runs")} == {"x"}
    assert len(list(tmp_path.glob("*/seed*/runs"))) == 6
    run(Toy(), tmp_path, again=True)
    assert {path.read_text() for path in tmp_path.glob("*/seed*/runs")} == {"xx"}


def test_a_direction_within_the_range_of_seeds_does_not_hold(tmp_path):
    (verdict,), _ = run(Toy(plain=(0.1, 0.2, 0.6)), tmp_path)
    assert not verdict.holds
    assert "**Does not hold** (+0.4 accuracy, 3 seeds)" in (tmp_path / "toy.md").read_text()


def test_a_run_that_fails_is_named_and_what_was_done_is_kept(tmp_path):
    with pytest.raises(ValueError, match="seed0 has no accuracy"):
        run(Toy(looped=(0.5,), plain=(-1.0,)), tmp_path, seeds=1)
    assert (tmp_path / "1x4_looped" / "seed0" / "outcome.json").exists()
    assert not (tmp_path / "toy.json").exists()


class Endless:
    """Says which process runs it, and never ends."""

    def steps(self):
        return 1

    def __call__(self, folder):
        folder.mkdir()
        (folder / "aside").write_text(str(os.getpid()))
        (folder / "aside").rename(folder / "process")
        time.sleep(600)


def test_runs_end_with_the_study_that_began_them(tmp_path):
    source = "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; from test_conduct import Endless\n"
    source += "from looplm.studies.runner import run_jobs; from rich.console import Console\n"
    source += "if __name__ == '__main__': run_jobs({Path(sys.argv[1], 'run'): Endless()}, 1, Console(quiet=True))\n"
    (tmp_path / "begin.py").write_text(source)
    study = subprocess.Popen([sys.executable, tmp_path / "begin.py", tmp_path, Path(__file__).parent])
    wait_for((tmp_path / "run" / "process").exists)
    run = int((tmp_path / "run" / "process").read_text())
    os.kill(run, 0)  # it is there
    study.kill()
    study.wait()
    wait_for(lambda: not runs(run))


def runs(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_bar_counts_the_steps_that_logs_tell_of(tmp_path):
    lines = '{"step": 10, "loss": 1.0}\n{"step": 20, "loss": 1.0}\n'
    for stage, text in (("stage1", lines), ("stage2", lines + '{"step": 3'), ("stage3", "")):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "log.jsonl").write_text(text)
    assert logged_steps(tmp_path) == 40
    console = Console(file=StringIO(), force_terminal=True, width=120)
    conduct(Toy(), tmp_path / "out", scale="smoke", seeds=2, processes=1, console=console)
    shown = console.file.getvalue()
    assert "4 of 4 runs" in shown
    assert "160/160" in shown


def test_the_verb_lists_studies_and_refuses_others():
    listed = CliRunner().invoke(app, ["study"])
    assert listed.exit_code == 0
    assert all(f"{name}: " in listed.output for name in (*STUDIES, "ouro-tiny"))
    refused = CliRunner().invoke(app, ["study", "nothing"])
    assert refused.exit_code == 1
    assert refused.output.startswith("looplm: no study 'nothing'; choose one of ")
    refused = CliRunner().invoke(app, ["study", "ouro-tiny", "--scale", "paper"])
    assert refused.exit_code == 1
    assert "miniature" in refused.output


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_says_what_the_paper_claims_and_has_runs_at_every_scale(name):
    study = STUDIES[name]
    assert all((study.title, study.claim, study.setting))
    for scale in ("paper", "cpu", "smoke"):
        cells = study.jobs(scale, 2)
        assert cells
        for jobs in cells.values():
            assert 1 <= len(jobs) <= 2
            for job in jobs:
                if hasattr(job, "recipes"):
                    assert job.recipes(Path("nowhere"))  # they load, with all their overrides
