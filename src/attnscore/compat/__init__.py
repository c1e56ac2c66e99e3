"""The frameworks' own attention, argument for argument, computed by `attend`; each module imports its framework."""
