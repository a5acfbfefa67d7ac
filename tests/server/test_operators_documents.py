"""What operators are given beside the server, the guide and the dashboard, says what the server has: every code, state and metric."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

import hardpoint.server
from hardpoint.engine.sleep import EngineState
from hardpoint.server.errors import _STATUS
from hardpoint.server.metrics import Metrics
from hardpoint.server.operations import OperationState
from hardpoint.server.served_model import ModelState
from tests.server.conftest import Running

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "operations.md").read_text("utf-8")
DASHBOARD = json.loads((DOCS / "grafana_dashboard.json").read_text("utf-8"))
SOURCES = sorted(Path(hardpoint.server.__file__).parent.glob("*.py"))


def table(title: str) -> list[str]:
    """Return the names in the first column of a section's table."""
    section = GUIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts of an expression: itself, the choices of a condition, the values of a table that is asked."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from [*texts(node.body), *texts(node.orelse)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Dict):
        for one in (*node.func.value.values, *node.args):
            yield from texts(one)
    elif ast.unparse(node) == "f'model_{self._state}'":
        yield from (f"model_{state}" for state in ModelState)


def codes_of(file: Path) -> set[str]:
    """Return the codes of the errors that a file makes; fails where one cannot be read from it."""
    tree = ast.parse(file.read_text("utf-8"))
    given: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            given.setdefault(node.targets[0].id, set()).update(texts(node.value))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ApiError":
            named = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            code = named[0] if named else node.args[2]
            known = given.get(code.id, set()) if isinstance(code, ast.Name) else set(texts(code))
            assert known, f"{file.name}:{node.lineno}: which code this error has is not seen"
            found |= known
    return found


def metrics() -> set[str]:
    """Return the names of all metrics, as Prometheus has them, without the prefix."""
    families = Metrics().registry.collect()
    names = {f"{one.name}_total" if one.type == "counter" else one.name for one in families}
    assert all(name.startswith("hardpoint:") for name in names)
    return {name.removeprefix("hardpoint:") for name in names}


def test_the_guide_has_every_error_code() -> None:
    codes = {code for _, _, code in _STATUS} | {"engine_error"}
    for file in SOURCES:
        codes |= codes_of(file)
    assert len(codes) > 30
    listed = table("Errors")
    assert set(listed) == codes
    assert len(listed) == len(codes)


def test_the_guide_has_every_state() -> None:
    assert sorted(table("States")) == sorted([*EngineState, *ModelState])
    operations = GUIDE.partition("Operations (`GET /operations`) are ")[2].partition("\n")[0]
    assert re.findall("`([^`]+)`", operations) == list(OperationState)


def test_the_guide_has_every_metric() -> None:
    assert sorted(table("Metrics")) == sorted(metrics())


def selectors(expression: Any) -> Iterator[Any]:
    """Yield the selectors of a parsed query."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
        return
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (part := getattr(expression, name, None)) is not None:
            yield from selectors(part)
    for part in getattr(expression, "args", ()):
        yield from selectors(part)


def parsed(query: str) -> list[Any]:
    """Return a query's selectors; raises ValueError where Prometheus could not read it."""
    found = list(selectors(promql_parser.parse(query.replace("$__rate_interval", "1m"))))
    assert found, query
    return found


@pytest.fixture(scope="module")
def shown(server: Running) -> dict[str, set[str]]:
    """The labels of each metric that a server shows, which has served, slept and woken; none where it has no values."""
    server.openai.completions.create(model="demo", prompt="Hello", max_tokens=3)
    server.operators.post("/models/demo/sleep").raise_for_status()
    server.operators.post("/models/demo/wake").raise_for_status()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.operators.get("/metrics").text):
        names = [family.name, f"{family.name}_total", *(f"{family.name}_{part}" for part in ("bucket", "sum", "count"))]
        found.update(
            (name, set()) for name in names[1:] if family.type == ("counter" if name == names[1] else "histogram")
        )
        if family.type == "gauge":
            found[family.name] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries() -> list[str]:
    """Return the queries of the dashboard and of the guide's alarms."""
    rules = yaml.safe_load(GUIDE.partition("```yaml\n")[2].partition("```")[0])["groups"][0]["rules"]
    assert all(rule["alert"] and rule["labels"]["severity"] in ("page", "ticket") for rule in rules)
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())] + [
        rule["expr"] for rule in rules
    ]


def test_every_query_asks_for_what_the_server_shows(shown: dict[str, set[str]]) -> None:
    asked = queries()
    assert len(asked) > 40
    for query in asked:
        for selector in parsed(query):
            assert selector.name in shown, query
            for matcher in selector.matchers.matchers:
                assert matcher.name in shown[selector.name] or not shown[selector.name], query
        names = {label for selector in parsed(query) for label in shown[selector.name]}
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            assert not names or set(grouped.split(", ")) <= names, query


def test_the_dashboard_shows_every_metric() -> None:
    named = {selector.name.removeprefix("hardpoint:") for query in queries() for selector in parsed(query)}
    bare = {re.sub("_(bucket|sum|count)$", "", name) for name in named}
    assert metrics() - bare == set()


def lost(given: Any, back: Any, path: str = "$") -> list[str]:
    """Return the places of a document that are not in another one."""
    if isinstance(given, dict) and isinstance(back, dict):
        return [place for key, value in given.items() for place in lost(value, back.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        return [place for at, one in enumerate(given) for place in lost(one, back[at], f"{path}[{at}]")]
    return [] if given == back else [path]


def test_the_dashboard_is_what_grafana_reads() -> None:
    """Grafana's own model of a dashboard reads it whole: no field is unknown to it."""
    read = Dashboard.from_json(DASHBOARD)
    assert lost(DASHBOARD, json.loads(JSONEncoder().encode(read))) == []
    assert lost({"no": 1}, json.loads(JSONEncoder().encode(Dashboard.from_json({"no": 1})))) == ["$.no"]
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"} == set(variables)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, f"'{panel['title']}' lies over another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
