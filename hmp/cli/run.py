"""``hmp run [OPTIONS] script.py ARGS``: an unmodified script under hmp."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import functools
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hmp

from ..compat.import_finders import after_import
from ..errors import to_install
from ..tools.extras import lacking
from .output import Parser, check_folder, check_page

# The environment variable that passes the parent's options to a spawned process.
OF_PARENT = "HMP_RUN"
_WRONG_USE = 2  # with which argparse ends a script that does not know an option


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "run",
        example="hmp run --policy autocast train.py --epochs 3\nhmp run --detect-nonfinite -m my_package.train",
        help="run an unmodified script under hmp",
        usage="hmp run [OPTION ...] [--] SCRIPT [ARGUMENT ...]\n       hmp run [OPTION ...] -m MODULE [ARGUMENT ...]",
        description="Runs a script, or with -m a module, as python itself would: its arguments, exit status, signals and tracebacks "
        "are its own. With --policy or a list (--bf16, --fp32, ...), or with the environment variable HMP_POLICY (used as "
        "--policy), its ops are cast as by hmp.convert(). If the script calls hmp.convert() itself, the script's policy replaces it. "
        "Options before the script are hmp's; all arguments after it are the script's. Exit status 2 if the options or the script cannot "
        "be used.",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    parser.add_argument("--policy", metavar="NAME", help="cast under this policy: a preset or a folder of list files")
    parser.add_argument("--bf16", metavar="FILE", help="cast with this BF16 list")
    parser.add_argument("--fp32", metavar="FILE", help="cast with this FP32 list")
    parser.add_argument("--fp8", metavar="FILE", help="run the matrix multiplications on this list in FP8, emulated on devices without FP8")
    parser.add_argument("--fp32-result", metavar="FILE", help="keep the results of the matrix multiplications on this list in float32")
    parser.add_argument("--list", metavar="KIND=FILE", action="append", help="cast with a list of another kind, which a package brings")
    parser.add_argument("--saved", metavar="FILE", help="store the activations that the ops on this list save for backward in 8 bits")
    parser.add_argument("--verbose", action="store_true", help="log the policy, and each distinct cast once")
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="record which dtype each op ran in, and write a report when the script ends: HTML (.html), JSON (.json) or text; "
        "ranks other than 0 write FILE.rank1.html and so on",
    )
    parser.add_argument(
        "--capture",
        metavar="FILE",
        help="record what every module returns in the first call of each model, for hmp diff; ranks other than 0 write FILE.rank1 "
        "and so on",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check the first steps; stop with an error if an op did not follow its list, and print what overrode the list",
    )
    parser.add_argument(
        "--detect-nonfinite", action="store_const", const="raise", help="stop at the first op that makes NaN or Inf out of finite inputs"
    )
    parser.add_argument(
        "--detect-nonfinite=log", dest="detect_nonfinite", action="store_const", const="log", help="log each such op, and continue"
    )
    parser.add_argument(
        "--habana",
        action="store_true",
        help="run scripts written for Gaudi without Habana's software: makes habana_frameworks importable and 'hpu' a device",
    )
    parser.add_argument(
        "--device-map", metavar="hpu=DEVICE", help="the device that 'hpu' means: hpu=cpu, hpu=cuda or hpu=auto; implies --habana"
    )
    # one argument and all that follows it, a "--" too
    parser.add_argument(
        "command", metavar="SCRIPT [ARGUMENT ...]", nargs=argparse.PARSER, help="a Python file, or a module with -m, and its arguments"
    )


def run(options: argparse.Namespace) -> int:
    """Return 0 where the script ended without one of its own, 2 if the options or the script cannot be used."""
    script, *arguments = options.command[1:] if options.command[0] == "--" else options.command
    try:
        with contextlib.ExitStack() as watching:
            try:
                if not (options.is_module or os.path.exists(script)):
                    raise hmp.HmpError(f"{script}: no such file; give a Python script, or -m and a module's name")
                if options.capture is not None and (lacks := lacking("capture")):
                    raise hmp.HmpError(f"--capture needs {lacks}: {to_install('capture')}")
                if not any(getattr(options, name) is not None for name in CASTING):
                    options.policy = os.environ.get(POLICY) or None
                called = prepare(options)
                pass_on(options)
                if options.capture is not None:
                    watching.enter_context(_captured(options.capture))
            except hmp.HmpError as error:
                print(f"hmp run: {error}", file=sys.stderr)
                return 2
            if options.report is not None:
                watching.enter_context(_recorded(options.report))
            if options.verify:
                watching.enter_context(verified_steps())
            if options.detect_nonfinite is not None:
                watching.enter_context(hmp.detect_nonfinite(options.detect_nonfinite))
            _launch(script, arguments, options.is_module)
    except SystemExit as end:
        say_what_matched_nothing(called)
        if end.code in (None, 0, _WRONG_USE):
            say_where_nothing_was_cast(options, script)
        raise
    except BaseException:
        _show_from_script_on()
        raise  # python itself prints it, and ends as it does after it
    say_what_matched_nothing(called)
    say_where_nothing_was_cast(options, script)
    return 0


def pass_on(options: argparse.Namespace) -> None:
    """Have processes that this one spawns, or that Lightning starts, do what the options ask for."""
    from multiprocessing import spawn

    values = {name: getattr(options, name) for name in (*CASTING, "verbose", "habana", "device_map")}
    for name in NAMING_FILES:
        if values[name] and os.path.exists(values[name]):
            values[name] = os.path.abspath(values[name])  # the script may change the working directory
    values["list"] = [f"{kind}={os.path.abspath(file)}" for kind, _, file in (each.partition("=") for each in options.list or ())] or None
    _pass_on_to_lightning(values)
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = original(name)
        main = {key: data.pop(key) for key in ("init_main_from_name", "init_main_from_path") if key in data}
        os.environ[OF_PARENT] = json.dumps({**values, **main})
        return {**data, "init_main_from_path": str(Path(__file__).resolve().with_name("child_process.py"))}

    spawn.get_preparation_data = get_preparation_data


def prepare(options: argparse.Namespace) -> Any:
    """Install the shim and convert, as far as the options ask for it.

    Return what finds the modules that scoped entries name, if there are such lines, else None. Raise HmpError where that cannot be.
    """
    converts = [name for name in CASTING if getattr(options, name) is not None]
    if options.policy is not None and converts != ["policy"]:
        others = ", ".join("--" + name.replace("_", "-") for name in converts if name != "policy")
        raise hmp.HmpError(f"expected --policy or {others}, got both; leave one out")
    if options.verbose and not converts:
        raise hmp.HmpError("--verbose logs what a policy casts, but no policy was given; add one, such as --policy autocast")
    if options.report is not None and Path(options.report).suffix not in ("", ".txt", ".json", ".html"):
        raise hmp.HmpError(f"--report {options.report}: expected a name that ends in .html, .json or .txt")
    if options.report is not None and options.report.endswith(".html"):
        check_page(options.report, "--report", "jinja2")
    check_folder(options.report, "--report")
    if options.habana or options.device_map is not None:
        from ..compat import habana  # here: other runs do without

        habana.install("auto" if options.device_map is None else options.device_map)
    if not converts:
        return None
    from ..core.convert import convert_script

    return convert_script("O1", options.policy, _list_files(options), options.verbose)


def _list_files(options: argparse.Namespace) -> dict[str, str]:
    """Return the list files that the options name, by the kind of list. Raise HmpError for a kind that is not installed."""
    from ..core import lists  # here: it imports torch

    found = {name: getattr(options, name) or "" for name in _LISTS}
    for given in options.list or ():
        kind, equals, file = given.partition("=")
        if not equals:
            raise hmp.HmpError(f"--list: expected KIND=FILE, such as fp8=my_lists/fp8.txt, got {given!r}")
        found[lists.kind_of(kind).name] = file
    return found


@contextlib.contextmanager
def _recorded(name: str) -> Iterator[None]:
    """Record while the script runs, and write the report however it ends."""
    from ..tools.traces.file import of_rank  # here: other runs do without

    with hmp.record() as report:
        try:
            yield
        finally:
            target = of_rank(Path(name))
            if write := {".html": report.to_html, ".json": report.to_json}.get(target.suffix):
                write(target)
            else:
                target.write_text(f"{report}\n", encoding="utf-8")
            print(f"hmp run: report written: {target}", file=sys.stderr)


@contextlib.contextmanager
def _captured(target: str) -> Iterator[None]:
    """Capture the first call of every model while the script runs; a line on stderr where none was called."""
    from ..tools.traces.capture import NothingCalled

    try:
        with hmp.capture(target, calls=1):
            yield
    except NothingCalled as error:
        print(f"hmp run: --capture {error}", file=sys.stderr)


def _launch(script: str, arguments: list[str], is_module: bool) -> None:
    """Run the script in a `__main__` of its own, with `sys.argv` and `sys.path` as python would set them."""
    _formerly.append(sys.modules["__main__"])  # whose functions are still running
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.argv = ["-m" if is_module else script, *arguments]
    if is_module:
        _set_path(os.getcwd())
        _run_module(script)
    elif os.path.isdir(script) or zipfile.is_zipfile(script):
        _set_path(os.path.abspath(script))
        _run_module("__main__")
    else:
        _set_path(os.path.dirname(os.path.realpath(script)))
        _run_file(os.path.join(os.getcwd(), script), main)


# The two whose frames are the last of hmp's: what is below them is as in a python without hmp.


def _run_module(name: str) -> None:
    # what python -m calls, and for "__main__" what it calls with a folder or an archive
    runpy._run_module_as_main(name, alter_argv=name != "__main__")  # type: ignore[attr-defined]


def _run_file(path: str, main: types.ModuleType) -> None:
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))


_LAST = (_run_module.__code__, _run_file.__code__)
_formerly: list[types.ModuleType] = []


def _show_from_script_on() -> None:
    """Have the traceback that python is about to print begin at the script; a hook that the script has set prints it."""
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> Any:
        found = trace
        while found is not None and found.tb_frame.f_code not in _LAST:
            found = found.tb_next
        trace = found.tb_next if found is not None else trace
        return hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def _set_path(first: str) -> None:
    """Put `first` where python puts the script's folder. hmp stays importable, for processes that the script starts."""
    if getattr(sys.flags, "safe_path", False):
        return
    home = str(Path(hmp.__file__).resolve().parent.parent)
    former, sys.path[0] = sys.path[0], first
    if former == home and home not in sys.path:
        sys.path.append(home)


