"""One transformer block, looped: the constructions of the theory as weights of real blocks, each runnable alone."""
