"""Every test leaves torch exactly as it found it; this file proves it after each one."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from torch_snapshot import Snapshot, all_of_torch, residue_on_modules, settle_torch, torch_owners

# the tensors here are tiny: a second thread only waits, and on a shared machine it waits long. A test's own processes inherit it: beside
# one another two of them took five times as long with two threads each.
THREADS = os.environ.get("HMP_TEST_THREADS", "1")
torch.set_num_threads(int(THREADS))
os.environ["OMP_NUM_THREADS"] = THREADS
# a forked process has not the threads of its parent's products, and would wait for them: torch's DataLoader does the same in its workers
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

# a million objects of libraries are alive, and a convert() makes fifty thousand: to look through them took a fourth of the time
gc.set_threshold(200_000, 20, 50)

# before any test module can import hmp: importing it must not change torch either
settle_torch()
# behind it: torch loads a profile of its own there. A patched call is slow the first time, so a deadline for each example says nothing
# A failing example patches torch anew each time it is tried: to shrink it takes many minutes, which look like a hang. Who wants it shrunk
# says --hypothesis-profile=hmp-shrink
settings.register_profile(
    "hmp",
    max_examples=int(os.environ.get("HMP_TEST_EXAMPLES", "6")),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("hmp-shrink", parent=settings.get_profile("hmp"), phases=list(Phase))
settings.load_profile("hmp")
TORCH = Snapshot(torch_owners())
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # torch.distributed.reduce_op warns when it is looked at
    ALL_OF_TORCH = Snapshot(all_of_torch())
_reported: set[str] = set()


def _differences(on_modules: bool = True) -> list[str]:
    hmp = sys.modules.get("hmp")
    left = residue_on_modules(os.path.dirname(os.path.abspath(hmp.__file__))) if hmp is not None and on_modules else []
    # what one test left behind is that test's failure alone
    return [line for line in TORCH.differences(whole_bodies=on_modules) + left if line not in _reported]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test marked native_kernels runs with torch's low-precision kernels on every processor, and so do its fixtures and processes."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("native_kernels") is not None:
            patch.setenv("HMP_LOW_KERNELS", "native")
        if "hmp.core.low_kernels" in sys.modules:  # what a test sets for the process would go before the environment of the next
            patch.setattr("hmp.core.low_kernels._chosen", None)
        return (yield)


_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def names_are_searched_for_where_they_are_tested(request: pytest.FixtureRequest) -> Iterator[None]:
    """The search goes through every object that is alive, and here those of all libraries are: half of the time of a test.

    Tests marked searches_references convert with it, and so do an eighth of the slow and nightly tests, always the same, and all other
    processes.
    """
    marks = {mark.name for mark in request.node.iter_markers()}
    one_of_eight = zlib.crc32(request.node.nodeid.encode()) % 8 == 0
    searches = "searches_references" in marks or (one_of_eight and not marks.isdisjoint({"slow", "nightly"}))
    if searches or "hmp.core.dispatch.placement" not in sys.modules:
        yield
        return
    from hmp.core.patching import heap, references

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heap, "partials_and_modules", lambda: heap.PartialsAndModules([], []))
        patch.setattr(references, "_in_python_modules", lambda replaced: iter(()))
        yield


@pytest.fixture(autouse=True)
def an_unknown_dynamo_is_no_surprise() -> None:
    """hmp warns of torch 2.7's at every convert(), which would be the failure of each test that takes warnings for errors."""
    if torch.__version__ < (2, 13):
        warnings.filterwarnings("ignore", r"hmp does not know the torch\.compile", RuntimeWarning)


@pytest.fixture(autouse=True)
def what_trainers_leave_ends_with_the_test() -> Iterator[None]:
    """LOCAL_RANK in the environment, by which the next trainer takes the process for one of several, and a process group."""
    environment, had_group = dict(os.environ), _has_process_group()
    yield
    for name in os.environ.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    if not had_group and _has_process_group():
        torch.distributed.destroy_process_group()


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@pytest.fixture(autouse=True)
def torch_knows_its_default_device() -> Iterator[None]:
    """Until torch 2.9, set_default_device(None) leaves a state in which get_default_device() raises, which transformers calls."""
    yield
    if torch.__version__ < (2, 10) and vars(torch._GLOBAL_DEVICE_CONTEXT).get("device_context", "") is None:
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


