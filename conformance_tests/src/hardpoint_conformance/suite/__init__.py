"""The tests: one module for each subject, named after its level, with nothing in them that is specific to a backend.

Every test function has a clause (`hardpoint_conformance.clauses`), whose text is its docstring. What several modules share (the oracle,
batches, the interposed driver, tiny models) lives beside this package.
"""
