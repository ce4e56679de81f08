"""Which tests a module needs, and which random faults of a module they notice."""
