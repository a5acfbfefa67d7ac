"""Other engines' interfaces over this engine, for libraries that import them by name. Thin: what is not here is refused by name, and no
other room imports this one."""
