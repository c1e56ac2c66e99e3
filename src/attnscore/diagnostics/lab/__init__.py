"""Experiments on why scores are scaled: measured, drawn and checked."""