@pytest.fixture
def no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that has none for bfloat16 and float16; what a test sets by hmp.set_low_kernels() ends with it."""
    monkeypatch.setattr("hmp.core.low_kernels._chosen", None)
    monkeypatch.setenv("HMP_LOW_KERNELS", "float32")


@pytest.fixture
def hpu_on_cpu() -> Iterator[Any]:
    """Habana's names, with the CPU for "hpu"."""
    from hmp.compat import habana

    with habana.install("cpu") as shim:
        yield shim


@pytest.fixture
def accelerates_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """None, and none is left: earlier releases of transformers write it into the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


@pytest.fixture
def forget_accelerator() -> Iterator[Callable[[], None]]:
    """Forgets an Accelerator's settings, which are the process's, for good; at the end it is done too."""
    state = pytest.importorskip("accelerate.state")

    def forget() -> None:
        for each in (state.AcceleratorState, state.GradientState, state.PartialState):
            each._reset_state()

    yield forget
    forget()


@pytest.fixture
def torch_differences() -> Callable[[], list[str]]:
    """What of torch is not as it was before hmp touched it; a test that calls hmp.revert() asks in its own body."""
    return _differences


@pytest.fixture(autouse=True)
def torch_stays_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed the test, undo its conversion, and prove that nothing of it is left in torch."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the traceback for each kind of device that may come
    yield
    hmp = sys.modules.get("hmp")
    if hmp is not None and hasattr(hmp, "revert"):
        hmp.revert()
    # there are thousands of classes of modules once every library is imported, and of functions: not every test looks into them
    differences = _differences(on_modules=next(_tests) % 25 == 0)
    _reported.update(differences)
    if differences:
        pytest.fail(_not_what_it_was(differences, "torch_has_compiled" not in request.fixturenames), pytrace=False)
    left_in = _left_in()
    if left_in is not None:
        pytest.fail(f"the test left its thread in {left_in!r}: a region that it entered did not end there", pytrace=False)


def _not_what_it_was(differences: list[str], may_lack_the_fixture: bool = True) -> str:
    said = "\n  ".join([f"torch is not what it was ({len(differences)} differences):", *differences[:20]])
    if may_lack_the_fixture and "torch._dynamo" in sys.modules:
        said += "\na test that compiles takes the fixture fresh_compiler: Dynamo's own changes are not counted then"
    return said


def _left_in() -> object:
    """What a test left in force in its own thread, None where that is nothing; the next test begins outside of it."""
    state = sys.modules.get("hmp.core.active.state")
    if state is None or state.current_state() is state.PROCESS:
        return None
    found = state.current_state()
    state.put(state.UNSET)
    return found


@pytest.fixture(scope="session")
def torch_has_compiled() -> None:
    """What torch.compile changes in torch at its first use, before hmp is in place, is not hmp's doing."""
    _note_changes_of("aot_eager")


@pytest.fixture(scope="session")
def inductor_has_compiled(torch_has_compiled: None) -> None:
    """The same of torch's own backend, which takes longer."""
    _note_changes_of("inductor")


def _note_changes_of(backend: str) -> None:
    importlib.import_module("torch.export._trace")
    compiled = torch.compile(lambda x: (x @ x).sum(), backend=backend)
    compiled(torch.ones(2, 2, requires_grad=True)).backward()
    _reported.update((*TORCH.differences(), *ALL_OF_TORCH.differences()))


@pytest.fixture
def fresh_compiler(torch_has_compiled: None) -> Iterator[None]:
    """Nothing is compiled when the test begins, and nothing is left when it ends."""
    torch._dynamo.reset()
    bridge = sys.modules.get("hmp.core.compile.bridge")
    if bridge is not None:
        bridge.forget_wrappers()  # the last test may have had other kernels
    yield
    sys.modules["hmp"].revert()
    torch._dynamo.reset()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The sweep's exceptions are named in every run that swept."""
    reports = [report for kept in terminalreporter.stats.values() for report in kept]
    if any("test_sweep.py" in getattr(report, "nodeid", "") for report in reports):
        import sweep_exceptions

        for line in sweep_exceptions.summary():
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True, scope="session")
def all_of_torch_stays_torch() -> Iterator[None]:
    """At the end of the session, look at every module and class of torch instead of the usual ones."""
    yield
    hmp = sys.modules.get("hmp")
    if hmp is not None and hasattr(hmp, "revert"):
        hmp.revert()
    # a strict export leaves its graphs among the globals of a module of torch's, with hmp and without
    differences = [line for line in ALL_OF_TORCH.differences() if line not in _reported and "__compiled_fn_" not in line]
    if differences:
        pytest.fail("after all tests, whichever of them did it, " + _not_what_it_was(differences), pytrace=False)
