"""`hmp run`: the script runs as python itself would run it, under hmp, with the options, the environment and the policy that were given."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_kit import ROOT, RUN, python

# Shows what a script can see of how it is run, and ends as it is told to.
PROBE = '''\
"""A script."""
import atexit, pickle, sys, threading, time
from beside import fail

class Here:
    pass

print(sys.argv, __name__, __file__, __spec__ and __spec__.name, __package__, __doc__, type(__builtins__).__name__)
print(type(__loader__).__name__, __loader__.name, __loader__.path, sorted(globals()))
print(sys.path[0], sys.modules["__main__"].__dict__ is globals(), pickle.loads(pickle.dumps(Here)) is Here)
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread", sys.modules["__main__"].Here))).start()
how = sys.argv[-1]
if how == "raise":
    try:
        1 / 0
    except ZeroDivisionError:
        fail()
if how == "hook":
    sys.excepthook = lambda kind, error, trace: print(kind, trace.tb_frame.f_code.co_name, error.__traceback__ is trace)
    fail()
if how == "message":
    sys.exit("a last word")
sys.exit(7)
'''


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    fails = "def fail():\n    raise ValueError('on purpose')\n"
    in_package = {"__init__": "", "__main__": PROBE.replace("from beside", "from package.beside"), "beside": fails}
    in_folder, beside = {"__main__": PROBE, "beside": fails}, {"probe": PROBE, "beside": fails, "wrong": "def (:\n"}
    for folder, modules in (("package", in_package), ("folder", in_folder), ("", beside)):
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, text in modules.items():
            (tmp_path / folder / f"{name}.py").write_text(text)
    return tmp_path


COMMANDS = [
    ["-m", "package", "raise"],
    ["./probe.py", "exit"],
    ["probe.py", "hook"],
    ["-m", "probe", "-m", "exit"],
    ["-m", "package.missing"],
    ["folder", "raise"],
    ["wrong.py"],
]


@pytest.mark.parametrize(
    "command",
    [
        ["probe.py", "--own", "-h", "--", "raise"],
        *(pytest.param(each, marks=pytest.mark.slow) for each in COMMANDS[:2]),
        *(pytest.param(each, marks=pytest.mark.nightly) for each in COMMANDS[2:]),
    ],
    ids=" ".join,
)
def test_a_script_sees_and_shows_what_it_does_under_python_itself(command: list[str], scripts: Path) -> None:
    wanted = python(*command, cwd=scripts)
    found = python(*RUN, *command, cwd=scripts)
    assert found.stdout == wanted.stdout
    assert found.stderr == wanted.stderr
    assert found.returncode == wanted.returncode != 0
    assert "hmp" not in found.stderr.replace(sys.prefix, "")  # a checkout may be in a folder of that name


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_signal_ends_the_script_as_it_does_under_python_itself(number: signal.Signals, scripts: Path) -> None:
    (scripts / "wait.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    results = []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for launcher in ((), RUN):
        command = [sys.executable, *launcher, "wait.py"]
        with subprocess.Popen(
            command, cwd=scripts, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # a shell that runs the tests in the background has its children ignore SIGINT
            preexec_fn=functools.partial(signal.signal, number, signal.SIG_DFL),
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            time.sleep(0.5)  # it has left print() by then
            process.send_signal(number)
            _, errors = process.communicate()
        results.append((process.returncode, errors))
    plain, ours = results
    assert ours == plain
    assert ours[0] == -number
    assert ("KeyboardInterrupt" in ours[1]) is (number == signal.SIGINT)


# Each process says what it is under; the function that a spawned process runs is the script's.
SPAWNS = """\
import sys, torch, torch.multiprocessing as mp
import habana_frameworks.torch.core as htcore
import hmp

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return torch.tensor([1.0], device="hpu")

def train(rank):
    dtype = torch.nn.functional.linear(torch.ones(2, 2, device="hpu"), torch.ones(2, 2)).dtype
    print(f"{rank} {dtype} {sys.argv[1:]}\\n", end="", flush=True)  # in one piece: processes write beside each other
    if rank == 1:
        child = mp.get_context("spawn").Process(target=train, args=(2,))
        child.start()
        child.join()

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        assert len(list(torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=method))) == 2
    mp.start_processes(train, args=(), nprocs=2, start_method="spawn")
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["spawns.py", pytest.param("-m spawns", marks=pytest.mark.nightly)])
def test_processes_that_the_script_spawns_are_under_hmp_too(script: str, tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    (tmp_path / "mine.txt").write_text("linear\n")
    done = python(*RUN, "--habana", "--bf16", "mine.txt", *script.split(), "--bf16", cwd=tmp_path)  # and one of the script's own
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} torch.bfloat16 ['--bf16']" for rank in range(3)]


