"""Programs for real transformer blocks: MLPs, biases, normalisation, grouped keys and values.

spec, target   what is simulated: the class, and weights with the definition's forward pass
folded         a target with gains, shifts and grouped heads folded into plain matrices
layout         which columns a program has at every layer, and how many
columns        what the program must show there
machine        the three verbs; sparse and dense are the two kinds
engines        two evaluations: the definition, and path space
certify        what is measured and what bounds it
"""
