"""Seeded data generators, each with a plain-Python solver and the trivial rules that an accuracy should be read beside."""