SCRIPT = """\
import sys, torch
x = torch.full((2, 2), 300.0)
print((x @ x).dtype, (x * x).dtype, sys.argv[1:])
"""
FLOAT32, HABANA = "torch.float32 torch.float32", "torch.bfloat16 torch.bfloat16"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return python(*RUN, *arguments, cwd=folder, **env)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["--policy", "habana", "--", "train.py", "--policy", "ppo"], f"{HABANA} ['--policy', 'ppo']"),
        (["train.py", "--", "--bf16", "-h", "--version"], f"{FLOAT32} ['--', '--bf16', '-h', '--version']"),
        (["-m", "train", "--bf16", "--report=a"], f"{FLOAT32} ['--bf16', '--report=a']"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_the_scripts_passes_through(arguments: list[str], seen: str, folder: Path) -> None:
    done = run(folder, *arguments)
    assert (done.returncode, done.stdout) == (0, f"{seen}\n"), done.stderr


@pytest.mark.slow
def test_the_environment_names_a_policy_and_an_option_wins(folder: Path) -> None:
    assert run(folder, "train.py", HMP_POLICY="habana").stdout.startswith(HABANA)
    (folder / "mine.txt").write_text("mul\n")
    assert run(folder, "--policy", "torch-cpu", "train.py", HMP_POLICY="habana").stdout.startswith("torch.bfloat16 torch.float32")
    assert run(folder, "train.py", HMP_POLICY="").stdout.startswith(FLOAT32)
    wrong = run(folder, "train.py", HMP_POLICY="habanna")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("hmp run: unknown policy 'habanna'; did you mean 'habana'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("-m train", "hmp run --policy autocast -m train"),
        ("train.py --bf16 --report=a --epochs", "hmp run --policy autocast train.py"),
        ("knows_none.py --policy habana", "hmp run --policy autocast knows_none.py"),
        ("fails.py --bf16", ""),
        ("reverts.py --bf16", ""),
        ("plain.py --bf16", ""),
    ],
)
def test_a_run_that_casts_nothing_says_so_and_names_what_may_have_been_meant(arguments: str, told: str, folder: Path) -> None:
    (folder / "plain.py").write_text("print('no torch')\n")
    (folder / "fails.py").write_text(f"{SCRIPT}\nsys.exit(3)\n")
    (folder / "knows_none.py").write_text("import argparse, torch\nargparse.ArgumentParser().parse_args()\n")
    (folder / "reverts.py").write_text("import hmp\nwith hmp.convert():\n    pass\n")
    said = run(folder, *arguments.split()).stderr
    assert told in said and said.count("hmp run: hmp cast nothing") == bool(told), said


FLOAT16 = "import torch\nx = torch.full((2, 2), 300.0).half()\ny = x * x\nprint('went on')\ny = torch.exp(x)\n"


@pytest.mark.slow
def test_nonfinite_numbers_stop_the_script_or_are_logged(folder: Path) -> None:
    (folder / "train.py").write_text(FLOAT16)
    stopped = run(folder, "--detect-nonfinite", "train.py")
    assert (stopped.returncode, stopped.stdout) == (1, "")
    assert "NonFiniteError: `mul` made Inf out of finite inputs: train.py:3" in stopped.stderr.replace(f"{folder}{os.sep}", "")
    logged = run(folder, "--detect-nonfinite=log", "train.py")
    assert (logged.returncode, logged.stdout) == (0, "went on\n")
    assert "`mul` made Inf" in logged.stderr and "`exp` made Inf" in logged.stderr


def test_scoped_entries_apply_in_the_models_that_a_script_calls(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import torch\n"
        "model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.ones(1, 4)\n"
        "print(model[:1](x).dtype, model(x).dtype)\n"
    )
    (folder / "bf16.txt").write_text("linear @ 1\n")
    done = run(folder, "--policy", ".", "train.py")
    assert done.stdout.strip() == "torch.float32 torch.bfloat16", done.stderr
