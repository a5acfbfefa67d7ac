"""The tests of the multi-process executor that hold for every executor with ranks elsewhere, over two actors on two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from core.tests.executor.test_multi_process import (
    order,
    test_a_call_that_fails_on_all_ranks_raises_the_first_ranks_error_and_they_go_on,
    test_a_callback_that_raises_fails_the_sleep_and_all_ranks_are_rolled_back,
    test_a_forked_child_cannot_use_the_ranks,
    test_a_rank_that_refuses_a_tensor_ends_the_update_on_all,
    test_a_signal_while_waiting_is_an_interrupt_and_answers_are_not_mixed_up,
    test_a_step_that_fails_alike_on_all_ranks_ends_no_rank,
    test_a_step_whose_output_fails_on_the_driver_alone_ends_no_rank,
    test_an_error_of_an_unknown_class_says_which,
    test_an_interrupted_wait_leaves_the_ranks_usable,
    test_an_iterator_that_raises_is_raised_in_the_ranks_too_and_raised_here_as_itself,
    test_every_question_is_answered_by_every_rank,
    test_sleep_is_prepared_and_committed_with_progress_of_the_first_rank,
    test_steps_and_answers_larger_than_the_ring_go_through,
    test_steps_carry_what_changes_and_return_the_drivers_output,
    test_tensors_of_an_update_reach_every_rank,
)
from hardpoint.executor.ray import RayExecutor
from hardpoint.interfaces import WorkerConfig
from hardpoint.plugins import Resolved

__all__ = [
    "order",
    "test_a_call_that_fails_on_all_ranks_raises_the_first_ranks_error_and_they_go_on",
    "test_a_callback_that_raises_fails_the_sleep_and_all_ranks_are_rolled_back",
    "test_a_forked_child_cannot_use_the_ranks",
    "test_a_rank_that_refuses_a_tensor_ends_the_update_on_all",
    "test_a_signal_while_waiting_is_an_interrupt_and_answers_are_not_mixed_up",
    "test_a_step_that_fails_alike_on_all_ranks_ends_no_rank",
    "test_a_step_whose_output_fails_on_the_driver_alone_ends_no_rank",
    "test_an_error_of_an_unknown_class_says_which",
    "test_an_interrupted_wait_leaves_the_ranks_usable",
    "test_an_iterator_that_raises_is_raised_in_the_ranks_too_and_raised_here_as_itself",
    "test_every_question_is_answered_by_every_rank",
    "test_sleep_is_prepared_and_committed_with_progress_of_the_first_rank",
    "test_steps_and_answers_larger_than_the_ring_go_through",
    "test_steps_carry_what_changes_and_return_the_drivers_output",
    "test_tensors_of_an_update_reach_every_rank",
]


@pytest.fixture(scope="module")
def pair(fake: ModuleType, cluster: Any) -> Iterator[RayExecutor]:
    descriptor = fake.hardpoint_backend()
    resolved = Resolved(descriptor, descriptor.probe().devices[0])
    executor = RayExecutor(resolved, WorkerConfig(model="", tensor_parallel_size=2, threads=6), None, {"amount": 4})
    yield executor
    executor.shutdown()


def test_ranks_are_processes_on_the_nodes_with_a_device_of_the_node_and_a_share_of_the_threads(
    pair: RayExecutor,
) -> None:
    first, second = pair.pids
    paths = [model.path for model in pair.call("load")]
    assert paths == [f"pid {first} rank 0 device 0 3", f"pid {second} rank 1 device 0 3"]
    assert len(set(pair.nodes)) == 2
