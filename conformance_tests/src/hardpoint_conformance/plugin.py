"""The pytest plugin: options, the backend under test, and a line of data for every result.

It is loaded wherever the suite is installed, and does nothing unless tests of the suite are collected.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shlex
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np

    from hardpoint.interfaces import AttentionBackend, Capabilities, DeviceAllocator
    from hardpoint_conformance.clauses import Clause
    from hardpoint_conformance.interposed import InterposedDriver
    from hardpoint_conformance.memory import Memory
    from hardpoint_conformance.target import Target

MARK = "conformance"
PROVES = "proves"
OVER = "over"
NOTHING = "nothing"
STDERR = 2
_NO_BACKEND = "the conformance suite needs --backend NAME"

_TARGET: pytest.StashKey[Target] = pytest.StashKey()
_CLAIMS: pytest.StashKey[Capabilities] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the suite's options."""
    group = parser.getgroup("hardpoint", "Hardpoint conformance")
    group.addoption("--backend", help="name of the backend to test")
    group.addoption("--device", type=int, default=0, help="index of its device")
    group.addoption("--seed", type=int, default=0, help="of all random inputs; 0 is the core seed")
    group.addoption("--explore", type=int, default=0, help="further seeds that each seeded test is run with")
    group.addoption("--levels", default="", help="levels to run, for example L0,L1; all by default")
    group.addoption("--clauses", default="", help="ids of the only clauses to run, separated by commas")
    group.addoption("--tests", type=Path, help="run only the tests whose ids this JSON file lists")
    group.addoption("--claims", type=Path, help="collect for the claims in this JSON file, without any backend")
    group.addoption("--results", type=Path, help="write a line of JSON for the start and the end of every test here")
    group.addoption("--listing", type=Path, help="write the collected tests as JSON here")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Declare the suite's marks, keep messages short, and have crashes of its own processes say where they were."""
    if config.getoption("results"):
        from hardpoint.memory import write_crash_frames

        write_crash_frames(STDERR)  # pytest's own handler, which has the frames of Python, comes after it
    if config.getoption("backend"):
        # Where these are set, pytest compares what differs to its end: minutes for a few megabytes, and pages that nobody reads.
        for name in ("CI", "BUILD_NUMBER"):
            os.environ.pop(name, None)
    if config.getoption("listing"):
        gc.disable()  # what the process imports it has to its end, which then follows: see `pytest_unconfigure`
    config.addinivalue_line("markers", f"{MARK}(clause): the clause that a test proves")
    config.addinivalue_line("markers", f"{PROVES}(capability): a further capability that a case proves")
    config.addinivalue_line("markers", f"{OVER}(name=function of the claims): the values that a parameter takes")
    config.addinivalue_line("markers", f"{NOTHING}: the one case of a test over claims of which there are none")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave what was imported for a listing to the kernel: the interpreter would look through all of it at its end."""
    if config.getoption("listing"):
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the suite's tests out of runs that name no backend, such as those of a repository that has the suite in it."""
    if (
        config.getoption("backend")
        or config.getoption("claims")
        or Path(__file__).with_name("suite")
        not in (
            collection_path,
            *collection_path.parents,
        )
    ):
        return None
    if config.getoption("pyargs"):
        raise pytest.UsageError(_NO_BACKEND)
    return True


def target_of(config: pytest.Config) -> Target:
    """Return the backend under test, found at the first use; raises pytest.UsageError without --backend."""
    if _TARGET not in config.stash:
        from hardpoint_conformance.target import Target

        name = config.getoption("backend")
        if not name:
            raise pytest.UsageError(_NO_BACKEND)
        config.stash[_TARGET] = Target.find(name, config.getoption("device"))
    return config.stash[_TARGET]


def claims_of(config: pytest.Config) -> Capabilities:
    """Return the claims to collect for: those of --claims, else the backend's."""
    if _CLAIMS not in config.stash:
        from hardpoint_conformance.claims import from_json

        file = config.getoption("claims")
        claims = from_json(json.loads(file.read_text())) if file else target_of(config).claims
        config.stash[_CLAIMS] = claims
    return config.stash[_CLAIMS]


def clause_of(item: pytest.Item) -> Clause | None:
    """Return the clause that a test proves; None for a test that is not the suite's."""
    mark = item.get_closest_marker(MARK)
    return None if mark is None else mark.kwargs["clause"]


def capabilities_of(item: pytest.Item, clause: Clause) -> tuple[str, ...]:
    """Return the capabilities that a case proves, the clause's own first; () for the core."""
    further = [mark.args[0] for mark in item.iter_markers(PROVES)]
    return tuple(dict.fromkeys(name for name in (clause.capability, *further) if name))


