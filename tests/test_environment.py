"""What a user's machine, shell and files do to a run: the result, or one line; nothing lost, nothing changed unsaid."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import Silent, StopAt
from depthgrow import files
from depthgrow.cli import main
from depthgrow.config import fields_of, override
from depthgrow.console import Console
from depthgrow.files import UserError, as_path, cache_root, locked, sweep, whole_folder, write_atomic
from depthgrow.recipes import debug, load_recipe
from depthgrow.report.write import write_report
from depthgrow.runner import run_study
from depthgrow.runtime import Stopped, StopSignal, stopping_at_once


def run(study, root):
    run_study(study, root, stop=StopAt(), listener=Silent())


def as_yaml(study, path, **changes):
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields_of(study)}
    path.write_text(json.dumps({"recipe": "debug"} | fields | changes))
    return str(path)


def command(*arguments, environment=None, **options):
    return subprocess.run(
        [sys.executable, "-m", "depthgrow", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        **options,
    )


# --- configs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999"])
def test_a_number_that_json_cannot_hold_is_refused_in_every_field(value):
    numbers = [name for name, old in fields_of(debug()) if isinstance(old, float)]
    assert len(numbers) > 8
    for name in [*numbers, "data.near_duplicates"]:
        with pytest.raises(UserError, match=rf"{name.split('.')[1]}={float(value)}"):
            override(debug(), {name: value})


def test_none_turns_clipping_off(mini, tmp_path, capsys):
    with pytest.raises(UserError, match="none turns clipping off"):
        override(mini, {"optim.clip_norm": "inf"})
    study = override(mini, {"optim.clip_norm": "none", "arms": "pre-single"})
    assert study.optim.clip_norm is None
    run(study, tmp_path)
    assert main(["ls", str(tmp_path)]) == 0  # its folder can be opened again


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: debug\noptim: {peak_lr: 1e-3}\noptim: {min_lr: 1e-5}\n", r"duplicate key.*line 3"),
        ("recipe: debug\noptim.peak_lr: 1e-3\noptim: {peak_lr: 2e-3}\n", r"sets optim\.peak_lr twice"),
        (
            "recipe: debug\ntrain: {steps_per_phase: true}\n",
            r"train\.steps_per_phase true: this field takes no truth value",
        ),
        ("recipe: debug\ntrain: {steps_per_phase: 1:30}\n", r"train\.steps_per_phase '1:30'"),
        ("recipe: debug\nverdict: yes\nseeds: [1]\n", r"seeds"),
        ("recipe: [debug]\n", "key 'recipe'"),
        ("just text\n", "must be a mapping"),
        ("recipe: debug\n  bad: indent\n", "r.yaml"),
    ],
)
def test_yaml_means_what_it_says_or_is_refused(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_recipe(str(tmp_path / "r.yaml"))
    assert "\n" not in str(caught.value)


def test_yaml_numbers_are_those_of_1_2(tmp_path):
    (tmp_path / "r.yaml").write_text("recipe: debug\ntrain: {steps_per_phase: 042}\noptim.peak_lr: 1e-3\nseed: 0o17\n")
    study = load_recipe(str(tmp_path / "r.yaml"))
    assert (study.train.steps_per_phase, study.optim.peak_lr, study.seed) == (42, 1e-3, 15)


def test_a_recipe_that_starts_from_itself_is_refused(tmp_path):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text(f"recipe: {b}\n")
    b.write_text(f"recipe: {a}\n")
    for path in (a, b):
        with pytest.raises(UserError, match="starts from itself"):
            load_recipe(str(path))


def test_options_may_stand_before_the_recipe(capsys):
    assert main(["plan", "--seeds", "2", "--optim.peak_lr=1e-3", "debug", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)["fields"]
    assert (fields["seeds"], fields["optim.peak_lr"], fields["name"]) == (2, 1e-3, "debug")
    assert main(["plan", "--seeds", "2"]) == 2
    assert "required: recipe" in capsys.readouterr().err
    assert main(["plan", "debug", "3"]) == 2
    assert "unexpected argument '3'" in capsys.readouterr().err


PYTHON_RECIPE = """
from dataclasses import replace
from depthgrow import curriculum
from depthgrow.config import override
from depthgrow.curriculum import Phase
from depthgrow.recipes import load_recipe
{broken}

