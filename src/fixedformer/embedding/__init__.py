"""Program = input embedding: a fixed universal transformer becomes any target through E.

tree      where every read-out lies: the tree of head prefixes
maps      fixed linear maps: matrices, and 0/1 matrices stored as index lists
readouts  what an embedding shows along every path; the condition E R_all = W_all
sparse, dense   the machines; machine: the three verbs compile, run, certify
engines   two evaluations: the definition, and path space
accurate, solve, bounds, certify   numbers that can be trusted
decompile: programs read back as the narrowest transformer. hankel: what is still shown after a cut; realise: the sweep
that factors it; truncate, stream, states, distil: narrower than exact; reach, compare, converse: are two networks one?
"""
