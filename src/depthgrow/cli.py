"""The command line; `depthgrow --help` lists the commands."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from depthgrow import __version__
from depthgrow.files import UserError, as_path, launched

DONE, OUR_FAULT, USER_ERROR, STOPPED, DIVERGED = 0, 1, 2, 3, 4
QUIET_SECONDS = 10  # a rank that leaves the telling to rank 0 must not end first: torchrun would end rank 0 unheard

RECIPE = (
    "debug | laptop | laptop-long | laptop-deep | smollm2 | paper | a .py or .yaml | a study's folder, to go on with it"
)
RECIPE_COMMANDS = ("study", "plan", "train", "prepare", "pretrain")
OWN_FLAGS = {"--out": True, "--arm": True, "--json": False, "--help": False}  # whether a value follows
OTHER_PATH, MORE_ROOM = "choose another path or change its rights", "make room there and run again"
REMEDIES = {
    **dict.fromkeys(
        (
            errno.ENOENT,
            errno.EPERM,
            errno.EACCES,
            errno.EEXIST,
            errno.ENOTDIR,
            errno.EISDIR,
            errno.EROFS,
            errno.ENAMETOOLONG,
            errno.ELOOP,
        ),
        OTHER_PATH,
    ),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), MORE_ROOM),
}
EPILOG = """\
options of a recipe are written --section.field value, for example --arms pre-grow,post-grow --seeds 3 --optim.peak_lr 2e-3;
`depthgrow plan RECIPE` lists them all with their values.
exit codes: 0 done, 1 our fault, 2 a mistake in the call or its input, 3 stopped by a signal with everything saved,
4 done but for phases that diverged (a loss or gradient was not finite).
"""


class _Parser(argparse.ArgumentParser):
    """One line and exit code 2 instead of a usage block."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def _parser() -> _Parser:
    style: dict[str, Any] = {
        "epilog": EPILOG,
        "allow_abbrev": False,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = _Parser(prog="depthgrow", description=__doc__, **style)
    parser.add_argument("--version", action="version", version=f"depthgrow {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, **style)

    for name, text in (
        ("study", "run what is missing of a study's tree, then write its report"),
        ("plan", "show a study's tree, parameters, budgets, memory and options; nothing is run"),
        ("train", "run one arm of a study"),
        ("prepare", "fetch or convert a teacher, tokenize the text, fill the teacher cache"),
    ):
        sub = command(name, text)
        sub.add_argument("recipe", help=RECIPE)
        if name in ("study", "train"):
            sub.add_argument(
                "--out", type=as_path, help="the study's folder (default: runs/RECIPE, or the folder named)"
            )
        if name == "train":
            sub.add_argument("--arm", required=True, help="for example post-grow")
        if name == "plan":
            sub.add_argument("--json", action="store_true", help="print the plan as JSON")
    sub = command("pretrain", "train a teacher from scratch and export it")
    sub.add_argument("recipe", help="laptop-teacher")
    sub.add_argument("--out", type=as_path, help="folder (default: runs/RECIPE)")
    _study_commands(command)
    command("doctor", "say what is installed, what is missing, and what this machine offers")
    return parser


def _study_commands(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Those that read what is there: a study's folder, an arm of it, a model."""
    sub = command("ls", "list a study folder's arms and nodes: done, started, missing, shared")
    sub.add_argument("study", type=as_path)
    sub.add_argument("--json", action="store_true")
    sub = command(
        "match", "name the joint arms that spend what a finished arm spent: tokens, active-layer tokens, FLOPs"
    )
    sub.add_argument("study", type=as_path)
    sub.add_argument("arm", help="for example post-grow")
    sub.add_argument("--json", action="store_true")
    sub = command("report", "write STUDY/report from the study's files")
    sub.add_argument("study", type=as_path)
    sub = command("eval", "evaluate an arm's final checkpoint, or a model folder, on a study's held-out documents")
    sub.add_argument("study", type=as_path)
    sub.add_argument("arm", nargs="?")
    sub.add_argument("--model", help="a Hugging Face model folder with the study's tokenizer")
    sub.add_argument("--seed", type=int)
    sub.add_argument("--json", action="store_true")
    sub = command("diagnose", "what each block is worth and sends on: of an arm, or of any Llama, Qwen2 or Qwen3 model")
    sub.add_argument("target", help="a study folder, or a model folder or hub name")
    sub.add_argument("arm", nargs="?", help="an arm of a study folder (default: all that are finished)")
    sub.add_argument("--seed", type=int, help="of the arm (default: the first there is)")
    sub.add_argument("--corpora", help="text for a model (default: docstrings:stdlib)")
    sub.add_argument("--documents", type=int, help="held-out documents of it to use (default: 32)")
    sub.add_argument("--layers-per-block", type=int, help="layers of a model taken as one block (default: 1)")
    sub.add_argument("--json", action="store_true")
    sub = command("export", "write an arm's final student as a Hugging Face model folder")
    sub.add_argument("study", type=as_path)
    sub.add_argument("arm")
    sub.add_argument("--to", type=as_path, required=True, help="folder to write")
    sub.add_argument("--seed", type=int)
    sub.add_argument("--dtype", default="float32", help="of the weights: float32 | bfloat16")
    sub.add_argument(
        "--teacher-rows",
        action="store_true",
        help="keep the teacher's unused vocabulary rows, so that the student can draft for it (assistant_model)",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code and never lets a traceback stand for a user's mistake."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        own, assignments = _split(list(sys.argv[1:] if arguments is None else arguments))
        options, rest = _parser().parse_known_args(own)
        return _run(options, [*rest, *assignments])
    except UserError as error:
        rank = os.environ["RANK"] if launched() else "0"
        if rank == "0" or error.told_elsewhere is False:  # else rank 0 of torchrun says the same
            print(f"depthgrow: {f'rank {rank}: ' if rank != '0' else ''}{error}", file=sys.stderr)
        else:
            time.sleep(QUIET_SECONDS)
        return USER_ERROR
    except KeyboardInterrupt:
        print("depthgrow: interrupted", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0)
        if remedy is None:
            traceback.print_exc()
            return OUR_FAULT
        where = f"{error.filename}: " if error.filename else ""
        print(f"depthgrow: {where}{error.strerror}; {remedy}", file=sys.stderr)
        return USER_ERROR


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """A command's own arguments, and the ``--section.field value`` pairs among them, wherever they stand."""
    if not arguments or arguments[0] not in RECIPE_COMMANDS:
        return arguments, []
    own, assignments = arguments[:1], []
    rest = arguments[1:]
    while rest:
        flag = rest.pop(0)
        name, equals, _ = flag.partition("=")
        if not flag.startswith("--") or name in OWN_FLAGS:
            own.append(flag)
            if OWN_FLAGS.get(name) and not equals and rest:
                own.append(rest.pop(0))
        else:
            assignments.append(flag)
            if not equals and rest:
                assignments.append(rest.pop(0))
    return own, assignments


def run() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal or locale without these characters
    if not launched():
        sys.exit(main())
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = OUR_FAULT
    # gloo's threads outlive the process group while anything still refers to it, and one that lets go of a tensor
    # during the interpreter's own shutdown aborts the process: a rank leaves without that shutdown
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    if options.command in RECIPE_COMMANDS:
        from depthgrow.config import parse_assignments

        assignments: dict[str, Any] = dict(parse_assignments(rest))
    elif rest:
        raise UserError(f"unexpected argument {rest[0]!r} (see depthgrow {options.command} --help)")
    ranked = options.command in ("study", "train", "prepare")
    if launched() and not ranked:
        raise UserError(f"{options.command} runs in one process; call it without torchrun")
    if options.command == "report":
        return _report(options.study)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if options.command in ("study", "plan", "train", "prepare"):
        return _recipe_command(options, assignments)
    if options.command == "pretrain":
        return _pretrain(options, assignments)
    from depthgrow import arms, status

    if options.command == "ls":
        return status.ls(options.study, as_json=options.json)
    if options.command == "match":
        return status.match(options.study, options.arm, as_json=options.json)
    if options.command == "eval":
        return arms.evaluate_arm(options.study, options.arm, options.model, options.seed, options.json)
    if options.command == "diagnose":
        return arms.diagnose_target(
            options.target,
            options.arm,
            options.seed,
            options.corpora,
            options.documents,
            options.layers_per_block,
            options.json,
        )
    if options.command == "export":
        return arms.export_arm(
            options.study, options.arm, options.to, options.seed, options.dtype, options.teacher_rows
        )
    return status.doctor()


def _recipe_command(options: argparse.Namespace, assignments: dict[str, Any]) -> int:
    from depthgrow.config import override
    from depthgrow.recipes import RECIPES, load_recipe
    from depthgrow.teacher.sources import prepare_smollm2

    study = load_recipe(options.recipe)
    if options.command == "train":
        assignments["arms"] = options.arm
    study = override(study, assignments)
    if options.command == "plan":
        from depthgrow.plan import plan

        return plan(study, as_json=options.json)
    from depthgrow.console import Console
    from depthgrow.parallel import first, joined, on_first
    from depthgrow.prepare import prepare
    from depthgrow.runner import run_study
    from depthgrow.runtime import Stopped, StopSignal, pick_device

    named = as_path(options.recipe)
    default = named if options.recipe not in RECIPES and named.is_dir() else Path("runs") / study.name
    root = getattr(options, "out", None) or default
    diverged: list[str] = []
    with joined(pick_device(study.train.device)), StopSignal().listening() as stop:
        with Console() if first() else Console(open(os.devnull, "w", encoding="utf-8")) as console:
            try:
                if options.command == "prepare":
                    if study.teacher.source == "smollm2":
                        console.note(f"teacher: {on_first(prepare_smollm2)}")
                    prepare(study, console, stop).fill(study, stop, console)
                else:
                    diverged = run_study(study, root, stop=stop, listener=console)
            except Stopped as stopped:
                console.note(f"stopped during {stopped}; everything is saved, run the same command to go on")
                return STOPPED
        code = _report(root) if options.command == "study" and first() else DONE
        return DIVERGED if diverged and code == DONE else code


def _pretrain(options: argparse.Namespace, assignments: dict[str, Any]) -> int:
    from depthgrow.config import override
    from depthgrow.console import Console
    from depthgrow.files import unknown
    from depthgrow.pretrain import pretrain
    from depthgrow.recipes.laptop_teacher import laptop_teacher
    from depthgrow.runtime import Stopped, StopSignal

    if options.recipe != "laptop-teacher":
        raise unknown("recipe", options.recipe, ["laptop-teacher"])
    config = override(laptop_teacher(), assignments)
    with StopSignal().listening() as stop, Console() as console:
        try:
            model = pretrain(config, options.out or Path("runs") / config.name, stop=stop, listener=console)
        except Stopped:
            console.note("stopped; everything is saved, run the same command to go on")
            return STOPPED
    print(model)
    return DONE


def _report(root: Path) -> int:
    from depthgrow.report.write import write_report

    result = write_report(root)
    print(result.sentence)
    print(f"report: {result.html}")
    return DONE


if __name__ == "__main__":
    run()
