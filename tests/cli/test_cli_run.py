"""`hmp run`: the script runs as python itself would run it, under hmp."""

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
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "beside.py").write_text("def fail():\n    raise ValueError('on purpose')\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(PROBE.replace("from beside", "from package.beside"))
    (tmp_path / "package" / "beside.py").write_text((tmp_path / "beside.py").read_text())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(PROBE)
    (tmp_path / "folder" / "beside.py").write_text((tmp_path / "beside.py").read_text())
    (tmp_path / "wrong.py").write_text("def (:\n")
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
