"""Test bed of `attnscore.diagnostics.watch`: healthy runs, and runs with one planted fault."""
