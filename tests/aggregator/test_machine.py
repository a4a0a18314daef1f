"""The pair under random operations and faults, on both databases."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.aggregator.machine import PairMachine
from tests.aggregator.postgres import PostgresServer


def test_results_are_exact_or_absent_on_sqlite() -> None:
    run_state_machine_as_test(
        PairMachine, settings=settings(max_examples=40, stateful_step_count=30)
    )


def test_results_are_exact_or_absent_on_postgresql(postgres: PostgresServer) -> None:
    class OnPostgreSQL(PairMachine):
        def make_urls(self) -> tuple[str, str]:
            self.stack = ExitStack()
            leader, helper = self.stack.enter_context(postgres.databases(2))
            return leader, helper

        def teardown(self) -> None:
            super().teardown()
            self.stack.close()

    run_state_machine_as_test(
        OnPostgreSQL, settings=settings(max_examples=8, stateful_step_count=25)
    )
