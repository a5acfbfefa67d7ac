"""Workers that are forks are as good as others."""

from __future__ import annotations

from typing import Any


def test_forks_draw_random_numbers_of_their_own(cluster: Any) -> None:
    import ray

    class Drawer:
        def draw(self) -> str:
            return str(ray.ObjectID.from_random().hex())

    on_the_head = ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})
    drawers = [on_the_head(Drawer).remote() for _ in range(2)]
    first, second = ray.get([one.draw.remote() for one in drawers])
    assert first != second
    for one in drawers:
        ray.kill(one)
