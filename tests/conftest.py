"""Each test begins with the same seed and without casts; after each file, torch is compared with what it was before hmp."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

import hmp
from torch_snapshot import Snapshot, all_of_torch, residue_on_modules, settle_torch, torch_settings

# the tensors here are tiny: a second thread only waits, and on a shared machine it waits long. A test's own processes inherit it: beside
# one another two of them took five times as long with two threads each.
THREADS = os.environ.get("HMP_TEST_THREADS", "1")
torch.set_num_threads(int(THREADS))
os.environ["OMP_NUM_THREADS"] = THREADS
# a forked process has not the threads of its parent's products, and would wait for them: torch's DataLoader does the same in its workers
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

# A patched call is slow the first time, so a deadline for each example says nothing. A failing example patches torch anew each time it is
# tried: to shrink it takes many minutes, which look like a hang. Who wants it shrunk says --hypothesis-profile=hmp-shrink
settings.register_profile(
    "hmp",
    max_examples=int(os.environ.get("HMP_TEST_EXAMPLES", "6")),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("hmp-shrink", parent=settings.get_profile("hmp"), phases=list(Phase))

TESTS = str(Path(__file__).parent)
# HMP_TEST_STRICT=1 compares after each test: to find which one of a file left something behind
STRICT = bool(os.environ.get("HMP_TEST_STRICT"))


class Torch:
    """What torch was before hmp's core was imported."""

    snapshot: Snapshot


def pytest_sessionstart(session: pytest.Session) -> None:
    """Look at torch before a test imports hmp's core: to import it must not change torch either. xdist's controller runs no test."""
    if hasattr(session.config, "workerinput") or session.config.getoption("dist", "no") == "no":
        settle_torch()
        settings.load_profile(session.config.getoption("--hypothesis-profile") or "hmp")  # torch has loaded one of its own
        Torch.snapshot = Snapshot(all_of_torch())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs all tests of a file, for which torch is patched once, and one all of tests/compat, which imports Lightning."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/compat" if nodeid.startswith("tests/compat/") else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # files of few tests are not the quick ones
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test marked native_kernels runs with torch's low-precision kernels on every processor, and so do its fixtures and processes."""
    with low_kernels("native") if item.get_closest_marker("native_kernels") is not None else contextlib.nullcontext():
        result = yield
    _leave_low_kernels_to(os.environ)
    return result


@contextlib.contextmanager
def low_kernels(choice: str) -> Iterator[None]:
    """The environment says so, to this process and to those that it starts."""
    before = dict(os.environ)
    hmp.low_kernels.set_low_kernels(choice)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMP_LOW_KERNELS", choice)
        _leave_low_kernels_to(os.environ)
        yield
        _leave_low_kernels_to(before)


def _leave_low_kernels_to(environment: Mapping[str, str]) -> None:
    """End what hmp.low_kernels.set_low_kernels() has set, which no public call does. What torch is patched with follows."""
    from hmp.core.rules import emulation

    hmp.low_kernels.set_low_kernels(environment.get("HMP_LOW_KERNELS") or "auto")
    emulation._chosen = None


@pytest.fixture(autouse=True, scope="function" if STRICT else "module")
def torch_is_as_it_was() -> Iterator[pytest.MonkeyPatch]:
    """Undo what the tests of a file left, and prove that nothing of hmp is left in torch."""
    gc.collect()
    gc.freeze()  # what was there before is neither collected nor, by hmp, searched for names taken before: a million objects of libraries
    with pytest.MonkeyPatch.context() as patch:
        _leave_libraries_out(patch)
        yield patch
        hmp.revert()
    left = Torch.snapshot.differences() + residue_on_modules(str(Path(hmp.__file__).parent))
    Torch.snapshot.accepted.update(left)
    if left:
        said = "\n  ".join([f"torch is not what it was ({len(left)} differences):", *left[:20]])
        said += "\nHMP_TEST_STRICT=1 tells which test did it; one that compiles takes the fixture fresh_compiler"
        pytest.fail(said, pytrace=False)


def _leave_libraries_out(patch: pytest.MonkeyPatch) -> None:
    """hmp searches tests, and what they make, for names that were taken before: all libraries would take 0.3 seconds for each policy."""
    from hmp.core.patching import names
    from hmp.tools import unreachable

    files = {name: getattr(module, "__file__", None) or TESTS for name, module in list(sys.modules.items()) if "." not in name}
    libraries = {name for name, file in files.items() if not file.startswith(TESTS)}
    for module in (names, unreachable):
        patch.setattr(module, "SKIPPED", module.SKIPPED | libraries)