def halves(num_blocks, steps):
    return [Phase(active=1, steps=steps), Phase(active=num_blocks, steps=steps)]

curriculum.CURRICULA["halves"] = halves

def study():
    return override(load_recipe({base!r}), {{"arms": ["pre-halves", "post-halves"], "train.jobs": 2}})
"""


def test_what_a_recipe_registers_is_known_to_workers(mini, tmp_path):
    base = as_yaml(mini, tmp_path / "base.yaml")
    (tmp_path / "mine.py").write_text(PYTHON_RECIPE.format(base=base, broken=""))
    result = command("study", tmp_path / "mine.py", "--out", tmp_path / "s")
    assert result.returncode == 0, result.stderr
    assert "2 side by side" in result.stderr
    assert len(list((tmp_path / "s" / "nodes").glob("*/done.json"))) == 4


def test_a_recipe_that_fails_names_its_line_and_a_worker_its_cause(mini, tmp_path):
    base = as_yaml(mini, tmp_path / "base.yaml")
    (tmp_path / "mine.py").write_text(PYTHON_RECIPE.format(base=base, broken="1 / 0"))
    with pytest.raises(UserError, match=r"mine\.py:7: ZeroDivisionError"):
        load_recipe(str(tmp_path / "mine.py"))
    only_here = "import multiprocessing\nassert multiprocessing.parent_process() is None, 'not in a worker'"
    (tmp_path / "mine.py").write_text(PYTHON_RECIPE.format(base=base, broken=only_here))
    result = command("study", tmp_path / "mine.py", "--out", tmp_path / "s")
    assert result.returncode == 1  # an error that nobody expected keeps its traceback
    assert "not in a worker" in result.stderr
    assert "lack of memory" not in result.stderr


# --- environment ----------------------------------------------------------------------------------------------------------


def test_a_notebooks_backend_does_not_cost_the_report(mini, tmp_path):
    run(replace(mini, arms=("pre-single",)), tmp_path)
    for backend in ("module://matplotlib_inline.backend_inline", "nonsense"):
        result = command("report", tmp_path, environment={"MPLBACKEND": backend})
        assert result.returncode == 0, result.stderr
    run(mini, tmp_path)
    assert command("report", tmp_path, environment={"MPLBACKEND": "nonsense"}).returncode == 0
    assert (tmp_path / "report" / "figures" / "interaction.png").stat().st_size > 5000


def test_a_rank_without_torchrun_is_no_rank(mini, tmp_path, capsys, monkeypatch):
    run(replace(mini, arms=("pre-single",)), tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # as some schedulers and notebooks leave them behind
        monkeypatch.setenv(name, "3")
    assert main(["ls", str(tmp_path)]) == 0
    run(replace(mini, arms=("pre-single", "post-single")), tmp_path)


def test_an_account_without_a_home_has_a_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def unknown(*args):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr(Path, "expanduser", unknown)
    assert cache_root().name.startswith("depthgrow-")
    with pytest.raises(UserError, match="no home folder is known"):
        as_path("~/x")


def test_colours_do_not_get_into_files(mini, tmp_path):
    recipe = as_yaml(replace(mini, arms=("pre-single",)), tmp_path / "r.yaml")
    result = command(
        "study", recipe, "--out", tmp_path / "s", environment={"FORCE_COLOR": "1", "COLORTERM": "truecolor"}
    )
    assert result.returncode == 0
    assert "\x1b" not in result.stderr + result.stdout
    assert "\x1b" not in command("ls", tmp_path / "s", environment={"FORCE_COLOR": "1"}).stdout


def test_a_terminal_of_ascii_shows_what_it_can(mini, tmp_path):
    recipe = as_yaml(replace(mini, arms=("pre-single", "post-single")), tmp_path / "r.yaml")
    plain = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    result = command("study", recipe, "--out", tmp_path / "s", environment=plain)
    assert result.returncode == 0, result.stderr
    assert command("ls", tmp_path / "s", environment=plain).returncode == 0
    first = (tmp_path / "s" / "report" / "report.json").read_bytes()
    assert command("report", tmp_path / "s").returncode == 0
    assert (tmp_path / "s" / "report" / "report.json").read_bytes() == first


@pytest.mark.parametrize("folder", ["/proc/none", "/sys/none", "/dev/null/x"])
def test_a_cache_or_folder_that_cannot_be_made_is_one_line(mini, tmp_path, folder):
    recipe = as_yaml(replace(mini, arms=("pre-single",)), tmp_path / "r.yaml")
    for result in (
        command("study", recipe, "--out", tmp_path / "s", environment={"XDG_CACHE_HOME": folder}),
        command("study", recipe, "--out", f"{folder}/s"),
    ):
        assert result.returncode == 2, result.stderr
        assert folder in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr


def test_home_is_found_wherever_a_path_is_read(mini, shared, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "texts.jsonl").write_bytes(shared.corpus.read_bytes())
    changes = {"data.corpora": ["~/texts.jsonl"], "teacher.cache_dir": "~/targets", "arms": ["pre-single"]}
    recipe = as_yaml(mini, tmp_path / "r.yaml", **changes)
    monkeypatch.chdir(tmp_path)
    assert main(["study", "~/r.yaml", "--out=~/s"]) == 0
    assert main(["export", "~/s", "pre-single", "--to", "~/m"]) == 0
    assert not (tmp_path / "~").exists()
    assert (tmp_path / "targets" / "teacher").is_dir()
    assert (tmp_path / "m" / "config.json").exists()
    assert str(recipe).startswith(str(tmp_path))


def test_brackets_in_a_name_are_text(capsys):
    import io

    stream = io.StringIO()
    with Console(stream, interactive=True) as console:
        console.note("runs/[/old] [bold]")
        console.progress("[/x]", 1, 2, {"loss": 1.0})
    assert "runs/[/old] [bold]" in stream.getvalue()
    assert main(["plan", "debug", "--teacher.cache_dir", "/tmp/[/old]"]) == 0
    assert "[/old]" in capsys.readouterr().out


def test_a_compiler_that_is_turned_off_is_not_recorded_as_used(mini, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with pytest.raises(UserError, match="turns the compiler off"):
        run(override(mini, {"train.compile": "true", "arms": ["pre-single"]}), tmp_path)
    run(override(mini, {"train.compile": "auto", "arms": ["pre-single"]}), tmp_path / "auto")
    (made,) = (tmp_path / "auto" / "nodes").glob("*/environment.json")
    assert json.loads(made.read_text())["compiled"] is False


# --- files ----------------------------------------------------------------------------------------------------------------


def test_what_a_killed_save_left_is_removed_and_what_is_being_written_is_not(mini, tmp_path):
    study = replace(mini, arms=("pre-single",))
    run(study, tmp_path)
    (node,) = (tmp_path / "nodes").iterdir()
    left = [node / "checkpoints" / ".partial-dead", tmp_path / ".partial-study.json.x"]
    left[0].mkdir()
    (left[0] / "weights.safetensors").write_bytes(b"x" * 1000)
    left[1].write_text("{")
    living = node / "eval" / ".partial-living"
    living.mkdir()
    handle = os.open(living, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    run(study, tmp_path)
    assert not any(path.exists() for path in left)
    assert living.exists()
    os.close(handle)
    sweep(node / "eval")
    assert not living.exists()


def test_folders_and_files_outlast_a_power_failure(monkeypatch, tmp_path):
    synced = []
    monkeypatch.setattr(files, "_sync", synced.append)
    with whole_folder(tmp_path / "c" / "step") as scratch:
        (scratch / "a").write_text("x")
        inside = scratch
    assert synced[:2] == [inside / "a", inside]
    assert synced[-1] == tmp_path / "c"  # the list of names that holds it
    synced.clear()
    write_atomic(tmp_path / "f.json", "{}")
    assert synced == [tmp_path]


def test_a_file_system_without_locks_is_said_and_used(monkeypatch, tmp_path, capsys):
    def unsupported(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked(tmp_path / ".lock", "in use"):
        write_atomic(tmp_path / "x", "y")
    assert "this file system has no locks" in capsys.readouterr().err
    assert (tmp_path / "x").read_text() == "y"


@pytest.mark.parametrize("size", [3_000, 60_000])
def test_a_disk_that_fills_is_one_line_and_the_next_call_goes_on(mini, tmp_path, size):
    """A limit on a file's size stands for a full disk: at a small file, and inside a checkpoint."""
    recipe = as_yaml(replace(mini, arms=("pre-single",)), tmp_path / "r.yaml")
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))}
    result = command("study", recipe, "--out", tmp_path / "s", **limited)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "make room there and run again" in result.stderr.splitlines()[-1]
    assert command("study", recipe, "--out", tmp_path / "s").returncode == 0
    full = command("export", tmp_path / "s", "pre-single", "--to", tmp_path / "m", **limited)
    assert full.returncode == 2, full.stderr
    assert "Traceback" not in full.stderr
    assert not (tmp_path / "m").exists()
    assert not list(tmp_path.glob(".partial-*"))


