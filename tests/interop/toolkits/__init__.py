"""Real toolkits, each in an environment beside this one: they train, and their conversions are compared."""
