"""Small faults put into the package on purpose: each must fail a test of the default tier.

- A table per part of the package lists them (`masks`, `scores`, `core`, `analysis`, `caches`, `layers`, `native`,
  `parallel`).
- `run` applies one at a time to a copy of the package and runs the tests named beside it; `make mutants` calls it.
- ``results.json`` holds which test killed each. ``tests/test_mutants.py`` holds that every fault still applies.
"""

from __future__ import annotations

from mutants import analysis, caches, core, layers, masks, native, parallel, scores
from mutants.fault import Fault

FAULTS: dict[str, Fault] = {}
for _table in (masks, scores, core, analysis, caches, layers, native, parallel):
    for _fault in _table.FAULTS:
        assert _fault.name not in FAULTS, _fault.name
        FAULTS[_fault.name] = _fault