def test_export_into_the_folder_one_is_in_is_refused_in_words(mini, tmp_path, monkeypatch, capsys):
    run(replace(mini, arms=("pre-single",)), tmp_path / "s")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["export", str(tmp_path / "s"), "pre-single", "--to", "."]) == 2
    assert "name one to be made in it" in capsys.readouterr().err


def test_lost_lines_of_metrics_are_said(mini, tmp_path):
    run(replace(mini, arms=("pre-single",)), tmp_path)
    (path,) = (tmp_path / "nodes").glob("*/metrics.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[2:]))
    page = write_report(tmp_path).html
    assert "2 of 6 steps have no line in metrics.jsonl" in page.read_text()
    assert "2 of 6 steps have no line" in page.with_name("report.md").read_text()


# --- signals and pipes ----------------------------------------------------------------------------------------------------


def test_a_signal_is_heard_where_nothing_is_to_be_saved():
    with StopSignal().listening() as stop:

        def signalled():
            with stopping_at_once(stop, "loading"):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)

        with pytest.raises(Stopped, match="loading"):
            signalled()
        with pytest.raises(Stopped), stopping_at_once(stop, "more"):  # one that came before
            raise AssertionError("not begun")


def test_nohup_is_left_in_force():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal().listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_lost_terminal_saves_and_the_next_call_goes_on(mini, tmp_path):
    study = override(mini, {"train.steps_per_phase": 400, "arms": ["pre-single"], "data.shard_documents": 24})
    recipe = as_yaml(study, tmp_path / "r.yaml")
    process = subprocess.Popen(
        [sys.executable, "-m", "depthgrow", "study", recipe, "--out", str(tmp_path / "s")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    for line in process.stderr:
        if "phase 1/1  " in line:
            break
    process.send_signal(signal.SIGHUP)
    process.stderr.close()  # the terminal is gone
    assert process.wait(60) == 3
    assert list((tmp_path / "s" / "nodes").glob("*/checkpoints/step-*"))
    assert command("study", recipe, "--out", tmp_path / "s").returncode == 0


def test_a_closed_pipe_does_not_end_training(mini, tmp_path):
    recipe = as_yaml(replace(mini, arms=("pre-grow",)), tmp_path / "r.yaml")
    line = (
        f"{sys.executable} -m depthgrow study {recipe} --out {tmp_path / 's'} 2>&1 | head -n 1; exit ${{PIPESTATUS[0]}}"
    )
    result = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0
    assert len(list((tmp_path / "s" / "nodes").glob("*/done.json"))) == 3
    assert (tmp_path / "s" / "report" / "report.html").exists()