def test_id(item: pytest.Item, clause: Clause) -> str:
    """Return the id of a case: its clause's, and its parameters' in brackets."""
    _, bracket, parameters = item.name.partition("[")
    return clause.id + bracket + parameters


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Make no tests of clauses that --clauses leaves out: of a file with one test that is wanted this is most of the work."""
    wanted = collector.config.getoption("clauses")
    marks = getattr(obj, "pytestmark", ()) if wanted else ()
    clauses = [mark.kwargs["clause"].id for mark in marks if mark.name == MARK]
    return [] if clauses and clauses[0] not in wanted.split(",") else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give parameters their values from the claims, and repeat tests with random inputs: for the run's seed, and for exploration."""
    from hardpoint_conformance.levels import Level

    clause = clause_of(metafunc.definition)
    if clause is None:
        return
    for mark in metafunc.definition.iter_markers(OVER):
        for name, values_of in mark.kwargs.items():
            claims = claims_of(metafunc.config)
            # Without attention there are no dtypes, sizes or dimensions to choose from, where every value is about a computation.
            is_about_nothing = clause.level >= Level.ATTENTION_CORE and not claims.attention.dtypes
            values = [] if is_about_nothing else list(values_of(claims))
            metafunc.parametrize(name, values or [pytest.param(None, id="none", marks=getattr(pytest.mark, NOTHING))])
    if "draw" in metafunc.fixturenames:
        draws = ["core", *(f"explore{index}" for index in range(metafunc.config.getoption("explore")))]
        metafunc.parametrize("draw", draws)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what --levels and --clauses ask for and what the claims call for; list what is left."""
    ours = [(item, clause) for item in items if (clause := clause_of(item)) is not None]
    if not ours:
        return
    from hardpoint_conformance.levels import Level

    levels = {Level.of(text) for text in config.getoption("levels").split(",") if text}
    wanted = {text for text in config.getoption("clauses").split(",") if text}
    file = config.getoption("tests")
    chosen = None if file is None else frozenset(json.loads(file.read_text()))
    ids = [test_id(item, clause) for item, clause in ours]
    if len(set(ids)) < len(ids):
        twice = sorted({name for name in ids if ids.count(name) > 1})
        raise pytest.UsageError(f"several tests have the same id: {', '.join(twice)}")
    dropped = [
        item
        for (item, clause), name in zip(ours, ids, strict=True)
        if (levels and clause.level not in levels)
        or (wanted and clause.id not in wanted)
        or (chosen is not None and name not in chosen)
    ]
    # Everything is a result: a case whose capability is not claimed is not deselected here; the report has it as such.
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]
    listing = config.getoption("listing")
    if listing:
        kept = set(items)
        listing.write_text(json.dumps([_entry(item, clause, config) for item, clause in ours if item in kept]))


def _entry(item: pytest.Item, clause: Clause, config: pytest.Config) -> dict[str, Any]:
    return {
        "id": test_id(item, clause),
        "clause": clause.id,
        "rule": clause.text,
        "level": int(clause.level),
        "node": item.nodeid,
        "capabilities": list(capabilities_of(item, clause)),
        "refusal": clause.refusal,
        "applies": applies(item, clause, claims_of(config)),
    }


def applies(item: pytest.Item, clause: Clause, claims: Capabilities) -> bool:
    """Return whether a case is to be run: all that it proves is claimed, or for a refusal, what it names is not.

    The one case of a test over claims of which there are none is not run.
    """
    from hardpoint_conformance.claims import claimed

    if item.get_closest_marker(NOTHING):
        return False
    needed = [claimed(name, claims) for name in capabilities_of(item, clause)]
    return not all(needed) if clause.refusal else all(needed)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what the claims do not call for; the reason is the result's."""
    clause = clause_of(item)
    if clause is not None and not applies(item, clause, claims_of(item.config)):
        names = ", ".join(capabilities_of(item, clause))
        pytest.skip(f"claimed: {names}" if clause.refusal else f"not claimed: {names}")


def seed_of(config: pytest.Config, test: str, draw: str) -> int:
    """Return the seed of one test: from the run's seed, the draw, and the test's id."""
    text = f"{config.getoption('seed')}/{draw}/{test}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


@pytest.fixture
def draw() -> str:
    """Which draw of random inputs this is; `core` for tests that are not repeated."""
    return "core"


@pytest.fixture
def seed(request: pytest.FixtureRequest, draw: str) -> int:
    """The seed of this test's random inputs."""
    number = seed_of(request.config, request.node.name, draw)
    request.node.user_properties.append(("seed", number))
    return number


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Random numbers that depend on --seed and the test's id."""
    import numpy as np

    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """The backend under test."""
    return target_of(request.config)