_LAUNCHERS = tuple(
    f"{home}.strategies.launchers.subprocess_script"
    for home in ("lightning.fabric", "lightning_fabric", "lightning.lite", "lightning_lite")
)


def _pass_on_to_lightning(values: dict[str, Any]) -> None:
    """Have them run under ``hmp run`` with these options: names as in the parsed command line, None and False for those not given."""
    options: list[str] = []
    for name, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            if each not in (None, False):
                options.append("--" + name.replace("_", "-"))
                options += [] if each is True else [str(each)]

    def under_hmp(command: list[str]) -> list[str]:
        return [command[0], "-m", "hmp", "run", *options, *command[1:]]

    for name in _LAUNCHERS:
        after_import(name, functools.partial(_replace, under_hmp))
    after_import("pytorch_lightning.strategies.launchers.subprocess_script", _refuse_old)


def _refuse_old(launcher: types.ModuleType) -> None:
    """Raise HmpError for releases before 1.8, whose processes would run without hmp."""
    if not hasattr(launcher, "_basic_subprocess_cmd"):  # later ones have it from one of _LAUNCHERS, with hmp's command
        raise hmp.HmpError("hmp run expected pytorch_lightning 1.8 or later, got an older release; upgrade it, or call hmp.convert()")


def _replace(under_hmp: Callable[[list[str]], list[str]], launcher: types.ModuleType) -> None:
    basic: Callable[..., list[str]] = launcher._basic_subprocess_cmd
    hydra: Callable[..., tuple[list[str], Any]] = launcher._hydra_subprocess_cmd

    @functools.wraps(basic)
    def basic_command() -> list[str]:
        return under_hmp(basic())

    @functools.wraps(hydra)
    def hydra_command(local_rank: int) -> tuple[list[str], Any]:
        command, folder = hydra(local_rank=local_rank)
        return under_hmp(command), folder

    # Lightning's Trainer takes them from here by name when it is imported, which is after this
    vars(launcher).update(_basic_subprocess_cmd=basic_command, _hydra_subprocess_cmd=hydra_command)