@pytest.fixture(autouse=True)
def each_test_for_itself() -> Iterator[None]:
    """Seed the test and end what it converted, applied and left in the process. A context that it entered and left open fails it."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the traceback for each kind of device that may come
    if torch.__version__ < (2, 13):  # hmp warns of 2.7's Dynamo: a failure of each test that takes warnings for errors
        warnings.filterwarnings("ignore", r"hmp does not know the torch\.compile", RuntimeWarning)
    settings, environment, had_group = torch_settings(), dict(os.environ), _has_process_group()
    yield
    left_in = _left_in()
    end_policies()
    if "hmp.core.log" in sys.modules:  # what is logged once is logged once in a test
        sys.modules["hmp.core.log"].log_once.cache_clear()
    # LOCAL_RANK, by which the next trainer takes the process for one of several, and a process group
    for name in os.environ.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    if not had_group and _has_process_group():
        torch.distributed.destroy_process_group()
    if torch.__version__ < (2, 10) and vars(torch._GLOBAL_DEVICE_CONTEXT).get("device_context", "") is None:
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # set_default_device(None) leaves it, and get_default_device() then raises
    if left_in is not None:
        pytest.fail(f"the test left its thread in {left_in!r}: a region that it entered did not end there", pytrace=False)
    if settings != torch_settings():
        pytest.fail(f"the test left torch's settings changed: {settings} became {torch_settings()}", pytrace=False)


def end_policies() -> None:
    """As hmp.revert(), but torch stays patched until the file ends: to patch it anew takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hmp.core.patching.patches.restore", lambda: None)
        hmp.revert()
    hmp.memory.clear_cache()


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _left_in() -> object:
    """What a test left in force in its own thread, None where that is nothing; the next test begins outside of it."""
    from hmp.core.active import state

    found = state.current_state()
    if found is state.PROCESS:
        return None
    state.put(state.UNSET)
    return found


@pytest.fixture
def process_group() -> None:
    """torch.distributed with this process alone; it ends with the test, as a group does that the test itself began."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


@pytest.fixture
def unpatched() -> Iterator[None]:
    """torch is not patched when the test begins, and nothing that hmp noted while it was is left when it ends."""
    hmp.revert()
    yield
    hmp.revert()


@pytest.fixture
def libraries_are_searched(torch_is_as_it_was: pytest.MonkeyPatch, unpatched: None) -> Iterator[None]:
    """hmp searches all that is alive for names that were taken before, as it does for users."""
    torch_is_as_it_was.undo()
    gc.unfreeze()
    yield
    hmp.revert()
    gc.freeze()
    _leave_libraries_out(torch_is_as_it_was)


@pytest.fixture
def torch_differences() -> Callable[[], list[str]]:
    """What of torch is not as it was before hmp touched it; a test that calls hmp.revert() asks in its own body."""
    return Torch.snapshot.differences


@pytest.fixture
def no_instructions() -> Iterator[None]:
    """As on a processor that has none for bfloat16 and float16."""
    with low_kernels("float32"):
        yield


@pytest.fixture(scope="session")
def torch_has_compiled() -> None:
    """What torch.compile changes in torch at its first use, before hmp is in place, is not hmp's doing."""
    _accept_changes_of("aot_eager")


@pytest.fixture(scope="session")
def inductor_has_compiled(torch_has_compiled: None) -> None:
    """The same of torch's own backend, which takes longer."""
    _accept_changes_of("inductor")


def _accept_changes_of(backend: str) -> None:
    hmp.revert()
    importlib.import_module("torch.export._trace")
    compiled = torch.compile(lambda x: (x @ x).sum(), backend=backend)
    compiled(torch.ones(2, 2, requires_grad=True)).backward()
    Torch.snapshot.accept()


@pytest.fixture
def fresh_compiler(torch_has_compiled: None, unpatched: None) -> Iterator[None]:
    """Nothing is compiled when the test begins, and nothing is left when it ends."""
    from hmp.core.compile import dynamo_patches

    torch._dynamo.reset()
    dynamo_patches.forget_wrappers()  # the last test may have had other kernels
    yield
    hmp.revert()
    torch._dynamo.reset()
