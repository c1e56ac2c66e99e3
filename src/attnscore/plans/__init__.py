"""How calls run: execution plans by signature, lowered scores, prepared keys."""