STEPS = 3


@contextlib.contextmanager
def verified_steps() -> Iterator[None]:
    """Record until an optimizer has made `STEPS` steps, or until the end; raises ViolationError there, in the script's own step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook  # here: other runs need not wait for torch

    from ..core.torch_private import function_modes

    with contextlib.ExitStack() as recording:
        report = recording.enter_context(hmp.record())
        steps, modes = 0, function_modes()

        def finish() -> None:
            hook.remove()
            recording.close()
            report.verify()
            calls = sum(row.calls for row in report.rows if row.source)
            print(f"hmp run: verified: {calls} calls in {steps} steps followed their lists{report.never_called_notice}", file=sys.stderr)

        def stepped(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps >= STEPS and function_modes() == modes:  # else a mode of the script's is in the way
                finish()

        hook = register_optimizer_step_post_hook(stepped)
        recording.callback(hook.remove)
        yield
        if report.is_recording:
            finish()


# The environment variable that names a policy where no option does.
POLICY = "HMP_POLICY"
_LISTS = ("fp8", "fp32_result", "saved", "bf16", "fp32")
NAMING_FILES = ("policy", *_LISTS)
CASTING = (*NAMING_FILES, "list")


def say_what_matched_nothing(called: Any) -> None:
    """Print a line on stderr for each scoped entry that matched none of the modules that the script called."""
    if called is None or not called.unmatched:
        return
    from ..core.log import should_log  # here: it imports torch

    where = f" of {', '.join(sorted(called.classes))}, which the script called" if called.classes else ", because the script called none"
    for entry in called.unmatched if should_log() else ():
        at = f"{entry.place}: " if entry.path else ""
        print(f"hmp run: {at}{entry.text!r} matched no module{where}", file=sys.stderr)


def say_where_nothing_was_cast(options: argparse.Namespace, script: str) -> None:
    """Print a line on stderr if torch was imported and nobody, neither options nor script, asked hmp to cast."""
    if "torch" not in sys.modules or "hmp.core.convert" in sys.modules or options.capture is not None:
        return
    from ..core.log import should_log  # here: it imports torch

    if should_log():
        print(
            f"hmp run: hmp cast nothing: no policy was given before {script}, and it does not use hmp; to cast with torch.autocast's lists "
            f"use: hmp run --policy autocast {'-m ' if options.is_module else ''}{script}",
            file=sys.stderr,
        )
