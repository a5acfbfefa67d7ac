"""What is decided before Ray is asked: settings, whether ranks fit, and their order. Needs no Ray."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.executor import RaySettings
from hardpoint.executor.ray_placement import Demand, in_order, rooms_of
from hardpoint.executor.ray_session import import_ray
from hardpoint.interfaces.errors import ConfigError

AMOUNTS = st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0, 2.0, 3.0])
SIZES = st.integers(1, 4)
ROOMS = st.lists(st.sampled_from([0.0, 0.3, 0.9, 1.0, 2.0, 4.0, 7.0, 8.0]), max_size=4)


@given(AMOUNTS, SIZES, SIZES, ROOMS)
def test_ranks_fit_when_they_can_be_put_one_after_the_other(
    amount: float, stages: int, size: int, rooms: list[float]
) -> None:
    demand = Demand("X", amount, stages, size)

    def place(groups: int, ranks: int) -> bool:
        """Put groups of ranks onto the first machine that has room, counted in whole hundredths."""
        left = [round(room * 100) for room in rooms]
        for _ in range(groups):
            machine = next((n for n, room in enumerate(left) if room >= ranks * round(amount * 100)), None)
            if machine is None:
                return False
            left[machine] -= ranks * round(amount * 100)
        return True

    assert demand.fits_together(rooms) == place(stages, size)
    assert demand.fits(rooms) == place(stages * size, 1)
    assert demand.fits(rooms) or not demand.fits_together(rooms)


@given(st.lists(st.sampled_from("abcd"), max_size=8), st.sampled_from("abcd"))
def test_ranks_of_one_machine_are_neighbours_and_this_machines_come_first(nodes: list[str], here: str) -> None:
    order = in_order(range(len(nodes)), nodes, here)
    assert sorted(order) == list(range(len(nodes)))
    ordered = [nodes[place] for place in order]
    changes = sum(a != b for a, b in pairwise(ordered))
    assert changes == max(len(set(nodes)) - 1, 0)
    assert here not in nodes or ordered[0] == here
    for node in set(nodes):
        places = [place for place in order if nodes[place] == node]
        assert places == sorted(places)


def test_machines_that_are_gone_have_no_room() -> None:
    def node(alive: bool, **resources: float) -> dict[str, Any]:
        return {
            "NodeManagerAddress": "10.0.0.1",
            "NodeID": f"{len(resources)}abc",
            "Alive": alive,
            "Resources": resources,
        }

    nodes = [node(True, X=2.0), node(False, X=4.0, Y=1.0), node(True)]
    assert rooms_of(nodes, "X") == {"10.0.0.1 (1abc)": 2.0, "10.0.0.1 (0abc)": 0.0}


@pytest.mark.parametrize(
    ("resource", "options"),
    [
        ("CPU", {"num_cpus": 0.5}),
        ("GPU", {"num_cpus": 0, "num_gpus": 0.5}),
        ("X", {"num_cpus": 0, "resources": {"X": 0.5}}),
    ],
)
def test_an_actor_takes_its_bundle_under_the_name_that_ray_wants(resource: str, options: dict[str, Any]) -> None:
    assert Demand(resource, 0.5, 1, 1).actor_options() == options


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"amount": 0}, "ray.amount=0"),
        ({"amount": 1.5}, "whole number"),
        ({"placement_seconds": "soon"}, "ray.placement_seconds='soon'"),
        ({"adress": "x"}, "'adress' is not a setting for Ray. Did you mean 'address'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RaySettings.parse(settings)


def test_ray_that_is_not_installed_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray cannot be imported.*pip install 'hardpoint\[ray\]'"):
        import_ray()
