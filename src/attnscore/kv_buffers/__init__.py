"""The buffers of `KeyValueCache`: slots of positions, writes, checks, files."""
