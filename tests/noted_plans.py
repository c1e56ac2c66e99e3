"""Plans of the native module whose runs a test sees."""

from __future__ import annotations

from typing import Any


class NotedPlan:
    """A plan of the module whose runs are noted, by their arguments."""

    def __init__(self, plan: Any, note: Any) -> None:
        self.plan, self.note = plan, note

    def __call__(self, *arguments: Any) -> None:
        self.note(arguments)
        self.plan(*arguments)

    def allocate_and_run(self, *arguments: Any) -> Any:
        self.note(arguments)
        return self.plan.allocate_and_run(*arguments)
