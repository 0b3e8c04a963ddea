"""Program in the prompt: one fixed attention network reads another attention layer's weights as tokens.

simulator = AttentionSimulator(n, d, d_v, heads)
prompt = simulator.compile(query_key, value, X)
simulator.run(prompt)                              # softmax(X A X^T) X V of every head
"""

from fixedformer.prompt.simulator import AttentionSimulator, Prompt
from fixedformer.prompt.sizes import SizeClass

__all__ = ["AttentionSimulator", "Prompt", "SizeClass"]