@pytest.fixture(scope="session")
def claims(request: pytest.FixtureRequest) -> Capabilities:
    """What the backend under test claims."""
    return claims_of(request.config)


@pytest.fixture
def attention(target: Target) -> AttentionBackend:
    """An attention backend of the target."""
    return target.attention()


@pytest.fixture
def allocator(target: Target) -> Generator[DeviceAllocator]:
    """An allocator of the target, closed at the end."""
    made = target.allocator()
    yield made
    made.close()


@pytest.fixture(params=["tensors", "pool"])
def memory(request: pytest.FixtureRequest, target: Target) -> Generator[Memory]:
    """The backend's memory, in every way in which it can be reached here."""
    yield from _memory(target, request.param)


@pytest.fixture
def pool_memory(target: Target) -> Generator[Memory]:
    """The backend's memory driver under the core's engine; every call is seen and can fail."""
    yield from _memory(target, "pool")


@pytest.fixture
def tensor_memory(target: Target) -> Generator[Memory]:
    """Tensors of the backend's allocator."""
    yield from _memory(target, "tensors")


def _memory(target: Target, way: str) -> Generator[Memory]:
    from hardpoint_conformance.memory import open_memory, require

    require(target, way)
    made = open_memory(target, way)
    yield made
    made.end()


@pytest.fixture
def driver(target: Target) -> Generator[InterposedDriver]:
    """The backend's memory driver, open; afterwards nothing of it is held."""
    from hardpoint_conformance.interposed import InterposedDriver
    from hardpoint_conformance.memory import assert_holds_nothing, driver_of

    made = InterposedDriver(driver_of(target))
    made.open()
    yield made
    made.close()
    assert_holds_nothing(made)


class Quality:
    """The errors that a test measured, as shares of their bounds; the worst one is in the report."""

    def __init__(self) -> None:
        self.worst: float | None = None

    def note(self, ratio: float) -> None:
        """Note an error divided by its bound; above 1 the test must fail."""
        self.worst = ratio if self.worst is None else max(self.worst, ratio)


@pytest.fixture
def quality(request: pytest.FixtureRequest) -> Generator[Quality]:
    """Where a numeric test notes its error ratios."""
    found = Quality()
    yield found
    if found.worst is not None:
        request.node.user_properties.append(("error_ratio", found.worst))


# Results


def _write(config: pytest.Config, data: dict[str, Any]) -> None:
    file = config.getoption("results")
    if file:
        with file.open("a") as stream:
            stream.write(json.dumps(data) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write that a test begins, and how it ended."""
    clause = clause_of(item)
    if clause is None or not item.config.getoption("results"):
        return (yield)
    _write(item.config, {"event": "start", "id": test_id(item, clause), "node": item.nodeid})
    item.stash[_REPORTS] = []
    start = time.perf_counter()
    result = yield
    ended = outcome_of(item.stash[_REPORTS])
    properties = dict(item.user_properties)
    _write(
        item.config,
        {
            "event": "end",
            **_entry(item, clause, item.config),
            **ended,
            "seconds": round(time.perf_counter() - start, 4),
            "seed": properties.get("seed"),
            "error_ratio": properties.get("error_ratio"),
        },
    )
    return result


_REPORTS: pytest.StashKey[list[tuple[pytest.TestReport, str]]] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say of a failure what was expected, found, and is known to cause it; keep a test's reports for its result."""
    report = yield
    clause, words = clause_of(item), ""
    if report.failed and clause is not None and call.excinfo is not None:
        from hardpoint_conformance.failures import told

        words = told(call.excinfo, clause)
        report.sections.append((clause.id, f"rule: {clause.text}\n{words}\nrepeat: {_repeat(item, clause)}"))
    if _REPORTS in item.stash:
        item.stash[_REPORTS].append((report, words))
    return report


def _repeat(item: pytest.Item, clause: Clause) -> str:
    """Return the command that runs a test again, alone."""
    name, seed = item.config.getoption("backend"), item.config.getoption("seed")
    words = ["hardpoint", "conformance", "run", "--backend", str(name), "--clause", test_id(item, clause)]
    return shlex.join([*words, "--seed", str(seed)])


def outcome_of(reports: list[tuple[pytest.TestReport, str]]) -> dict[str, str]:
    """Return outcome and message of a test: passed, failed, error (in set-up or tear-down), or skipped with its reason.

    Args:
        reports: each with what is to be said of its failure.
    """
    for report, words in reports:
        if report.failed:
            outcome = "failed" if report.when == "call" else "error"
            return {"outcome": outcome, "message": f"{words}\n\n{report.longrepr}"}
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            return {"outcome": "skipped", "message": str(reason).removeprefix("Skipped: ")}
    return {"outcome": "passed", "message": ""}
