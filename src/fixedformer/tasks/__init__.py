"""Seeded data generators, each with a plain-Python solver and the trivial rules to read an accuracy beside."""
