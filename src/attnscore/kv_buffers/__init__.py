"""The buffers of `KeyValueCache`: which slot holds which position, how they are written, what they refuse, files."""
